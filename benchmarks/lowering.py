"""The cost to define, lower, verify and plan a stack of layers, per expression.

python benchmarks/lowering.py
mdfuse bench lowering --quick

A Llama-like stack on a mesh of 2 x 4 ranks, of which this process stands for one; nothing is sent.
Then rings and pipelines of up to thousands of ranks, training steps, and such in microbatches: what
it costs to verify them.
CPU time of one thread, garbage collection included; all caches are emptied before each definition.
Prints one table and stores it with every round.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from _lowering import VERIFIED, forget
from _measure import Report, Row, show

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard
from mdfuse.cli import screen
from mdfuse.frontend.handle import Handle
from mdfuse.hir.verify.check import verify

_RESULTS = Path(__file__).parent / "results"
_MESH = DeviceMesh.arange(dp=2, tp=4)
_LAYERS = (8, 32, 128)

_BATCH, _TOKENS, _HIDDEN, _UNITS = 4, 16, 64, 128
_HEADS, _KV_HEADS, _HEAD = 8, 4, 8

#: Microseconds per expression that a stage may take; verification and plans are shown only.
_LIMITS: dict[str, float | None] = {"define": 250.0, "compile": 250.0}

_Result = TypeVar("_Result")


def stack(layers: int) -> mf.FusionDefinition:
    """Layers of RMSNorm, rotary embedding, grouped attention and SwiGLU; two all-reduces each."""
    with mf.FusionDefinition("stack") as fd:
        x = _tensor(fd, [_BATCH, _TOKENS, _HIDDEN], {"dp": Shard(0)})
        cos, sin = (_tensor(fd, [_TOKENS, _HEAD], {}) for _ in range(2))
        for _ in range(layers):
            x = _attention(fd, x, cos, sin)
            x = _mlp(fd, x)
        fd.add_output(x)
    return fd


def _tensor(fd: mf.FusionDefinition, shape: list[int], layout: dict[str, Shard]) -> Handle:
    x: Handle = fd.define_tensor(shape, torch.bfloat16, _MESH, layout)
    return x


def _column(fd: mf.FusionDefinition, x: Handle, units: int) -> Handle:
    y: Handle = fd.ops.linear(x, _tensor(fd, [units, _HIDDEN], {"tp": Shard(0)}))
    return y


def _row(fd: mf.FusionDefinition, x: Handle, units: int) -> Handle:
    w = _tensor(fd, [_HIDDEN, units], {"tp": Shard(1)})
    y: Handle = fd.ops.set(fd.ops.linear(x, w)).on(_MESH, {"dp": Shard(0)})
    return y


def _attention(fd: mf.FusionDefinition, x: Handle, cos: Handle, sin: Handle) -> Handle:
    n = fd.ops.rms_norm(x, [_HIDDEN], _tensor(fd, [_HIDDEN], {}))
    q, k, v = (
        _column(fd, n, heads * _HEAD).reshape(_BATCH, _TOKENS, heads, _HEAD).transpose(1, 2)
        for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
    )
    q, k = _rotated(fd, q, cos, sin), _rotated(fd, k, cos, sin)
    a = fd.ops.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    merged = a.transpose(1, 2).reshape(_BATCH, _TOKENS, _HEADS * _HEAD)
    y: Handle = x + _row(fd, merged, _HEADS * _HEAD)
    return y


def _rotated(fd: mf.FusionDefinition, x: Handle, cos: Handle, sin: Handle) -> Handle:
    first, second = fd.ops.chunk(x, 2, -1)
    y: Handle = x * cos + fd.ops.cat([-second, first], -1) * sin
    return y


def _mlp(fd: mf.FusionDefinition, x: Handle) -> Handle:
    n = fd.ops.rms_norm(x, [_HIDDEN], _tensor(fd, [_HIDDEN], {}))
    gate, up = _column(fd, n, _UNITS), _column(fd, n, _UNITS)
    y: Handle = x + _row(fd, fd.ops.silu(gate) * up, _UNITS)
    return y


def stages(layers: int) -> tuple[int, dict[str, float]]:
    """The number of expressions, and the CPU time in nanoseconds of each stage."""
    forget()
    times: dict[str, float] = {}

    def timed(name: str, call: Callable[[], _Result]) -> _Result:
        start = time.process_time_ns()
        result = call()
        times[name] = float(time.process_time_ns() - start)
        return result

    definition = timed("define", lambda: stack(layers))
    count = len(timed("its fusion", lambda: definition.fusion).exprs)
    program = timed(
        "compile", lambda: mf.compile(definition, Options(verify=False, overlap="never"))
    )
    timed("verify", lambda: verify(program.host))
    arguments = _arguments(program)
    timed("first run, not verified", lambda: program.run(*arguments))
    timed("second run", lambda: program.run(*arguments))
    return count, times


def _arguments(program: mf.Program) -> list[Any]:
    """Return the arguments of rank 0: its parts of the inputs."""
    host = program.host
    types = (host.types[name] for name in host.inputs)
    return [torch.ones(t.layout.local_shape(t.shape, 0), dtype=t.dtype) for t in types if t.layout]


def rows(rounds: int, counts: Sequence[int]) -> Iterator[Row]:
    """The figures."""
    stages(1)
    for layers in counts:
        samples: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            expressions, times = stages(layers)
            for name, time_ns in times.items():
                samples[name].append(time_ns)
        for name, of_rounds in samples.items():
            yield Row(
                name=f"{name}, per expression", unit="us", kind="added", per=expressions,
                sizes=f"{layers} layers, {expressions} expressions", ours=of_rounds,
                against=[0.0] * rounds, alternative="nothing", limit=_LIMITS.get(name),
            )  # fmt: skip


def verified(rounds: int, largest: int) -> Iterator[Row]:
    """Compare the cost to verify rings and pipelines with the cost to define and lower them.

    Args:
        rounds: how often.
        largest: the most ranks, layers, microbatches or stages.
    """
    for name, lowered_of, counts in VERIFIED:
        for count in (n for n in counts if n <= largest):
            ours, against = [], []
            for _ in range(rounds):
                forget()
                start = time.process_time_ns()
                program = lowered_of(count)
                lowered = time.process_time_ns()
                verify(program)
                ours.append(float(time.process_time_ns() - lowered))
                against.append(float(lowered - start))
            yield Row(
                name=f"verify, against lowering: {name}", unit="ms", sizes=f"{count}", ours=ours,
                against=against, alternative="defining and lowering it", limit=None,
            )  # fmt: skip


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", default=",".join(map(str, _LAYERS)))
    parser.add_argument(
        "--largest", type=int, default=8192, help="ranks or stages of what is verified"
    )
    parser.add_argument("--output", type=Path, help="by default in benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    mf.init(backend="null", size=_MESH.size)
    rounds = 1 if arguments.quick else arguments.rounds
    counts = (2,) if arguments.quick else tuple(map(int, arguments.layers.split(",")))
    all_rows = [
        *rows(rounds, counts),
        *verified(rounds, 8 if arguments.quick else arguments.largest),
    ]
    path = arguments.output or _RESULTS / "lowering.json"
    show(screen.output(), "defining, lowering, verifying, planning", all_rows)
    given = {"rounds": str(rounds), "layers": ",".join(map(str, counts))}
    given["largest"] = str(arguments.largest)
    Report(benchmark="lowering", arguments=given, rows=all_rows, where={"ranks": 1}).write(path)
    screen.output().print(f"written: {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
