"""Kernels of Triton: tests that run them are left out, with the reason, where it is absent."""

from __future__ import annotations

from importlib.util import find_spec

from helpers.left_out import hooks

pytest_collection_modifyitems, pytest_terminal_summary = hooks(
    "triton",
    lambda: find_spec("triton"),
    "tests that run kernels of Triton are left out: it is not installed",
)
