"""What `compile` returns: programs, their segments, functions traced into them."""
