"""Ranges around the steps of a plan, for profilers: torch's own, or NVIDIA's Nsight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from mdfuse.errors import ProgramError
from mdfuse.plan.build import Plan
from mdfuse.plan.lines import Stamping
from mdfuse.plan.traced import described


def ranged(plan: Plan, tool: Literal["torch", "nvtx"], rank: int) -> Plan:
    """Return a plan that puts each step into a range with its description and the user's line.

    Args:
        plan: of this rank; its function is not made yet.
        tool: "torch": `torch.profiler.record_function`; "nvtx".
        rank: this rank.

    Raises:
        ProgramError: there is no such tool in this process.
    """
    if tool == "nvtx" and not torch.cuda.is_available():
        raise ProgramError(
            f'ranges="nvtx" for @{plan.name}',
            because="NVTX comes with CUDA, and torch sees no GPU here",
            hint='ranges="torch" is for torch.profiler, which works everywhere',
        )
    ranges = Ranges(_Torch() if tool == "torch" else _Nvtx())
    before, behind = dict[int, Callable[[], object]](), dict[int, Callable[[], object]]()
    for first, last, _, entry in described(plan, rank):
        text = f"{entry.name}  {entry.source}".rstrip()
        before[first], behind[last] = ranges.begin(text, is_first=not before), ranges.end
    wrapped = replace(plan, stamping=Stamping(before, behind).around(plan.stamping))
    vars(wrapped)["owned"] = plan.owned  # the buffers are made already
    return wrapped


@dataclass
class Ranges:
    """Begins and ends ranges, one at a time.

    Attributes:
        tool: opens a range with a text, and closes the last one.
        is_open: whether a range is open.
    """

    tool: _Torch | _Nvtx
    is_open: bool = False

    def begin(self, text: str, is_first: bool) -> Callable[[], None]:
        """Return the function that begins a range; the first call ends one left by a broken run."""

        def enter() -> None:
            if is_first and self.is_open:
                self.end()
            self.tool.open(text)
            self.is_open = True

        return enter

    def end(self) -> None:
        """End the range."""
        self.tool.close()
        self.is_open = False


@dataclass
class _Torch:
    current: Any = field(default=None)

    def open(self, text: str) -> None:
        self.current = torch.profiler.record_function(text)
        self.current.__enter__()

    def close(self) -> None:
        self.current.__exit__(None, None, None)


class _Nvtx:
    def open(self, text: str) -> None:
        torch.cuda.nvtx.range_push(text)

    def close(self) -> None:
        torch.cuda.nvtx.range_pop()
