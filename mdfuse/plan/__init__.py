"""Plans: one rank's host program as a flat list of prepared calls; `build` makes them."""
