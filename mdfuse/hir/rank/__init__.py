"""What one rank runs of a program: its projection, written out, as plans are made of it."""
