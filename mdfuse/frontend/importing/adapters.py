"""Low-rank adapters: matrices A and B beside a linear layer, y = x W^T + scale * x A^T B^T.

Hu et al. 2021. The module has them while it is exported; its own code and parameters stay as they
are. Their layouts follow the layer's matrix: B is split as its outputs, A as its inputs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mdfuse.errors import DefinitionError
from mdfuse.frontend.importing.place import matching, unmatched
from mdfuse.frontend.plain import brief, is_finite
from mdfuse.layouts.layout import Layout, Shard

#: The names of the two matrices in their layer.
A, B = "lora_A", "lora_B"


@dataclass(frozen=True, slots=True)
class Adapter:
    """The origin of an adapter's parameter.

    Attributes:
        of: the name of the layer's matrix.
        is_transposed: whether the matrix has its inputs first, as in GPT-2.
        start: its initial numbers.
    """

    of: str
    is_transposed: bool
    start: Tensor

    def own_dim(self, name: str) -> int:
        """The dim of an adapter's matrix that it shares with the layer's matrix."""
        return int(name.endswith(A))

    def dim(self, name: str) -> int:
        """The shared dim of the layer's matrix."""
        return 1 - self.own_dim(name) if self.is_transposed else self.own_dim(name)

    def layout(self, name: str, weight: Layout) -> Layout:
        """Return the layout of an adapter's matrix, given that of the layer's matrix."""
        taken, split = Shard(self.dim(name)), Shard(self.own_dim(name))
        order = {self.own_dim(name): weight.split_axes(self.dim(name))}
        placed = {a: split for a, p in weight.by_axis().items() if p == taken}
        return Layout(weight.mesh, placed, order if placed else None)


@contextmanager
def adapted(module: nn.Module, said: Mapping[str, Any]) -> Iterator[dict[str, Adapter]]:
    """Add adapters to layers of a module while the block runs.

    Args:
        module: any.
        said: pattern of names of layers -> the rank, or (rank, alpha): the scale is alpha / rank.

    Yields:
        Name of each adapter's parameter -> its origin.

    Raises:
        DefinitionError: an invalid rank; a layer without a single matrix.
        LayoutError: a pattern that matches no linear layer, or two that are equally exact.
    """
    layers = {n: m for n, m in module.named_modules() if _features(m) is not None}
    for pattern in said:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise unmatched("adapters", pattern, layers)
    adapters: dict[str, Adapter] = {}
    hooks = []
    try:
        for name, layer in layers.items():
            match = matching(said, [name], "adapters")
            if match is not None:
                hooks.append(_add(layer, name, *match, adapters))
        yield adapters
    finally:
        for hook in hooks:
            hook.remove()
        for name in adapters:
            layer_name, _, attribute = name.rpartition(".")
            delattr(module.get_submodule(layer_name), attribute)


def _features(layer: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and outputs of a linear layer; None for other modules.

    Linear is also the `Conv1D` of transformers; others may have a class of that name.
    """
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    nx, nf = (getattr(layer, name, None) for name in ("nx", "nf"))
    if type(layer).__name__ == "Conv1D" and isinstance(nx, int) and isinstance(nf, int):
        return nx, nf
    return None


def _add(
    layer: nn.Module, name: str, pattern: str, said: Any, adapters: dict[str, Adapter]
) -> torch.utils.hooks.RemovableHandle:
    rank, alpha = said if isinstance(said, tuple) and len(said) == 2 else (said, said)
    features = _features(layer)
    assert features is not None
    is_rank = type(rank) is int and 0 < rank <= min(features)
    if not is_rank or not is_finite(alpha) or hasattr(layer, A):
        raise DefinitionError(
            f"adapters[{pattern!r}] = {brief(said)} for {name} of {features[0]} inputs and "
            f"{features[1]} outputs",
            because="an adapter has a rank from 1 to these and a finite alpha, and a layer has one"
            if not hasattr(layer, A) else f"it has a parameter {A} of its own",
            hint='{"*.q_proj": 8}, or (rank, alpha): {"*.q_proj": (8, 16)}',
        )  # fmt: skip
    weight: Any = layer.weight
    bound = 1 / math.sqrt(features[0])  # as nn.Linear begins; the same on every rank
    numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    first = torch.empty(rank, features[0]).uniform_(-bound, bound, generator=numbers)
    for attribute, start in ((A, first), (B, torch.zeros(features[1], rank))):
        start = start.to(weight.dtype)
        layer.register_parameter(attribute, nn.Parameter(start.to(weight.device)))
        key = f"{name}.{attribute}" if name else attribute
        of = f"{name}.weight" if name else "weight"
        adapters[key] = Adapter(of, not isinstance(layer, nn.Linear), start)
    return layer.register_forward_hook(partial(_forward, scale=alpha / rank))


def _forward(layer: Any, args: tuple[Tensor, ...], y: Tensor, *, scale: float) -> Tensor:
    narrow = F.linear(args[0], layer.lora_A)
    return y + F.linear(narrow if scale == 1 else narrow * scale, layer.lora_B)
