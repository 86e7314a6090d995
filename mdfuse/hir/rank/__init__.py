"""The program that one rank runs: its projection, written out, as plans are made of it."""
