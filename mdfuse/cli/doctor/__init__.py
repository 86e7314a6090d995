"""`mdfuse doctor`: show what this machine has and can use, and the remedy for what it cannot."""
