"""Copies of a whole value into the input whose place it takes."""

from __future__ import annotations

from collections.abc import Iterator

from mdfuse.hir.analysis.dataflow import storage
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.text.printer import nbytes_held
from mdfuse.ir.ops import TABLE


def copies(program: HostProgram) -> Iterator[str]:
    """Yield a line for each output that is copied whole into the input that it reuses."""
    code = [*program.walk()] if program.aliases else []
    shared = storage(program) if program.aliases else {}
    for output, buffer in program.aliases.items():
        places = (n for n, i in enumerate(code) if i.op == "set" and i.outputs == (output,))
        at = next(places, None)
        if at is not None:
            new = code[at].reads[0]
            size = nbytes_held(program, program.types[output])
            where = f" ({code[at].source})" if code[at].source else ""
            yield f"copies {size} bytes into %{buffer}: %{output} is computed elsewhere{where}"
            yield f"  because {_reason(code, new, buffer, at, shared)}"


def _reason(code: list[Instruction], new: str, buffer: str, at: int, shared: dict[str, str]) -> str:
    """Return why an output is not new in the buffer of an input."""
    first = next((n for n, i in enumerate(code[:at]) if new in i.outputs and i.op != "alloc"), at)
    for i in code[first + 1 : at]:
        if i.op not in ("free", "launch") and any(shared.get(x, x) == buffer for x in i.reads):
            where = f" ({i.source})" if i.source else ""
            return f"{i.fn or i.op}{where} reads the old %{buffer} later"
    maker = code[first]
    row = TABLE.get(maker.fn)
    if row is None or not (row.is_elementwise or row.keeps is not None):
        return f"{maker.fn or maker.op} writes no part of %{buffer}"
    if row.keeps is not None and maker.inputs[row.keeps] != buffer:
        return f"{maker.fn} writes into %{maker.inputs[row.keeps]}, which is no %{buffer}"
    return f"{maker.fn or maker.op} reads other elements of %{buffer} than it writes"
