"""A rank's parts of what a step takes: of a batch, and of parameters with their states."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mdfuse.errors import ProgramError
from mdfuse.frontend.importing import load as loading
from mdfuse.ir.graph import Fusion
from mdfuse.layouts.boxes import boxes_of, within
from mdfuse.layouts.sharding import shard_tensor


def part_of_batch(fusion: Fusion, name: str, x: Any, rank: int) -> Any:
    """Return a rank's part of an input, of which the whole or the part is given."""
    if not fusion.values[name].is_tensor:
        return x
    layout, value = fusion.layout(name), fusion.values[name]
    shape = (*x.shape,) if isinstance(x, Tensor) else None
    is_here = rank in layout.mesh.ranks
    if shape == value.shape:
        return shard_tensor(x, layout, rank=rank) if is_here else None
    part = layout.local_shape(value.shape, rank) if is_here else None
    if shape == part:
        return x
    raise ProgramError(
        f"shard of @{fusion.name}: {name} is {type(x).__name__} {[*(shape or ())]}",
        because=f"the whole has {[*value.shape]}, and the part of rank {rank} "
        + (f"{[*part]}" if part is not None else "is none"),
        hint=f"cut, or fill up, the batch to {[*value.shape]}",
    )


def part_of_state(fusion: Fusion, name: str, of: str, x: Tensor, rank: int | None) -> Tensor:
    """Return the part of a parameter that a state of it is a part of.

    Args:
        fusion: with the layouts of both.
        name: of the state.
        of: the parameter.
        x: it, as a whole or a rank's part.
        rank: which; None: x is the whole.

    Raises:
        ProgramError: x is a part, and no rank is said.
    """
    layout, held, shape = fusion.layout(name), fusion.layout(of), fusion.values[of].shape
    if layout == held:
        return x
    if rank is None and tuple(x.shape) == tuple(shape):
        return x
    if rank is None:
        raise ProgramError(
            f"state of @{fusion.name}: {of} of the shape {list(x.shape)}, a part of {list(shape)}",
            because=f"{name} lies as {layout}, and the parameter as {held}",
            hint="step.state(weights, rank=comm.rank)",
        )
    rows = held.rows(shape, rank)
    boxes = tuple(boxes_of(layout.rows(shape, rank)))
    return loading.joined(boxes, lambda box: loading.part_of(x, within(box, rows)))
