"""The watchdog of a process: it knows the ranks that wait for others, and for how long."""
