"""A program of blocks and calls over two meshes."""

from __future__ import annotations

from helpers.programs import program_text

TWO_MESHES = program_text("calls/two_meshes")
CALLS = [line.strip() for line in TWO_MESHES.splitlines() if line.startswith("  call")]


def ordered(*calls: str) -> str:
    """The program with other calls."""
    kept = [line for line in TWO_MESHES.splitlines() if not line.startswith("  call")]
    return "\n".join([*kept[:-2], *(f"  {call}" for call in calls), *kept[-2:]])
