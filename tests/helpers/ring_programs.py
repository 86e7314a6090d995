"""Host programs that rotate an axis, drawn, and faults that all ranks have alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from helpers.mutants import edited, mutants, places, with_attrs
from helpers.programs import program_texts
from helpers.type_mutants import type_mutants
from mdfuse import MdfuseError, hir
from mdfuse.extents.expressions import UNKNOWN, Calc, Term
from mdfuse.hir import HostProgram

TEMPLATES = program_texts("rings")


def ring(name: str, seed: int) -> HostProgram:
    """A right program on a drawn mesh with drawn, mostly uneven, rows."""
    draw = random.Random(f"{name} {seed}")
    n, is_grid = draw.choice((4, 5, 6, 7)), draw.random() < 0.3
    sign, other = draw.choice(("+-", "-+"))
    rows = draw.choice((n, 2 * n, 2 * n + 1, 3 * n - 1, n - 1, n - 2, 1, 0))
    chunks = draw.choice((5, 7, 9)) if name == "local" else n
    values = {
        "n": n,
        "mesh": f"dp=2, tp={n}" if is_grid else f"tp={n}",
        "dp": "dp=R, " if is_grid else "",
        "rows": rows,
        "part": -(-rows // chunks),
        "even": n * n,
        "up": f"coord(tp) {sign} %i",
        "to": f"coord(tp) {other} %i",
        "hop": draw.randrange(n),
        "chunks": chunks,
        "least": draw.randrange(9),
    }
    return hir.parse(TEMPLATES[name].format_map(values))


# -- what may be wrong ---------------------------------------------------------------------------


def broken(program: HostProgram, draw: random.Random) -> HostProgram:
    """The program with one change, which may leave it right."""
    changes: list[Callable[[HostProgram, random.Random], HostProgram]]
    changes = [_other_index, _other_index, _other_chunk, _other_instruction, _other_type]
    while True:
        found = draw.choice(changes)(program, draw)
        if found is not program:
            return found


def indices(index: Any, n: int) -> Iterator[Any]:
    """Other index expressions, near to this one."""
    i, c = Term("index", "i"), Term("coord", "tp")
    yield from (0, 1, n - 1, i, c, Calc("-", n - 1, c), Term("rank"))
    yield from (Calc("mod", Calc(op, a, b), n) for op in "+-" for a, b in ((c, i), (i, c)))
    yield from (Calc("mod", Calc(op, c, k), n) for op in "+-" for k in (1, 2, Calc("*", 2, i)))
    if isinstance(index, UNKNOWN):
        yield from (Calc("mod", Calc("+", index, k), n) for k in (1, n - 1, 2))
        yield from (Calc("mod", index, k) for k in (n - 1, n + 1))
        yield Calc("min", index, n - 2)
    if isinstance(index, Calc):
        yield replace(index, left=index.right, right=index.left) if index.op != "mod" else index
        yield index.left


def _other_index(program: HostProgram, draw: random.Random) -> HostProgram:
    """Another peer, another bound of a loop, another branch."""
    found = [
        (block, at, key)
        for block, at in places(program.instructions)
        for key, _ in block[at].attrs
        if key in ("to", "from", "start", "stop", "step", "test")
    ]
    if not found:
        return program
    block, at, key = draw.choice(found)
    value = block[at].kwargs[key]
    if key == "test":
        other = replace(value, op=draw.choice(("==", "!=", "<", "<=", ">", ">=")))
        other = replace(other, right=draw.randrange(-1, 8))
    elif key in ("to", "from"):
        other = draw.choice(list(indices(value, program.meshes[0].axis_size("tp"))))
    else:
        other = value + draw.choice((-1, 1, 2))
    new = (*block[:at], with_attrs(block[at], **{key: other}), *block[at + 1 :])
    return edited(program, block, new)


def _other_chunk(program: HostProgram, draw: random.Random) -> HostProgram:
    """Another chunk of one buffer, of all buffers, or in another number of chunks."""
    is_all, op = draw.random() < 0.3, draw.random()
    names = [n for n, k in program.types.items() if k.layout is not None and k.layout.stream]
    if not names:
        return program
    chosen = names if is_all else [draw.choice(names)]
    first = program.types[chosen[0]].layout.stream  # type: ignore[union-attr]
    assert first is not None
    index = draw.choice(list(indices(first.index, first.count)))
    chunks = first.chunks if op < 0.8 else first.count + draw.choice((-1, 1))
    types = dict(program.types)
    for name in chosen:
        kind = types[name]
        assert kind.layout is not None and kind.layout.stream is not None
        stream = replace(kind.layout.stream, index=index, chunks=chunks)
        types[name] = replace(kind, layout=kind.layout.with_stream(stream))
    return replace(program, types=types)


def _other_instruction(program: HostProgram, draw: random.Random) -> HostProgram:
    return draw.choice([m.program for m in mutants(program)])


def _other_type(program: HostProgram, draw: random.Random) -> HostProgram:
    """Another layout, another shape of one buffer or of all that have this one, or attribute."""
    if draw.random() < 0.5:
        return draw.choice([other for _, other in type_mutants(program)])
    names = [n for n, k in program.types.items() if k.layout is not None]
    chosen = program.types[draw.choice(names)].shape
    rows = max(chosen[0] + draw.choice((-1, 1, 3)), 0)
    types = {
        n: replace(k, shape=(rows, *k.shape[1:])) if k.shape == chosen else k
        for n, k in program.types.items()
    }
    return replace(program, types=types)


def verdict(program: HostProgram, in_full: bool) -> str:
    """What the verifier says: nothing, or the kind of its error."""
    from mdfuse.hir.verify.check import verify

    try:
        verify(program, in_full)
    except MdfuseError as error:
        return type(error).__name__
    return ""
