"""Compiled programs, their segments, and functions that are traced into programs."""
