"""`mdfuse doctor`: what this machine has, what is usable, and the remedy for what is not."""
