"""All streamed programs of the tests, for the simulator and for real ranks."""

from __future__ import annotations

import stream_cases_local  # noqa: F401 they fill the table
import stream_cases_meshes  # noqa: F401
import stream_cases_sets  # noqa: F401
from stream_case import CASES, Case, line, text

__all__ = ["CASES", "Case", "line", "text"]
