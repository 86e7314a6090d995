"""The cost to define a fusion again that was defined before.

python benchmarks/definitions.py
mdfuse bench definitions --quick

A definition that is found again is a walk of a trie, so it costs host time per recorded operation
and nothing else. It is compared with nothing (what is added), with defining it for the first time,
and with tracing the same function by torch.fx. Prints one table and stores it with every round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _measure import Contender, Report, Row, interleave, show
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Replicate, Shard
from mdfuse.cli import screen

_RESULTS = Path(__file__).parent / "results"
_MESH = DeviceMesh.arange(tp=4)

#: Microseconds per recorded operation that defining again may take.
_LIMIT = 2.0


def _mlp(x: Any, w1: Any, w2: Any) -> Any:
    """Eleven operations; every one is in torch and here."""
    h = x @ w1
    a = h * 0.5
    b = a + a
    y = b @ w2
    r = y + x
    c = r - 1.0
    d = c * c
    e = d + 1e-5
    f = e * c
    g = f / e
    return g - r


def mlp() -> mf.FusionDefinition:
    """A tensor-parallel MLP: three inputs, eleven operations, one output."""
    with mf.FusionDefinition("mlp") as fd:
        x = fd.define_tensor([64, 128], mesh=_MESH, layout={"tp": Replicate()})
        w1 = fd.define_tensor([128, 512], mesh=_MESH, layout={"tp": Shard(1)})
        w2 = fd.define_tensor([512, 128], mesh=_MESH, layout={"tp": Shard(0)})
        fd.add_output(_mlp(x, w1, w2))
    return fd


def layer() -> mf.FusionDefinition:
    """Operations with arguments: reductions, softmax, slices, reshapes, laws."""
    with mf.FusionDefinition("layer") as fd:
        x = fd.define_tensor([8, 64, 128], mesh=_MESH, layout={"tp": Shard(0)})
        w = fd.define_tensor([128, 128], mesh=_MESH)
        m = fd.ops.mean(x, -1, keepdim=True)
        c = x - m
        v = fd.ops.mean(c * c, -1, keepdim=True)
        n = c * fd.ops.rsqrt(v + 1e-5)
        h = fd.ops.linear(n, w)
        p = fd.ops.softmax(h, dim=-1)
        q = p.transpose(1, 2)
        s = q.reshape(8, 64 * 128)
        g = fd.ops.set(s).on(_MESH, {"tp": Replicate()})
        fd.add_output(fd.ops.sum(g, 0))
    return fd


def recorded(define: Callable[[], mf.FusionDefinition]) -> int:
    """Operations, inputs, laws and outputs: what is looked up one by one."""
    mf.debug.FusionCache.reset()
    define()
    return mf.debug.FusionCache.get().nodes()


class _Module(nn.Module):
    def forward(self, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        result: Tensor = _mlp(x, w1, w2)
        return result


def _anew(define: Callable[[], mf.FusionDefinition]) -> Callable[[], object]:
    def define_anew() -> object:
        mf.debug.FusionCache.reset()
        return define().named

    return define_anew


def rows(rounds: int, batch: int) -> Iterator[Row]:
    """The figures."""

    def times(**calls: Callable[[], object]) -> dict[str, list[float]]:
        contenders = {name: Contender(call=call) for name, call in calls.items()}
        return interleave(contenders, rounds=rounds, batch=batch, settle=lambda: None)

    def nothing() -> None:
        return None

    for define in (mlp, layer):
        n = recorded(define)
        sizes = f"{n} recorded"
        ns = times(again=define, nothing=nothing)
        yield Row(
            name=f"{define.__name__}, defined again: per recorded operation", sizes=sizes,
            unit="us", ours=ns["again"], against=ns["nothing"], alternative="nothing",
            limit=_LIMIT, kind="added", per=n,
        )  # fmt: skip
        mf.compile(define())
        ns = times(again=lambda: mf.compile(define()), nothing=nothing)  # noqa: B023
        yield Row(
            name="  and compiled again", sizes=sizes, unit="us", ours=ns["again"],
            against=ns["nothing"], alternative="nothing", limit=None, kind="added", per=n,
        )  # fmt: skip
    ns = times(again=mlp, fx=lambda: torch.fx.symbolic_trace(_Module()))
    yield Row(
        name="mlp, defined again", sizes=f"{recorded(mlp)} recorded", unit="us",
        ours=ns["again"], against=ns["fx"], alternative="torch.fx.symbolic_trace", limit=None,
    )  # fmt: skip
    batch = max(1, batch // 20)
    ns = times(again=mlp, anew=_anew(mlp))
    yield Row(
        name="mlp, defined again or anew", sizes="", unit="us", ours=ns["again"],
        against=ns["anew"], alternative="anew", limit=None,
    )  # fmt: skip


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")
    arguments = parser.parse_args()
    rounds, batch = (3, 20) if arguments.quick else (arguments.rounds, 100)
    all_rows = list(rows(rounds, batch))
    path = arguments.output or _RESULTS / "definitions.json"
    show(screen.output(), "defining again", all_rows)
    given = {"rounds": str(rounds), "quick": str(arguments.quick)}
    Report(benchmark="definitions", arguments=given, rows=all_rows, where={"ranks": 1}).write(path)
    screen.output().print(f"written: {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
