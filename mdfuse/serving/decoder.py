"""A causal model of transformers with caches: what `mf.from_torch` imports for an engine."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mdfuse.errors import DefinitionError, MdfuseError, counted, message_of
from mdfuse.serving.cached_attention import (
    NAME,
    Noting,
    Places,
    Seen,
    Written,
    attending,
    register,
)
from mdfuse.serving.rotation import fixed
from mdfuse.serving.shape import StepShape
from mdfuse.torch_private import FakeTensorMode

#: The submodule that holds the caches; their names are "caches.k0", "caches.v0", ….
CACHES = "caches"

#: The buffer with the token that was chosen last for each slot, and what stands for it in a step.
CHOSEN, LAST = "chosen", -1


class Caches(Written, nn.Module):
    """Keys and values of all layers, [rows, heads, features] each; what `past_key_values` is.

    An import writes each buffer in place. Attention reads the buffers, not what `update` returns.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        nn.Module.__init__(self)
        Written.__init__(self)
        for name, x in tensors.items():
            self.register_buffer(name, x)
        self.rows: Tensor | None = None

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values, [1, heads, tokens, features], of a layer."""
        assert self.rows is not None
        for name, x in ((f"k{layer}", k), (f"v{layer}", v)):
            cache = getattr(self, name)
            cache.index_copy_(0, self.rows, x[0].transpose(0, 1).to(cache.dtype))
        self.written[layer] = k, v
        return k, v


class Served(nn.Module):
    """The forward of a model that serves: mixed into the class of the model."""

    shape_served: StepShape
    chosen: Tensor

    def forward(self, step: Tensor) -> Tensor:
        """Write one step's tokens into the caches, and the most probable next ones into `chosen`.

        Returns:
            logits [slots, words].

        Args:
            step: the integers of a step, in the order of `StepShape.fields`.
        """
        s = self.shape_served
        caches: Any = getattr(self, CACHES)
        parts = s.parts(step)
        caches.rows, caches.written = parts["rows"], {}
        places = Places(s, caches, parts["positions"], parts["table"], parts["slot"])
        with attending(places):
            results: Any = super().forward(
                input_ids=self._tokens(parts["ids"])[None],
                position_ids=parts["positions"][None],
                past_key_values=caches,
                use_cache=True,
                logits_to_keep=torch.arange(s.slots, device=step.device),
            )
        caches.written = {}  # they were of this step
        logits: Tensor = results.logits[0].float()
        self.chosen.copy_(logits.argmax(-1))
        return logits

    def _tokens(self, ids: Tensor) -> Tensor:
        """Return ids with the token chosen last where a slot goes on with it."""
        n = self.shape_served.slots
        return torch.cat((torch.where(ids[:n] == LAST, self.chosen, ids[:n]), ids[n:]))


def served(
    module: nn.Module, shape: StepShape, caches: Mapping[str, Tensor], chosen: Tensor
) -> nn.Module:
    """Return a model that shares the parameters of a module, and has caches and another forward."""
    kind = type(module)
    other = copy.copy(module)
    other.__class__ = type(kind.__name__, (Served, kind), {"__module__": kind.__module__})
    other._modules = {**module._modules, CACHES: Caches(caches)}
    other._buffers = {**module._buffers, CHOSEN: chosen}
    other.shape_served = shape  # type: ignore[assignment]
    return other


def cache_types(module: nn.Module, context: int = 1) -> dict[str, tuple[int, int, torch.dtype]]:
    """Return heads, features and dtype of each cache: a forward on the meta device tells them.

    Args:
        context: the most tokens of a text.

    Raises:
        DefinitionError: layers keep other state than keys and values, or a table of positions has
            fewer rows than the context.
    """
    noted = Noting()
    try:
        with (
            FakeTensorMode(),
            torch.no_grad(),
            own_attention(module, "batched_mm"),
            fixed(module),
            attending(noted),
        ):
            tensors = {
                name: torch.empty(x.shape, dtype=x.dtype)
                for name, x in (*module.named_parameters(), *module.named_buffers())
            }
            token, at = torch.zeros(2, 1, 1, dtype=torch.int64)
            given: dict[str, Any] = {"input_ids": token, "position_ids": at}
            given |= {"past_key_values": noted, "use_cache": True}
            with _in_tables(module, at, context):
                torch.func.functional_call(module, tensors, (), given)
    except MdfuseError:
        raise
    except Exception as error:  # the forward is the model's, and raises whatever it likes
        because = f"its forward of one token says: {message_of(error)}"
        if isinstance(error, AttributeError) and error.obj is noted:
            because = f"it asks a cache for {error.name}, and caches here are keys and values alone"
        if isinstance(error, AttributeError) and isinstance(error.obj, Seen):
            because = "it computes with masks, which follow from positions here"
        raise DefinitionError(
            f"a cache for {type(module).__name__}",
            because=because,
            hint="generate() serves models whose state is keys and values",
        ) from error
    if not noted.types:
        raise DefinitionError(
            f"a cache for {type(module).__name__}",
            because="its forward wrote no keys and values into past_key_values",
            hint="generate() serves causal models of transformers",
        )
    _check_all_attended(module, noted.written, noted.attended)
    return noted.types


@contextmanager
def _in_tables(module: nn.Module, positions: Tensor, context: int) -> Iterator[None]:
    """Refuse a context of more positions than an embedding of them has rows."""

    def check(table: Any, given: tuple[Any, ...]) -> None:
        rows = table.num_embeddings
        if given and given[0] is positions and rows < context:
            raise DefinitionError(
                f"a context of {counted(context, 'token')}",
                because=f"{type(module).__name__} has embeddings of {rows} positions",
                hint=f"generate(..., context={rows})",
            )

    with ExitStack() as stack:
        for m in module.modules():
            if isinstance(m, nn.Embedding):
                stack.callback(m.register_forward_pre_hook(check).remove)
        yield


@contextmanager
def own_attention(module: Any, experts: str | None = None) -> Iterator[None]:
    """Let a model of transformers call `attend` meanwhile, and compute experts by this function.

    Nothing is trained: no dropout draws, and no checkpoint computes again, which has no caches.
    """
    register()
    said = {"_attn_implementation_internal": NAME}
    said |= {} if experts is None else {"_experts_implementation_internal": experts}
    configs = {
        id(c): c for m in module.modules() if (c := getattr(m, "config", None)) is not None
    }.values()
    before = [(c, key, getattr(c, key, None)) for c in configs for key in said]
    before += [(m, "training", m.training) for m in module.modules()]
    try:
        for c, key, _ in before:
            setattr(c, key, said.get(key, False))
        yield
    finally:
        for c, key, value in before:
            setattr(c, key, value)


def _check_all_attended(module: nn.Module, written: Collection[int], attended: set[int]) -> None:
    if attended != {*written}:
        raise DefinitionError(
            f"{type(module).__name__} wrote caches of {counted(len(written), 'layer')} and "
            f"attended to {len(attended)}",
            because="its layers do not take their attention from transformers' table of functions",
            hint="generate() serves models that do (`_supports_attention_backend`)",
        )
