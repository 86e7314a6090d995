"""Decompositions of operations over dims that are split."""
