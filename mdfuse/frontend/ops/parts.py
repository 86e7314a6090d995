"""Parts of tensors, and tensors made of parts: splitting, joining."""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from mdfuse.errors import DefinitionError, counted
from mdfuse.extents.extent import is_symbolic
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import indexing
from mdfuse.frontend.ops.recording import Integers, own_place, place, record


def slice(
    x: Handle,
    start_indices: Sequence[int],
    end_indices: Sequence[int],
    strides: Sequence[int] | None = None,
) -> Handle:
    """The window from start to end (exclusive) with steps, one entry per dim."""
    steps = tuple(strides) if strides is not None else (1,) * x.ndim
    if not len(start_indices) == len(end_indices) == len(steps) == x.ndim:
        raise DefinitionError(
            f"slice(%{x.name}, {list(start_indices)}, {list(end_indices)}, {list(steps)})",
            because=f"%{x.name} has {counted(x.ndim, 'dim')}, each with one start, end and step",
            hint="or index it: x[2:5, ...]",
        )
    return indexing.index(x, tuple(map(builtins.slice, start_indices, end_indices, steps)))


def select(x: Handle, dim: int, index: int) -> Handle:
    """`x[..., index, ...]`: one place of a dim, which goes."""
    return indexing.along(x, dim, index)


def narrow(x: Handle, dim: int, start: int, length: int) -> Handle:
    """`length` places of a dim from `start` on."""
    extent = x.shape[own_place(x, dim)]
    if start < 0:
        start = start + extent
    if start < 0 or length < 0 or start + length > extent:
        raise DefinitionError(
            f"narrow(%{x.name}, {dim}, {start}, {length}) of {x.value.type_text()}",
            because=f"dim {dim} goes from 0 to {extent}",
            hint="a slice, x[start:end], may reach beyond the end",
        )
    return indexing.along(x, dim, builtins.slice(start, start + length))


# -- splitting -----------------------------------------------------------------------------------


def split(x: Handle, split_size: Integers, dim: int = 0) -> tuple[Handle, ...]:
    """Parts of a dim: of one size each (the last may be smaller), or of the sizes in a list."""
    extent = x.shape[own_place(x, dim)]
    if isinstance(split_size, Sequence):
        lengths = tuple(split_size)
    else:
        lengths = _equal_parts(x, split_size, extent)
    ends = [builtins.sum(lengths[: i + 1]) for i in range(len(lengths))]
    if not lengths or builtins.min(lengths) < 0 or ends[-1] != extent:
        raise DefinitionError(
            f"split(%{x.name}, {split_size}, dim={dim}) of {x.value.type_text()}",
            because=f"the parts make up dim {dim}, which is {extent} long",
            hint="one size for all parts, or sizes whose sum is the extent",
        )
    spans = zip([0, *ends[:-1]], ends, strict=True)
    return tuple(indexing.along(x, dim, builtins.slice(start, end)) for start, end in spans)


def _equal_parts(x: Handle, size: int, extent: int) -> tuple[int, ...]:
    if size < 1:
        raise DefinitionError(
            f"parts of %{x.name} of size {size}",
            because="a part has at least one element",
            hint="a positive size, or a list of sizes",
        )
    whole, remainder = divmod(extent, size)
    _check_parts(x, whole)
    parts = (size,) * whole  # a symbolic number of parts is fixed from here on
    return (*parts, remainder) if remainder or not parts else parts


def chunk(x: Handle, chunks: int, dim: int = 0) -> tuple[Handle, ...]:
    """At most `chunks` parts of a dim, all but the last of one size."""
    extent = x.shape[own_place(x, dim)]
    if chunks < 1:
        raise DefinitionError(
            f"{chunks} chunks of %{x.name}",
            because="there is at least one",
            hint="a positive number",
        )
    if chunks <= extent and extent % chunks == 0:
        _check_parts(x, chunks)
        return split(x, (extent // chunks,) * chunks, dim)
    return split(x, -(-extent // chunks), dim)


def unbind(x: Handle, dim: int = 0) -> tuple[Handle, ...]:
    """Each place of a dim."""
    extent = x.shape[own_place(x, dim)]
    _check_parts(x, extent)
    return tuple(select(x, dim, i) for i in range(extent))


def _check_parts(x: Handle, count: int) -> None:
    """Check the number of parts, because each is an expression of the program."""
    if count > _MOST_PARTS:
        raise DefinitionError(
            f"{count} parts of %{x.name}: {x.value.type_text()}",
            because=f"each is an expression of the program, {_MOST_PARTS} at most",
            hint="larger parts",
        )


_MOST_PARTS = 1 << 14


# -- joining -------------------------------------------------------------------------------------


def cat(tensors: Sequence[Handle], dim: int = 0) -> Handle:
    """Tensors joined along a dim."""
    tensors = tuple(tensors)
    if not tensors:
        raise DefinitionError("cat of no tensors", hint="pass at least one")
    own_place(tensors[0], dim)  # packed rows have fewer dims than they stand for
    return record("cat", *tensors, dim=dim)


def stack(tensors: Sequence[Handle], dim: int = 0) -> Handle:
    """Tensors of one shape joined along a new dim."""
    tensors = tuple(tensors)
    if not tensors:
        raise DefinitionError("stack of no tensors", hint="pass at least one")
    shapes = {x.shape for x in tensors if not is_symbolic(x.shape)}
    if len(shapes) > 1:
        raise DefinitionError(
            "stack of " + ", ".join(f"%{x.name}: {x.value.type_text()}" for x in tensors),
            because="their shapes differ",
            hint="cat joins along a dim that they have",
        )
    at = place(tensors[0], dim, new=1)
    return cat([record("unsqueeze", x, dims=(at,)) for x in tensors], at)
