"""Graphs that do nothing, for processes without a GPU: what is left of a run is the host's work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mdfuse import evaluator
from mdfuse.plan import capture_plans, graphs


class _Nothing:
    """A recording whose replay is a call of the interpreter that does nothing."""

    def __init__(self) -> None:
        self.replay: Any = {}.clear

    def reset(self) -> None:
        """Give up nothing."""


class _Recorder:
    """Records by calling a function once."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self.stream = None

    def record(self, run: Callable[[], list[Any]], place: int) -> tuple[list[Any], _Nothing]:
        return run(), _Nothing()


class _Stream:
    cuda_stream = 0


def _all_at_one_place(forms: Sequence[Any]) -> Callable[[], list[torch.Tensor]]:
    """New tensors, each where the last one of its kind lay, as on GPUs in a loop."""
    guards: Any = torch._C._dynamo.guards
    makers = []
    for shape, strides, dtype, _ in forms:
        memory = torch.empty_strided(shape, strides, dtype=dtype)
        makers.append(partial(guards._reinterpret_tensor, memory, shape, strides))
    return lambda: [make() for make in makers]


def stand_in() -> None:
    """Let programs on CPUs be captured from now on, as graphs that do nothing."""
    which: Any = evaluator
    which.HostIrEvaluator._may_capture = lambda *_: True
    which.HostIrEvaluator._may_compile = lambda *_: False
    which.check_graph = lambda *_: None
    module: Any = capture_plans
    module.capture_stream = lambda _: _Stream()
    module.CudaRecorder = _Recorder
    of_plans: Any = graphs
    of_plans.all_new = _all_at_one_place
