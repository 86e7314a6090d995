"""The arguments of a run, and its results."""
