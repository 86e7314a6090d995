"""Cotangents of slices of a value: adjacent ones are concatenated, others padded by zeros.

%q, %k, %v = parts of %h                    cotangent of %h: cat(%dq, %dk, %dv)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdfuse.extents.extent import Extent, are_same, is_symbolic
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.recording import record


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The cotangent of a slice of an operand; other elements get zeros.

    Attributes:
        ct: the cotangent of the slice.
        shape: of the operand.
        starts: per dim, the first place that the slice took.
        steps: per dim.
    """

    ct: Handle
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def dim(self) -> int | None:
        """The only dim that the slice cuts, if it takes one known range; else None."""
        pairs = enumerate(zip(self.ct.shape, self.shape, strict=True))
        cut = [d for d, (n, of) in pairs if not are_same(n, of)]
        if len(cut) != 1 or any(step != 1 for step in self.steps):
            return None
        places = self.starts[cut[0]], self.ct.shape[cut[0]], self.shape[cut[0]]
        return None if is_symbolic(places) or not places[1] else cut[0]

    def in_zeros(self) -> Handle:
        """Return the cotangent in the operand's shape."""
        where = {"shape": self.shape, "starts": self.starts, "steps": self.steps}
        spread: Handle = record("slice_grad", self.ct, **where)
        return spread


#: The cotangent of an operand.
Part = Handle | Window


def joined(parts: Sequence[Part]) -> list[Handle]:
    """Return the cotangents of a value; slices that make up a dim are concatenated."""
    merged: list[Handle] = []
    windows = [x for x in parts if isinstance(x, Window)]
    for part in parts:
        if not isinstance(part, Window):
            merged.append(part)
        elif part in windows:
            row = _row(part, windows)
            whole = (
                part.in_zeros()
                if len(row) == 1
                else record("cat", *(x.ct for x in row), dim=part.dim)
            )
            merged.append(whole)
            windows = [x for x in windows if x not in row]
    return merged


def _row(part: Window, windows: Sequence[Window]) -> list[Window]:
    """Return the adjacent slices that cover a dim, or only the given one."""
    dim, at, row = part.dim, 0, list[Window]()
    if dim is None:
        return [part]
    by_start: dict[int, Window] = {}
    for x in (part, *windows):
        if x.dim == dim:
            by_start.setdefault(x.starts[dim], x)
    while at in by_start:
        row.append(by_start[at])
        at += row[-1].ct.shape[dim]
    return row if at == part.shape[dim] and part in row else [part]


def sliced(x: Handle, starts: Sequence[int], steps: Sequence[int], shape: Sequence[int]) -> Handle:
    """Return the slice of x that begins at some places and has a shape."""
    ends = tuple(
        start + (n - 1) * step + 1 if isinstance(n, Extent) or n else start
        for start, step, n in zip(starts, steps, shape, strict=True)
    )
    return record("slice", x, starts=starts, ends=ends, steps=steps)
