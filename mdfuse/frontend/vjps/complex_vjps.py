"""Gradients of complex numbers z = a + ib, as torch has them: dL/da + i dL/db of a real loss."""

from __future__ import annotations

from collections.abc import Sequence

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.recording import record
from mdfuse.frontend.vjps.table import RULES, Applied, cos, eq, rule, sin, where

#: Ops whose rule holds for complex numbers: moves, sums, and ops with their own complex rule.
COMPLEX = frozenset(
    ("set", "stride_order", "permute", "reshape", "unsqueeze", "squeeze", "expand", "slice",
     "slice_grad", "cat", "flip", "index_select", "add", "sub", "neg", "mul", "div", "lerp",
     "addcmul", "addcdiv", "sum", "mean", "abs", "where", "conj", "real", "imag", "angle", "sgn",
     "complex", "polar", "view_as_complex", "view_as_real", "index_copy", "index_put", "scatter",
     "slice_scatter"),
)  # fmt: skip


def _pair(a: Handle, b: Handle) -> Handle:
    pair: Handle = record("complex", a, b)
    return pair


def _real(z: Handle) -> Handle:
    return record("real", z) if z.dtype.is_complex else z


def _imag(z: Handle) -> Handle:
    return record("imag", z) if z.dtype.is_complex else z * 0.0


RULES.update(
    {
        "conj": lambda e, ct: (record("conj", ct),),
        "real": lambda e, ct: (_pair(ct, ct * 0.0),),
        "imag": lambda e, ct: (_pair(ct * 0.0, ct),),
        "complex": lambda e, ct: (_real(ct), _imag(ct)),
        "view_as_complex": lambda e, ct: (record("view_as_real", ct),),
        "view_as_real": lambda e, ct: (record("view_as_complex", ct),),
    }
)


@rule("polar")
def _polar(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """r (cos t + i sin t)."""
    size, turn = e[0], e[1]
    a, b, c, s = _real(ct), _imag(ct), cos(turn), sin(turn)
    return a * c + b * s, size * (b * c - a * s)


@rule("angle")
def _angle(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """atan2(b, a), with slope 0 at 0."""
    if not e[0].dtype.is_complex:
        return (ct * 0.0,)
    a, b = _real(e[0]), _imag(e[0])
    square = a * a + b * b
    share = where(eq(square, 0), 0.0, ct / where(eq(square, 0), 1.0, square))
    return (_pair(-b * share, a * share),)


@rule("sgn")
def _sgn(e: Applied, ct: Handle) -> Sequence[Handle | None]:
    """z / |z|: the part of the cotangent across z, over |z|. Real numbers have a step."""
    z = e[0]
    if not z.dtype.is_complex:
        return (None,)
    size = record("abs", z)
    is_zero = eq(size, 0)
    safe = where(is_zero, 1.0, size)
    along = record("real", ct * record("conj", z)) / (safe * safe)
    return (where(is_zero, 0.0, (ct - z * along) / safe),)
