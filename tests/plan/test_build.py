"""Plans as they run on real ranks: one function each, with buffers of their own, a thread per rank.

The simulator makes a plan's calls one by one, on new buffers. Here drawn programs run as written
functions, twice on other data, so that a buffer which is given up too soon shows. Nothing is
poisoned: what a run finds in its buffers is what the run before left there.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import sampling
from helpers.drawn_programs import ALIASES, Drawer, expected, program_text
from helpers.drawn_views import Drawn, programs
from helpers.host_programs import parse
from helpers.oracle import given_to_each, is_close, local_part
from helpers.several_outputs import many
from hypothesis import given
from torch import Tensor

import mdfuse as mf
from mdfuse import Partial
from mdfuse.backends.base import PostSite
from mdfuse.hir.rank.pipelines import project
from mdfuse.layouts.call import Call
from mdfuse.plan.build import Plan, build
from mdfuse.simulation.network import SimNetwork, SimWork

CPU = torch.device("cpu")


class Room:
    """Where the threads of all ranks meet: the simulator's network behind a lock."""

    def __init__(self) -> None:
        self.network, self.changed = SimNetwork(), threading.Condition()
        self.is_broken = False

    def bind(self, call: Call) -> Poster:
        return Poster(self, call)

    def leave(self) -> None:
        """One rank failed: the others need not wait."""
        with self.changed:
            self.is_broken = True
            self.changed.notify_all()


@dataclass
class Poster:
    room: Room
    call: Call

    def __call__(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> Waiting:
        with self.room.changed:
            work = self.room.network.bind(self.call)(srcs, dsts)
            self.room.changed.notify_all()
        return Waiting(self.room, work)

    def prepare(self, srcs: Sequence[Tensor], dsts: Sequence[Tensor], place: PostSite) -> None:
        """There is no library under it."""


@dataclass
class Waiting:
    room: Room
    work: SimWork

    def wait(self) -> None:
        with self.room.changed:
            self.room.changed.wait_for(lambda: self.work.is_done or self.room.is_broken, 30)
            assert self.work.is_done, self.work.call


class Ranks:
    """The plans of all ranks of a program, built for inputs like these."""

    def __init__(self, program: mf.Program, inputs: Sequence[Tensor]) -> None:
        self.program, self.room = program, Room()
        self.plans: list[Plan] = [
            build(project(program.host, rank), self.room.bind, CPU, False, arguments)
            for rank, arguments in enumerate(self.arguments(inputs))
        ]

    def arguments(self, inputs: Sequence[Tensor]) -> list[list[Any]]:
        rows = given_to_each(self.program, inputs)
        return [[row.get(name) for name in self.program.host.inputs] for row in rows]

    def run(self, inputs: Sequence[Tensor]) -> list[list[Any]]:
        results: list[Any] = [None] * len(self.plans)

        def work(rank: int, arguments: list[Any]) -> None:
            try:
                results[rank] = self.plans[rank].run(arguments)
            except BaseException as error:
                results[rank] = error
                self.room.leave()

        rows = self.arguments(inputs)
        threads = [threading.Thread(target=work, args=(r, row)) for r, row in enumerate(rows)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for found in results:
            if isinstance(found, BaseException):
                raise found
        return results

    def check(self, got: list[list[Any]], wants: Sequence[Tensor]) -> None:
        """Every rank has its part of each output that is not Partial."""
        for n, (name, want) in enumerate(zip(self.program.fusion.outputs, wants, strict=True)):
            layout = self.program.fusion.layout(name)
            if any(isinstance(p, Partial) for p in layout.placements):
                continue
            for rank in layout.mesh.ranks:
                part = local_part(want, layout, rank)
                assert is_close(got[rank][n], part), f"%{name}, rank {rank}\n{self.plans[rank]}"


@given(drawn=programs())
@sampling.examples(150)
def test_drawn_programs(drawn: Drawn) -> None:
    inputs, want = drawn.tensors(), drawn.plain()[-1]
    ranks = Ranks(mf.compile(drawn.define()), inputs)
    ranks.run([torch.ones_like(x) for x in inputs])
    first = ranks.run(inputs)
    ranks.run([torch.zeros_like(x) for x in inputs])
    ranks.check(first, [want])  # no later run writes into it


@pytest.mark.parametrize("seed", range(40))
def test_values_with_several_readers(seed: int) -> None:
    fd, x, wants, merge = many(seed)
    ranks = Ranks(mf.compile(fd, should_merge=merge), [x])
    ranks.run([x + 1])
    first = ranks.run([x])
    ranks.run([-x])
    ranks.check(first, wants)


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_programs_by_hand(start: int) -> None:
    """Aliases, views, loops, updates in place, frees."""
    count = 0
    for seed in range(start, start + 100):
        draw = random.Random(seed)
        block, aliases = Drawer(draw).block(), draw.choice(ALIASES)
        x = torch.tensor([draw.randint(-3, 3) for _ in range(4)]).float().view(2, 2)
        if expected(block, aliases, x) is None:
            continue
        host = project(parse(program_text(block, aliases)), 0)
        plan = build(host, Room().bind, CPU, True, [x.clone()])
        for given_x in (x + 1, x):
            want, given_now = expected(block, aliases, given_x), given_x.clone()
            (got,) = plan.run([given_now])
            assert want is not None
            assert torch.equal(got.nan_to_num(99), want[0].nan_to_num(99)), f"{seed}\n{plan}"
            assert torch.equal(given_now.nan_to_num(99), want[1].nan_to_num(99)), f"{seed}\n{plan}"
        count += 1
    assert count > 20


def test_parts_of_16_bits_are_added_in_one_call() -> None:
    """Each call reads them as they are: none is cast in a pass of its own.

    Rings of more than two ranks keep what arrives, and add it up behind the loop.
    """
    mesh, around = mf.DeviceMesh.arange(tp=2), mf.Stream(0, 2, rotate="tp")
    with mf.FusionDefinition("scatter") as fd:
        x = fd.define_tensor([16, 8], torch.bfloat16, mesh=mesh, layout={"tp": mf.Shard(1)})
        w = fd.define_tensor([8, 6], torch.bfloat16, mesh=mesh, layout={"tp": mf.Shard(0)})
        fd.add_output(fd.ops.set(x @ w).on(mesh, {"tp": mf.Shard(0)}, stream=around))
    local = project(mf.compile(fd).host, 1)
    plan = build(local, lambda call: lambda srcs, dsts: None, torch.device("cpu"), poison=False)  # type: ignore[arg-type,return-value]
    added = [line for step in plan.steps if step.op == "binary" for line in step.lines]
    assert [line.run for line in added] == [torch.add]
    assert not [x for s in plan.steps if s.op == "unary" for x in s.lines if x.run is not None]
