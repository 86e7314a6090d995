"""The command `mdfuse calibrate`: it measures the times of work and communications here."""
