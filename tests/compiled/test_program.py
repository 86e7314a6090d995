"""How runs are called: `out=`, numbers, extents; copies of programs; what simulates is verified."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Partial, Shard, hir
from mdfuse.hir.rank.pipelines import project
from mdfuse.ir.scalars import as_number

ONE = DeviceMesh.arange(x=1)
TWO = DeviceMesh.arange(x=2)


def scaled(is_symbolic: bool = False, dtype: torch.dtype = torch.int64) -> mf.Program:
    with mf.FusionDefinition("scaled") as fd:
        x = fd.define_tensor([-1 if is_symbolic else 2, 3], torch.int64, ONE, {"x": Shard(0)})
        s = fd.define_scalar(dtype=dtype)
        fd.add_output(x * s)
    return mf.compile(fd)


X = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.usefixtures("alone")
def test_inputs_by_name() -> None:
    program = scaled()
    x, s = program.fusion.inputs
    for found in (program(**{s: 3, x: X}), program(X, **{s: 3}), program(X, 3)):
        assert torch.equal(found[0], X * 3)
    for given, named, text in (
        ((), {x: X}, f"lacks {s}"), ((X,), {x: X, s: 3}, f"no input {x!r}"),
        ((X,), {s: 3, "y": X}, "no input 'y'"),
    ):  # fmt: skip
        with pytest.raises(mf.ProgramError, match=re.escape(text)):
            program(*given, **named)


@pytest.mark.usefixtures("alone")
def test_as_many_plans_are_found_again_as_are_kept() -> None:
    """With more shapes in turns than programs of known extents are kept by default."""
    with mf.FusionDefinition("turns") as fd:
        x = fd.define_tensor([-1, 4], mesh=ONE, layout={})
        fd.add_output(x + 1)
    program = mf.compile(fd, Options(plans=64))
    for _ in range(2):
        for n in range(1, 51):
            assert torch.equal(program.run(torch.ones(n, 4))[0], torch.full((n, 4), 2.0))
    assert program.plans.info() == (50, 50, 0, 50, 64)


# -- out= ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "out", [3, X, "ab", {"t": X}, iter([X]), [3], ["t"], [X, X], [], [X.float()], [None], [X.T]],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
@pytest.mark.parametrize("has_dtensors", [False, True])
def test_what_is_no_buffer(out: Any, has_dtensors: bool) -> None:
    if has_dtensors:
        import_module("torch.distributed.tensor")
    program = scaled()
    for _ in range(2):
        with pytest.raises(mf.ProgramError):
            program.run(X, 3, out=out)
        for buffer in (torch.empty_like(X), torch.empty_like(X)):
            assert program.run(X, 3, out=(buffer,))[0] is buffer
            assert torch.equal(buffer, X * 3)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("arguments", [3, None, [X, 3], "xs"])
def test_arguments_without_names(arguments: Any) -> None:
    evaluator = mf.HostIrEvaluator(scaled().host)
    with pytest.raises(mf.ProgramError, match="by name"):
        evaluator.run(arguments)
    x, s = evaluator.program.inputs
    assert torch.equal(evaluator.run({x: X, s: 3})[0], X * 3)


# -- numbers ---------------------------------------------------------------------------------------

BIG = 1 << 63


@pytest.mark.parametrize(
    ("x", "dtype", "want"),
    [
        (BIG - 1, torch.int64, BIG - 1),
        (-BIG, torch.int64, -BIG),
        (BIG, torch.int64, None),
        (-BIG - 1, torch.int64, None),
        (10**5000, torch.int64, None),
        (1e300, torch.int64, None),
        (float("nan"), torch.int64, None),
        (float("inf"), torch.int32, None),
        (1 << 31, torch.int32, None),
        (-1, torch.uint8, None),
        (255.0, torch.uint8, 255),
        (2, torch.bool, None),
        (1.0, torch.bool, True),
        (10**400, torch.float32, None),
        (10**300, torch.float64, 1e300),
        (1 << 70, torch.float32, float(1 << 70)),
        (torch.tensor(3), torch.int32, 3),
        (torch.tensor(3, device="meta"), torch.int32, None),
        (torch.tensor([3]), torch.int32, None),
        (torch.tensor(3).to_sparse(), torch.int32, None),
        (torch.tensor(1j), torch.float32, None),
        (1j, torch.float32, None),
        ("3", torch.int64, None),
        (None, torch.int64, None),
        (torch.float32, torch.int64, None),
    ],
    ids=lambda x: type(x).__name__,
)
def test_numbers(x: Any, dtype: torch.dtype, want: Any) -> None:
    found = as_number(x, dtype)
    assert found == want
    assert type(found) is type(want)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "number",
    [BIG, -BIG - 1, 10**5000, 1e300, float("nan"), 2.5, "3", X],
    ids=lambda x: type(x).__name__,
)
def test_numbers_that_do_not_fit(number: Any) -> None:
    program = scaled()
    for _ in range(2):
        with pytest.raises(mf.ProgramError, match=r"number of dtype torch\.int64"):
            program.run(X, number)
        with pytest.raises(mf.ProgramError, match=r"number of dtype torch\.int64"):
            mf.simulate(program, [X, number])
        for s in (3, -3, BIG - 1, 3.0, True):
            assert torch.equal(program.run(X, s)[0], X * int(s))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "extent", [BIG, 10**5000, -1, 1.0, "2", None, True], ids=lambda x: type(x).__name__
)
def test_extents_that_are_none(extent: Any) -> None:
    program = scaled(is_symbolic=True)
    for _ in range(2):
        with pytest.raises(mf.ProgramError, match=r"x\.0=.*(.|\n)*63 bits"):
            program.run(X, 3, extents={"x.0": extent})
        with pytest.raises(mf.ProgramError, match="63 bits"):
            mf.simulate(program, [X, 3], extents={"x.0": extent})
        assert torch.equal(program.run(X, 3, extents={"x.0": 2})[0], X * 3)


def test_extents_that_are_too_great() -> None:
    """Each fits, and what is made of them does not."""
    program = scaled(is_symbolic=True)
    for extent in (1 << 62, (1 << 63) - 1, 1 << 60):
        with pytest.raises(mf.ProgramError, match=r"2\^63 bytes"):
            program.host_for({"x.0": extent})


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("add", [lambda x, s: x + s, lambda x, s: s + x, lambda x, s: s - x])
def test_numbers_are_added_to_partial_sums_once(
    shape: tuple[int, ...], add: Callable[[Any, Any], Any]
) -> None:
    with mf.FusionDefinition("added") as fd:
        x = fd.define_tensor(shape, mesh=TWO, layout={"x": Partial()})
        s = fd.define_scalar()
        fd.add_output(fd.ops.set(add(x, s)).on(TWO, {}))
    x = torch.ones(shape)
    (y,) = mf.simulate(mf.compile(fd), [x, 3.0]).outputs
    assert torch.equal(y, add(x, 3.0))


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_buffers_are_poisoned(dtype: torch.dtype, seed: int | None) -> None:
    with mf.FusionDefinition("complex") as fd:
        x = fd.define_tensor([4], dtype, TWO, {"x": Partial()})
        y = fd.define_tensor([4], dtype, TWO, {"x": Shard(0)})
        fd.add_output(fd.ops.set(x).on(TWO, {}) + fd.ops.set(y).on(TWO, {}))
    x, y = torch.randn(2, 4, dtype=dtype)
    found = mf.simulate(mf.compile(fd), [x, y], options=Options(poison=True), schedule=seed)
    assert torch.equal(found.outputs[0], x + y)


# -- copies ----------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("is_symbolic", [False, True])
def test_copies_of_programs(how: str, is_symbolic: bool) -> None:
    """Before and after a run, and after one of the copy; each runs by itself."""
    copied, program = COPIES[how], scaled(is_symbolic)
    extents = {"x.0": 2} if is_symbolic else None
    for _ in range(2):
        other = copied(program)
        assert str(other) == str(program)
        for p in (other, copied(other), program):
            for n in (3, 4):
                assert torch.equal(p.run(X, n, extents=extents)[0], X * n)
            assert p.plans.info().size == 1
        for segment in copied(program.segments):
            assert torch.equal(segment.run(X, 5, extents=extents)[0], X * 5)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_evaluators(how: str, alone: mf.Communicator) -> None:
    evaluator = mf.HostIrEvaluator(scaled().host, alone, Options(plans=7))
    x, s = evaluator.program.inputs
    for _ in range(2):
        other = COPIES[how](evaluator)
        assert other.options == Options(plans=7)
        for e in (other, evaluator):
            assert torch.equal(e.run({x: X, s: 3})[0], X * 3)
    with pytest.raises(mf.BackendError, match="init"):
        COPIES[how](alone)


# -- simulation ------------------------------------------------------------------------------------


def test_what_is_simulated_is_verified() -> None:
    """As in a run, and as there the options say so; on ranks of one program and of several."""
    text = """host @wrong on mesh(x=2) {
      input %x: f32[1] of [2] (x=S0)
      %y: f32[2] (x=R) = alloc
      %c = post allgather(%x) -> %y f32[2] (x=S0) => (x=R) axis=x dim=0
      %z: f32[2] (x=R) = add(%y, 1.0)
      wait %c
      return %z
    }"""
    program, x = hir.parse(text), torch.tensor([1.0, 2.0])
    locals_ = [project(program, rank) for rank in range(2)]
    rows = [{"x": part} for part in x.chunk(2)]
    for _ in range(2):
        with pytest.raises(mf.ProgramError, match="%y"):
            mf.simulate(program, [x])
        with pytest.raises(mf.ProgramError, match="%y"):
            mf.simulate(locals_, per_rank=rows)
    mf.simulate(program, [x], options=Options(verify=False))
    mf.simulate(locals_, per_rank=rows, options=Options(verify=False))
