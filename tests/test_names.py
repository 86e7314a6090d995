"""Users' names are only names: whatever they are, no Python code is made of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, hir
from mdfuse.ir.graph import Names, fresh_name

ONE = DeviceMesh.arange(x=1)
TWO = DeviceMesh.arange(x=2)

pytestmark = pytest.mark.usefixtures("alone")


#: Pairs that Python reads as one identifier, and names that it reads as something else.
PAIRS = [
    ("y", "\N{MATHEMATICAL BOLD SMALL Y}"),
    ("fi", "\N{LATIN SMALL LIGATURE FI}"),
    ("\N{MICRO SIGN}", "\N{GREEK SMALL LETTER MU}"),
    ("K", "\N{KELVIN SIGN}"),
    ("class", "def"),
    ("None", "run"),
    ("v0", "b0"),
    ("x.1", "x_1"),
    ("mm", "torch"),
    ("caller", "v1"),
    ("_", "__debug__"),
    ("ª", "a"),
    ("٣", "3"),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_names_are_two_values(one: str, other: str) -> None:
    with mf.FusionDefinition("names") as fd:
        x = fd.define_tensor([4], mesh=ONE, name=one)
        y = fd.define_tensor([4], mesh=ONE, name=other)
        fd.add_output(x * 2.0 - y)
        fd.add_output(y + 1.0)
    x, y = torch.arange(4.0), torch.tensor([5.0, -1.0, 0.0, 2.0])
    program = mf.compile(fd)
    for _ in range(2):
        difference, more = program.run(x, y)
        assert torch.equal(difference, x * 2.0 - y)
        assert torch.equal(more, y + 1.0)
    (simulated, _) = mf.simulate(program, [x, y]).outputs
    assert torch.equal(simulated, x * 2.0 - y)
    printed = str(program.plans.recent)
    assert printed.isascii() or any(f"%{name}" in printed for name in (one, other))
    assert f"%{one}" in printed
    assert f"%{other}" in printed


@pytest.mark.parametrize(("one", "other"), PAIRS[:4])
def test_names_of_host_programs(one: str, other: str) -> None:
    """Inner values that look alike are two values of the compiled plan."""
    body = "input %a: f32[4] (x=R) %NAME: f32[4] (x=R) = mul(%a, 2.0) %OTHER: f32[4] (x=R) = "
    body += "mul(%a, 3.0) %c: f32[4] (x=R) = sub(%NAME, %OTHER) return %c"
    body = body.replace("NAME", f"n{one}").replace("OTHER", f"n{other}")
    program = hir.parse(f"host @alike on mesh(x=1) {{ {body} }}")
    a = torch.arange(4.0)
    evaluator = mf.HostIrEvaluator(program)
    for _ in range(2):
        (c,) = evaluator.run({"a": a})
        assert torch.equal(c, a * 2.0 - a * 3.0)


#: What a file may be called: the line of a program is printed, and is part of its plan.
FILES = [
    "a\rimport nothing.py",
    "a\nraise SystemExit.py",
    "b\udcff.py",
    "\ud800.py",
    "c\x0c d\u2028e.py",
    "nul\0.py",
    "é.py",
]


@pytest.mark.parametrize("file", FILES, ids=ascii)
def test_a_file_may_have_any_name(file: str) -> None:
    source = "y = fd.ops.exp(x) * 2.0"
    with mf.FusionDefinition("filed") as fd:
        x = fd.define_tensor([4], mesh=ONE)
        names = {"fd": fd, "x": x}
        code = compile(source, "stand-in.py", "exec").replace(co_filename=file)
        exec(code, names)
        fd.add_output(names["y"])
    program = mf.compile(fd)
    x = torch.arange(4.0)
    for _ in range(2):
        assert torch.equal(program.run(x)[0], torch.exp(x) * 2.0)
    assert torch.equal(mf.simulate(program, [x]).outputs[0], torch.exp(x) * 2.0)
    text = str(program)
    text.encode()
    assert hir.parse(text) == program.host
    str(program.plans.recent).encode()


@pytest.mark.parametrize("name", ["a\rimport nothing", "b\udcff", "nul\0", "", "a-b", 3, None])
def test_names_that_a_definition_cannot_have(name: Any) -> None:
    with pytest.raises(mf.DefinitionError, match="a fusion named"):
        mf.FusionDefinition(name)


@pytest.mark.parametrize("name", ["class", "None", "run", "fi", "ﬁ", "µ", "𝐲", "a.b"])
def test_a_definition_may_have_any_word_for_a_name(name: str) -> None:
    with mf.FusionDefinition(name) as fd:
        x = fd.define_tensor([4], mesh=ONE)
        fd.add_output(x + 1.0)
    program = mf.compile(fd)
    assert hir.parse(str(program)) == program.host
    assert torch.equal(program.run(torch.ones(4))[0], torch.full((4,), 2.0))


def test_arguments_of_functions_may_have_any_name() -> None:
    @mf.fusion
    def total(*xs: Any, **others: Any) -> Any:
        result = xs[0]
        for x in (*xs[1:], *others.values()):
            result = result * 2.0 + x
        return result

    spec = mf.TensorSpec([4], torch.float32, ONE)
    names = ["class", "fi", "\N{LATIN SMALL LIGATURE FI}"]  # as sorted
    program = total.program(spec, spec, **dict.fromkeys(names, spec))
    xs = [torch.randn(4) for _ in range(5)]
    assert len(program.host.inputs) == 5
    expected = xs[0]
    for x in xs[1:]:
        expected = expected * 2.0 + x
    for _ in range(2):
        assert torch.equal(program.run(*xs)[0], expected)


def test_fresh_names_are_those_found_by_counting_from_the_start() -> None:
    drawn, names, taken = random.Random(3), Names(), set[str]()
    for _ in range(3000):
        if taken and drawn.random() < 0.3:
            name = drawn.choice(sorted(taken))
            taken.remove(name)
            names.free(name)
            continue
        base = drawn.choice(("t", "t_1", "t_1_2", "s", "s_", "t_01"))
        found = names.fresh(taken, base)
        assert found == fresh_name(taken, base)
        taken.add(found)


def test_fresh_names_are_not_counted_from_the_start() -> None:
    class Asked(set[str]):
        times = 0

        def __contains__(self, name: object) -> bool:
            self.times += 1
            return super().__contains__(name)

    names, taken = Names(), Asked()
    for _ in range(500):
        taken.add(names.fresh(taken, "t"))
    assert len(taken) == 500
    assert taken.times < 1000
