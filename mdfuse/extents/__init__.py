"""Integers that a run may choose: expressions, and what is assumed of them."""
