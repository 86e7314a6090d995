"""Products beside a communication: their shapes, as programs of mdfuse, and their right values."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from _measure import Row
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, Stream


@dataclass(frozen=True)
class Shape:
    """An all-gather and the product that reads it, or a product and its reduce-scatter.

    What is gathered is computed first (scaled), as in a model: it is nobody's input.

    Attributes:
        kind: which of both.
        rows: of all ranks.
        inner: of the product on a rank, which it sums over.
        columns: of the product on a rank.
    """

    kind: Literal["AG+MM", "MM+RS"]
    rows: int
    inner: int
    columns: int

    def __str__(self) -> str:
        return f"{self.kind} {self.rows} x {self.inner} x {self.columns}"

    @property
    def limit(self) -> float:
        """Time on one GPU, as a multiple of the longer one of product and copies."""
        return 1 / 0.95 if self.rows >= 8192 else 1 / 0.90

    def moved(self, ranks: int, itemsize: int) -> int:
        """Return the bytes that a rank receives, and sends."""
        width = self.inner if self.kind == "AG+MM" else self.columns
        return (ranks - 1) * self.rows // ranks * width * itemsize

    def parts(self, ranks: int, device: torch.device, dtype: torch.dtype) -> list[Parts]:
        """Return the parts of some ranks, drawn alike on every machine."""
        draw = torch.Generator(device).manual_seed(self.rows + self.columns)
        rows = self.rows // ranks if self.kind == "AG+MM" else self.rows

        def drawn(*shape: int) -> Tensor:
            numbers = torch.randn(shape, generator=draw, device=device, dtype=torch.float32)
            return (numbers * self.inner**-0.25).to(dtype)

        return [
            Parts(drawn(rows, self.inner), drawn(self.inner, self.columns)) for _ in range(ranks)
        ]

    def ready(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the first step of a rank on its part."""
        return torch.mul(x, 0.5, out=out) if self.kind == "AG+MM" else x

    def incoming(self, parts: list[Parts]) -> dict[int, Tensor]:
        """Rank -> what rank 0 gets from it."""
        if self.kind == "AG+MM":
            return {r: self.ready(p.x) for r, p in enumerate(parts) if r}
        mine = self.rows // len(parts)
        return {r: p.x[:mine] @ p.w for r, p in enumerate(parts) if r}

    def right(self, parts: list[Parts], rank: int = 0) -> Tensor:
        """Return the expected result of a rank, in float64: every 97th row."""
        if self.kind == "AG+MM":
            whole = torch.cat([self.ready(p.x) for p in parts])[::97]
            return whole.double() @ parts[rank].w.double()
        rows = self.rows // len(parts)
        mine = slice(rank * rows, (rank + 1) * rows, 97)
        return sum(
            (p.x[mine].double() @ p.w.double() for p in parts), torch.zeros(()).to(parts[0].x)
        )


@dataclass(frozen=True)
class Parts:
    """The parts of a rank: of the left operand, and of the right."""

    x: Tensor
    w: Tensor


#: Measured on two H200s, and what is sought of one GPU.
SHAPES = (
    Shape("AG+MM", 8192, 8192, 7168),
    Shape("AG+MM", 8192, 8192, 1280),
    Shape("AG+MM", 4096, 8192, 3584),
    Shape("AG+MM", 16384, 8192, 14336),
    Shape("MM+RS", 8192, 7168, 8192),
    Shape("MM+RS", 8192, 1280, 8192),
    Shape("MM+RS", 4096, 3584, 8192),
    Shape("MM+RS", 16384, 14336, 8192),
)

#: Only to see that it runs.
SMALL = (Shape("AG+MM", 64, 16, 24), Shape("MM+RS", 64, 16, 24))


#: Sixteenths of a shard that begin and end small: copies start early, and little follows the last.
UNEVEN = (2, 5, 5, 3, 1)

#: mdfuse's program -> in how many pieces each rank's shard goes, or their lengths in sixteenths of
#: it; 0: as a whole.
FORMS: dict[str, int | tuple[int, ...]] = {
    "one after the other": 0,
    "one piece": 1,
    "two pieces": 2,
    "four pieces": 4,
    "eight pieces": 8,
    "uneven pieces": UNEVEN,
}

#: dtype -> the largest error, relative to the norm of the result.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


def compare(what: str, got: Tensor, right: Tensor) -> None:
    """Raise AssertionError where a result is wrong; `right` has every 97th row."""
    rows = got[::97].double()
    error = float(torch.linalg.vector_norm(rows - right) / torch.linalg.vector_norm(right))
    if not error < _TOLERANCE[got.dtype]:
        raise AssertionError(f"{what}: a relative error of {error:.2g}")


def figures(
    shape: Shape, times: Mapping[str, Sequence[float]], moved: str, has_limit: bool
) -> Iterator[Row]:
    """The quickest of mdfuse's forms against the ideal, and against all else.

    Args:
        shape: what was computed.
        times: nanoseconds of each contender in each round.
        moved: the contender that only communicates, beside `product`.
        has_limit: whether the ideal sets a limit.
    """
    pieces = [name for name, n in FORMS.items() if n and name in times]
    best = min(pieces, key=lambda name: statistics.median(times[name]))
    ideal = [max(pair) for pair in zip(times["product"], times[moved], strict=True)]
    for name, others in {"ideal": ideal, **times}.items():
        if name != best:
            yield Row(
                name=f"{shape}: time",
                sizes=best,
                unit="us",
                ours=times[best],
                against=others,
                alternative=name,
                limit=shape.limit if has_limit and name == "ideal" else None,
            )


def definition(
    shape: Shape, mesh: DeviceMesh, dtype: torch.dtype, pieces: int | tuple[int, ...], name: str
) -> mf.FusionDefinition:
    """A program: one after the other, or in so many pieces for each rank, in a ring.

    Pieces may have lengths, in sixteenths of a shard.
    """
    n = mesh.axis_size("tp")
    if isinstance(pieces, tuple):
        pieces = tuple(k * shape.rows // (16 * n) for k in pieces)
    stream = Stream(0, pieces * n, rotate="tp") if pieces else None
    with mf.FusionDefinition(name.replace(", ", "_").replace(" ", "_")) as fd:
        if shape.kind == "AG+MM":
            x = _tensor(fd, shape.rows, shape.inner, mesh, 0, dtype)
            w = _tensor(fd, shape.inner, shape.columns * n, mesh, 1, dtype)
            x = x * 0.5
            x = fd.ops.set(x).on(mesh, {}, stream=stream)
            fd.add_output((x @ w).on(mesh, {"tp": Shard(1)}, stream=stream))
        else:
            x = _tensor(fd, shape.rows, shape.inner * n, mesh, 1, dtype)
            w = _tensor(fd, shape.inner * n, shape.columns, mesh, 0, dtype)
            fd.add_output((x @ w).on(mesh, {"tp": Shard(0)}, stream=stream))
    return fd


def run_of(program: mf.Program, mine: Parts) -> Callable[[], Tensor]:
    """A run of a program on a rank's parts."""
    run = program.run
    return lambda: run(mine.x, mine.w)[0]


def _tensor(
    fd: mf.FusionDefinition, rows: int, columns: int, mesh: DeviceMesh, dim: int, dtype: torch.dtype
) -> Any:
    return fd.define_tensor([rows, columns], dtype, mesh, {"tp": Shard(dim)})
