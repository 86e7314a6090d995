"""Hand-written host programs: every instruction prints, parses back, projects and runs."""

from __future__ import annotations

import pytest
import torch
from host_posts import CASES
from host_programs import POISON, Case, alone, numbers, parse, simulate
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Shard, hir
from mdfuse.hir import BufferType, HostProgram, Instruction
from mdfuse.index import Calc, Term, loop

SEEDS = range(5)


def check(case: Case, program: object, schedule: int | None = None) -> None:
    """Every rank gets what plain torch gives; a rank outside of a mesh gets None."""
    rows = [case.inputs(rank) for rank in range(case.ranks)]
    result = mf.simulate(program, per_rank=rows, options=POISON, schedule=schedule)
    for rank, got in enumerate(result.per_rank):
        for mine, want in zip(got, case.expected(rank), strict=True):
            if want is None:
                assert mine is None
            else:
                assert isinstance(mine, Tensor) and torch.equal(mine, want), f"rank {rank}: {mine}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_runs(case: Case) -> None:
    check(case, case.program())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_runs_in_any_order(case: Case) -> None:
    for seed in SEEDS:
        check(case, case.program(), seed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_its_text_reads_back(case: Case) -> None:
    program = case.program()
    for printed in (program, *map(program.project, range(case.ranks))):
        assert hir.parse(str(printed)) == printed
        assert str(hir.parse(str(printed))) == str(printed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_its_projections_run(case: Case) -> None:
    """Each rank's own program, read back from its text."""
    program = case.program()
    check(case, [hir.parse(str(program.project(rank))) for rank in range(case.ranks)])


def test_every_instruction_is_in_a_case() -> None:
    ops = {i.op for case in CASES for i in case.program().walk()}
    assert ops >= {
        "alloc", "free", "set", "permute", "unary", "binary", "reduce", "matmul", "linear",
        "select", "chunk", "launch", "post", "send", "recv", "group_start", "group_end", "wait",
        "barrier", "for", "if", "get_stream", "set_stream", "sync", "return",
    }  # fmt: skip


# -- built by hand -------------------------------------------------------------------------------


def buffer(layout: Layout, *shape: int) -> BufferType:
    return BufferType(dtype=torch.float32, shape=shape, layout=layout)


def test_a_program_from_dataclasses() -> None:
    """A loop that adds to an input through an alias."""
    layout = Layout(DeviceMesh([0, 1]), {"x": Shard(0)})
    body = Instruction(op="binary", fn="add", inputs=("y", Calc("*", loop("i"), 2)), outputs=("y",))
    bounds = (("start", 0), ("stop", Calc("+", Term("rank"), 2)), ("step", 1))
    program = HostProgram(
        name="sums",
        types={
            "x": buffer(layout, 4),
            "y": buffer(layout, 4),
            "i": BufferType(dtype=torch.int64),
        },
        inputs=("x",),
        outputs=("y",),
        instructions=(
            Instruction(op="for", outputs=("i",), attrs=bounds, body=(body,)),
            Instruction(op="return", inputs=("y",)),
        ),
        aliases={"y": "x"},
    )
    assert hir.parse(str(program)) == program
    given = [numbers(2), numbers(2)]
    result = simulate(program, *({"x": x} for x in given))
    assert [outputs[0].tolist() for outputs in result.per_rank] == [[2.0, 3.0], [6.0, 7.0]]
    assert [outputs[0].data_ptr() for outputs in result.per_rank] == [x.data_ptr() for x in given]


def test_an_instruction_that_does_not_exist() -> None:
    layout = Layout(DeviceMesh([0]))
    program = HostProgram(
        name="odd",
        types={"y": buffer(layout, 4)},
        inputs=(),
        outputs=("y",),
        instructions=(Instruction(op="frobnicate", outputs=("y",)),),
    )
    with pytest.raises(mf.ProgramError, match="no instruction 'frobnicate'"):
        simulate(program, {})


# -- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "value"),
    [
        ("%i-1", 1),
        ("%i - 1 + 1", 2),
        ("-1 + %i", 1),
        ("%i*2-4//%i", 2),
        ("(%i + 3) mod 4", 1),
        ("7 mod 4 - %i + -1", 0),
        ("(%i > 1) + (%i < 1) + (%i != 2)", 1),
    ],
)
def test_index_arithmetic(index: str, value: int) -> None:
    body = f"""
      input %x: f32[4] (x=R)
      for %i in 2..3 {{
        %y: f32[] (x=R) = select(%x, dim=0, index={index})
      }}
      return %y"""
    assert alone(body, x=numbers(4)) == [torch.tensor(float(value))]
    program = parse(body)
    assert hir.parse(str(program)) == program


@pytest.mark.parametrize("memory", ["device", "host", "pinned", "symmetric"])
def test_words_that_torch_has_too(memory: str) -> None:
    """`device` is a name in torch, but no dtype."""
    program = parse(f"%y: f32[2] (x=R) = alloc(memory={memory}) return %y")
    assert program.instructions[0].kwargs == {"memory": memory}
    assert hir.parse(str(program)) == program


@pytest.mark.parametrize("kind", ["allgather", "all_gather"])
def test_kinds_with_and_without_an_underscore(kind: str) -> None:
    body = f"""
      input %x: f32[2] of [4] (x=S0)
      %y: f32[4] (x=R) = alloc
      %c = post {kind}(%x) -> %y f32[4] (x=S0) => (x=R) axis=x dim=0
      wait %c
      return %y"""
    program = parse(body, "mesh(x=2)")
    assert program.communications[0].kind == "Allgather"


# -- projections ---------------------------------------------------------------------------------

DOUBLE = "input %x: f32[2] of [4] (x=S0) %y: f32[2] of [4] (x=S0) = add(%x, %x) return %y"


def test_a_projection_of_another_rank() -> None:
    program = parse(DOUBLE, "mesh(x=2)")
    rows = [{"x": numbers(2)}] * 2
    with pytest.raises(mf.ProgramError, match="onto rank 1 in place 0"):
        simulate([program.project(1), program.project(0)], *rows)
    with pytest.raises(mf.ProgramError, match="onto rank 1 alone"):
        simulate(program.project(1), *rows)


def test_projections_of_different_programs() -> None:
    program = parse(DOUBLE, "mesh(x=2)")
    other = parse(DOUBLE.replace("%y", "%z"), "mesh(x=2)")
    with pytest.raises(mf.ProgramError, match="other inputs or outputs than on rank 0"):
        simulate([program.project(0), other.project(1)], *[{"x": numbers(2)}] * 2)


def test_too_few_rows_of_arguments() -> None:
    with pytest.raises(mf.ProgramError, match="1 dicts of inputs for 2 ranks"):
        simulate(parse(DOUBLE, "mesh(x=2)"), {"x": numbers(2)})


def test_a_number_as_output() -> None:
    body = """
      input %s: f32 scalar
      %t: f32 scalar = mul(%s, 2.0)
      return %t"""
    program = parse(body)
    result = mf.simulate(program, [1.5])
    assert result.outputs == [3.0]
