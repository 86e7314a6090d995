"""Run all ranks of a program in this process."""
