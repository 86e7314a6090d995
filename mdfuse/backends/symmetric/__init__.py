"""Memory that every member of a team reads and writes: staged by its owner, taken by the others."""
