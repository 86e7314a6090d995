"""The frontend: definitions, operators on handles, traced functions, import of torch modules."""
