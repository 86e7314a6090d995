"""The speed and the memory of a step of training that runs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from mdfuse.errors import RECOMPUTED, ProgramError, counted
from mdfuse.hir.instructions import is_local
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank.pipelines import as_run, project
from mdfuse.seeing.amounts import operations

#: Part of a device's name -> its floating-point operations per second in 16 bits, as data sheets
#: have them, without sparsity.
PEAKS = {"GB200": 2.5e15, "B200": 2.25e15, "H200": 989e12, "H100": 989e12, "A100": 312e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Figures of the steps since the last question; the first step, which compiles, is left out.

    Attributes:
        steps: how many.
        seconds: of a step, their mean on this rank.
        tokens_per_s: of all ranks together; None where it is not known what a token is.
        flops: floating-point operations of a step on this rank: the user's number, or those of
            products, convolutions and attention, forwards and backwards; none that are computed
            again, and all of an attention with a causal mask.
        mfu: the share of the peak of this device that they are; None where its peak is not known.
        memory: the most bytes that torch has held on this rank's GPU meanwhile; None without one.
        skipped: how many steps changed nothing, since gradients were not finite.
    """

    steps: int
    seconds: float
    tokens_per_s: float | None
    flops: float
    mfu: float | None
    memory: int | None
    skipped: int

    def __str__(self) -> str:
        parts = [f"{counted(self.steps, 'step')} of {self.seconds * 1e3:.4g} ms"]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.mfu is not None:
            parts.append(f"MFU {100 * self.mfu:.1f} %")
        if self.memory is not None:
            parts.append(f"{self.memory / 2**30:.2f} GiB")
        return ", ".join([*parts, *([f"{self.skipped} skipped"] if self.skipped else [])])


class StepMeter:
    """Counts the steps of a window of time; a step costs it an addition."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._began: float | None = None
        self._steps = 0
        self._skipped: Tensor | None = None

    def count(self, is_skipped: Tensor | None) -> None:
        """Count a step that was begun."""
        if self._began is None:
            self._begin()
            return
        self._steps += 1
        if is_skipped is not None:
            flag = is_skipped.to(torch.int64)
            self._skipped = flag if self._skipped is None else self._skipped + flag

    def _begin(self) -> None:
        self._wait()
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._began, self._steps, self._skipped = time.perf_counter(), 0, None

    def _wait(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def stats(self, tokens: float | None, flops: float, peak: float | None) -> StepStats:
        """Return the figures of the window, and begin another.

        Raises:
            ProgramError: no step since the first one, or since the last question.
        """
        self._wait()
        if self._began is None or not self._steps:
            raise ProgramError(
                "stats of no step",
                because="steps count since the last question, but for the first, which compiles",
                hint="call it after some more steps",
            )
        seconds = (time.perf_counter() - self._began) / self._steps
        peak = self._peak() if peak is None else peak
        on = self._device
        result = StepStats(
            steps=self._steps,
            seconds=seconds,
            tokens_per_s=None if tokens is None else tokens / seconds,
            flops=flops,
            mfu=None if peak is None else flops / seconds / peak,
            memory=None if on is None else torch.cuda.max_memory_allocated(on),
            skipped=0 if self._skipped is None else int(self._skipped),
        )
        self._begin()
        return result

    def _peak(self) -> float | None:
        name = "" if self._device is None else torch.cuda.get_device_name(self._device)
        return next((peak for part, peak in PEAKS.items() if part in name), None)


def flops_of(program: HostProgram, rank: int) -> int:
    """Return the floating-point operations of a rank, without those that are computed again."""
    flat = as_run(project(program, rank))
    news = (i for i in flat.walk() if i.source is None or i.source.note != RECOMPUTED)
    return math.ceil(sum(operations(flat, i) for i in news if is_local(i)))
