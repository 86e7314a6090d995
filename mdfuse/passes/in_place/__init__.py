"""Writes into parts of a value: through views, and into the value itself."""
