"""Outputs that are written into an input: after every read of the old value, on every rank."""

from __future__ import annotations

import pytest
import torch
from host_programs import POISON, numbers
from reuse_cases import CASES, MESH, Build, Expect, a_later_reader, define, inputs, one_op

import mdfuse as mf
from mdfuse import FusionDefinition, Partial, hir

SEEDS = [None, *range(5)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("build", "expect"), CASES, ids=lambda f: f.__name__)
def test_outputs_lie_in_their_inputs(build: Build, expect: Expect, seed: int | None) -> None:
    program = mf.compile(define(build))
    assert hir.parse(str(program.host)) == program.host
    want = expect(*inputs())
    rows = [
        dict(zip(("x", "w"), (i.chunk(2)[rank].clone() for i in inputs()), strict=True))
        for rank in range(2)
    ]
    names = program.host.inputs
    rows = [dict(zip(names, row.values(), strict=True)) for row in rows]
    result = mf.simulate(program, per_rank=rows, options=POISON, schedule=seed)
    for at, whole in enumerate(want):
        assert torch.equal(result.outputs[at], whole), f"{build.__name__} {at}\n{program}"
    for output, name in program.fusion.reuse.items():
        at = program.host.outputs.index(output)
        for row, outputs in zip(rows, result.per_rank, strict=True):
            assert torch.equal(row[name], outputs[at])
            assert seed is not None or outputs[at].data_ptr() == row[name].data_ptr()


@pytest.mark.parametrize(("build", "expect"), CASES, ids=lambda f: f.__name__)
def test_the_single_device_agrees(build: Build, expect: Expect) -> None:
    fd = define(build)
    x, w = inputs()
    got = mf.reference(fd, [x.clone(), w.clone()])
    for mine, theirs in zip(got, expect(x, w), strict=True):
        assert torch.equal(mine, theirs)


def test_a_second_run_goes_on_from_the_first() -> None:
    program = mf.compile(define(one_op))
    rows = [dict(zip(program.host.inputs, (numbers(2, 3), numbers(2, 3)), strict=True))] * 2
    rows = [{name: x.clone() for name, x in row.items()} for row in rows]
    for run in range(1, 4):
        result = mf.simulate(program, per_rank=rows, options=POISON)
        assert torch.equal(result.per_rank[1][0], numbers(2, 3) + run)


def test_a_partial_output_into_a_partial_input() -> None:
    with FusionDefinition("partials") as fd:
        x = fd.define_tensor([4], mesh=MESH, layout={"x": Partial()})
        fd.add_output(x * 2.0, reuse=x)
        fd.add_output(fd.ops.set(x).on(MESH, {}))
    program = mf.compile(fd)
    (name,) = program.host.inputs
    rows = [{name: numbers(4, start=10 * rank)} for rank in range(2)]
    result = mf.simulate(program, per_rank=rows, options=POISON)
    assert torch.equal(result.outputs[1], 2 * numbers(4) + 10)
    for rank, row in enumerate(rows):
        assert torch.equal(row[name], 2 * numbers(4, start=10 * rank))


def test_one_input_for_two_of_the_program_s() -> None:
    """It would be overwritten while it is still read."""
    program = mf.compile(define(a_later_reader))
    x = numbers(2, 3)
    rows = [dict.fromkeys(program.host.inputs, x)] * 2
    with pytest.raises(mf.ProgramError, match="shares memory with"):
        mf.simulate(program, per_rank=rows, options=POISON)
