"""Hand-written host programs: every instruction prints, parses back, projects and runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.host_posts import CASES
from helpers.host_programs import POISON, Case, alone, numbers, parse, simulate
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Shard, hir
from mdfuse.extents.expressions import Calc, Index, Term, loop
from mdfuse.hir import BufferType, HostProgram, Instruction
from mdfuse.hir.instructions import BLOCKS, BUFFER_OPS, INSTRUCTIONS, POSTS
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.verify.bindings import check_bindings
from mdfuse.hir.verify.check import verify
from mdfuse.ir.ops import TABLE

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
    for printed in (program, *(project(program, r) for r in range(case.ranks))):
        assert hir.parse(str(printed)) == printed
        assert str(hir.parse(str(printed))) == str(printed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_its_projections_run(case: Case) -> None:
    """Each rank's own program, read back from its text."""
    program = case.program()
    check(case, [hir.parse(str(project(program, rank))) for rank in range(case.ranks)])


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

POST = "post allreduce[sum](%x) -> %t f32[2] (x=P(sum)) => (x=R) axis=x"

DOUBLE = "input %x: f32[2] of [4] (x=S0) %y: f32[2] of [4] (x=S0) = add(%x, %x) return %y"


def test_a_projection_of_another_rank() -> None:
    program = parse(DOUBLE, "mesh(x=2)")
    rows = [{"x": numbers(2)}] * 2
    with pytest.raises(mf.ProgramError, match="onto rank 1 in place 0"):
        simulate([project(program, 1), project(program, 0)], *rows)
    with pytest.raises(mf.ProgramError, match="onto rank 1 alone"):
        simulate(project(program, 1), *rows)


def test_projections_of_different_programs() -> None:
    program = parse(DOUBLE, "mesh(x=2)")
    other = parse(DOUBLE.replace("%y", "%z"), "mesh(x=2)")
    with pytest.raises(mf.ProgramError, match="other inputs or outputs than on rank 0"):
        simulate([project(program, 0), project(other, 1)], *[{"x": numbers(2)}] * 2)


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


# -- the table of instructions -------------------------------------------------------------------


def test_every_instruction_is_known_where_it_is_used() -> None:
    """A row that the verifier or a plan has forgotten would be a wrong program, not an error."""
    from mdfuse.hir.verify.buffer_types import _OF_ONE, RULES
    from mdfuse.hir.verify.counts import _OF_TYPES
    from mdfuse.hir.verify.flow import _STEPS
    from mdfuse.plan.buffer_ops import _PREPARED

    by_rows = {op for op in BUFFER_OPS if INSTRUCTIONS[op].write is not None}
    assert set(_PREPARED) == set(BUFFER_OPS) - by_rows == {*_OF_ONE, *_OF_TYPES, "addmm"}
    followed = {"accumulate"}  # of buffer ops: what it read before counts
    written_out = {*BLOCKS, "call", "next"}
    assert set(_STEPS) == (set(INSTRUCTIONS) - set(BUFFER_OPS) - written_out) | followed
    assert set(RULES) >= {*BUFFER_OPS, "alloc"}
    assert set(POSTS) == {"post", "send", "recv"}
    assert not set(TABLE) & set(INSTRUCTIONS)


def test_attributes_are_those_that_the_calls_take() -> None:
    """A row of the op table names what its call takes beside operands, and nothing else."""
    for op in TABLE.values():
        try:
            parameters = inspect.signature(op.call).parameters.values()
        except ValueError:  # torch's own functions do not say
            continue
        taken = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        named = {a.name for a in op.attrs}
        has_others = any(p.kind is p.VAR_KEYWORD for p in parameters)  # attention passes them on
        if taken and not has_others:
            assert named == taken - {"device", "out"}, op.name


LAYOUT = Layout(DeviceMesh([0, 1]), {"x": Shard(0)})
ADD = Instruction(op="binary", fn="add", inputs=("x", 1.0), outputs=("y",))


def built(*code: Instruction, **more: object) -> HostProgram:
    """A program of Python objects on %x and %y."""
    types = {"x": buffer(LAYOUT, 4), "y": buffer(LAYOUT, 4)}
    parts = {"name": "p", "types": types, "inputs": ("x",), "outputs": ("y",)}
    code = (*code, Instruction(op="return", inputs=("y",)))
    return HostProgram(**{**parts, "instructions": code, **more})  # type: ignore[arg-type]


def nested(depth: int) -> Instruction:
    bounds = (("start", 0), ("stop", 2), ("step", 1))
    inner = ADD
    for _ in range(depth):
        inner = Instruction(op="for", outputs=("i",), attrs=bounds, body=(inner,))
    return inner


def deep(depth: int) -> Index:
    index: Index = Term("rank")
    for _ in range(depth):
        index = Calc("+", index, 1)
    return index


def wide(depth: int) -> Index:
    index: Index = Term("rank")
    for _ in range(depth):
        index = Calc("+", index, index)
    return index


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda: built(replace(ADD, attrs=(("fast", 3),))), "add has no attribute 'fast'"),
        (lambda: built(replace(ADD, op="unary")), "add as 'unary'"),
        (lambda: built(replace(ADD, inputs=("x",))), "add of 1 operand"),
        (lambda: built(replace(ADD, inputs=("x", 2**70))), "numbers have 64 bits"),
        (lambda: built(replace(ADD, inputs=("x", 1 + 2j))), "add of"),
        (lambda: built(ADD, replace(ADD, outputs=())), "add defines 0 names"),
        (lambda: built(replace(ADD, body=(ADD,))), "add with instructions inside it"),
        (lambda: built(Instruction(op="if", body=(ADD,))), "if without test="),
        (lambda: built(ADD, Instruction(op="for", outputs=("i",))), "for without start="),
        (
            lambda: built(ADD, Instruction(op="post", inputs=("x", "y"), outputs=("c",))),
            "without a comm",
        ),
        (lambda: built(ADD, Instruction(op="sync")), "sync of 0 streams"),
        (lambda: built(nested(400)), "nested more than 64 deep"),
        (lambda: built(ADD, name="my program"), "a program is named 'my program'"),
        (lambda: built(ADD, replace(ADD, outputs=("a b",))), "a value is named 'a b'"),
        (lambda: built(ADD, aliases={"b": "nothing"}), "nothing makes %nothing"),
        (lambda: built(replace(ADD, inputs=("x", deep(400)))), "an index expression of 65"),
        (lambda: built(replace(ADD, inputs=("x", wide(40)))), "an expression with 1023 operations"),
    ],
)
def test_what_is_built_wrongly(program: Callable[[], HostProgram], words: str) -> None:
    """What is built by hand is refused as text is, with or without the verifier."""
    with pytest.raises(mf.ProgramError, match=words):
        mf.simulate(program(), [torch.ones(4)])
    with pytest.raises(mf.ProgramError, match=words):
        verify(program())


def test_a_deep_program_is_not_printed() -> None:
    with pytest.raises(mf.ProgramError, match="nested more than 64 deep"):
        str(built(nested(400)))
    assert str(built(nested(60))).count("for") == 60


def test_a_unit_with_the_name_of_an_op() -> None:
    """A host unit may be called as an op is; it is a unit all the same."""
    body = """
      input %x: f32[2] (x=R)
      launch sum(%x) -> %y {
        %h: f32[2] (x=R) = exp(%x)
        %y: f32[2] (x=R) = log(%h)
      }
      return %y"""
    program = parse(body)
    verify(program)
    assert hir.parse(str(program)) == program
    assert alone(body, x=torch.zeros(2))[0].tolist() == [0.0, 0.0]


def test_what_a_pad_shares_is_not_written() -> None:
    """A pad of what is long enough already is its operand's memory."""
    body = """
      input %x: f32[4] (x=R)
      %h: f32[4] (x=R) = pad(%x, dim=0)
      %h = mul(%h, 2.0)
      return %h"""
    text = body.replace("%h: f32[4] (x=R) =", "%h: f32[4] (x=R) pad=block(dim=0,parts=1) =")
    with pytest.raises(mf.ProgramError, match=r"writes into %h, (which|a view)|%x"):
        verify(parse(text))


# -- without verification ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("%z: f32[2] (x=R) = add(%h, 1.0)", "add -> z reads %h, which nothing computed"),
        ("free %x", "free of %x, which is an input"),
        ("free %t free %t", "free of %t, which was freed before"),
        ("free %t %z: f32[2] (x=R) = add(%t, 1.0)", "add -> z reads %t, which was freed before"),
        ("group_start", "return inside a group"),
        ("group_end", "group_end without a group_start"),
        ("set_stream -1", "set_stream -1"),
        (f"%c = {POST} pieces=2 wait %c[2]", r"wait %c\[2\]: there is no such piece"),
        (f"%c = {POST} wait %c wait %c", "wait %c, which was waited for before"),
        (f"%c = {POST} %c = {POST} wait %c", "while another %c is under way"),
    ],
)
def test_a_rank_checks_its_own_program_whatever_the_options(code: str, words: str) -> None:
    """What a plan takes for granted; the same words as with all of the verification."""
    body = f"input %x: f32[2] (x=P(sum)) %t: f32[2] (x=R) = alloc(fill=1) {code} return %x"
    for rank in range(2):
        local = project(parse(body, "mesh(x=2)"), rank)
        with pytest.raises(mf.ProgramError, match=words):
            check_bindings(local)
        with pytest.raises(mf.ProgramError, match=words):
            verify(local)
        with pytest.raises(mf.ProgramError, match=words):
            simulate(parse(body, "mesh(x=2)"), *[{"x": numbers(2)}] * 2)


def test_the_order_of_accesses_is_not_asked_for_without_verification() -> None:
    program = parse(
        f"""
      input %x: f32[2] (x=P(sum))
      %t: f32[2] (x=R) = alloc
      %c = {POST}
      %y: f32[2] (x=R) = add(%t, 1.0)
      wait %c
      return %y""",
        "mesh(x=2)",
    )
    for rank in range(2):
        check_bindings(project(program, rank))
    with pytest.raises(mf.ProgramError, match="is still using"):
        verify(program)
