"""All streamed programs of the tests, for the simulator and for real ranks."""

from __future__ import annotations

from helpers import (  # noqa: F401  they fill the table
    stream_cases_local,
    stream_cases_meshes,
    stream_cases_sets,
)
from helpers.stream_case import CASES, Case, line, text

__all__ = ["CASES", "Case", "line", "text"]
