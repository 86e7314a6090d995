"""From passes' output to host instructions."""
