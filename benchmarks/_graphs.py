"""A loop of calls captured by hand as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class HandGraph:
    """Inputs are copied into the buffers that were captured, the output is copied out of its own.

    Args:
        call: what is captured; its tensors are its only inputs.
        inputs: tensors like those of later calls.
    """

    def __init__(self, call: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
        self.inputs = [x.clone() for x in inputs]
        stream: Any = torch.cuda.Stream
        side = stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        # not "global": a thread of NCCL's process group may ask about its own events meanwhile
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.output = call(*self.inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        for static, given in zip(self.inputs, inputs, strict=True):
            static.copy_(given)
        self.graph.replay()
        return self.output.clone()
