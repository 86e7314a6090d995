"""Backends move bytes: each is one module with a class that fits `base.Backend`."""
