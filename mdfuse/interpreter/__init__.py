"""Python itself: its threads, their stacks, its garbage collector."""
