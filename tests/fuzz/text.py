"""Texts of host programs: real ones with something changed, and some drawn from the grammar.

Each text is read, or is refused with an error of mdfuse. What is read prints and reads back equal;
what then verifies runs on all its ranks, on poisoned buffers, without an error of Python.
"""

from __future__ import annotations

import doctest
import random
import re
from functools import cache
from pathlib import Path

import torch
from helpers.host_posts import CASES
from helpers.two_stage import CASES as TWO_STAGE

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir import HostProgram
from mdfuse.hir.instructions import INSTRUCTIONS
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.verify.check import verify
from mdfuse.ir.ops import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "host_ir.md"
OPTIONS = mf.Options(poison=True)
#: Programs that are larger are not run.
RANKS, ELEMENTS, STEPS = 8, 4096, 400

#: What texts are made of: the longest run that is a name, a number, a string, or one sign.
TOKEN = re.compile(r"%?[^\W\d][\w.]*|%?\d[\w.]*|\"[^\"]*\"|\.\.|->|=>|==|!=|<=|>=|//|\s+|.")
NUMBERS = (
    "0", "1", "2", "3", "5", "7", "-1", "-2", "1.5", "1e9", "-1e300", "nan", "inf", "00012",
    "99999", "2147483648", "9223372036854775807", "9223372036854775808", "1" * 40, "٣", "0x10",
)  # fmt: skip
WORDS = (
    "True", "False", "None", "rank", "coord(x)", "coord(q)", "extent(%x,0)", "extent(%y,7)", "sum",
    "max", "foo", "device", "pinned", "none", "flat", "contiguous", "order=[0]", "order=[1,0]", "R",
    "S0", "S1", "S9", "P(sum)", "P(max)", "P(foo)", "f64", "bf16", "bool", "i64", "f31", "quint8",
    "complex64", "uint16", "scalar", "x", "µ", "ﬁ", "\"a\\n\"", "\"", "[1,[2]]", "[]", "[%i]",
    "%x", "%y", "%i", "%c0", "%nothing", "%µ", "%ﬁ", "(rank + 1) mod 2", "1 // 0", "mesh", "#",
    "\u2028", "\r", "\x00", "\ud800", "'", "{", "}", "(", ")", "[", "]", ",", ":", "=", "..", "->",
)  # fmt: skip
ATTRIBUTES = tuple(
    sorted(
        {a.name for row in INSTRUCTIONS.values() for a in (*row.attrs, *row.sets)}
        | {a.name for op in TABLE.values() for a in op.attrs}
        | {"keep", "fast"}
    )
)
OPS = (*TABLE, *INSTRUCTIONS, "frobnicate")
LINES = (
    "%z: f32[2] (x=R) = alloc(zero=True)", "alias %b = %nothing", "input %q: f32[2] (x=R)",
    "wait %c0", "free %x", "group_start", "group_end", "sync 0", "set_stream 1", "%s = get_stream",
    "set_stream %s", "barrier (x=R)", "barrier (x=R) axis=x", "return %x", "return", "}",
    "for %i in 0..2 {", "for %i in 0..1000000000 { sync 0 }", "for %i in 2..0 step -1 { sync %i }",
    "for %i in 0..9 step 0 { sync 0 }", "if rank == 0 { barrier (x=R) }", "launch u(%x) -> %y { }",
    "if 1 { } else {", "%k: i64 scalar = add(1, 2)", "%k: f32 scalar = mul(%k, 1.5)",
    "%c9 = send(%x, to=0)", "%c9 = recv(%y, from=rank)", "# a comment \" {", "wait %c0[0]",
)  # fmt: skip


@cache
def seeds() -> tuple[str, ...]:
    """The texts that are changed: cases of tests, compiled programs, the examples of a page."""
    found = [case.text for case in CASES]
    found += [str(case.program()) for case in CASES[::3]]
    compiled = [case.program() for case in TWO_STAGE[::40]]
    found += [str(p.host) for p in compiled] + [str(p.for_rank(1)) for p in compiled]
    examples = doctest.DocTestParser().get_examples(PAGE.read_text(encoding="utf-8"))
    for example in examples:
        found += re.findall(r"host @.*?\n\}", example.source, re.DOTALL)
    return tuple(found)


# -- changing -------------------------------------------------------------------------------------


def _number(drawn: random.Random) -> str:
    return drawn.choice(NUMBERS) if drawn.random() < 0.6 else str(drawn.randrange(-4, 12))


def _piece(drawn: random.Random) -> str:
    """Something that may stand somewhere."""
    match drawn.randrange(6):
        case 0:
            return _number(drawn)
        case 1:
            return drawn.choice(OPS)
        case 2:
            return (
                f"{drawn.choice(ATTRIBUTES)}={drawn.choice((_number(drawn), drawn.choice(WORDS)))}"
            )
        case 3:
            return chr(drawn.choice((drawn.randrange(128), drawn.randrange(0x3000))))
    return drawn.choice(WORDS)


def _change_token(tokens: list[str], drawn: random.Random) -> None:
    at = drawn.randrange(len(tokens))
    like = [n for n, t in enumerate(tokens) if t[:1].isdigit()]
    match drawn.randrange(9):
        case 0:
            del tokens[at]
        case 1:
            tokens.insert(at, tokens[drawn.randrange(len(tokens))])
        case 2:
            other = drawn.randrange(len(tokens))
            tokens[at], tokens[other] = tokens[other], tokens[at]
        case 3 | 4 if like:
            tokens[drawn.choice(like)] = _number(drawn)
        case 5:
            named = [n for n, t in enumerate(tokens) if t[:1] == "%"]
            if named:
                tokens[drawn.choice(named)] = tokens[drawn.choice(named)]
        case 6:
            calls = [n for n, t in enumerate(tokens) if t == ")"]
            if calls:
                attribute = f"{drawn.choice(ATTRIBUTES)}={_piece(drawn)}"
                tokens.insert(drawn.choice(calls), f", {attribute}")
        case 7:
            named = [n for n, t in enumerate(tokens) if t in TABLE or t in INSTRUCTIONS]
            if named:
                tokens[drawn.choice(named)] = drawn.choice(OPS)
        case _:
            tokens[at] = _piece(drawn)


def _change_line(lines: list[str], drawn: random.Random) -> None:
    at, other = (drawn.randrange(len(lines)) for _ in range(2))
    match drawn.randrange(5):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[other])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            lines.insert(at, drawn.choice(LINES))
        case _:
            text = drawn.choice(seeds()).splitlines()
            lines.insert(at, drawn.choice(text))


def _change_length(text: str, drawn: random.Random) -> str:
    """Cut off, or repeated until something is deep, long or many."""
    at, n = drawn.randrange(len(text) + 1), drawn.choice((2, 30, 70, 400, 3000))
    part = drawn.choice(
        ("(", "[", "{", "1 + ", "(1 + ", "for %i in 0..2 { ", "if 1 { ", "9", "%x, ")
    )
    match drawn.randrange(4):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + part * n + text[at:]
        case 2:
            ends = {"(": "0)", "[": "]", "(1 + ": "0)", "{": "}"}.get(
                part, "}" * (part[-2:] == "{ ")
            )
            return text[:at] + part * n + (ends[-1:] * n) + text[at:]
    return text.replace("return", "for %j in 0..2 {" * n + "sync 0 " + "}" * n + " return", 1)


def changed(drawn: random.Random) -> str:
    """A text with one to four changes."""
    text = drawn.choice(seeds())
    for _ in range(drawn.choice((1, 1, 1, 2, 2, 3, 4))):
        kind = drawn.random()
        if kind < 0.75:
            tokens = TOKEN.findall(text)
            if tokens:
                _change_token(tokens, drawn)
            text = "".join(tokens)
        elif kind < 0.97:
            lines = text.splitlines()
            if lines:
                _change_line(lines, drawn)
            text = "\n".join(lines)
        else:
            text = _change_length(text, drawn)
    return text


# -- drawing from the grammar ---------------------------------------------------------------------


def _index(drawn: random.Random, depth: int = 0) -> str:
    if depth > 3 or drawn.random() < 0.5:
        terms = (
            "0",
            "1",
            "2",
            "%i",
            "rank",
            "coord(x)",
            "coord(q)",
            "extent(%x,0)",
            "extent(%x,3)",
        )
        return drawn.choice(terms)
    op = drawn.choice(("+", "-", "*", "//", "mod", "==", "<"))
    return f"({_index(drawn, depth + 1)} {op} {_index(drawn, depth + 1)})"


def _type(drawn: random.Random) -> str:
    dims = [drawn.choice((0, 1, 2, 3, 4)) for _ in range(drawn.choice((0, 1, 1, 2, 2, 3)))]
    split = drawn.randrange(len(dims)) if dims and drawn.random() < 0.4 else None
    whole = [n * 2 if d == split else n for d, n in enumerate(dims)]
    of = f" of [{','.join(map(str, whole))}]" if split is not None and whole != dims else ""
    placement = "R" if split is None else f"S{split}"
    if split is None and drawn.random() < 0.2:
        placement = drawn.choice(("P(sum)", "P(max)", "P(bor)"))
    dtype = drawn.choice(("f32", "f32", "f32", "f64", "i64", "bool", "bf16", "i8", "complex64"))
    return f"{dtype}[{','.join(map(str, dims))}]{of} (x={placement})"


def _value(drawn: random.Random, kind: str) -> str:
    """A value of an attribute that is said to be of some kind."""
    numbers = [str(drawn.randrange(-2, 3)) for _ in range(drawn.randrange(4))]
    if "list" in kind or "permutation" in kind:
        return f"[{','.join(numbers)}]"
    if "index" in kind:
        return _index(drawn)
    words = {"True or False": "True", "a dtype": "f64", "a number": "0.5", "a name": "x"}
    return words.get(kind, drawn.choice((*numbers, "0", "tanh", "host")))


def _instruction(drawn: random.Random, names: list[str]) -> str:
    if drawn.random() < 0.25:
        return drawn.choice(LINES)
    if drawn.random() < 0.1:
        body = " ".join(_instruction(drawn, names) for _ in range(drawn.randrange(3)))
        return f"for %i in {_index(drawn)}..{_index(drawn)} {{ {body} }}"
    op = drawn.choice([*TABLE] if drawn.random() < 0.7 else [*INSTRUCTIONS])
    attrs = (TABLE[op] if op in TABLE else INSTRUCTIONS[op]).attrs
    least, most = (TABLE[op] if op in TABLE else INSTRUCTIONS[op]).operands
    count = drawn.randint(least, most if most is not None else 3)
    operands = [drawn.choice((*names, *names, "%i", "2", "1.5", "None")) for _ in range(count)]
    said = [a for a in attrs if a.required or drawn.random() < 0.3]
    settings = [f"{a.name}={_value(drawn, a.kind)}" for a in said]
    name = f"%v{len(names)}" if drawn.random() < 0.8 else drawn.choice(names)
    type_ = f": {_type(drawn)}" if name not in names else ""
    order = drawn.choice(("", "", "", " contiguous", " order=[1,0]"))
    names.append(name)
    return f"{name}{type_} = {op}({', '.join((*operands, *settings))}){order}"


def from_grammar(drawn: random.Random) -> str:
    names = ["%x", "%y"]
    lines = [f"input %x: {_type(drawn)}", f"input %y: {_type(drawn)}"]
    lines += [_instruction(drawn, names) for _ in range(drawn.randrange(1, 6))]
    lines.append(f"return {drawn.choice(names)}")
    return "host @drawn on mesh(x=2) {\n" + "\n".join(lines) + "\n}"


# -- using ----------------------------------------------------------------------------------------


def fuzz(drawn: random.Random) -> None:
    """Read a text; print, verify and run what it means."""
    use(from_grammar(drawn) if drawn.random() < 0.25 else changed(drawn))


def use(text: str) -> None:
    """Read a text; print, verify and run what it means."""
    program = hir.parse(text)
    printed = str(program)
    again = hir.parse(printed)
    assert again == program, f"reads back as another program:\n{printed}"
    assert str(again) == printed, f"prints otherwise the second time:\n{printed}"
    if program.last_rank >= RANKS or not is_small(program):
        return
    verify(program)
    if program.rank is None:
        ranks = range(program.last_rank + 1)
        for local in (project(program, r) for r in ranks):
            assert hir.parse(str(local)) == local, f"reads back as another projection:\n{local}"
        mf.simulate(program, per_rank=[arguments(program, rank) for rank in ranks], options=OPTIONS)


def is_small(program: HostProgram) -> bool:
    """It takes little memory, and no long loops."""
    shapes = [torch.Size(max(n, 1) for n in kind.shape) for kind in program.types.values()]
    shapes += [torch.Size(c.shape) for c in program.communications]
    loops = [i.kwargs["stop"] for i in program.walk() if i.op == "for"]
    bounds = [n for n in loops if isinstance(n, int)]
    steps = 1
    for n in bounds:
        steps *= max(n, 1)
    return all(s.numel() <= ELEMENTS for s in shapes) and not STEPS < steps < 10**8


def arguments(program: HostProgram, rank: int) -> dict[str, object]:
    """What a rank passes: ones, or nothing where it has no part."""
    found: dict[str, object] = {}
    for name in program.inputs:
        kind = program.types[name]
        if kind.layout is None:
            found[name] = True if kind.dtype == torch.bool else 1
        elif rank in kind.layout.mesh:
            found[name] = torch.ones(kind.local_shape(rank), dtype=kind.dtype)
    return found
