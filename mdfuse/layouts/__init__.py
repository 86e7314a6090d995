"""Layouts: each rank's part of a tensor, and the messages that change it."""
