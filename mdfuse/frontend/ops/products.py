"""Products of tensors: contractions, and operations composed of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import are_same
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.lookup_parts import check_places
from mdfuse.frontend.ops.recording import (
    Operand,
    back,
    check_factor,
    in_f32,
    is_inexact,
    is_narrow,
    record,
    shown,
)


def matmul(x: Handle, other: Handle) -> Handle:
    """`torch.matmul`: the last dim of x with the second to last of other, batch dims broadcast."""
    return record("matmul", x, other)


def _of_dims(name: str, *operands: tuple[Handle, int]) -> None:
    """Refuse operands with another number of dims than the operation takes."""
    for x, ndim in operands:
        if x.ndim != ndim:
            raise DefinitionError(
                f"{name} of {shown(x)}",
                because=f"{name} takes it with {ndim} dim{'s' * (ndim != 1)}",
                hint="matmul takes vectors, matrices and batches of them",
            )


def mm(x: Handle, mat2: Handle) -> Handle:
    """The product of two matrices."""
    _of_dims("mm", (x, 2), (mat2, 2))
    return matmul(x, mat2)


def bmm(x: Handle, mat2: Handle) -> Handle:
    """The products of two batches of matrices, [b,m,k] and [b,k,n]."""
    _of_dims("bmm", (x, 3), (mat2, 3))
    if x.shape[0] != mat2.shape[0]:
        raise DefinitionError(
            f"bmm of {shown(x)} and {shown(mat2)}",
            because="their batches differ",
            hint="matmul repeats a batch of extent 1",
        )
    return matmul(x, mat2)


def mv(x: Handle, vec: Handle) -> Handle:
    """A matrix times a vector."""
    _of_dims("mv", (x, 2), (vec, 1))
    return matmul(x, vec)


def dot(x: Handle, tensor: Handle) -> Handle:
    """The product of two vectors."""
    _of_dims("dot", (x, 1), (tensor, 1))
    return matmul(x, tensor)


def outer(x: Handle, vec2: Handle) -> Handle:
    """Each element of one vector times each of another: [m], [n] -> [m,n]."""
    _of_dims("outer", (x, 1), (vec2, 1))
    return record("mul", record("unsqueeze", x, dims=(1,)), vec2)


def addmm(
    x: Handle, mat1: Handle, mat2: Handle, *, beta: Operand = 1, alpha: Operand = 1
) -> Handle:
    """beta * x + alpha * (mat1 @ mat2)."""
    return _added(mm, x, (mat1, mat2), beta, alpha)


def baddbmm(
    x: Handle, batch1: Handle, batch2: Handle, *, beta: Operand = 1, alpha: Operand = 1
) -> Handle:
    """beta * x + alpha * (batch1 @ batch2), for batches of matrices."""
    return _added(bmm, x, (batch1, batch2), beta, alpha)


def addmv(x: Handle, mat: Handle, vec: Handle, *, beta: Operand = 1, alpha: Operand = 1) -> Handle:
    """beta * x + alpha * (mat @ vec)."""
    return _added(mv, x, (mat, vec), beta, alpha)


def _added(
    product_of: Callable[..., Handle],
    x: Handle,
    factors: tuple[Handle, Handle],
    beta: float,
    alpha: float,
) -> Handle:
    """Return beta * x + alpha * the product; 16 bits are rounded once, from f32, as in torch."""
    is_fraction = any(type(factor) is float for factor in (alpha, beta))
    if is_fraction and not all(map(is_inexact, (x, *factors))):
        raise DefinitionError(
            f"alpha={alpha}, beta={beta} for {shown(x)}",
            because="a product of integers is one of integers",
            hint="whole numbers, or floating tensors",
        )
    for key, factor in (("alpha", alpha), ("beta", beta)):
        check_factor(key, factor, x, is_wide=True)
    if beta == 0:  # then x is not read, not even NaN
        # A small factor may bring a large product into the range of 16 bits.
        product = product_of(*factors) if alpha == 1 else product_of(*map(in_f32, factors)) * alpha
        return _as_factors(product, factors)
    if alpha == beta == 1 and product_of is mm and _is_bias(x, *factors):
        return record("linear", factors[0], record("permute", factors[1], dims=(1, 0)), x)
    product = product_of(*map(in_f32, factors))
    total = record(
        "add",
        in_f32(x) if beta == 1 else in_f32(x) * beta,
        product if alpha == 1 else product * alpha,
    )
    return _as_factors(total, (x, *factors))


def _is_bias(x: Handle, left: Handle, right: Handle) -> bool:
    """Return whether x is a 16-bit number per column: one kernel adds it, and rounds once."""
    is_row = x.ndim == 1 and left.ndim == right.ndim == 2 and are_same(x.shape[0], right.shape[1])
    return is_row and is_narrow(x) and x.dtype == left.dtype == right.dtype


def _as_factors(y: Handle, of: Sequence[Handle]) -> Handle:
    """Return a result in the common 16-bit dtype of the operands."""
    kinds = {x.dtype for x in of}
    return back(y, of[0]) if len(kinds) == 1 and is_narrow(of[0]) else y


def linear(x: Handle, weight: Handle, bias: Handle | None = None) -> Handle:
    """x[…,k] @ weight[n,k].T + bias[n]."""
    if bias is not None and (bias.ndim != weight.ndim - 1 or bias.shape != weight.shape[:-1]):
        raise DefinitionError(
            f"linear with {shown(weight)} and the bias {shown(bias)}",
            because="a bias has one number for each row of the weight",
            hint="add any other tensor: linear(x, weight) + bias",
        )
    return record("linear", x, weight, *(() if bias is None else (bias,)))


def embedding(
    indices: Handle,
    weight: Handle,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
) -> Handle:
    """Rows of weight[v,d] at indices[…]. They are below v: see `Options.check_indices`.

    Args:
        indices: of rows.
        weight: the table.
        padding_idx: a row to which no gradient goes; negative: counted from the end.
        scale_grad_by_freq: the gradient of a row is divided by how often it is read.
    """
    check_places("embedding", indices, weight, 0)
    said: dict[str, Any] = {"scale_grad_by_freq": True} if scale_grad_by_freq else {}
    if padding_idx is None:
        return record("embedding", indices, weight, **said)
    if not weight.ndim or not -weight.shape[0] <= padding_idx < weight.shape[0]:
        raise DefinitionError(
            f"embedding of {shown(weight)} with padding_idx={padding_idx}",
            because="it is one of its rows",
            hint="a row of the table",
        )
    said["padding_idx"] = padding_idx % weight.shape[0]
    return record("embedding", indices, weight, **said)


def grouped_mm(x: Handle, weight: Handle, offs: Handle | None = None) -> Handle:
    """Rows of x[t,k] times the matrix of their group in weight[e,k,n], as experts compute them.

    Experts may be split: each rank computes the rows of its experts, and results are added.

    Args:
        x: the rows of a group one after the other.
        weight: a matrix for each group.
        offs: [e], integers: behind which row each group ends; rows behind the last become zeros.
            None for a ragged x, [parts, experts, <=bound : n, k], of `group_rows`.
    """
    if offs is None:
        _of_dims("grouped_mm of a ragged value", (x, 4), (weight, 3))
        return record("rows_mm", x, weight)
    _of_dims("grouped_mm", (x, 2), (weight, 3), (offs, 1))
    fits = weight.shape[0] == offs.shape[0] and x.shape[1] == weight.shape[1]
    is_whole = not (offs.dtype.is_floating_point or offs.dtype == torch.bool)
    if not fits or not is_whole or x.dtype != weight.dtype or not x.dtype.is_floating_point:
        raise DefinitionError(
            f"grouped_mm of {shown(x)}, {shown(weight)} and {shown(offs)}",
            because="x is [t,k], the weight [e,k,n] of its dtype, offs has e integers",
            hint="offs = counts.cumsum(0)",
        )
    return record("grouped_mm", x, weight, offs)


def routed_mm(x: Handle, weight: Handle, ids: Handle) -> Handle:
    """Each row of x[t,k] times the matrix of its number, of those in weight[p,e,k,n].

    Matrices stand in p parts, which may be split over ranks. The product has a dim of parts,
    [p,t,n]: each part holds the rows of its matrices, and zeros for the others. If x has this dim,
    [p,t,k], the product has none, [t,n], and rows of other parts are not read. So rows stay with
    their matrices from one product to the next, and are summed over the ranks at the end.

    Args:
        x: rows in any order; they may be split.
        weight: the matrices.
        ids: [t], integers: the number of each row's matrix, of all p * e; others give zeros.
    """
    apart = (t, k) = x.shape[-2:] if x.ndim > 1 else (0, 0)
    is_number = not (ids.dtype.is_floating_point or ids.dtype == torch.bool)
    fits = weight.ndim == 4 and weight.shape[2] == k and ids.shape == (t,) and is_number
    fits = fits and tuple(x.shape) in ((t, k), (weight.shape[0], *apart))
    if not fits or x.dtype != weight.dtype or not x.dtype.is_floating_point:
        raise DefinitionError(
            f"routed_mm of {shown(x)}, {shown(weight)} and {shown(ids)}",
            because="x is [t,k] or [p,t,k], the weight [p,e,k,n] of its dtype, ids has t integers",
            hint="weight.unflatten(0, (1, -1)) where no rank has a part of the matrices",
        )
    return record("routed_mm", x, weight, ids)
