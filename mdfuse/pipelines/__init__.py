"""Pipelines: their stages, and the schedules that order stages and microbatches.

The package is not called `pipeline`, since `mdfuse.pipeline` is a function.
"""
