"""Programs with sizes: runs of fewer rows take the next larger plan, with their own values."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.sized import SIZES, by_torch, given, step

import mdfuse as mf
from mdfuse import DeviceMesh, Shard


@pytest.mark.parametrize(
    ("axes", "rows", "cache"),
    [({"tp": 1}, {}, {}), ({"tp": 2}, {"tp": Shard(0)}, {}), ({"tp": 3}, {}, {"tp": Shard(0)})],
)
def test_rows_that_fill_up_write_nothing_and_results_are_cut(
    axes: Any, rows: Any, cache: Any
) -> None:
    program = mf.compile(step(DeviceMesh.arange(**axes), rows, cache), SIZES)
    for n in (0, 1, 3, 8):
        inputs = given(n)
        made = mf.simulate(program, [x.clone() for x in inputs]).outputs
        torch.testing.assert_close(made, by_torch(*inputs))
    with pytest.raises(mf.ProgramError, match=r"ids.0 is 9, and the largest of its sizes 8"):
        mf.simulate(program, [torch.zeros(9, dtype=torch.int64), torch.arange(9), *inputs[2:]])


def test_runs_of_any_rows_have_as_many_plans_as_sizes() -> None:
    """They are made before the first run, which leaves the state as it is."""
    with closing(mf.init(backend="null", rank=0, size=1)):
        program = mf.compile(step(DeviceMesh.arange(tp=1)), SIZES)
        *_, w, c, a = given(0)
        for n in (3, 8, 0, 5, 1, 2, 7):
            ids, pos, *_ = given(n)
            wanted = by_torch(ids, pos, w, c, a)
            torch.testing.assert_close(program.run(ids, pos, w, c, a), wanted)
            torch.testing.assert_close([c, a], wanted[:2])
        assert program.whole.plans.info()[:4] == (7, 3, 0, 3)
        assert "sizes: ids.0 of 2, 4, 8, planned before the first run" in program.explain()
        with pytest.raises(mf.ProgramError, match="largest of its sizes"):
            program.run(torch.zeros(9, dtype=torch.int64), torch.arange(9), w, c, a)
        one = mf.Step(program, {"c": c, "a": a})(torch.tensor([3]), torch.tensor([1]), w)
        torch.testing.assert_close(one, F.rms_norm(w[3:4], (8,)) @ w.t())


MIXED: dict[str, Any] = {
    "sum": lambda y, ids: y + y.sum(),
    "softmax": lambda y, ids: y.softmax(0),
    "flip": lambda y, ids: y.flip(0),
    "slice": lambda y, ids: y[1:],
    "mul": lambda y, ids: y * ids.shape[0],
}


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_depend_on_each_other_are_refused_with_the_line(name: str) -> None:
    fd = step(DeviceMesh.arange(tp=2), more=MIXED[name])
    with pytest.raises(mf.MdfuseError, match=r"(?s)ids\.0.*test_sizes.py:|test_sizes.py:.*ids\.0"):
        mf.compile(fd, SIZES)


def test_what_is_no_size_is_refused() -> None:
    for wrong in ({"ids.0": ()}, {"ids.0": (4, 2)}, {"ids.0": (0, 1)}, 5):
        with pytest.raises(mf.ProgramError, match="sizes="):
            mf.Options(sizes=wrong)
    with pytest.raises(mf.ProgramError, match=r"sizes of 'x\.0'"):
        mf.compile(step(DeviceMesh.arange(tp=1)), mf.Options(sizes={"x.0": (1,)}))
    with mf.FusionDefinition("own") as fd:
        x = fd.define_tensor([-1, 4], mesh=DeviceMesh.arange(tp=1), name="x")
        fd.add_output(x + 1, reuse=x)
    with pytest.raises(mf.MdfuseError, match="a state has one size"):
        mf.compile(fd, mf.Options(sizes={"x.0": (1,)}))


def test_sizes_share_one_memory() -> None:
    """Columns are places in two tables, of 3 and of 40 rows: no size reads what another left.

    Rows are the second dim, so what is a place in the large table lies where smaller sizes have
    places in the small one. Results stay as they were.
    """
    with mf.FusionDefinition("pairs") as fd:
        at = fd.define_tensor([2, -1], torch.int64, DeviceMesh.arange(tp=1), name="at")
        few = fd.define_tensor([3, 4], mesh=DeviceMesh.arange(tp=1), name="few")
        many = fd.define_tensor([40, 4], mesh=DeviceMesh.arange(tp=1), name="many")
        fd.add_output(F.embedding(at[0], few) + F.embedding(at[1], many))
        fd.add_output(at.view(2, 1, -1))
    few, many, kept = torch.randn(3, 4), torch.randn(40, 4), list[tuple[Any, Any]]()
    with closing(mf.init(backend="null", rank=0, size=1)):
        program = mf.compile(fd, mf.Options(sizes={"at.1": (2, 4, 8, 16)}))
        for n in (16, 3, 7, 1, 8, 2, 0, 13, 4):
            at = torch.stack((torch.randint(3, (n,)), torch.randint(3, 40, (n,))))
            y, same = program.run(at, few, many)
            kept += [(y, few[at[0]] + many[at[1]]), (same, at.view(2, 1, n))]
        for got, wanted in kept:
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        (rooms,) = program._rooms.values()
        sizes = {name: room.memory.nbytes for name, room in rooms.items()}
        assert sizes == {"at": 2 * 16 * 8, "rows_of_at_1": 16}


def test_a_size_of_one_row_takes_reshapes() -> None:
    """The dim of one row has no label in a reshape; rows are independent all the same."""
    with mf.FusionDefinition("heads") as fd:
        x = fd.define_tensor([-1, 6], mesh=DeviceMesh.arange(tp=1), name="x")
        fd.add_output(x.reshape(x.shape[0], 1, 2, 3).transpose(1, 2).softmax(-1))
    program = mf.compile(fd, mf.Options(sizes={"x.0": (1, 2, 4)}))
    for n in (1, 3, 0, 2):
        x = torch.randn(n, 6)
        (made,) = mf.simulate(program, [x]).outputs
        torch.testing.assert_close(made, x.reshape(n, 1, 2, 3).transpose(1, 2).softmax(-1))


def scaled() -> mf.Program:
    """Rows times a matrix."""
    mesh = DeviceMesh.arange(tp=1)
    with mf.FusionDefinition("scaled") as fd:
        x = fd.define_tensor([-1, 4], mesh=mesh, name="x")
        fd.add_output(x @ fd.define_tensor([4, 3], mesh=mesh, name="w"))
    return mf.compile(fd, mf.Options(sizes={"x.0": (2, 8)}))


X, W = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(4, 3)
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "wide": ((X.double(), W), {}, "dtype torch.float64, expected torch.float32"),
    "numbers": ((X.long(), W), {}, "dtype torch.int64, expected torch.float32"),
    "few columns": ((X[:, :1], W), {}, r"shape \(3, 1\) on rank 0, expected \(3, 4\)"),
    "many columns": ((torch.ones(3, 5), W), {}, r"shape \(3, 5\) on rank 0, expected \(3, 4\)"),
    "few arguments": ((X,), {}, "1 argument for 2 inputs"),
    "many arguments": ((X, W, W), {}, "3 arguments for 2 inputs"),
    "gradient": ((X.clone().requires_grad_(), W), {}, "%x requires grad"),
    "float extent": ((X, W), {"extents": {"x.0": 3.0}}, r"x\.0=3\.0"),
    "list extent": ((X, W), {"extents": {"x.0": [3]}}, r"x\.0=\[3\]"),
    "list of extents": ((X, W), {"extents": [3]}, r"extents=\[3\]"),
    "true extent": ((X[:1], W), {"extents": {"x.0": True}}, r"x\.0=True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_refused_behind_right_ones(name: str) -> None:
    """A copy of a wrong input would fit; a program goes on behind a refusal."""
    program, (wrong, how, why) = scaled(), WRONG[name]
    for _ in range(2):
        for n in (1, 3):
            (y,) = program.run(X[:n], W, extents={"x.0": n})
            assert torch.equal(y, X[:n] @ W)
        with pytest.raises(mf.ProgramError, match=why):
            program.run(*wrong, **how)


def test_memory_that_was_given_up_is_refused() -> None:
    program, x = scaled(), X.clone()
    program.run(x, W)
    x.untyped_storage().resize_(0)
    with pytest.raises(mf.ProgramError, match=r"the extents x\.0 are missing"):
        program.run(x, W)


def test_modes_of_torch_change_between_runs() -> None:
    program, x = scaled(), X.clone().requires_grad_()
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(program.run(x, W)[0], X @ W)
        with pytest.raises(mf.ProgramError, match="%x requires grad"):
            program.run(x, W)
        assert torch.equal(program.run(X, W)[0], X @ W)


@pytest.mark.parametrize("name", ["wide", "few columns", "many columns"])
def test_wrong_inputs_of_simulations_are_refused(name: str) -> None:
    with pytest.raises(mf.ProgramError, match="expected a global tensor"):
        mf.simulate(scaled(), WRONG[name][0])
