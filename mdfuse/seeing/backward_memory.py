"""Memory of a backward: forward values that it reads, values computed again, and their costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mdfuse.errors import RECOMPUTED, counted
from mdfuse.hir.program import Instruction
from mdfuse.ir.graph import Expr, Fusion
from mdfuse.ir.ops import TABLE
from mdfuse.passes.prices import received_bytes
from mdfuse.pipelines.stages import behind_gradients
from mdfuse.seeing.amounts import operations
from mdfuse.seeing.report.numbers import size_text


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardMemory:
    """The cost of a backward on a rank, in memory and in work done twice.

    Attributes:
        held: forward value that the backward reads -> its bytes; views count as their memory.
        again: value that is computed again -> its bytes.
        operations: floating-point operations of products and attention that are done again.
        all_operations: those of the whole program.
        received: bytes that arrive once more.
    """

    held: Mapping[str, int]
    again: Mapping[str, int]
    operations: int
    all_operations: int
    received: int


@dataclass(frozen=True, slots=True)
class LocalParts:
    """The parts of a fusion's values on a rank."""

    fusion: Fusion
    rank: int

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a value's part; empty for numbers, and where the rank has none."""
        value = self.fusion.values[name]
        if not value.is_tensor or self.rank not in self.fusion.layout(name).mesh:
            return ()
        return self.fusion.layout(name).local_shape(value.shape, self.rank)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a value's part, expanded dims counted as one element."""
        value = self.fusion.values[name]
        if not value.is_tensor or self.rank not in self.fusion.layout(name).mesh:
            return 0
        extents = enumerate(self.local_shape(name))
        return math.prod(n for d, n in extents if d not in value.expanded) * value.dtype.itemsize

    def operations(self, expr: Expr) -> int:
        """Return the floating-point operations of a product or an attention; 0 for other work."""
        if not self.nbytes(expr.outputs[0]):
            return 0
        attrs = tuple(expr.kwargs.items())
        i = Instruction(
            op=expr.op, fn=expr.op, inputs=expr.inputs, outputs=expr.outputs, attrs=attrs
        )
        return operations(self, i)

    def received(self, expr: Expr) -> int:
        """Return the bytes that a change of layout brings."""
        if expr.op != "set" or not self.nbytes(expr.outputs[0]):
            return 0
        (x,), layout = expr.reads, self.fusion.layout
        return round(received_bytes(self.fusion.values[x], layout(x), layout(expr.output)))


def memories(fusion: Fusion) -> dict[str, str]:
    """Return value -> the value whose memory it shows, for values that expressions compute."""
    memory: dict[str, str] = {}
    for expr in fusion.exprs:
        first = expr.reads[0] if expr.reads else None
        for name in expr.outputs:
            is_view = first is not None and TABLE[expr.op].is_view and not _moves(fusion, expr)
            memory[name] = memory.get(str(first), str(first)) if is_view else name
    return memory


def _moves(fusion: Fusion, expr: Expr) -> bool:
    is_set = expr.op == "set" and fusion.values[expr.output].is_tensor
    return is_set and fusion.layout(expr.reads[0]) != fusion.layout(expr.output)


def backward_memory(fusion: Fusion, rank: int) -> BackwardMemory:
    """Return what a rank keeps of the forward, and computes again.

    Args:
        fusion: with layouts; lines of the backward are noted.
        rank: whose parts count.
    """
    parts, memory, behind = LocalParts(fusion, rank), memories(fusion), behind_gradients(fusion)
    computed = (e for e in fusion.exprs if not TABLE[e.op].is_creation)  # numbers cost nothing
    forward = {x for e in computed for x in e.outputs} - behind
    notes = [(e, e.source.note) for e in fusion.exprs if e.source is not None and e.source.note]
    read = dict.fromkeys(memory[x] for e, _ in notes for x in e.reads if x in forward)
    repeated = [e for e, note in notes if note == RECOMPUTED]
    again = (x for e in repeated for x in e.outputs if memory[x] == x)
    return BackwardMemory(
        held={x: n for x in read if x in forward and (n := parts.nbytes(x))},
        again={x: n for x in again if (n := parts.nbytes(x))},
        operations=sum(map(parts.operations, repeated)),
        all_operations=sum(map(parts.operations, fusion.exprs)),
        received=sum(map(parts.received, repeated)),
    )


def backward_lines(fusion: Fusion) -> Iterator[str]:
    """Yield a line on the memory of a backward, on the rank that keeps most; none without one."""
    if not behind_gradients(fusion):
        return
    meshes = {fusion.layout(x).mesh for x, value in fusion.values.items() if value.is_tensor}
    ranks = {mesh.ranks[0] for mesh in meshes}
    most = max(
        (backward_memory(fusion, r) for r in sorted(ranks)), key=lambda x: sum(x.held.values())
    )
    yield (
        f"backward: of the forward {counted(len(most.held), 'value')}, "
        f"{size_text(sum(most.held.values()))} on a rank, are kept"
    )
    if most.again:
        share = 100 * most.operations / max(most.all_operations, 1)
        yield (
            f"  {counted(len(most.again), 'value')}, {size_text(sum(most.again.values()))}, are "
            f"computed again: {most.operations / 1e9:.3g} GFLOP, {share:.0f} % of all products"
            + (f", and {size_text(most.received)} received once more" if most.received else "")
        )
