"""Stages whose work is to sleep: how far a schedule on real ranks is from its table.

Forward, and each half of the backward, of a stage take one nap: so every schedule's table says how
many naps the whole takes, and few cores are enough for many ranks. A nap takes longer than it is
told to, which is measured beside: naps alone, as many as a table has. The same table by hand, with
torch's sends and receives and no work but naps, says what is left for mdfuse to do better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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


def register(seconds: float) -> Any:
    """Return an operation x w^T that sleeps, whose gradients sleep as long, each by itself."""

    def add(name: str, call: Callable[[Tensor, Tensor], Tensor], rule: str, **more: Any) -> Any:
        def sleeping(a: Tensor, b: Tensor) -> Tensor:
            time.sleep(seconds)
            return call(a, b)

        return mf.register_op(name, sleeping, rule, meta=call, **more)

    inward = add("nap_inward", torch.matmul, "b e!, e! d -> b d")
    weights = add("nap_weights", lambda ct, x: ct.T @ x, "b e, b d -> e d", reduces={"b": "sum"})
    return add(
        "nap",
        lambda x, w: x @ w.T,
        "b d!, e d! -> b e",
        vjp=lambda e, ct: (inward(ct, e[1]), weights(ct, e[0])),
    )


def _by_hand(ranks: Ranks, seconds: float, schedule: mf.Schedule) -> Callable[[], None]:
    """The naps and hand-overs of this rank's row, one stage on each rank."""
    rank, last = ranks.comm.rank, ranks.comm.size - 1
    x = torch.zeros(_ROWS, _WIDTH, dtype=torch.float64)

    def call() -> None:
        sent = []
        for action in schedule.actions[rank]:
            step = 1 if action.phase == "F" else -1
            hands_over = action.phase != "W"
            if hands_over and 0 <= rank - step <= last:
                dist.recv(x, rank - step)
            for _ in range(2 if action.phase == "B" else 1):
                time.sleep(seconds)
            if hands_over and 0 <= rank + step <= last:
                sent.append(dist.isend(x.clone(), rank + step))
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
        found = self.program.run(*self.inputs)
        for name, got, want in zip(fusion.outputs, found, self.wanted, strict=True):
            if rank in fusion.layout(name).mesh:
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def _places(size: int, schedule: str) -> list[DeviceMesh]:
    """The mesh of each stage."""
    groups = [DeviceMesh([r], axes=["tp"]) for r in range(size)]
    if SCHEDULES[schedule] == 1:
        return groups
    return [*groups, *(groups if schedule == "interleaved" else reversed(groups))]


def _made(ranks: Ranks, nap: Any, schedule: str, microbatches: int) -> _Naps:
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


def _sleep(seconds: float) -> None:
    for _ in range(_ALONE):
        time.sleep(seconds)


def rows(ranks: Ranks, seconds: float, microbatches: int, rounds: int) -> Iterator[Row]:
    """Each schedule beside its table."""
    nap, size = register(seconds), ranks.comm.size
    made = {name: _made(ranks, nap, name, microbatches) for name in _possible(size, microbatches)}
    for naps in made.values():
        for _ in range(2):  # the second run has a plan
            naps.check(ranks.comm.rank)
    calls: dict[str, Callable[[], object]] = {"naps": partial(_sleep, seconds)}
    for name, x in made.items():
        calls[name] = partial(x.program.run, *x.inputs)
        if SCHEDULES[name] == 1:
            calls[f"{name} by hand"] = _by_hand(ranks, seconds, x.schedule)
    times = interleave(
        {name: Contender(call=call) for name, call in calls.items()},
        rounds=rounds,
        batch=1,
        settle=ranks.settle,
        stopwatch=partial(makespan_of, ranks),
    )
    for name, naps in made.items():
        slots = naps.schedule.timed().makespan
        predicted = {
            "table": [slots * nap / _ALONE for nap in times["naps"]],
            "table, as told": [slots * seconds * 1e9] * rounds,
            "by hand": times.get(f"{name} by hand"),
        }
        for alternative, against in predicted.items():
            if against is not None:
                yield Row(
                    name=f"sleeping stages, {name}: time",
                    sizes=f"{size} ranks, {len(_places(size, name))} stages, "
                    f"{microbatches} microbatches",
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
