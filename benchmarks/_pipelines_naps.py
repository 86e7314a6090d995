"""Stages whose work is to sleep: how far a schedule on real ranks is from its table.

Forward, and each half of the backward, of a stage take one nap: so every schedule's table says how
many naps the whole takes, and few cores are enough for many ranks. A nap takes longer than it is
told to, which is measured beside: naps alone. The same table by hand, with torch's sends and
receives and no work but naps, says what is left for mdfuse to do better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _measure import Contender, Row, interleave
from _pipelines_clock import makespan_of
from _ranks import Ranks
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh

_ROWS, _WIDTH = 4, 16

#: Schedule -> how many stages each rank has.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb1p": 1, "zbv": 2, "dualpipev": 2}
#: Measured, as a multiple of what the table says.
_LIMIT = 1.08
#: Tags of a stage's messages by hand: two for each microbatch.
_TAGS = 1 << 10


@dataclass
class Nap:
    """The length of a nap, in seconds: 0 while programs are made and their results compared."""

    seconds: float = 0.0

    def take(self, times: int = 1) -> None:
        for _ in range(times):
            time.sleep(self.seconds)


def register(nap: Nap) -> Any:
    """Return an operation x w^T that sleeps, whose gradients sleep as long, each by itself."""

    def add(name: str, call: Callable[[Tensor, Tensor], Tensor], rule: str, **fields: Any) -> Any:
        def sleeping(a: Tensor, b: Tensor) -> Tensor:
            nap.take()
            return call(a, b)

        return mf.register_op(name, sleeping, rule, meta=call, **fields)

    inward = add("nap_inward", torch.matmul, "b e!, e! d -> b d")
    weights = add("nap_weights", lambda ct, x: ct.T @ x, "b e, b d -> e d", reduces={"b": "sum"})
    return add(
        "nap",
        lambda x, w: x @ w.T,
        "b d!, e d! -> b e",
        vjp=lambda e, ct: (inward(ct, e[1]), weights(ct, e[0])),
    )


def _by_hand(ranks: Ranks, nap: Nap, schedule: mf.Schedule) -> Callable[[], None]:
    """The naps and hand-overs of this rank's row; what a rank hands to itself, it has."""
    rank, owners = ranks.comm.rank, schedule.owners
    x = torch.zeros(_ROWS, _WIDTH, dtype=torch.float64)

    def neighbour(stage: int) -> int | None:
        other = owners.get(stage)
        return None if other == rank else other

    def call() -> None:
        sent = []
        for action in schedule.actions[rank]:
            s, forward = action.stage, action.phase == "F"
            before, after = (s - 1, s + 1) if forward else (s + 1, s - 1)
            tag = 2 * action.microbatch + forward
            hands_over = action.phase != "W"
            if hands_over and (source := neighbour(before)) is not None:
                dist.recv(x, source, tag=tag + _TAGS * s)
            nap.take(2 if action.phase == "B" else 1)
            if hands_over and (target := neighbour(after)) is not None:
                sent.append(dist.isend(x.clone(), target, tag=tag + _TAGS * after))
        for work in sent:
            work.wait()

    return call


@dataclass(frozen=True, kw_only=True)
class _Naps:
    """A pipeline of naps by one schedule.

    Attributes:
        program: its step.
        inputs: this rank's; None for those of others.
        wanted: outputs in float64, whole.
    """

    program: mf.Program
    inputs: list[Tensor | None]
    wanted: list[Tensor]

    @property
    def schedule(self) -> mf.Schedule:
        assert self.program.schedule is not None
        return self.program.schedule

    def check(self, rank: int) -> None:
        """Raise AssertionError where a result is wrong."""
        fusion = self.program.fusion
        results = self.program.run(*self.inputs)
        for name, got, want in zip(fusion.outputs, results, self.wanted, strict=True):
            if rank in fusion.layout(name).mesh:
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def _places(size: int, schedule: str) -> list[DeviceMesh]:
    """The mesh of each stage."""
    groups = [DeviceMesh([r], axes=["tp"]) for r in range(size)]
    if SCHEDULES[schedule] == 1:
        return groups
    return [*groups, *(groups if schedule == "interleaved" else reversed(groups))]


def _naps_of(ranks: Ranks, nap: Any, schedule: str, microbatches: int) -> _Naps:
    """A stage is `h w^T`; the gradients of all weights, and of what comes in."""
    places = _places(ranks.comm.size, schedule)
    batch = [_ROWS * microbatches, _WIDTH]
    with mf.FusionDefinition(f"naps_{schedule}") as fd:
        h: Any = fd.define_tensor(batch, torch.float64, places[0], name="x")
        t = fd.define_tensor(batch, torch.float64, places[-1], name="t")
        wrt = [h]
        for n, mesh in enumerate(places):
            wrt.append(fd.define_tensor([_WIDTH] * 2, torch.float64, mesh, name=f"w{n}"))
            h = nap(fd.ops.set(h).on(mesh, {}) if n else h, wrt[-1])
        loss = (h * t).sum()
        for value in (loss, *mf.grad(loss, wrt)):
            fd.add_output(value)
    options = mf.Options(compile="never")
    rows = {"x": 0, "t": 0}
    program = mf.pipeline(
        fd, microbatches=microbatches, batch=rows, schedule=schedule, options=options
    )
    draw = torch.Generator().manual_seed(0)
    shapes = [batch, batch, *[[_WIDTH] * 2] * len(places)]
    wholes = [torch.randn(s, generator=draw, dtype=torch.float64) / _WIDTH**0.5 for s in shapes]
    layouts = [program.fusion.layout(name) for name in program.fusion.inputs]
    given = zip(wholes, layouts, strict=True)
    inputs = [x if ranks.comm.rank in layout.mesh else None for x, layout in given]
    return _Naps(program=program, inputs=inputs, wanted=_reference(wholes))


def _reference(wholes: list[Tensor]) -> list[Tensor]:
    """The loss and the gradients, by torch's autograd."""
    with torch.enable_grad():
        x, t, *weights = (w.clone().requires_grad_() for w in wholes)
        h = x
        for w in weights:
            h = h @ w.T
        loss = (h * t).sum()
        return [loss.detach(), *torch.autograd.grad(loss, [x, *weights])]


#: Naps behind each other whose time says what one takes.
_ALONE = 12


def rows(ranks: Ranks, lengths: Sequence[float], microbatches: int, rounds: int) -> Iterator[Row]:
    """Each schedule beside its table, by naps of some lengths, in seconds."""
    nap, size = Nap(), ranks.comm.size
    op = register(nap)
    programs = {
        name: _naps_of(ranks, op, name, microbatches) for name in _possible(size, microbatches)
    }
    for naps in programs.values():
        for _ in range(2):  # the second run has a plan
            naps.check(ranks.comm.rank)
    calls = {"naps": Contender(call=partial(nap.take, _ALONE))}
    for name, x in programs.items():
        calls[name] = Contender(call=partial(x.program.run, *x.inputs))
        calls[f"{name} by hand"] = Contender(call=_by_hand(ranks, nap, x.schedule))
    clock = partial(makespan_of, ranks)
    measure = partial(interleave, calls, batch=1, settle=ranks.settle, stopwatch=clock)
    measure(rounds=0)  # naps of no length warm as well
    for nap.seconds in lengths:
        times = measure(rounds=rounds, warm=0)
        for name, naps in programs.items():
            slots = naps.schedule.timed().makespan
            expected = [slots * nap.seconds * 1e9] * rounds
            beside = {
                "table": [slots * each / _ALONE for each in times["naps"]],
                "table, as told": expected,
                "by hand": times[f"{name} by hand"],
            }
            sizes = f"{size} ranks, {len(_places(size, name))} stages, {microbatches} microbatches"
            for alternative, against in beside.items():
                yield Row(
                    name=f"naps of {nap.seconds * 1e3:g} ms, {name}: time",
                    sizes=sizes,
                    unit="ms",
                    ours=times[name],
                    against=against,
                    alternative=alternative,
                    limit=_LIMIT if alternative == "table" else None,
                )


def _possible(size: int, microbatches: int) -> list[str]:
    """The schedules that take so many microbatches."""
    rounds = max(1, microbatches // size)
    least = {"dualpipev": microbatches >= 2 * size}
    goes_round = microbatches % rounds == 0
    can = least | {"interleaved": goes_round, "zb1p": goes_round}
    return [name for name in SCHEDULES if can.get(name, True)]
