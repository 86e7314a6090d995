"""Operations that draw random numbers in training, and masks of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import DefinitionError
from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.constants import asked_once, without_repeats

ops: Any = operations


@dataclass(frozen=True, slots=True)
class RecordingContext:
    """The context of a recording besides its graph: a seed."""

    seed: Handle | None


def dropout(context: RecordingContext, x: Handle, p: float = 0.5, train: bool = False) -> Any:
    return ops.dropout(x, p, context.seed) if train and p else x


def other_dropout(x: Handle, p: float, train: bool) -> Any:
    """`Dropout2d`, `AlphaDropout` and their like, which do nothing in eval mode."""
    if train and p:
        raise DefinitionError(
            "dropout of whole channels, or that keeps mean and variance, in training",
            because="there is no such operation",
            hint="nn.Dropout, or module.eval() before the import",
        )
    return x


def rrelu(x: Handle, lower: float = 1 / 8, upper: float = 1 / 3, train: bool = False) -> Any:
    """`RReLU` in eval mode: the mean of the slopes that it draws in training."""
    if train:
        raise DefinitionError(
            "rrelu in training",
            because="there is no such operation",
            hint="nn.LeakyReLU, or module.eval() before the import",
        )
    return ops.leaky_relu(x, (lower + upper) / 2)


def attention(
    context: RecordingContext,
    query: Handle,
    key: Handle,
    value: Handle,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **how: Any,
) -> Any:
    kind = kind_of_mask(attn_mask, query.shape[-2], key.shape[-2])
    if isinstance(kind, int) and not dropout_p:
        return _windowed(query, key, value, kind, **how)
    if kind in ("causal", "none"):
        attn_mask, is_causal = None, kind == "causal"
    if dropout_p:
        return _attention_with_dropout(
            context.seed, query, key, value, attn_mask, dropout_p, is_causal, **how
        )
    return ops.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, **how
    )


def _windowed(
    query: Handle,
    key: Handle,
    value: Handle,
    window: int,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Causal attention whose rows see few of the keys before them: none of the others is read."""
    if enable_gqa:
        key, value = (_with_heads_of(query, x) for x in (key, value))
    lead = query.shape[:-2]
    key, value = (ops.expand(x, (*lead, *x.shape[-2:])) for x in (key, value))
    return ops.attention(query, key, value, is_causal=True, scale=scale, window=window).output


def _with_heads_of(query: Handle, x: Handle) -> Handle:
    """Repeat each head for those of the query that share it."""
    repeated: Handle = ops.repeat_interleave(x, query.shape[-3] // x.shape[-3], -3)
    return repeated


def _attention_with_dropout(
    seed: Any,
    query: Handle,
    key: Handle,
    value: Handle,
    mask: Any,
    p: float,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention in its parts: probabilities are dropped before they meet the values."""
    if enable_gqa:
        key, value = (_with_heads_of(query, x) for x in (key, value))
    scores = ops.matmul(query, ops.transpose(key, -2, -1))
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        rows, columns = (ops.arange(n) for n in scores.shape[-2:])
        mask = ops.unsqueeze(rows, 1) >= columns
    if mask is not None:
        is_shown = mask.dtype == torch.bool
        scores = ops.where(mask, scores, -torch.inf) if is_shown else scores + mask
    return ops.matmul(ops.dropout(ops.softmax(scores, -1), p, seed), value)


def draws(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a node draws random numbers, which take a seed."""
    if target == "aten.dropout.default":
        p, train = [*args, *(kwargs.get(k) for k in ("p", "train")[len(args) - 1 :])][1:3]
        return bool(p and train)
    is_attention = target == "aten.scaled_dot_product_attention.default"
    return is_attention and bool(args[4] if len(args) > 4 else kwargs.get("dropout_p"))


@asked_once
def kind_of_mask(mask: Any, rows: Any, columns: Any) -> str | int | None:
    """Return the kind of a known mask: "none" hides nothing, "causal" hides later positions.

    A number: it also hides all but so many of the last ones.
    """
    if not isinstance(mask, Tensor):
        return None
    is_square = mask.ndim >= 2 and tuple(mask.shape[-2:]) == (rows, columns) and rows == columns
    mask = without_repeats(mask)
    shown = mask if mask.dtype == torch.bool else mask == 0
    if shown.all():
        return "none"
    if not is_square or (mask.dtype != torch.bool and not (shown | (mask == -torch.inf)).all()):
        return None
    causal = torch.ones(rows, columns, dtype=torch.bool).tril()
    if (shown == causal).all():
        return "causal"
    window = int(shown[..., -1, :].sum(-1).max())
    return window if window and (shown == causal.triu(1 - window)).all() else None


def wanted_of_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, *others: Any, **__: Any
) -> list[Any]:
    kind = kind_of_mask(attn_mask, query.shape[-2], key.shape[-2])
    is_known = kind is not None and not (isinstance(kind, int) and any(others[:1]))
    return [query, key, value, *([] if is_known else [attn_mask])]
