"""Cells of recurrent networks, bags of rows, attention of several heads."""

from __future__ import annotations

from typing import Any

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops import creations, parts, reductions, views
from mdfuse.frontend.ops.neural import scaled_dot_product_attention, softmax
from mdfuse.frontend.ops.pointwise import ROWS, where
from mdfuse.frontend.ops.products import embedding, linear
from mdfuse.frontend.ops.recording import Operation, named, shown


def _gates(
    x: Handle,
    hidden: Handle,
    weights: tuple[Handle, Handle],
    biases: tuple[Any, Any],
    count: int,
    cell: Handle | None = None,
) -> list[tuple[Handle, Handle]]:
    """Return the contributions of input and last state to each gate.

    Args:
        x: the input.
        hidden: the last state; for an LSTM its output, maybe projected.
        weights: of both.
        biases: of both.
        count: of gates.
        cell: the state with the extent of a gate, if it is not the hidden state.

    Raises:
        DefinitionError: the weights do not have `count` rows for each place of the state.
    """
    state = hidden if cell is None else cell
    for w in weights:
        if not state.ndim or w.ndim != 2 or w.shape[0] != count * state.shape[-1]:
            raise DefinitionError(
                f"a cell of {shown(state)} with {shown(w)}",
                because=f"of a state of [b,n] weights are [{count}*n,k]: a matrix for each gate",
                hint="a state with n places in its last dim",
            )
    products = [linear(a, w, b) for a, w, b in zip((x, hidden), weights, biases, strict=True)]
    chunks = [parts.chunk(y, count, y.ndim - 1) if count > 1 else (y,) for y in products]
    return list(zip(*chunks, strict=True))


def lstm_cell(
    x: Handle,
    hx: Any,
    w_ih: Handle,
    w_hh: Handle,
    b_ih: Handle | None = None,
    b_hh: Handle | None = None,
) -> tuple[Handle, Handle]:
    """One step of a long short-term memory: x[b,i], (h, c)[b,n], w_ih[4n,i] -> (h, c)."""
    hidden, cell = _two_states(hx)
    gates = _gates(x, hidden, (w_ih, w_hh), (b_ih, b_hh), 4, cell)
    into, forget, new, out = (a + b for a, b in gates)
    sigmoid, tanh = ROWS["sigmoid"], ROWS["tanh"]
    cell = sigmoid(forget) * cell + sigmoid(into) * tanh(new)
    return sigmoid(out) * tanh(cell), cell


def _two_states(hx: Any) -> tuple[Handle, Handle]:
    is_pair = isinstance(hx, tuple | list) and len(hx) == 2
    if not is_pair or not all(isinstance(h, Handle) for h in hx):
        raise DefinitionError(
            "lstm_cell without two states", because="it has a state and a cell", hint="(h, c)"
        )
    return hx[0], hx[1]


def gru_cell(
    x: Handle,
    hx: Handle,
    w_ih: Handle,
    w_hh: Handle,
    b_ih: Handle | None = None,
    b_hh: Handle | None = None,
) -> Handle:
    """One step of a gated recurrent unit: x[b,i], h[b,n], w_ih[3n,i], w_hh[3n,n] -> h."""
    reset, update, new = _gates(x, hx, (w_ih, w_hh), (b_ih, b_hh), 3)
    sigmoid = ROWS["sigmoid"]
    candidate = ROWS["tanh"](new[0] + sigmoid(reset[0] + reset[1]) * new[1])
    return candidate + sigmoid(update[0] + update[1]) * (hx - candidate)


def _plain_cell(name: str) -> Operation:
    def function(
        x: Handle,
        hx: Handle,
        w_ih: Handle,
        w_hh: Handle,
        b_ih: Handle | None = None,
        b_hh: Handle | None = None,
    ) -> Handle:
        ((a, b),) = _gates(x, hx, (w_ih, w_hh), (b_ih, b_hh), 1)
        return ROWS[name](a + b)

    doc = f"One step of a plain network: {name}(x w_ih^T + h w_hh^T)."
    return named(f"rnn_{name}_cell", doc, function)


rnn_tanh_cell, rnn_relu_cell = _plain_cell("tanh"), _plain_cell("relu")


# -- bags ----------------------------------------------------------------------------------------


def embedding_bag(
    indices: Handle, weight: Handle, *, mode: str = "mean", per_sample_weights: Handle | None = None
) -> Handle:
    """Rows of weight[v,d] at indices[b,n], joined to one for each bag of n.

    Args:
        indices: of rows; all bags are of one size.
        weight: the table, whose rows and columns may be split.
        mode: "mean", "sum" or "max".
        per_sample_weights: [b,n], with "sum": a factor for each row.
    """
    known = {"mean": reductions.mean, "sum": reductions.sum, "max": reductions.amax}
    is_weighed = per_sample_weights is not None
    if indices.ndim != 2 or mode not in known or (is_weighed and mode != "sum"):
        raise DefinitionError(
            f"embedding_bag of {shown(indices)} with mode={mode!r}",
            because="bags are the rows of a matrix; they are joined by mean, sum or max, and "
            "factors go with a sum",
            hint="offsets=None, and indices of two dims",
        )
    rows = embedding(indices, weight)
    if per_sample_weights is not None:
        rows = rows * views.unsqueeze(per_sample_weights, -1)
    joined: Handle = known[mode](rows, 1)
    return joined


# -- attention -----------------------------------------------------------------------------------


def multi_head_attention_forward(
    query: Handle,
    key: Handle,
    value: Handle,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Handle,
    in_proj_bias: Handle | None,
    bias_k: Handle | None,
    bias_v: Handle | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Handle,
    out_proj_bias: Handle | None,
    training: bool = True,
    key_padding_mask: Handle | None = None,
    need_weights: bool = True,
    attn_mask: Handle | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Handle, Handle | None]:
    """Attention of several heads as of `torch.nn.MultiheadAttention`: its result and its weights.

    Args:
        query, key, value: [l,b,e], [s,b,e], [s,b,e], for e = embed_dim_to_check.
        in_proj_weight, in_proj_bias: [3e,e] and [3e], for query, key and value.
        out_proj_weight, out_proj_bias: [e,e] and [e].
        bias_k, bias_v, add_zero_attn: None, None and False; dropout_p is 0 in training.
        key_padding_mask, attn_mask: [b,s], [l,s]: bools (True is left out), or floats to add.
        need_weights: whether weights are returned, else None; without them no scores are kept.
        average_attn_weights: the mean over the heads.
        is_causal: taken with an attn_mask that says so.
    """
    e, is_plain = embed_dim_to_check, bias_k is None and bias_v is None and not add_zero_attn
    fits = query.ndim == key.ndim == value.ndim == 3 and query.shape[-1] == e
    if not fits or not is_plain or (dropout_p and training) or num_heads < 1 or e % num_heads:
        raise DefinitionError(
            f"multi_head_attention_forward of {shown(query)} with {num_heads} heads",
            because="it takes [length, batch, features] with features for each head, without "
            "dropout, bias_k, bias_v and add_zero_attn",
            hint="training=False, or linear, scaled_dot_product_attention and dropout",
        )
    biases: Any = (None,) * 3 if in_proj_bias is None else parts.chunk(in_proj_bias, 3)
    given = zip((query, key, value), parts.chunk(in_proj_weight, 3), biases, strict=True)
    q, k, v = (_for_heads(linear(x, w, b), num_heads) for x, w, b in given)
    mask = _joined_mask(attn_mask, key_padding_mask, q, k)
    if need_weights:
        scores = q @ k.mT * (e // num_heads) ** -0.5
        weights = softmax(scores if mask is None else scores + mask, -1)
        attended, returned_weights = (
            weights @ v,
            reductions.mean(weights, 1) if average_attn_weights else weights,
        )
    else:
        attended, returned_weights = scaled_dot_product_attention(q, k, v, mask), None
    attended = views.reshape(views.permute(attended, (2, 0, 1, 3)), query.shape)
    return linear(attended, out_proj_weight, out_proj_bias), returned_weights


def _for_heads(x: Handle, heads: int) -> Handle:
    """[l,b,e] -> [b,heads,l,e/heads]."""
    length, batch, e = x.shape
    return views.permute(views.reshape(x, (length, batch, heads, e // heads)), (1, 2, 0, 3))


def _joined_mask(attn: Handle | None, padding: Handle | None, q: Handle, k: Handle) -> Any:
    """Return the sum to add to the scores [b,heads,l,s], or None."""
    total = None
    for mask, shape in ((attn, None), (padding, (k.shape[0], 1, 1, k.shape[2]))):
        if mask is None:
            continue
        added = views.reshape(mask, shape) if shape is not None else mask
        if added.ndim == 3:
            added = views.reshape(added, (q.shape[0], q.shape[1], *added.shape[1:]))
        if not added.dtype.is_floating_point:
            added = where(added, -float("inf"), creations.zeros((), dtype=q.dtype))
        total = added if total is None else total + added
    return total
