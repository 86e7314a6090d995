"""`mdfuse doctor`: show what this machine has and can use, with remedies for the rest."""
