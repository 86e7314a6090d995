"""The watchdog of a process: which ranks wait for which others, and for how long."""
