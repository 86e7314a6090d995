"""Who waits for whom, and for how long: the watchdog of a process."""
