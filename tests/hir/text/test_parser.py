"""Host programs as text: what is printed reads back, and what is no program is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.two_stage import CASES, Case

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard, hir
from mdfuse.errors import Source
from mdfuse.names import NAME, VALUE

GRID = DeviceMesh([[3, 0, 5], [1, 4, 2]], axes=("dp", "tp"))


def check(program: mf.Program) -> None:
    """The global program and every projection of it read back equal, and print the same again."""
    ranks = range(program.host.last_rank + 2)
    for printed in (program.host, *map(program.for_rank, ranks)):
        text = str(printed)
        assert hir.parse(text) == printed
        assert str(hir.parse(text)) == without_comments(text)


def without_comments(text: str) -> str:
    return "\n".join(line.partition("#")[0].rstrip() for line in text.splitlines())


@pytest.mark.parametrize("case", CASES[::9], ids=str)
def test_two_stages(case: Case) -> None:
    check(case.program())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"dp": Shard(0), "tp": Shard(1)}, {"dp": Shard(1), "tp": Shard(0)}),
        ({"dp": Shard(0), "tp": Shard(0)}, {"tp": Replicate()}),
        ({"dp": Partial("max"), "tp": Shard(2)}, {"dp": Shard(0), "tp": Shard(1)}),
        ({"tp": Shard(1)}, {"tp": Shard(0)}),
        ({}, {"tp": Partial()}),
    ],
)
def test_reshards(before: dict[str, mf.layout.Placement], after: dict[str, object]) -> None:
    with mf.FusionDefinition("reshard") as fd:
        x = fd.define_tensor([7, 5, 4], torch.bfloat16, GRID, before)
        fd.add_output(fd.ops.set(x).on(GRID, after))
    check(mf.compile(fd))


def test_every_kind_of_attribute() -> None:
    """Numbers, words, dtypes, lists, orders of axes, scalars, units, several meshes."""
    with mf.FusionDefinition("attributes") as fd:
        order = Layout(GRID, {"dp": Shard(0), "tp": Shard(0)}, {0: ("tp", "dp")})
        x = fd.define_tensor([12, 8], torch.float32, order)
        s = fd.define_scalar()
        y = fd.ops.gelu(x * (s + 1), approximate="tanh").to(torch.float16)
        y = fd.ops.where(y > 1e-9, y, float("inf"))
        y = fd.ops.dropout(fd.ops.softmax(y, dim=-1), 0.5, seed=7)
        z = fd.ops.set(y).on(DeviceMesh([7, 8]), {"x": Shard(1)})
        fd.add_output(fd.ops.max(z, dims=[0], keepdim=True))
        fd.add_output(y, stride_order=[0, 1])
    check(mf.compile(fd))


SMALL = """
host @double on mesh(x=2) {
  input %x: f32[2] of [4] (x=S0)
  %y: f32[2] of [4] (x=S0) = add(%x, %x)   # a comment
  return %y
}"""


def test_a_program_from_text_runs() -> None:
    program = hir.parse(SMALL)
    given = [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([3.0, 4.0])}]
    result = mf.simulate(program, per_rank=given)
    assert torch.equal(result.outputs[0], torch.tensor([2.0, 4.0, 6.0, 8.0]))


def test_lines_of_source_do_not_count() -> None:
    program = CASES[0].program().host
    assert any(i.source for i in program)
    assert not any(i.source for i in hir.parse(str(program)))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("add(%x, %x)", "add(%x, %x", "line 5"),
        ("add", "frobnicate", "there is no op 'frobnicate'"),
        ("f32[2]", "f31[2]", "there is no dtype f31"),
        ("return %y", "return %z", "return of undefined"),
        ("(x=S0) =", "m3(x=S0) =", "there is no mesh m3"),
    ],
)
def test_what_is_no_program(old: str, new: str, words: str) -> None:
    with pytest.raises(mf.ProgramError, match=words):
        hir.parse(SMALL.replace(old, new))


# -- attributes and operands that there are not ----------------------------------------------------

WRONG_FORMS = [
    ("%y: f32[2] (x=R) = alloc(zero=True)", "alloc has no attribute 'zero'", "memory (one of"),
    ("%y: f32[2] (x=R) = alloc(%x)", "alloc of 1 operand", "no operands"),
    ("%y: f32[2] (x=R) = set(%x, fast=3)", "set has no attribute 'fast'", "set has no attributes"),
    ("%y: f32[2] (x=R) = select(%m, dim=0, index=1, keep=1)", "no attribute 'keep'", "index ("),
    ("%y: f32[2] (x=R) = select(%m, dim=0)", "select without index=", "dim (a dim)"),
    ("%y: f32[2] (x=R) = select(%m, dim=0, dim=0, index=1)", "dim= twice", "index ("),
    ("%y: f32[2,2] (x=R) = permute(%m)", "permute without dims=", "names each dim once"),
    ("%y: f32[2] (x=R) = sum(%m, dims=[5])", "sum with dims=[5]", "dims go from -2 to 1"),
    ("%y: f32[2] (x=R) = sum(%m, dims=[%i])", "sum with dims=[%i]", "a list of different dims"),
    ("%y: f32[2] (x=R) = sum(%m, dims=[0], count=2)", "no attribute 'count'", "keepdim"),
    ("%y: f32[2] (x=R) = mean(%x, count=2)", "mean has no attribute 'count'", "dims ("),
    ("%y: f32[2] (x=R) = add(%x)", "add of 1 operand", "it takes 2 operands"),
    ("%y: f32[2] (x=R) = relu(%x, 2)", "relu of 2 operands", "it takes 1 operand"),
    ("%y: f32[2] (x=R) = gelu(%x, approximate=exact)", "approximate=exact", "one of none, tanh"),
    ("%y: f32[2] (x=R) = cast(%x, dtype=3)", "cast with dtype=3", "dtype is a dtype"),
    ("%y: f32[2] (x=R) = add(%x, 1) order=[0,0]", "order=[0,0] is no permutation", "1 dim"),
    ("%y: f32[2] (x=R) = dropout(%x, 1, p=7, stream=0)", "dropout with p=7", "from 0 to 1"),
    ("%y: f32[2] (x=R) = chunk(3)", "chunk of 3", "it takes names"),
    ("%c = send(%x, to=0) contiguous", "send with a memory order", "buffers have one"),
    ("%c = send(%x)", "send without to=", "axis (a name)"),
    ("%c: f32[2] (x=R) = send(%x, to=0)", "%c has a type", "no value"),
    ("%c = recv(%x, from=0, tag=3)", "recv has no attribute 'tag'", "from (an index"),
    ("%s = get_stream(%x)", "get_stream of 1 operand", "no operands"),
    ("set_stream %x", "set_stream: %x is no index", ""),
    ("barrier (x=R) to_dim=0", "barrier has no attribute 'to_dim'", "axis (a name)"),
    ("barrier (x=R) team=(0 1)", "team=(0 1) in the program of all ranks", "leave it out"),
    (
        "%c = post allreduce[sum](%x) -> %x f32[2] (x=P(sum)) => (x=R) axis=x tag=1",
        "'tag'",
        "pieces",
    ),
    ("%c = post allreduce[sum](%x) -> %x f32[2] (x=P(sum)) => (x=R) axis=x dim=3", "dim=3", "0"),
    ("%c = post allreduce[foo](%x) -> %x f32[2] (x=P(sum)) => (x=R) axis=x", "'foo'", "sum"),
    ("%c = post allreduce[sum](%x) -> %x f32[2] (x=P(sum)) => (x=R) axis=q", "no axis 'q'", "'x'"),
    ("%y: f32[9] of [2] (x=R) = add(%x, 1)", "%y has [9] of [2]", "(x=R) is [2]"),
    ("%y: f32 none (x=R) = add(%x, 1)", "without `of [...]`", "global extents"),
    ("%y: f32[2] (x=R) = add(%x, 1) %y: f32[3] (x=R) = add(%x, 1)", "%y has two types", "is one"),
    ("%y: f32[2] (x=S4) = add(%x, 1)", "is about dim 4", "dims go from 0 to 0"),
    ("%y: f32[2] (x=R) pad=side(dim=0,parts=1) = pad(%x, dim=0)", "pad=side", "one block"),
    ("%y: f32[2] (x=R) pad=block(dim=0) = pad(%x, dim=0)", "pad=block without parts=", "parts ("),
    ("%y: f32[2] (x=R) = select(%m, dim=0, index=extent(%m,2))", "extent(%m,2)", "count from 0"),
    ("for %i in 0..extent(%c,0) { }", "%c is no buffer", "buffers have extents"),
]


@pytest.mark.parametrize(("code", "what", "rest"), WRONG_FORMS, ids=[w for _, w, _ in WRONG_FORMS])
def test_a_form_that_is_not(code: str, what: str, rest: str) -> None:
    """What, then the line of the text, then what the instruction knows."""
    text = f"host @p on mesh(x=1) {{\ninput %x: f32[2] (x=R)\ninput %m: f32[2,2] (x=R)\n{code}\n}}"
    with pytest.raises(mf.ProgramError) as caught:
        mf.simulate(hir.parse(text), [torch.ones(2), torch.ones(2, 2)])
    message = str(caught.value)
    assert what in message and rest in message[message.index(what) :]
    if not code.startswith("set_stream"):
        assert f"  line 4: {code}" in message


def test_an_alias_of_nothing() -> None:
    text = "host @p on mesh(x=1) {\n  input %x: f32[2] (x=R)\n  alias %b = %nothing\n  return %x\n}"
    with pytest.raises(mf.ProgramError, match="alias %b = %nothing, but nothing makes %nothing"):
        hir.parse(text)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("f32[2] of [4]", "f32[3] of [4]", r"%x has \[3\] of \[4\]"),
        ("(x=2)", "(x=0)", r"mesh of shape \(0,\)"),
        ("(x=2)", "(x=2: 0..7)", "with 8 ranks"),
        ("(x=2)", "(x=1000000000000)", "at most 1048576 ranks"),
        ("(x=2)", "(x=1: 99999999)", "at most 1048576 ranks"),
        ("mesh(", "m7=mesh(", "mesh 0 is named m7"),
        ("%x, %x", "%x, " + "9" * 30, "numbers have 64 bits"),
        ("%x, %x", "%x, " + "9" * 5000, "numbers have 64 bits"),
        ("(x=S0) =", "(x=S99999999999999999999) =", "numbers have 64 bits"),
        ("f32[2] of [4]", "f32[4611686018427387904] of [9223372036854775807]", "64 bits"),
        ("%x, %x", "%x, 4 // (rank - rank)", "nothing is divided by zero"),
        ("%x, %x", "%x, 7 mod (2 - 2)", "nothing is divided by zero"),
        ("%x, %x", "%x, 9223372036854775807 + 1", "numbers have 64 bits"),
        ("%x, %x", "%x, " + " + ".join(["1"] * 5000), "nested"),
        ("%x, %x", "%x, a=" + "[" * 5000 + "]" * 5000, "nested"),
        ("  return", "for %i in 0..2 {" * 400 + "}" * 400 + "  return", "nested"),
        (
            "  return",
            "for %i in 0..1000000000 { set_stream 0 }  return",
            "up to 1000000 iterations",
        ),
        (
            "  return",
            "for %i in 0..2 {" * 30 + "set_stream 0" + "}" * 30 + "  return",
            f"runs {2**31 - 2} iterations",
        ),
        ("  return %y\n}", "", "is no host program"),
    ],
)
def test_what_is_too_much(old: str, new: str, words: str) -> None:
    program = SMALL.replace(old, new)
    with pytest.raises(mf.ProgramError, match=words):
        mf.simulate(hir.parse(program), [torch.ones(4)])


def test_deep_brackets_mean_what_is_inside() -> None:
    program = hir.parse(SMALL.replace("%x, %x", "%x, " + "(" * 5000 + "1" + ")" * 5000))
    assert program.instructions[0].inputs == ("x", 1)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axis", ["µ", "order", "rank", "mesh", "R", "m0", "chunk", "ﬁ", "_0", "mod"]
)
def test_axes_of_any_name(axis: str) -> None:
    """What a mesh accepts prints and reads back, in layouts, orders, coordinates and posts."""
    mesh = DeviceMesh([[0, 1], [2, 3]], axes=(axis, "tp"))
    with mf.FusionDefinition("µ.2") as fd:
        layout = Layout(mesh, {axis: Shard(0), "tp": Shard(0)}, {0: ("tp", axis)})
        x = fd.define_tensor([8, 4], torch.float32, layout, name="ñ.0")
        fd.add_output(fd.ops.set(x).on(mesh, {}))
    check(mf.compile(fd))
    text = f"host @p on {hir_mesh(mesh)} {{\n  barrier ({axis}=R, tp=R)\n"
    text += f"  for %i in 0..coord({axis}) {{\n  }}\n  return\n}}"
    assert str(hir.parse(text)) == text


def hir_mesh(mesh: DeviceMesh) -> str:
    return "mesh(" + ", ".join(f"{a}={n}" for a, n in zip(mesh.axes, mesh.shape, strict=True)) + ")"


@pytest.mark.parametrize("name", ["a b", "1st", "a-b", "", "a.", "e\u0301"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(mf.MeshError, match="a name is letters"):
        DeviceMesh([0, 1], axes=(name,))
    with pytest.raises(mf.DefinitionError, match="a fusion named"):
        mf.FusionDefinition(name)
    with mf.FusionDefinition() as fd, pytest.raises(mf.DefinitionError, match="name="):
        fd.define_tensor([2], name=f"{name} ")


def test_names_that_python_chose() -> None:
    """A lambda has a name that is none; what programs cannot print is named otherwise."""
    doubled = mf.fusion(lambda x: x + x)
    program = doubled.program(mf.TensorSpec((4,), mesh=DeviceMesh([0])))
    assert program.host.name == "lambda"
    check(program)


def test_the_grammar_knows_the_rule_for_names() -> None:
    from mdfuse.hir.text.parser import _parser

    patterns = {t.name: t.pattern.value for t in _parser().terminals}
    assert patterns["NAME"] == NAME.pattern
    assert patterns["VALUE"] == "%" + VALUE.pattern


def test_the_name_of_a_file_stays_on_its_line() -> None:
    program = hir.parse(SMALL)
    source = Source("a\r\nreturn %x\u2028.py", 3)
    first = replace(program.instructions[0], source=source)
    printed = replace(program, instructions=(first, *program.instructions[1:]))
    assert hir.parse(str(printed)) == program
