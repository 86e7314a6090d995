"""Sums over ranks behind which a norm follows, as in a decode: mdfuse beside NCCL in a graph.

Each rank has a part z of [ranks, rows, width]. A link of the chain multiplies it by the y of the
link before, in place of a product whose sum ranks split: x = y · z is a term of a sum over the
ranks, r = r + that sum, y = rms_norm(r) · w. So none can be sent ahead. By `symmetric` a sum, its
residual and its norm are one kernel, and apart where `Options(sums="apart")` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _graphs import HandGraph
from _measure import Row, device_time, eagerly
from torch import Tensor

import mdfuse as mf
from mdfuse import Partial, Shard

#: Rows -> the most that a link may take on two H100s, nanoseconds.
_LIMITS = {6: 7_000.0, 138: 13_000.0}

_WIDTH, _SMALL_WIDTH = 6144, 64

#: Links of one graph, so that the cost of its launch is divided among them.
_LINKS, _FEW_LINKS = 32, 4

#: Calls of a turn, and clock cycles in which the host queues them.
_CALLS, _AHEAD = 8, 8_000_000

#: By dtype: how far a result may be off, relative to the norm of the right one.
_ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

_EPS = 1e-5


def rows(plan: Any) -> Iterator[Row]:
    """Yield time of a link, for each number of rows and each backend.

    Args:
        plan: of `serving.py`.

    Raises:
        AssertionError: a result is wrong.
    """
    width, links = (_SMALL_WIDTH, _FEW_LINKS) if plan.is_small else (_WIDTH, _LINKS)
    for count, limit in _LIMITS.items():
        shape = count, width
        given, right = _case(plan, shape, links)
        calls = _contenders(plan, shape, links, given)
        what = f"sums [{count}, {width}]"
        errors = {name: _error(call(), right) for name, call in calls.items()}
        plan.world.setdefault("sums", {})[what] = errors
        if not all(x < _ERRORS[plan.dtype] for x in errors.values()):
            raise AssertionError(f"{what}: relative errors {errors}")
        watch = partial(device_time, ahead=_AHEAD) if plan.is_gpu else plan.until_done
        times = plan.timed(_CALLS, warm=3, stopwatch=watch, **calls)
        each = {name: [x / links for x in spent] for name, spent in times.items()}
        sizes = f"{plan.ranks.comm.size} ranks, {links} links in a graph"
        for name in _carriers(plan):
            pair = {"ours": each[name], "against": each["by hand"]}
            yield plan.row(f"{what}: {name}", sizes, "us", pair, "by hand", 1.0)
            pair["against"] = [limit] * len(each[name])
            yield plan.row(f"{what}: {name}", sizes, "us", pair, f"{limit / 1e3:g} us", 1.0)


#: In one kernel, and apart.
_JOINED, _APART = "symmetric", "symmetric, apart"


def _carriers(plan: Any) -> tuple[str, ...]:
    return _JOINED, _APART, plan.ranks.comm.backend


def _case(plan: Any, shape: tuple[int, int], links: int) -> tuple[dict[str, Tensor], Tensor]:
    """This rank's terms and the values that all have, and the right result in float64."""
    size, rank, drawn = plan.ranks.comm.size, plan.ranks.comm.rank, torch.Generator()
    drawn.manual_seed(shape[0])

    def numbers(*of: int) -> Tensor:
        return torch.randn(of, generator=drawn).to(plan.dtype)

    z = numbers(size, *shape)
    whole = {"r": numbers(*shape), "w": 1 + numbers(shape[1]) / 8}
    y, w = (x.double() for x in whole.values())
    r = y
    for _ in range(links):
        r = r + z.double().sum(0) * y
        y = F.rms_norm(r, r.shape[-1:], w, _EPS)
    given = {"z": z[rank : rank + 1], **whole}
    return {n: x.contiguous().to(plan.device) for n, x in given.items()}, torch.cat([r, y])


def _error(got: Sequence[Tensor], right: Tensor) -> float:
    values = torch.cat([*got]).double().cpu()
    return float((values - right).norm() / right.norm())


def _contenders(
    plan: Any, shape: tuple[int, int], links: int, given: Mapping[str, Tensor]
) -> dict[str, Callable[[], Sequence[Tensor]]]:
    calls: dict[str, Callable[[], Sequence[Tensor]]] = {"by hand": _by_hand(plan, links, given)}
    for name in _carriers(plan):
        program = _program(plan, shape, links, name)
        calls[name] = partial(program.run, *given.values())
        for _ in range(3):  # eager, captured, replayed
            calls[name]()
        plan.world["eager"] += [f"sums, {name}: {line}" for line in eagerly(program)]
    return calls


def _program(plan: Any, shape: tuple[int, int], links: int, carrier: str) -> mf.Program:
    mesh, dtype, width = plan.ranks.mesh, plan.dtype, shape[1]
    part = {"tp": Shard(0)}
    with mf.FusionDefinition("sums") as fd:
        z = fd.define_tensor([plan.ranks.comm.size, *shape], dtype, mesh, part, name="z")
        y: Any = fd.define_tensor([*shape], dtype, mesh, name="r")
        w = fd.define_tensor([width], dtype, mesh, name="w")
        r = y
        for _ in range(links):
            x = (z * y).sum(0).on(mesh, {"tp": Partial("sum")})
            r = r + fd.ops.set(x).on(mesh, {})
            y = fd.ops.rms_norm(r, (width,), w, _EPS)
        fd.add_output(r)
        fd.add_output(y)
    sums: Any = "apart" if carrier == _APART else "auto"
    backend = f"{plan.ranks.comm.backend}, tp={carrier.split(',')[0]}"
    program = mf.compile(fd, mf.Options(backend=backend, sums=sums))
    joined = links if carrier == _JOINED and plan.is_gpu else 0
    assert str(program.host).count("then=row_norm") == joined
    return program


def _by_hand(plan: Any, links: int, given: Mapping[str, Tensor]) -> Callable[[], Sequence[Tensor]]:
    """All-reduces of the library, and a compiled function between two of them, in a graph."""

    def between(x: Tensor, z: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r = r + x
        y = F.rms_norm(r, r.shape[-1:], w, _EPS)
        return r, y, y * z

    compiled = torch.compile(
        between, backend="inductor" if plan.is_gpu else plan.compiler, dynamic=False, fullgraph=True
    )

    def chain() -> tuple[Tensor, Tensor]:
        z, r, w = given["z"][0], given["r"], given["w"]
        x = z * r
        for _ in range(links):
            dist.all_reduce(x)
            r, y, x = compiled(x, z, r, w)
        return r, y

    if not plan.is_gpu:
        return chain
    captured = HandGraph(chain, ())

    def replayed() -> tuple[Tensor, Tensor]:
        captured.graph.replay()
        return captured.output

    return replayed
