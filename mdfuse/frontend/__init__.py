"""How users write fusions: definitions, operators on handles, traced functions."""
