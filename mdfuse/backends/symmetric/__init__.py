"""Memory that every member of a team sees: its owner puts pieces there, the others take them."""
