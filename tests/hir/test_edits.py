"""Changes by position, made at once."""

from __future__ import annotations

from mdfuse.hir.edits import Edits
from mdfuse.hir.program import Instruction


def code_of(text: str) -> tuple[Instruction, ...]:
    """Instructions `op x y`, which read x and y."""
    words = (row.split() for row in text.split("; "))
    return tuple(Instruction(op=op, inputs=tuple(names)) for op, *names in words)


def text_of(code: tuple[Instruction, ...]) -> str:
    return "; ".join(" ".join((i.op, *i.reads)) for i in code)


def test_moves_drops_and_frees() -> None:
    edits = Edits(code_of("a; wait c; b; free x y; free y; d"))
    edits.move(1, 5)
    edits.move(0, 6)
    edits.gone.add("y")
    edits.instead[2] = [*code_of("e; f")]
    assert text_of(edits.result()) == "e; f; free x; wait c; d; a"
    edits.unfree(3, "x")
    assert text_of(edits.result()) == "e; f; wait c; d; a"


def test_changes_in_a_host_unit() -> None:
    unit = Instruction(op="launch", fn="u", outputs=("y", "p"), body=code_of("a; b"))
    edits = Edits((unit, *code_of("free p")))
    edits.instead[0, 1] = [*code_of("c; d")]
    edits.gone.add("p")
    (changed,) = edits.result()
    assert changed.outputs == ("y",) and text_of(changed.body) == "a; c; d"


def test_nothing_changes() -> None:
    code = code_of("a; free x")
    assert all(a is b for a, b in zip(Edits(code).result(), code, strict=True))
