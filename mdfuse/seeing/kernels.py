"""Kernels: the compiled kernels of a launch, as far as bytes go.

Connected work between two library calls becomes one kernel; values that only that kernel reads are
neither written nor read again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mdfuse.hir.instructions import is_library
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.ir.graph import dtype_name
from mdfuse.seeing.amounts import added_to, are_across, buffer_bytes, is_work

#: Work that goes through a row more than once.
_ROWS = frozenset(("softmax", "log_softmax", "layer_norm", "rms_norm"))


@dataclass(frozen=True, slots=True)
class Kernel:
    """The compiled kernel of some work.

    Attributes:
        nbytes: that it reads and writes.
        dtype: of its result.
        like: the measured kind of work with the same memory access: pointwise; a reduction of rows;
            reads across memory, with or without a reduction of rows.
    """

    nbytes: int
    dtype: str
    like: Literal["*", "sum", "across", "rows across"] = "*"


def kernels(program: HostProgram, launch: Instruction) -> list[Kernel]:
    """Return the kernels of a launch, but for those of libraries."""
    body = launch.body
    level: dict[str, int] = {}
    producers = {x: n for n, i in enumerate(body) for x in i.outputs}
    roots = _roots(body)
    #: work -> the work whose kernel it joins; the first of a kernel joins none
    joined: dict[int, int] = {}
    heights: list[int] = []
    for n, i in enumerate(body):
        height = max((level.get(x, 0) for x in i.reads), default=0)
        level.update(dict.fromkeys(i.outputs, height + is_library(i)))
        heights.append(height)
        if is_library(i) or not is_work(i):
            continue
        joined[n] = n
        for at in (producers.get(roots.get(x, x)) for x in i.reads):
            if at is not None and at in joined and heights[at] == height:
                one, other = _first(joined, at), _first(joined, n)
                joined[max(one, other)] = min(one, other)
    parts: dict[int, list[int]] = defaultdict(list)
    for n in joined:
        parts[_first(joined, n)].append(n)
    return [_kernel(program, launch, part, roots) for part in parts.values()]


def _first(joined: Mapping[int, int], n: int) -> int:
    """Return the first work of a kernel."""
    while joined[n] != n:
        n = joined[n]
    return n


def _kernel(
    program: HostProgram, launch: Instruction, part: list[int], roots: dict[str, str]
) -> Kernel:
    work = [launch.body[n] for n in part]
    outputs = [x for i in work for x in i.outputs]
    first = program.types[work[-1].outputs[0]].dtype
    like: Literal["*", "sum", "across", "rows across"] = "*"
    is_by_rows = any(_is_by_rows(program, i) for i in work)
    if are_across(program, {x for i in work for x in i.reads} - {*outputs}, outputs):
        like = "rows across" if is_by_rows else "across"
    elif is_by_rows:
        like = "sum"
    return Kernel(_moved(program, launch, part, roots), dtype_name(first), like)


def _is_by_rows(program: HostProgram, i: Instruction) -> bool:
    """Return whether work reduces its operands, or goes through rows more than once."""
    written = sum(buffer_bytes(program, x) for x in i.outputs)
    return i.fn in _ROWS or any(buffer_bytes(program, x) > written for x in i.reads)


def _moved(
    program: HostProgram, launch: Instruction, part: list[int], roots: dict[str, str]
) -> int:
    inside = {x for n in part for x in launch.body[n].outputs}
    reads = {x for n in part for x in launch.body[n].reads if roots.get(x, x) not in inside}
    outside = (i for n, i in enumerate(launch.body) if n not in part)
    used = {roots.get(x, x) for i in outside if is_work(i) for x in i.reads}
    writes = inside & (used | {roots.get(x, x) for x in launch.outputs})
    sums = sum(added_to(program, launch.body[n]) for n in part)
    return sums + sum(buffer_bytes(program, x) for x in reads | writes)


def _roots(body: tuple[Instruction, ...]) -> dict[str, str]:
    """Return a view -> its base."""
    roots: dict[str, str] = {}
    for i in body:
        if not is_work(i) and i.reads:
            roots.update(dict.fromkeys(i.outputs, roots.get(i.reads[0], i.reads[0])))
    return roots
