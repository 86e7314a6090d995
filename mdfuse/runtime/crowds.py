"""Detect threads of one process that run communicating programs at once.

Each rank's threads come in an order of their own, so that ranks would meet in different programs. A
run notes that it is under way in two attributes (`Communicator.is_ready`), and only who finds that
it may not run, or that the ranks differ, looks at the stacks of the other threads.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

from mdfuse.errors import ProgramError

#: The function that each run goes through.
_RUN = "HostIrEvaluator.call"


def crowd(rank: int) -> str:
    """Which threads of this rank run programs that communicate, this one too; "" where no other."""
    me = threading.current_thread()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    others = [names.get(t, str(t)) for t in sorted(frames) if t != me.ident and _runs(frames[t])]
    if not others:
        return ""
    listed = ", ".join(map(repr, [me.name, *others]))
    return f"threads {listed} of rank {rank} run programs that communicate at once"


def refusal(rank: int, name: str) -> ProgramError | None:
    """Why this thread may not run a program now, or None."""
    found = crowd(rank)
    if not found:
        return None
    return ProgramError(f"@{name} is not run: {found}", because=BECAUSE, hint=HINT)


BECAUSE = "threads come in an order of each rank's own, so that ranks meet in different programs"
HINT = "run programs that communicate on one thread of each rank"


def _runs(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_qualname == _RUN and frame.f_locals["self"].communicates:
            return True
        frame = frame.f_back
    return False
