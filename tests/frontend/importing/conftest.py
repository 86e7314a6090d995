"""Models of torchvision: left out, with the reason, where that is not installed."""

from __future__ import annotations

from importlib.util import find_spec

from helpers.left_out import hooks

pytest_collection_modifyitems, pytest_terminal_summary = hooks(
    "torchvision",
    lambda: find_spec("torchvision"),
    "tests of torchvision's models are left out: it is not installed",
)
