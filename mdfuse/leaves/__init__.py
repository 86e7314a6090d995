"""One program for every number of ranks: leaves that ranks compute, and sums in a fixed tree."""
