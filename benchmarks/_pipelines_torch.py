"""The same stages by torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

if TYPE_CHECKING:
    from _pipelines_layers import Bench, Results

#: mdfuse's name of a schedule -> torch's class, and whether a rank's stages are given as a list.
SCHEDULES: Mapping[str, tuple[Any, bool]] = {
    "gpipe": (ScheduleGPipe, False),
    "1f1b": (Schedule1F1B, False),
    "interleaved": (ScheduleInterleaved1F1B, True),
    "zb1p": (ScheduleInterleavedZeroBubble, True),
}


class Stage(nn.Module):
    """This rank's layers."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench
        self.kept = nn.ParameterList(nn.Parameter(x) for x in bench.weights.values())

    def forward(self, x: Tensor) -> Tensor:
        w = dict(zip(self.bench.weights, self.kept, strict=True))
        result: Tensor = self.bench.stage({**w, **self.bench.angles}, x)
        return result


def stage_of(bench: Bench, compiler: str | None) -> Stage:
    """This rank's layers, for any number of schedules.

    Args:
        bench: the stages.
        compiler: the backend of torch.compile; None: they are run as they are.
    """
    with torch.enable_grad():
        module = Stage(bench)
        if compiler is not None:
            module.compile(backend=compiler, dynamic=False)
    return module


def step_of(bench: Bench, name: str, module: Stage) -> Callable[[], Results]:
    """A step by a schedule of torch.

    Args:
        bench: the stages.
        name: of the schedule.
        module: this rank's layers.
    """
    kind, several = SCHEDULES[name]
    rank, size = bench.ranks.comm.rank, bench.stages
    with torch.enable_grad():
        stage = PipelineStage(module, rank, size, bench.ranks.device)
        schedule = kind(
            [stage] if several else stage, n_microbatches=bench.microbatches, loss_fn=F.mse_loss
        )

    def step() -> Results:
        losses: list[Tensor] = []
        for p in module.parameters():
            p.grad = None
        with torch.enable_grad():
            given = (bench.x,) if rank == 0 else ()
            aims = {"target": bench.t, "losses": losses} if rank == size - 1 else {}
            schedule.step(*given, **aims, return_outputs=False)
        gradients = zip(bench.weights, (p.grad for p in module.parameters()), strict=True)
        loss = torch.stack(losses).mean().detach() if losses else None
        return loss, {name: x for name, x in gradients if x is not None}

    return step
