"""Long runs of instructions are cut into pieces: equal ones where they repeat."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Options
from mdfuse.hir.passes.repeats import LEAST, LIMIT, pieces
from mdfuse.hir.program import HostProgram


def chain(ops: list[str]) -> HostProgram:
    """A program that applies ops one after the other."""
    with FusionDefinition("chain") as fd:
        x = fd.define_tensor([4], torch.float32, DeviceMesh.arange(t=1), {})
        for op in ops:
            x = getattr(fd.ops, op)(x)
        fd.add_output(x)
    return mf.compile(fd, options=Options(compile="never")).host


def cut(ops: list[str]) -> list[list[str]]:
    host = chain(ops)
    run = [i for i in host.instructions if i.fn]
    assert [i.fn for i in run] == ops
    found = pieces(host, run)
    assert [i for piece in found for i in piece] == run
    return [[i.fn for i in piece] for piece in found]


def test_few_instructions_stay_together() -> None:
    assert len(cut(["exp"] * LIMIT)) == 1


def test_equal_layers_behind_something_else() -> None:
    layer = ["exp", "sin", "cos", "tanh", "neg", "abs", "sqrt", "relu", "floor", "ceil"]
    found = cut(["log", "erf", *layer * 60, "log"])
    sizes = [len(piece) for piece in found]
    assert max(sizes) <= LIMIT
    whole = [piece for piece in found if len(piece) == 30]  # the least multiple from LEAST on
    assert len(whole) >= 18
    assert len({tuple(piece) for piece in whole}) == 1
    assert LEAST <= 30 < LEAST + 10


def test_each_repetition_is_cut() -> None:
    layer = ["exp", "sin", "cos", "tanh", "neg", "abs", "sqrt", "relu"]
    other = ["floor", "ceil", "erf", "log", "round"]
    found = cut([*layer * 60, *other * 60])
    assert sum(len(piece) == 24 for piece in found) >= 18
    assert sum(len(piece) == 25 for piece in found) >= 10
    assert len({tuple(piece) for piece in found}) <= 6


def test_a_number_that_all_repetitions_read_is_from_outside() -> None:
    """Each is further behind the number's computation than the one before."""
    with FusionDefinition("updates") as fd:
        mesh = DeviceMesh.arange(t=1)
        rate = fd.define_tensor([], torch.float32, mesh, {}).exp()
        for _ in range(64):
            w = fd.define_tensor([4], torch.float32, mesh, {})
            fd.add_output((w.sin() * rate).tanh().exp().relu() - rate)
    host = mf.compile(fd, options=Options(compile="never")).host
    run = [i for i in host.instructions if i.fn]
    sizes = [len(piece) for piece in pieces(host, run)]
    assert sum(size == 24 for size in sizes) >= 14


def test_nothing_repeats() -> None:
    names = ["exp", "sin", "cos", "tanh", "neg", "abs"]
    drawn = torch.randint(6, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    found = cut([names[n] for n in drawn])
    assert max(map(len, found)) <= LIMIT
    assert len(found) < 12


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["exp", "sin", "cos"]), min_size=1, max_size=6), st.data())
def test_pieces_are_the_run(period: list[str], data: st.DataObject) -> None:
    """Whatever repeats, however often: nothing is lost, nothing is too long."""
    times = data.draw(st.integers(1, 400 // len(period)))
    ahead = data.draw(st.integers(0, 300))
    assert all(len(piece) <= LIMIT for piece in cut([*["abs"] * ahead, *period * times]))


@pytest.mark.parametrize("n", [0, 1, 2])
def test_hardly_anything(n: int) -> None:
    host = chain(["exp"] * 2)
    assert pieces(host, host.instructions[:n]) == [host.instructions[:n]]
