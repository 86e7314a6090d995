"""`grad` and `recompute`: gradients of values of a definition."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from mdfuse.errors import DefinitionError
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.recording import definition_of
from mdfuse.frontend.plain import brief


def grad(
    y: Handle, wrt: Handle | Sequence[Handle], seed: Handle | None = None
) -> tuple[Handle, ...]:
    """Append the gradients of a value to its definition.

    Gradients are ordinary values: their layouts are inferred, they can be differentiated again, and
    unread ones are dropped. The gradient of an input, or of a value with a law, has its layout.

    Args:
        y: a floating tensor; without dims, or with a seed.
        wrt: inputs or other values; one that y does not depend on has a gradient of zeros.
        seed: the cotangent of y, in its shape and dtype; by default one.

    Returns:
        A gradient for each value of wrt, in its shape and dtype.

    Raises:
        DefinitionError: y has dims, and there is no seed; a seed of another shape or dtype; a
            number, an integer tensor, a value of another definition; an op without a rule; a call
            inside of `recompute`.

    >>> import torch, mdfuse as mf
    >>> with mf.FusionDefinition() as fd:
    ...     x = fd.define_tensor([3])
    ...     (dx,) = mf.grad((x * x).sum(), [x])
    ...     fd.add_output(dx)
    >>> mf.debug.reference(fd, [torch.tensor([1.0, 2.0, 3.0])])
    [tensor([2., 4., 6.])]
    """
    every: Sequence[object] = wrt if isinstance(wrt, list | tuple) else (wrt,)
    for x in (y, *every, *(() if seed is None else (seed,))):
        if not isinstance(x, Handle):
            raise DefinitionError(
                f"grad with {brief(x)}",
                because="gradients are those of values of a definition",
                hint="what define_tensor or an operation returned",
            )
    return y.definition.grad(y, (wrt,) if isinstance(wrt, Handle) else tuple(wrt), seed)


class recompute:
    """A `with` block whose values the backward recomputes instead of keeping.

    Values read by the block are kept. A weight that is gathered inside the block is gathered once
    more for the backward.

    >>> import mdfuse as mf
    >>> mesh = mf.DeviceMesh.arange(dp=2)
    >>> with mf.FusionDefinition() as fd:
    ...     x = fd.define_tensor([4, 8], mesh=mesh, layout={"dp": mf.Shard(0)})
    ...     w = fd.define_tensor([8, 6], mesh=mesh, layout={"dp": mf.Shard(0)})
    ...     with mf.recompute():
    ...         whole = fd.ops.set(w).on(mesh, {})
    ...     dx, dw = mf.grad((x @ whole).tanh().sum(), [x, w])
    ...     fd.add_output(dx)
    ...     fd.add_output(dw)
    >>> [c.kind for c in mf.compile(fd).communications]
    ['Allgather', 'Allgather', 'ReduceScatter']
    """

    def __enter__(self) -> Self:
        self._definition: FusionDefinition = definition_of()
        self._definition.begin_recompute()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._definition.end_recompute()
