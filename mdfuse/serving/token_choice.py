"""The choice of tokens from logits: temperature, top-k, top-p, and a number drawn for each."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import mdfuse.frontend.ops as operations
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.layouts.layout import Layout

ops: Any = operations

#: Columns of a slot's numbers.
TEMPERATURE, TOP_K, TOP_P, DRAWN = range(4)

#: How many of the largest logits are put in order where each `top_k` is at most that.
FEW = 256

#: Sums of shares that are as near to `top_p` reach it, relative to it.
_NEAR = 1e-12


def ordered(numbers: npt.NDArray[np.float64], words: int) -> int:
    """Return how many of the largest logits of a row must be put in order: 0, `FEW`, or all."""
    drawn = numbers[numbers[:, TEMPERATURE] > 0]
    cut = drawn[(drawn[:, TOP_K] < words) | (drawn[:, TOP_P] < 1)]
    most = cut[:, TOP_K].max(initial=0)
    return next(n for n in (0, min(FEW, words), words) if n >= most)


def define(slots: int, words: int, layout: Layout, largest: int) -> FusionDefinition:
    """The choice as a definition: logits [slots, words], numbers f64 [slots, 4] -> [slots].

    Args:
        largest: as `choice` takes it.
    """
    with FusionDefinition("sample") as fd:
        logits = fd.define_tensor([slots, words], mesh=layout.mesh, layout=layout, name="logits")
        numbers = fd.define_tensor([slots, 4], torch.float64, layout.mesh, name="numbers")
        fd.add_output(choice(ops.set(logits).on(layout.mesh, {}), numbers, largest))
    return fd


def choice(logits: Any, numbers: Any, largest: int) -> Any:
    """Choose a token of each row by the number drawn for it.

    Tokens with smaller logits than the `top_k`th one are left out (ties stay), then those behind
    the most probable ones whose shares reach `top_p` (among ties the first tokens stay). The drawn
    number, in [0, 1), picks one of the others by the sums of their shares, in the order of tokens.
    At temperature 0 it is the first one of the most probable ones.

    Args:
        numbers: of each row its temperature, top_k from 1 to the number of words, top_p, and the
            number drawn.
        largest: how many of the largest logits are put in order; at least each row's top_k, unless
            it leaves nothing out, and 0 where no row leaves anything out. Results do not depend on
            it.
    """
    temperature, top_k, top_p, drawn = (numbers[:, n : n + 1] for n in range(4))
    values = logits.double()
    top = values.amax(-1, True)
    weights = _weights(values, top, temperature)
    weights = weights.masked_fill((temperature <= 0) & (values < top), 0.0)
    if largest:
        weights = _cut(values, weights, top, temperature, top_k, top_p, largest)
    sums = weights.cumsum(-1)
    whole = sums.masked_fill(weights <= 0, 0.0).amax(-1, True)
    limit = drawn.clamp(max=1 - 2.0**-52) * whole  # some sum is larger
    limit = limit.masked_fill(temperature <= 0, -1.0)
    return ((weights > 0) & (sums > limit)).long().argmax(-1)


def _weights(values: Any, top: Any, temperature: Any) -> Any:
    """Return e to the values over temperature, 1 for the largest ones, which may be infinite."""
    scaled = (values - top) / temperature.clamp(min=1e-6)
    return scaled.masked_fill(values == top, 0.0).exp()


def _cut(
    values: Any, weights: Any, top: Any, temperature: Any, top_k: Any, top_p: Any, largest: int
) -> Any:
    """Return the weights, 0 for tokens that are left out."""
    words = values.shape[-1]
    order = values.sort(-1, True) if largest == words else values.topk(largest)
    best = order[0]
    place = top_k.clamp(max=largest)
    least = best.gather(-1, place.long() - 1).masked_fill(top_k > largest, -torch.inf)
    weights = weights.masked_fill(values < least, 0.0)
    share = weights.sum(-1, True) * (top_p * (1 - _NEAR))
    those = _weights(best, top, temperature)
    before = those.cumsum(-1) - those
    count = (before < share).long().sum(-1, True)
    last = best.gather(-1, torch.minimum(count, place.long()).clamp(min=1) - 1)
    last = last.masked_fill(top_p >= 1, -torch.inf)
    above = weights.masked_fill(values <= last, 0.0).sum(-1, True)
    ties = values == last
    rank = (ties.long().cumsum(-1) - 1).double()
    each = _weights(last, top, temperature)
    is_over = ties & (rank > 0) & (above + rank * each >= share) & (top_p < 1)
    return weights.masked_fill((values < last) | is_over, 0.0)
