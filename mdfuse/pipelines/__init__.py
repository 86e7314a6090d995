"""Pipelines: which stage computes what for which microbatch, and when.

The package is not called `pipeline`, since `mdfuse.pipeline` is a function.
"""
