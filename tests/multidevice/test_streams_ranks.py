"""Streamed programs on real ranks; on GPUs also with streams that are held up at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers.oracle import is_close, local_part, shares
from helpers.stream_cases import CASES, Case
from torch import Tensor

import mdfuse as mf
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.pipelines import project
from mdfuse.plan import numbered_streams
from mdfuse.plan.build import Plan, build
from mdfuse.plan.lines import Line
from mdfuse.plan.posting import groups

ALL = list(CASES.values())
COMMUNICATING = [case for case in ALL if case.family != "local"]
PLAIN = mf.Options(poison=True, verify=False)
ONE_STREAM = mf.Options(poison=True, verify=False, streams=1)
ROUND_ROBIN = mf.Options(poison=True, verify=False, stream_policy="round_robin")
#: How often each program runs with streams that are held up.
RUNS = 50


def parts(program: mf.Program, inputs: list[Any], comm: mf.Communicator) -> list[Any]:
    """This rank's part of each input."""
    found: list[Any] = []
    for name, x in zip(program.fusion.inputs, inputs, strict=True):
        layout = program.fusion.values[name].layout
        if layout is None:
            found.append(x)
            continue
        mine = shares(x, layout).get(comm.rank)
        found.append(None if mine is None else mine.to(comm.device, copy=True))
    return found


def check(case: Case, program: mf.Program, got: list[Any], comm: mf.Communicator) -> None:
    """Compare this rank's outputs with its parts of what plain torch gives."""
    wholes = case.expected(case.inputs(program))
    for name, y, whole in zip(program.fusion.outputs, got, wholes, strict=True):
        layout = program.fusion.layout(name)
        if comm.rank not in layout.mesh:
            assert y is None
            continue
        part = local_part(whole, layout, comm.rank)
        assert is_close(y.cpu(), part, exact=case.is_exact), f"%{name}:\n{y}\nexpected\n{part}"


def check_case(case: Case, comm: mf.Communicator, rows: int, options: mf.Options) -> None:
    program = case.compile(comm.size, 8 if case.fixed else rows, options)
    for _ in range(2):
        check(case, program, program.run(*parts(program, case.inputs(program), comm)), comm)


@pytest.mark.world(4)
@pytest.mark.parametrize("case", COMMUNICATING, ids=str)
def test_on_four_ranks(case: Case, comm: mf.Communicator) -> None:
    check_case(case, comm, 7, PLAIN)


@pytest.mark.world(2)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_on_two_ranks(case: Case, comm: mf.Communicator) -> None:
    """Short chunks, and some that are empty."""
    check_case(case, comm, 3, PLAIN)


@pytest.mark.world(4)
@pytest.mark.parametrize("options", [ONE_STREAM, ROUND_ROBIN], ids=["one_stream", "round_robin"])
@pytest.mark.parametrize("name", ["gather_matmul_in_a_ring", "matmul_scatter", "matmul_reduce"])
def test_policies(name: str, options: mf.Options, comm: mf.Communicator) -> None:
    check_case(CASES[name], comm, 8, options)


# -- streams that are held up --------------------------------------------------------------------


@dataclass
class Delays:
    """Holds up whatever stream is current, at random places of a plan.

    Attributes:
        sleep: holds up the current stream for a number of clock cycles.
        draw: where, and for how long.
        count: how often it did.
    """

    sleep: Callable[[int], None]
    draw: random.Random
    count: int = field(default=0)

    def __call__(self) -> None:
        self.count += 1
        self.sleep(self.draw.randrange(1_000_000))  # up to half a millisecond

    def into(self, plan: Plan) -> Plan:
        """The plan with delays before some of its steps, others in each run."""
        held = Line(run=self.maybe)
        steps = tuple(replace(step, lines=(held, *step.lines)) for step in plan.steps)
        return replace(plan, steps=steps)

    def maybe(self) -> None:
        """A delay, in some of the cases."""
        if self.draw.random() < 0.3:
            self()


def plan_of(host: HostProgram, arguments: list[Any], out: list[Any], comm: mf.Communicator) -> Plan:
    """The plan of this rank, whatever verification would say of the program."""
    local = project(host, comm.rank)
    comm.prepare(groups(local, comm.rank))
    caller = torch.cuda.current_stream().cuda_stream if comm.device.type == "cuda" else 0
    return build(local, comm.poster, comm.device, True, arguments, out, caller=caller)


def poisoned(x: Any) -> Any:
    """A buffer of the same form, full of what no result is."""
    return x if not isinstance(x, Tensor) else torch.full_like(x, 77)


def runs(
    host: HostProgram, arguments: list[Any], like: list[Any], delays: Delays, comm: mf.Communicator
) -> list[list[Any]]:
    """The outputs of many runs of a plan with delays, queued without waiting for any.

    Inputs become right late, on the caller's stream, which reads the outputs as soon as it may.
    """
    like = [None if n in host.aliases else y for n, y in zip(host.outputs, like, strict=True)]
    plan = delays.into(plan_of(host, arguments, like, comm))
    results = []
    for _ in range(RUNS):
        given, out = [poisoned(x) for x in arguments], [poisoned(y) for y in like]
        hold_up_all(delays, comm.device)
        for x, late in zip(given, arguments, strict=True):
            if isinstance(x, Tensor):
                x.copy_(late)
        results.append([y if y is None else y.clone() for y in plan.run(given, out)])
    return results


def hold_up_all(delays: Delays, device: torch.device) -> None:
    """Before a run: each stream of programs is behind by some time, and so is the caller's."""
    if device.type == "cuda":
        for index in range(4):
            with torch.cuda.stream(numbered_streams.stream(device, index)):
                delays()
    delays()


def check_held_up(case: Case, comm: mf.Communicator, delays: Delays) -> None:
    program = case.compile(comm.size, 8)
    arguments = parts(program, case.inputs(program), comm)
    like = program.run(*(x.clone() if isinstance(x, Tensor) else x for x in arguments))
    for got in runs(program.host, arguments, like, delays, comm):
        check(case, program, got, comm)
    assert delays.count > RUNS


def on_gpu(comm: mf.Communicator) -> Delays:
    return Delays(torch.cuda._sleep, random.Random(comm.rank))


@pytest.mark.world(2)
@pytest.mark.gpu
@pytest.mark.parametrize("case", ALL, ids=str)
def test_two_ranks_held_up(case: Case, comm: mf.Communicator) -> None:
    check_held_up(case, comm, on_gpu(comm))


@pytest.mark.world(4)
@pytest.mark.gpu
@pytest.mark.parametrize("case", ALL, ids=str)
def test_four_ranks_held_up(case: Case, comm: mf.Communicator) -> None:
    check_held_up(case, comm, on_gpu(comm))


@pytest.mark.world(2)
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["one_op", "gather_matmul", "matmul_scatter"])
def test_without_syncs_it_would_show(name: str, comm: mf.Communicator) -> None:
    """The delays find what they are there to find."""
    case = CASES[name]
    program = case.compile(comm.size, 8)
    arguments = parts(program, case.inputs(program), comm)
    like = program.run(*arguments)
    wrong = replace(program.host, instructions=without_syncs(program.host.instructions))
    found = runs(wrong, arguments, like, on_gpu(comm), comm)
    is_same = [torch.equal(y, z) for got in found for y, z in zip(got, like, strict=True)]
    assert not all(is_same)


def without_syncs(block: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    return tuple(replace(i, body=without_syncs(i.body)) for i in block if i.op != "sync")


@pytest.mark.world(2)
@pytest.mark.parametrize("name", ["one_op", "matmul_scatter", "reused"])
def test_the_delays_themselves(name: str, comm: mf.Communicator) -> None:
    """On any device: they run, before and inside the plan, and change no result."""
    slept: list[int] = []
    delays = Delays(slept.append, random.Random(comm.rank))
    check_held_up(CASES[name], comm, delays)
    assert len(slept) == delays.count > 2 * RUNS
    assert len(set(slept)) > RUNS
