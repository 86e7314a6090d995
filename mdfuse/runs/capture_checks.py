"""Obstacles to CUDA graphs: to those that a program asks for, and to the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mdfuse.config import Options, options_from_environment
from mdfuse.errors import ProgramError
from mdfuse.hir.program import HostProgram
from mdfuse.runtime.backend_rows import BACKENDS
from mdfuse.torch_private import current_raw_stream, is_capturing

if TYPE_CHECKING:
    from mdfuse.runtime.communicator import Communicator


def check_graph(program: HostProgram, options: Options | None, communicator: Communicator) -> None:
    """Refuse a program that is to be captured whole, where no capture is possible.

    Raises:
        ProgramError: it is refused.
    """
    chosen = options_from_environment(options)
    if chosen.graph == "always" and not communicator.can_capture(program.backends):
        raise ProgramError(
            f'@{program.name} with graph="always" on {communicator.device} by backend '
            f"{communicator.backend!r}",
            because="CUDA graphs are for GPUs, and hold only what the host need not do",
            hint='graph="auto" captures where it can',
        )


def captured_by_caller(
    program: HostProgram, communicator: Communicator
) -> Callable[[], bool] | None:
    """Return a test whether the caller captures a graph that cannot hold a program's posts.

    The driver is asked on streams of the caller's only: work on a device's own stream, of handle 0,
    is never captured.

    None: any graph could hold them.
    """
    if not any(_in_turn(program, communicator)):
        return None
    device, stream_of = communicator.device.index, current_raw_stream
    return lambda: stream_of(device) != 0 and is_capturing()


def check_capture(program: HostProgram, communicator: Communicator) -> None:
    """Refuse to run within the caller's capture of a graph that could not hold the program.

    Raises:
        ProgramError: the caller captures.
    """
    is_captured = captured_by_caller(program, communicator)
    if is_captured is not None and is_captured():
        raise ProgramError(
            f"@{program.name} is called while a CUDA graph is captured, and posts by backend "
            f"{next(_in_turn(program, communicator))!r}",
            because="its posts and the replays of graphs take turns as the host queues them, and "
            "replays of the caller's graph would not",
            hint="call it outside of the capture: its second run makes a graph of it; or take "
            "backend 'nccl', with graph='never'",
        )


def _in_turn(program: HostProgram, communicator: Communicator) -> Iterator[str]:
    """Yield the backends of a program whose posts on GPUs take turns with replays."""
    if communicator.device.type == "cuda":
        named = (communicator.backend, *program.backends)
        yield from (n for n in named if n in BACKENDS and BACKENDS[n].takes_turns)
