"""Programs whose lengths change from run to run: how many functions are compiled, and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Options, Shard
from mdfuse.plan import compilation, inductor
from mdfuse.plan.fusing import Fuser
from mdfuse.plan.inductor import TracedGraph

MESH = DeviceMesh.arange(t=1)
ALWAYS = Options(compile="always")


class Compiler:
    """Stands for Inductor: runs the graph that it is given; counts, and may refuse sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.assumes: Callable[[Sequence[torch.SymInt]], object] = len
        self.refuses = False

    def __call__(self, found: TracedGraph) -> Callable[..., Any]:
        if found.sizes:
            if self.refuses:
                raise NotImplementedError("sizes")
            self.assumes(found.sizes)
        self.sizes.append(len(found.sizes))
        return lambda *values: list(found.graph(*values))


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    found = Compiler()
    monkeypatch.setattr(inductor, "compiled", found)
    monkeypatch.setattr(inductor, "folder", lambda: None)
    compilation._MADE.empty()
    yield found
    compilation._MADE.empty()


def defined(build: Callable[..., Any], *shapes: Sequence[int]) -> FusionDefinition:
    with FusionDefinition("f") as fd:
        given = [fd.define_tensor(shape, mesh=MESH, layout={}) for shape in shapes]
        fd.add_output(build(fd.ops, *given))
    return fd


def norm(ops: Any, x: Any, w: Any) -> Any:
    return (x @ w).relu().softmax(0) * 2.0 + x


def check(
    program: mf.Program, lengths: Sequence[int], expected: Callable[..., Tensor] = norm
) -> None:
    w = torch.randn(8, 8)
    for n in lengths:
        x = torch.randn(n, 8)
        for _ in range(2):
            (got,) = program.run(x, w)
        torch.testing.assert_close(got, expected(torch, x, w))


def test_later_lengths_share_a_function(compiler: Compiler) -> None:
    program = mf.compile(defined(norm, [-1, 8], [8, 8]), options=ALWAYS)
    check(program, [5, 9, 8, 30, 7, 2, 16, 1000])
    assert compiler.sizes == [0, 0, 1]
    assert "1 shared with other lengths" in program.explain()
    check(program, [1, 0])  # for which the program is lowered anew
    assert compiler.sizes == [0, 0, 1, 0]  # nothing is computed of no rows


def test_a_length_of_one_comes_first(compiler: Compiler) -> None:
    program = mf.compile(defined(norm, [-1, 8], [8, 8]), options=ALWAYS)
    check(program, [1, 5, 1, 7, 9, 11, 13])
    assert compiler.sizes.count(1) == 1 and len(compiler.sizes) <= 4


def test_equal_layers_share_it(compiler: Compiler) -> None:
    def layers(ops: Any, x: Any, w: Any) -> Any:
        for _ in range(200):
            x = (x @ w * 0.1).exp() * 0.25
        return x

    program = mf.compile(defined(layers, [-1, 8], [8, 8]), options=ALWAYS)
    check(program, [3, 4, 5, 6, 7], layers)
    assert compiler.sizes.count(1) <= 2 and len(compiler.sizes) <= 6


def test_what_the_compiler_assumes_holds(compiler: Compiler) -> None:
    """Here that lengths are at most 20, and even."""
    compiler.assumes = lambda sizes: bool(sizes[0] <= 20) and bool(sizes[0] % 2 == 0)
    program = mf.compile(defined(norm, [-1, 8], [8, 8]), options=ALWAYS)
    check(program, [5, 9, 12, 14, 6])
    assert compiler.sizes == [0, 0, 1]
    check(program, [22])
    assert compiler.sizes == [0, 0, 1, 1]


def test_a_compiler_without_sizes(compiler: Compiler) -> None:
    compiler.refuses = True
    program = mf.compile(defined(norm, [-1, 8], [8, 8]), options=ALWAYS)
    check(program, [5, 9, 12, 14, 6])
    assert compiler.sizes == [0] * 5


def test_a_limit_where_none_is_shared(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.refuses = True
    monkeypatch.setattr("mdfuse.evaluator.Fuser", lambda _, *rest: Fuser(False, *rest))
    program = mf.compile(defined(norm, [-1, 8], [8, 8]), options=ALWAYS)
    check(program, range(20, 40))
    assert compiler.sizes == [0] * 8
    assert "compiled for 8 other shapes" in program.explain()


def test_two_lengths(compiler: Compiler) -> None:
    """Batch and length, which are equal by chance, or do not change together."""

    def scores(ops: Any, x: Any, w: Any) -> Any:
        y = (x @ w).exp()
        return (y @ y.permute(0, 2, 1)) * 0.5 + 1.0

    program = mf.compile(defined(scores, [-1, -1, 8], [8, 8]), options=ALWAYS)
    w = torch.randn(8, 8) / 8
    for b, n in [(4, 4), (4, 6), (5, 6), (7, 3), (3, 3), (8, 8), (9, 9), (2, 30)]:
        x = torch.randn(b, n, 8)
        (got,) = program.run(x, w)
        torch.testing.assert_close(got, scores(torch, x, w))
    assert sum(n > 0 for n in compiler.sizes) <= 3 and len(compiler.sizes) <= 6


OPS: dict[str, Callable[..., Any]] = {
    "views": lambda ops, x, w: (x @ w).exp().reshape(-1, 2, 4).permute(1, 0, 2) + 1.0,
    "flat": lambda ops, x, w: (x @ w).exp().reshape(-1) * 2.0,
    "joined": lambda ops, x, w: ops.cat([x.exp(), w.sin()], 0) * 2.0,
    "reduced": lambda ops, x, w: ((x @ w).exp() * 2.0).mean(0),
    "scan": lambda ops, x, w: (x @ w).exp().cumsum(0) * 2.0,
    "mask": lambda ops, x, w: ((x @ w) @ x.permute(1, 0)).exp().tril() * 2.0,
    "repeat": lambda ops, x, w: (x @ w).exp().repeat(3, 1) + 1.0,
    "slices": lambda ops, x, w: (x @ w).exp()[1:] * x[:-1],
}


@pytest.mark.parametrize("name", OPS)
def test_ops(name: str, compiler: Compiler) -> None:
    program = mf.compile(defined(OPS[name], [-1, 8], [8, 8]), options=ALWAYS)
    check(program, [6, 4, 9, 8, 2, 31, 64], OPS[name])
    assert len(compiler.sizes) <= 5


def test_shards_of_uneven_lengths(compiler: Compiler) -> None:
    """A rank's rows are not in proportion to the length."""
    mesh = DeviceMesh.arange(t=3)
    with FusionDefinition("f") as fd:
        x = fd.define_tensor([-1, 8], mesh=mesh, layout={"t": Shard(0)})
        fd.add_output((x.exp() * 2.0 + 1.0).on(mesh, {}).sin() * 2.0)
    program = mf.compile(fd, options=ALWAYS)
    for n in (7, 9, 11, 12, 13, 2, 30):
        given = torch.randn(n, 8)
        (got,) = mf.simulate(program, [given]).outputs
        torch.testing.assert_close(got, (given.exp() * 2 + 1).sin() * 2)


def test_inductor_itself() -> None:
    """C++ on CPUs, for any length; what it assumes of lengths is known."""
    compilation._MADE.empty()

    def build(ops: Any, x: Any, w: Any) -> Any:
        return (x @ w).softmax(0).reshape(-1, 4) + 1.0

    program = mf.compile(defined(build, [-1, 8], [8, 8]), options=ALWAYS)
    check(program, [5, 9, 12, 6, 700], build)
    assert dict(program._evaluators.recent.fuser.lengths.counts).popitem()[1] <= 4
