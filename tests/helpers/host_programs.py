"""What the tests of hand-written host programs share: cases, and running small programs.

Each case says what every rank passes and what it must get, computed by plain torch. All numbers are
small integers, so that results are equal to the last bit whatever the order of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mdfuse as mf
from helpers.programs import program_text
from mdfuse import hir
from mdfuse.simulation.simulate import Simulated

Row = dict[str, Any]

#: The runtime by itself: each rank checks that its own program can run, and no more.
POISON = mf.Options(poison=True, verify=False)


@dataclass(frozen=True)
class Case:
    """A program.

    Attributes:
        name: of the program.
        text: the program, for all ranks.
        inputs: rank -> what it passes.
        expected: rank -> what it gets.
        ranks: how many ranks there are.
    """

    name: str
    text: str
    inputs: Callable[[int], Row]
    expected: Callable[[int], list[Any]]
    ranks: int

    def __str__(self) -> str:
        return self.name

    def program(self) -> hir.HostProgram:
        return hir.parse(self.text)


def register(cases: list[Case], ranks: int, inputs: Callable[[int], Row]) -> Any:
    """Add the program of a file to a list; the function under it gives what a rank must get."""

    def add(expected: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
        name = expected.__name__
        text = program_text(f"host_cases/{name}")
        cases.append(Case(name, text, inputs, expected, ranks))
        return expected

    return add


def numbers(*shape: int, start: int = 0) -> Tensor:
    """0, 1, 2, … in a shape, as f32."""
    n = torch.Size(shape).numel()
    return torch.arange(start, start + n, dtype=torch.float32).reshape(shape)


def mine(rank: int, *shape: int) -> Tensor:
    """What a rank passes: other numbers than every other rank."""
    return numbers(*shape, start=100 * rank)


def each(**shapes: tuple[int, ...]) -> Callable[[int], Row]:
    """Every rank passes other numbers; the inputs of one rank differ too."""

    def row(rank: int) -> Row:
        return {
            name: numbers(*shape, start=100 * rank + 7 * at)
            for at, (name, shape) in enumerate(shapes.items())
        }

    return row


# -- running small programs ----------------------------------------------------------------------


def parse(body: str, mesh: str = "mesh(x=1)") -> hir.HostProgram:
    """A program on a mesh, one rank by default."""
    return hir.parse(f"host @small on {mesh} {{{body}}}")


def simulate(program: Any, *rows: Row, **more: Any) -> Simulated:
    """Run a program, or its text on one rank; one row of arguments per rank."""
    program = parse(program) if isinstance(program, str) else program
    return mf.simulate(program, per_rank=rows, options=POISON, **more)


def alone(body: str, schedule: int | None = None, **arguments: Any) -> list[Any]:
    """The outputs of a program of one rank."""
    return simulate(body, arguments, schedule=schedule).per_rank[0]
