"""Check host programs before they run: see `check.py`."""
