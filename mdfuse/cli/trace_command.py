"""The command `mdfuse trace merge`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mdfuse.cli import screen
from mdfuse.errors import ProgramError
from mdfuse.seeing.merging import merge


def merged(paths: Sequence[Path], out: Path) -> None:
    """Merge traces into a file, and say how many records it has.

    Raises:
        ProgramError: one of them is no trace, or the file cannot be written.
    """
    try:
        with screen.progress("merging"):
            count = merge(paths, out)
    except OSError as error:
        raise ProgramError(
            f"{out} cannot be written", because=str(error), hint="pass another file with -o"
        ) from error
    screen.output().print(f"{out}: {count} records; open it in https://ui.perfetto.dev")
