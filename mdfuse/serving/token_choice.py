"""The choice of tokens from logits: temperature, top-k, top-p, and a number drawn for each."""

from __future__ import annotations

from typing import Any

import torch

import mdfuse.frontend.ops as operations
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.layouts.layout import Layout

ops: Any = operations

#: Columns of a slot's numbers.
TEMPERATURE, TOP_K, TOP_P, DRAWN = range(4)


def define(slots: int, words: int, layout: Layout) -> FusionDefinition:
    """The choice as a definition: logits [slots, words], numbers f64 [slots, 4] -> [slots]."""
    with FusionDefinition("sample") as fd:
        logits = fd.define_tensor([slots, words], mesh=layout.mesh, layout=layout, name="logits")
        numbers = fd.define_tensor([slots, 4], torch.float64, layout.mesh, name="numbers")
        fd.add_output(choice(ops.set(logits).on(layout.mesh, {}), numbers))
    return fd


def choice(logits: Any, numbers: Any) -> Any:
    """Choose a token of each row by the number drawn for it.

    Args:
        numbers: of each row its temperature, top_k from 1 to the number of words, top_p, and the
            number drawn.

    Tokens are sorted by their probability. Those behind the `top_k` first ones are left out (ties
    of the last one stay), then those behind the first ones whose sum reaches `top_p`; the drawn
    number, in [0, 1), picks one of the others by the sums of their probabilities. At temperature 0
    it is the first one.
    """
    temperature, top_k, top_p, drawn = (numbers[:, n : n + 1] for n in range(4))
    values, tokens = (logits.double() / temperature.clamp(min=1e-6)).sort(-1, True)
    kth = values.gather(-1, top_k.long() - 1)
    values = values.masked_fill(values < kth, -torch.inf)
    shares = values.softmax(-1)
    before = shares.cumsum(-1) - shares
    shares = shares.masked_fill(before >= top_p, 0.0)
    sums = shares.cumsum(-1)
    limit = drawn * sums[:, -1:]
    place = (sums <= limit).long().sum(-1, True)
    last = (shares > 0).long().sum(-1, True) - 1
    place = torch.minimum(place, last).clamp(min=0)
    place = place.masked_fill(temperature <= 0, 0)
    return tokens.gather(-1, place)[:, 0]
