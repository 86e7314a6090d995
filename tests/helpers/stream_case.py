"""A streamed program of the tests: how it is defined, and what it must give."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.passes.segmentation import ShouldMerge

Define = Callable[[mf.FusionDefinition, int, int], None]


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        name: of the function that defines it.
        define: `define(definition, ranks, rows)`.
        plain: the outputs from whole inputs, in plain torch.
        merge: which expressions become host units.
        is_exact: small integers stay exact through it.
        fixed: it is for 8 rows only.
    """

    name: str
    define: Define
    plain: Callable[..., Any]
    merge: ShouldMerge | None
    is_exact: bool
    fixed: bool

    def __str__(self) -> str:
        return self.name

    @property
    def family(self) -> str:
        """The module that defines it: "local", "sets" or "meshes"."""
        return self.define.__module__.rpartition("_")[2]

    def definition(self, n: int = 4, rows: int = 8) -> mf.FusionDefinition:
        """The program on n ranks."""
        with mf.FusionDefinition(self.name) as fd:
            self.define(fd, n, rows)
        return fd

    def compile(self, n: int = 4, rows: int = 8, options: mf.Options | None = None) -> mf.Program:
        """The program, lowered once."""
        return _compiled(self, n, rows, options)

    def inputs(self, program: mf.Program, seed: int = 0) -> list[Any]:
        """Small integers, so that sums are exact whatever their order."""
        generator = torch.Generator().manual_seed(seed)
        values = [program.fusion.values[name] for name in program.fusion.inputs]
        drawn = [torch.randint(-3, 4, v.shape, generator=generator).to(v.dtype) for v in values]
        return [x if v.is_tensor else x.item() for x, v in zip(drawn, values, strict=True)]

    def expected(self, inputs: list[Any]) -> list[Tensor]:
        """The whole outputs."""
        found = self.plain(*inputs)
        return [found] if isinstance(found, Tensor) else list(found)


@cache
def _compiled(case: Case, n: int, rows: int, options: mf.Options | None) -> mf.Program:
    return mf.compile(case.definition(n, rows), options, case.merge)


def text(program: object) -> str:
    """The text of a program without source lines, which move, and with long lines broken."""
    lines = []
    for row in re.sub(r" +# .*", "", str(program)).splitlines():
        indent = re.match(" *", row).group()  # type: ignore[union-attr]
        row = row.replace(", ", ",\0")  # no break within parentheses
        lines += textwrap.wrap(row, 92, subsequent_indent=indent + "    ", break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


#: name -> program; the modules `stream_cases_*` fill it.
CASES: dict[str, Case] = {}


def case(
    plain: Callable[..., Any],
    merge: ShouldMerge | None = None,
    is_exact: bool = True,
    fixed: bool = False,
) -> Callable[[Define], Define]:
    """Put a definition into the table."""

    def register(define: Define) -> Define:
        name = define.__name__
        CASES[name] = Case(name, define, plain, merge, is_exact, fixed)
        return define

    return register


def line(n: int) -> DeviceMesh:
    return DeviceMesh.arange(tp=n)


def grid(n: int) -> DeviceMesh:
    """n / 2 x 2."""
    return DeviceMesh.arange(dp=max(n // 2, 1), tp=2)


def halves(n: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Two meshes with no rank in common."""
    return DeviceMesh(range(n // 2), axes=("a",)), DeviceMesh(range(n // 2, n), axes=("b",))
