"""Some layers after each other, each with weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from _layers_peers import Bench
from _ranks import Ranks
from torch import Tensor

#: One layer, from its inputs by name to its output.
Layer = Callable[[Mapping[str, Any]], Any]

#: Inputs that all layers share.
_SHARED = ("x", "cos", "sin")


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Layers that follow each other, with what goes in and what comes back.

    Attributes:
        layer: one of them; all have its sizes.
        count: how many.
        weights: of each layer, whole.
        x: the sequences of all ranks.
        seed: the gradient of what comes of them.
    """

    layer: Bench
    count: int
    weights: list[dict[str, Tensor]]
    x: Tensor
    seed: Tensor

    @property
    def ranks(self) -> Ranks:
        return self.layer.ranks

    @property
    def angles(self) -> dict[str, Tensor]:
        return {name: w for name, w in self.layer.wholes.items() if name in _SHARED[1:]}

    def mine(self, x: Tensor) -> Tensor:
        """This rank's rows of what all ranks share."""
        return x.chunk(self.ranks.comm.size)[self.ranks.comm.rank].clone()

    def function(self, one: Layer) -> Layer:
        """The stack made of a layer: weights have names as `q.0`."""

        def stack(w: Mapping[str, Any]) -> Any:
            angles, h = {name: w[name] for name in self.angles}, w["x"]
            for n, weights in enumerate(self.weights):
                h = one({**angles, **{name: w[f"{name}.{n}"] for name in weights}, "x": h})
            return h

        return stack


def stacked(layer: Bench, count: int, sequences: int = 1) -> Stack:
    """Draw everything; all ranks draw the same.

    Args:
        layer: its weights, with some noise for each layer.
        count: of layers.
        sequences: how many times what the layer takes.
    """
    names = [n for n in layer.wholes if n not in _SHARED]
    like = layer.wholes["x"]
    generator = torch.Generator(like.device).manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)

    weights = []
    for _ in range(count):
        noise = {n: drawn(*layer.wholes[n].shape) for n in names}
        weights.append({n: layer.wholes[n] + noise[n] * layer.wholes[n].std() / 4 for n in names})
    shape = sequences * like.shape[0], *like.shape[1:]
    return Stack(layer=layer, count=count, weights=weights, x=drawn(*shape), seed=drawn(*shape))
