"""Detect threads of one process that run communicating programs at once.

Each rank's threads come in an order of their own, so that ranks would meet in different programs. A
run only notes that it is under way (`Communicator.is_ready`). The stacks of other threads are read
where a run finds that it may not begin, or that the ranks differ.
"""

from __future__ import annotations

import threading
from types import FrameType

from mdfuse.errors import ProgramError
from mdfuse.interpreter.stacks import seen

#: The function that each run goes through.
_RUN = "HostIrEvaluator.call"


def crowd(rank: int) -> str:
    """Return a sentence that names the threads which run communicating programs at once.

    This thread is one of them; "" where no other thread runs such a program.
    """
    me = threading.current_thread()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    running = seen(_runs)
    others = [names.get(t, str(t)) for t in sorted(running) if t != me.ident and any(running[t])]
    if not others:
        return ""
    listed = ", ".join(map(repr, [me.name, *others]))
    return f"threads {listed} of rank {rank} run programs that communicate at once"


def refusal(rank: int, name: str) -> ProgramError | None:
    """Return the error of running a program while another thread runs one; None if none does."""
    others = crowd(rank)
    if not others:
        return None
    return ProgramError(f"@{name} is not run: {others}", because=BECAUSE, hint=HINT)


BECAUSE = "threads come in an order of each rank's own, so that ranks meet in different programs"
HINT = "run programs that communicate on one thread of each rank"


def _runs(frame: FrameType) -> bool:
    return frame.f_code.co_qualname == _RUN and bool(frame.f_locals["self"].communicates)
