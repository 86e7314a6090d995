"""Run a program on the launched ranks or simulate it, and compare it with one device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mdfuse
from mdfuse.compiled.program import Program, compile
from mdfuse.errors import ProgramError, counted, listed
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.layouts.sharding import shard_tensor
from mdfuse.mesh import DeviceMesh
from mdfuse.runtime.communicator import Communicator

#: Timed runs, after the first one, which builds the plan.
RUNS = 5

#: Largest difference from one device, as a share of the largest element: the order of additions
#: differs. Other dtypes must agree exactly.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.complex128: 1e-10,
    torch.complex64: 1e-5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outputs of a program, and the times of its runs.

    Attributes:
        outputs: the global outputs; empty on ranks other than 0.
        seconds: time of each timed run, on this rank.
    """

    outputs: list[Tensor]
    seconds: list[float]

    @property
    def median(self) -> float:
        """The median of the times, seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference between an output and what one device computes.

    Attributes:
        largest: the largest absolute difference of elements; infinite where NaNs do not match.
        allowed: the largest difference that counts as none.
    """

    largest: float
    allowed: float

    @property
    def is_allowed(self) -> bool:
        return self.largest <= self.allowed


def run_on_ranks(program: Program, inputs: Sequence[Any], comm: Communicator) -> Outcome:
    """Run a program on every rank of a communicator, and time it; all ranks call it.

    Args:
        program: on meshes whose ranks the communicator has.
        inputs: global tensors (numbers for scalars), the same on all ranks.
        comm: as `mdfuse.init()` returns it.
    """
    mine = local_inputs(program, inputs, comm)
    results = program.run(*mine)
    seconds = [timed(lambda: program.run(*mine), comm) for _ in range(RUNS)]
    return Outcome(outputs=gather(program, results, comm), seconds=seconds)


def run_simulated(program: Program, inputs: Sequence[Any]) -> Outcome:
    """Simulate all ranks in this process, once; the time says nothing about real ranks."""
    start = time.perf_counter()
    outputs = mdfuse.simulate(program, inputs).outputs
    return Outcome(outputs=outputs, seconds=[time.perf_counter() - start])


def local_inputs(program: Program, inputs: Sequence[Any], comm: Communicator) -> list[Any]:
    """Return this rank's part of each input, on its device; None where it has no part.

    Raises:
        ProgramError: the number of inputs is not that of the program.
    """
    names = program.host.inputs
    if len(inputs) != len(names):
        raise ProgramError(
            f"build gave {counted(len(inputs), 'input')} for {len(names)}",
            hint="return a global tensor or number for each of " + listed(names),
        )
    return [_local(program, n, x, comm) for n, x in zip(names, inputs, strict=True)]


def _local(program: Program, name: str, x: Any, comm: Communicator) -> Any:
    layout = program.host.types[name].layout
    if layout is None:
        return x
    if comm.rank not in layout.mesh:
        return None
    part = shard_tensor(x, layout, rank=comm.rank)
    return torch.empty_like(part, device=comm.device).copy_(part)  # dense, in the order of x


def timed(
    call: Callable[[], object],
    comm: Communicator,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds that a call takes on this rank, once all ranks are ready."""
    _finish(comm)
    comm.barrier()
    start = clock()
    call()
    _finish(comm)
    return clock() - start


def _finish(comm: Communicator) -> None:
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)


def gather(program: Program, results: Sequence[Any], comm: Communicator) -> list[Tensor]:
    """Gather global outputs on rank 0, by a program of sets; all ranks call it.

    Returns:
        the outputs on rank 0, and an empty list elsewhere.
    """
    kinds = [program.host.types[name] for name in program.host.outputs]
    with FusionDefinition("gather") as fd:
        for i, kind in enumerate(kinds):
            x = fd.define_tensor(kind.shape, kind.dtype, kind.layout, name=f"out{i}")
            fd.add_output(fd.ops.set(x).on(DeviceMesh([0])))
    gathered = compile(fd, program.options).run(*results)
    return gathered if comm.rank == 0 else []


def compare(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Difference]:
    """Compare each output with what one device computes."""
    return [_difference(a, b) for a, b in zip(outputs, expected, strict=True)]


def _difference(output: Tensor, expected: Tensor) -> Difference:
    """Compare in double precision; NaN equals NaN, and infinities equal themselves."""
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = (x.detach().cpu().to(wide) for x in (output, expected))
    gap = (a - b).abs().masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
    largest = gap.nan_to_num(nan=torch.inf).max().item() if gap.numel() else 0.0
    if expected.dtype not in TOLERANCES and not torch.equal(output.cpu(), expected.cpu()):
        largest = max(largest, 1.0)  # whole numbers beyond 53 bits
    finite = b[b.isfinite()].abs()
    scale = max(1.0, finite.max().item() if finite.numel() else 0.0)
    return Difference(largest=largest, allowed=scale * TOLERANCES.get(expected.dtype, 0.0))
