"""Views: permutations, reshapes, broadcasts, memory orders."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence

from mdfuse.errors import DefinitionError, counted
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.recording import (
    Dims,
    Flags,
    Integers,
    checked,
    out_of_range,
    own_place,
    place,
    record,
    sequence,
    shown,
)
from mdfuse.frontend.stride_order import dims_of, no_permutation


def set(x: Handle) -> Handle:
    """The value itself, to be placed elsewhere: `set(x).on(mesh, {...})` is a reshard."""
    return record("set", x)


def detach(x: Handle) -> Handle:
    """The value itself, through which no gradient goes back."""
    return record("detach", x)


# -- the order of dims ---------------------------------------------------------------------------


def permute(x: Handle, dims: Integers, *further: int) -> Handle:
    """Dims in another order: result dim i is dim `dims[i]` of x."""
    return record("permute", x, dims=sequence(dims, further))


def transpose(x: Handle, dim0: int = -2, dim1: int = -1) -> Handle:
    """Two dims swapped."""
    dims = list(range(x.ndim))
    try:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    except IndexError:
        raise out_of_range(x, (dim0, dim1)) from None
    return record("permute", x, dims=tuple(dims))


def t(x: Handle) -> Handle:
    """A matrix transposed; a vector or a scalar as it is."""
    if x.ndim > 2:
        raise DefinitionError(
            f"t(%{x.name}) of {x.value.type_text()}",
            because="it has more than two dims",
            hint="say which to swap: transpose(x, dim0, dim1), or x.mT for the last two",
        )
    return permute(x, tuple(reversed(range(x.ndim))))


def movedim(x: Handle, source: Integers, destination: Integers) -> Handle:
    """Dims moved to other places, the rest in their order."""
    before = [place(x, d) for d in sequence(source, ())]
    after = [place(x, d) for d in sequence(destination, ())]
    if not len(builtins.set(before)) == len(builtins.set(after)) == len(before) == len(after):
        raise DefinitionError(
            f"movedim(%{x.name}, {source}, {destination})",
            because="each dim that moves has one place to go to",
            hint="as many different places as dims",
        )
    unmoved = iter(d for d in range(x.ndim) if d not in before)
    moved = dict(zip(after, before, strict=True))
    return permute(x, [moved[d] if d in moved else next(unmoved) for d in range(x.ndim)])


# -- shapes --------------------------------------------------------------------------------------


def reshape(x: Handle, shape: Integers, *further: int) -> Handle:
    """The same elements in row-major order in another shape; one extent may be -1."""
    new = sequence(shape, further)
    if new.count(-1) == 1:
        known = -math.prod(new)
        missing = math.prod(x.shape) // known if known else 0
        new = tuple(missing if n == -1 else n for n in new)
    return record("reshape", x, shape=new)


def reshape_as(x: Handle, other: Handle) -> Handle:
    """The same elements in the shape of another value."""
    return reshape(x, other.shape)


def flatten(x: Handle, start_dim: int = 0, end_dim: int = -1) -> Handle:
    """Dims from start to end (inclusive) as one."""
    first, last = place(x, start_dim), place(x, end_dim)
    merged = math.prod(x.shape[first : last + 1])
    return reshape(x, (*x.shape[:first], merged, *x.shape[last + 1 :]))


def unflatten(x: Handle, dim: int, sizes: Sequence[int]) -> Handle:
    """One dim as several; one of their extents may be -1."""
    at = own_place(x, dim)
    return reshape(x, (*x.shape[:at], *_completed(sizes, x.shape[at]), *x.shape[at + 1 :]))


def _completed(sizes: Sequence[int], extent: int) -> tuple[int, ...]:
    """Return extents with -1 replaced, so that their product is `extent`."""
    if sizes.count(-1) != 1:
        return tuple(sizes)
    known = -math.prod(sizes)
    return tuple((extent // known if known else 0) if n == -1 else n for n in sizes)


def unsqueeze(x: Handle, dim: int) -> Handle:
    """A new dim of extent 1."""
    return record("unsqueeze", x, dims=(place(x, dim, new=1),))


def squeeze(x: Handle, dim: Dims = None, *, dims: Integers | None = None) -> Handle:
    """Without the given dims (all by default) where their extent is 1."""
    gone = checked(x, dim, dims)
    return record("squeeze", x, dims=tuple(range(x.ndim)) if gone is None else gone)


# -- repeated elements ---------------------------------------------------------------------------


def expand(x: Handle, shape: Integers, *further: int) -> Handle:
    """Dims of extent 1 repeated without copies; -1 keeps an extent; new dims come in front."""
    new = sequence(shape, further)
    skip = len(new) - x.ndim
    extents = tuple(x.shape[d - skip] if n == -1 and d >= skip else n for d, n in enumerate(new))
    if any(type(n) is int and n < 0 for n in extents):
        raise DefinitionError(
            f"expand(%{x.name}, {list(new)}) of {x.value.type_text()}",
            because="-1 keeps an extent, and a new dim has none to keep",
            hint="say how long each new dim is",
        )
    return record("expand", x, shape=extents)


def expand_as(x: Handle, other: Handle) -> Handle:
    """Expanded to the shape of another value."""
    return expand(x, other.shape)


def broadcast(x: Handle, dims: Flags) -> Handle:
    """With a list of bools: a new dim of extent 1 where True. With a shape: `expand`."""
    if builtins.all(isinstance(d, bool) for d in dims):
        if builtins.sum(not d for d in dims) != x.ndim:
            raise DefinitionError(
                f"broadcast(%{x.name}, {list(dims)}) for {x.value.type_text()}",
                because="a new dim stands where True is, the dims of the value where False is",
                hint=f"pass {x.ndim} times False",
            )
        new = tuple(i for i, is_new in enumerate(dims) if is_new)
        return record("unsqueeze", x, dims=new) if new else set(x)
    return expand(x, dims)


def broadcast_in_dim(x: Handle, shape: Sequence[int], broadcast_dims: Sequence[int]) -> Handle:
    """Dim i of x becomes dim `broadcast_dims[i]` of the result; the others are repeated."""
    new = [d not in builtins.set(broadcast_dims) for d in range(len(shape))]
    return expand(broadcast(x, new), shape)


def repeat(x: Handle, repeats: Integers, *further: int) -> Handle:
    """The whole repeated along each dim; more numbers than dims add dims in front."""
    times = sequence(repeats, further)
    if len(times) < x.ndim:
        raise DefinitionError(
            f"repeat(%{x.name}, {times}) of {x.value.type_text()}",
            because=f"it has {counted(x.ndim, 'dim')}, each with one number",
            hint="1 for a dim that stays",
        )
    shape = (1,) * (len(times) - x.ndim) + x.shape
    apart = reshape(x, [n for extent in shape for n in (1, extent)])
    many = expand(apart, [n for pair in zip(times, shape, strict=True) for n in pair])
    return reshape(many, [n * extent for n, extent in zip(times, shape, strict=True)])


def repeat_interleave(x: Handle, repeats: int, dim: int | None = None) -> Handle:
    """Each element along a dim repeated in place; without a dim, of x flattened."""
    if not isinstance(repeats, int):
        raise DefinitionError(
            f"repeat_interleave(%{x.name}, {repeats!r})",
            because="the shape of the result is known when the fusion is defined",
            hint="one integer for all elements",
        )
    if dim is None:
        return repeat_interleave(flatten(x), repeats, 0)
    at, shape = own_place(x, dim), list(x.shape)
    many = expand(unsqueeze(x, at + 1), [*shape[: at + 1], repeats, *shape[at + 1 :]])
    return reshape(many, [*shape[:at], shape[at] * repeats, *shape[at + 1 :]])


# -- memory order --------------------------------------------------------------------------------


def stride_order(x: Handle, order: Integers) -> Handle:
    """The value in a memory order that is kept: `order[d]` is the place of dim d, 0 the fastest.

    Args:
        x: a tensor.
        order: the place of each dim in memory, 0 the fastest.

    Raises:
        DefinitionError: x is a scalar; the order is no permutation of its dims.

    >>> import torch, mdfuse as mf
    >>> with mf.FusionDefinition() as fd:
    ...     x = fd.define_tensor([4, 6])
    ...     y = fd.ops.stride_order(x, (0, 1))  # column-major
    ...     fd.add_output(y)
    >>> mf.debug.reference(fd, [torch.ones(4, 6)])[0].stride()
    (1, 4)
    """
    if not x.is_tensor:
        raise DefinitionError(
            f"stride_order={order!r} of %{x.name}, which is a scalar",
            where=x.definition.fusion_where(),
            because="a number has no dims",
            hint="require the order of a tensor",
        )
    dims = dims_of(order, x.ndim)
    if dims is None:
        raise no_permutation(order, x.ndim, shown(x), x.definition.fusion_where())
    return record("stride_order", x, order=dims)


def contiguous(x: Handle) -> Handle:
    """The value with its last dim the fastest in memory."""
    return stride_order(x, tuple(reversed(range(x.ndim))))
