"""The command `mdfuse calibrate`: it measures what work and communications take here."""
