"""The memory orders in which the buffers of a host program lie, as its instructions tell.

An instruction states an order, or leaves its result as it comes: a new buffer row by row, a view as
the elements lie that it looks at, anything else as torch likes.

    %y.recv: f32[8,2] (x=R) = alloc                lies as [0,1]
    %y: f32[2,8] (x=R) = permute(%y.recv, …)       lies as [1,0]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdfuse.hir.program import HostProgram, Instruction

#: The dims from outermost to innermost in memory.
Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """The memory order of a buffer, alike on all ranks.

    Attributes:
        stated: by the instruction that makes it; None: it leaves it as it comes.
        lies: how it lies then; None where the program does not tell.
    """

    stated: Dims | None = None
    lies: Dims | None = None


def orders_of(program: HostProgram, has_dense_inputs: bool = False) -> dict[str, Order]:
    """Return name with a buffer of its own -> its order; `program.orders` keeps this.

    Args:
        program: the host program.
        has_dense_inputs: whether to take it that inputs lie row by row, as they mostly do.
    """
    orders: dict[str, Order] = {}
    if has_dense_inputs:
        shapes = ((name, program.types[name].local_shape()) for name in program.inputs)
        orders = {name: Order(lies=tuple(range(len(shape)))) for name, shape in shapes}
    settled: set[str] = set()
    for i in program.walk():
        if i.op == "free":
            settled.difference_update(map(program.root, i.reads))
        for name in map(program.root, i.outputs if i.op != "launch" else ()):
            if name in settled or name not in program.types:
                continue  # later writes go into the same buffer
            orders[name] = Order(i.order, _lies(program, i, name, orders))
            settled.update((name,) if i.op == "alloc" or i.order is not None else ())
    return orders


def _lies(program: HostProgram, i: Instruction, name: str, orders: dict[str, Order]) -> Dims | None:
    if i.order is not None:
        return i.order
    if i.op == "alloc":
        return tuple(range(len(program.types[name].local_shape())))
    of = orders.get(program.root(i.reads[0])) if i.op in ("permute", "narrow") else None
    return None if of is None or of.lies is None else seen_through(i, of.lies)


def seen_through(view: Instruction, order: Dims) -> Dims:
    """Return the order of a permutation, or a part, of a buffer that lies in an order."""
    dims = [d % len(order) for d in view.kwargs.get("dims", range(len(order)))]
    return tuple(map(dims.index, order))
