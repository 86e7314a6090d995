"""From the second run on: a plan that has run once becomes CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch

from mdfuse.errors import ProgramError
from mdfuse.plan.build import Plan
from mdfuse.plan.captures import CudaRecorder
from mdfuse.plan.graphs import COPY_LIMIT, GraphPlan
from mdfuse.plan.numbered_streams import capture_stream
from mdfuse.plan.runnable import Once
from mdfuse.plan.tensor_meta import empty, without_elements

if TYPE_CHECKING:
    from mdfuse.runtime.fast_lane import Replays

#: Builds a plan: of arguments and buffers like these, for a caller's stream.
Build = Callable[[Sequence[Any], Sequence[Any], int], Plan]


def graphs_of(
    once: Once,
    arguments: Sequence[Any],
    out: Sequence[Any] | None,
    build: Build,
    *,
    name: str,
    device: torch.device,
    stream: int,
    watch: Replays | None,
    is_all: bool,
) -> GraphPlan | None:
    """Return the plan that captures itself region by region; None where nothing can be captured.

    Args:
        once: the plan, with the addresses of its first run.
        arguments: those of the second run.
        out: the caller's buffers for outputs, None for those without; None: there are none.
        build: builds the plan anew.
        name: of the program, for errors.
        device: the GPU.
        stream: of the caller.
        watch: notes captures and replays.
        is_all: everything is to be captured, however much a replay copies.

    Raises:
        ProgramError: everything was to be captured, and some of it cannot be.
    """
    plan, side_stream = once.plan, capture_stream(device)
    given = out if out is not None else (None,) * len(plan.outputs)
    fresh = [form if x is None else None for form, x in zip_longest(once.fresh, given)]
    buffers = [
        without_elements(x) if form is None else empty((*form[:3], torch.device("meta")))
        for form, x in zip(fresh, given, strict=True)
    ]
    again = partial(build, [without_elements(x) for x in arguments], buffers)
    captured = again(side_stream.cuda_stream)
    plan.release()
    graphs = GraphPlan(
        captured,
        partial(again, stream),
        CudaRecorder(device, side_stream),
        once.stay(captured, plan.addresses(arguments, out)),
        fresh,
        may_overlap=plan.may_overlap,
        watch=watch,
        limit=None if is_all else COPY_LIMIT,
    )
    reasons = {r.eager for r in graphs.regions if r.eager is not None}
    if reasons and is_all:
        raise ProgramError(
            f"@{name} cannot be captured whole: " + "; ".join(sorted(reasons)),
            because='graph="always"',
            hint='graph="auto" captures the rest; program.explain() lists what runs eagerly',
        )
    return None if all(r.eager is not None for r in graphs.regions) else graphs
