"""Gradients of convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import is_symbolic
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import moves, views
from mdfuse.frontend.ops.recording import record, shown
from mdfuse.frontend.vjps.table import RULES, Applied, by_operand, rule


def _settings(e: Applied) -> dict[str, Any]:
    return {k: e.attrs[k] for k in ("stride", "padding", "dilation", "groups") if k in e.attrs}


def _spread(ct: Handle, weight: Handle, shape: Sequence[int], how: dict[str, Any]) -> Handle:
    """Spread the cotangent of a convolution over the places that it read."""
    settings = zip(how["stride"], how["padding"], how["dilation"], strict=True)
    dims = zip(shape[2:], weight.shape[2:], settings, strict=True)
    extra_rows = [0 if s == 1 else (n + 2 * p - (k - 1) * d - 1) % s for n, k, (s, p, d) in dims]
    return record("convolution", ct, weight, transposed=True, more=tuple(extra_rows), **how)


def _behind(e: Applied) -> list[int]:
    """Return the number of extra rows of a convolution of a transposed one's result."""
    strides = e.attrs["stride"]
    extra_rows = e.attrs.get("more") or (0,) * len(strides)
    return [m // s for m, s in zip(extra_rows, strides, strict=True)]


def _to_transposed(e: Applied, ct: Handle, how: dict[str, Any]) -> Sequence[Handle | None]:
    dx, x, behind = None, None, _behind(e)
    if e.wants(0):
        dx = record("convolution", ct, e[1], **how)
        if any(behind):
            n = dx.ndim
            dx = record("slice", dx, starts=(0,) * n, ends=e.shape(0), steps=(1,) * n)
    if e.wants(1):
        x = moves.pad(e[0], [m for k in reversed(behind) for m in (0, k)]) if any(behind) else e[0]
    dw = None if x is None else record("convolution_weight", x, ct, shape=e.shape(1), **how)
    return dx, dw


@rule("convolution")
def _convolution(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    how = _settings(e)
    if e.attrs.get("transposed"):
        return _to_transposed(e, ct, how)
    return (
        _spread(ct, e[1], e.shape(0), how) if e.wants(0) else None,
        record("convolution_weight", ct, e[0], shape=e.shape(1), **how) if e.wants(1) else None,
    )


# The op is linear in both operands, with the cotangent in place of the weight.
RULES["convolution_weight"] = by_operand(
    lambda e, ct: record("convolution", e[1], ct, **_settings(e)),
    lambda e, ct: _spread(e[0], ct, e.shape(1), _settings(e)),
)


def _check_windows(e: Applied) -> None:
    """Raise DefinitionError for a window without elements, which has no place for its cotangent."""
    n = len(e.attrs["kernel"])
    how = (e.attrs[k] for k in ("kernel", "stride", "padding", "dilation"))
    dims = zip(e.shape(0)[-n:], e.results[0].shape[-n:], *how, strict=True)
    for d, (extent, count, kernel, stride, padding, dilation) in enumerate(dims, -n):
        if dilation == 1 or is_symbolic((extent, count)):
            continue  # a padding is half a window at most
        for i in range(count):
            first = i * stride - padding
            if not any(0 <= first + j * dilation < extent for j in range(kernel)):
                raise DefinitionError(
                    f"the gradient of max_pool{n}d of {shown(e[0])}",
                    because=f"window {i} along dim {d} lies in the padding: it has no element that "
                    "is the largest",
                    hint="another padding or dilation",
                )


@rule("max_pool")
def _max_pool(e: Applied, cts: Sequence[Any]) -> Sequence[Handle | None]:
    """Scatter the cotangent to the place of the largest element."""
    _check_windows(e)
    return (record("max_pool_grad", e.results[1], cts[0], shape=e.shape(0), **e.attrs),)


@rule("max_pool_grad")
def _max_pool_grad(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """Gather the cotangent from there."""
    free = e.shape(1)[: -len(e.attrs["kernel"])]
    flat, places = (views.reshape(x, (*free, -1)) for x in (ct, e[0]))
    gathered = record("gather", places, flat, along=len(free))
    return None, views.reshape(gathered, e.shape(1))


@rule("mean_pool")
def _mean_pool(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    extents = e.shape(0)[-len(e.attrs["kernel"]) :]
    is_back = not e.attrs.get("transposed", False)
    return (record("mean_pool", ct, **{**e.attrs, "made": extents, "transposed": is_back}),)
