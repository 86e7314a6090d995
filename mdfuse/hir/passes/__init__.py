"""Passes over host programs, one per file."""
