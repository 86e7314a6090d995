"""Which part of a tensor each rank holds, and what a rank posts to change that."""
