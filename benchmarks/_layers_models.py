"""Transformer layers, each written once: for plain tensors, for DTensor's modules, for a fusion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mdfuse import DeviceMesh, Layout, Shard

Family = Literal["llama", "gpt", "bert"]
Phase = Literal["prefill", "decode"]

#: Applies the linear layer of that name: (name, x) -> x W^T, with its bias where it has one.
Dense = Callable[[str, Any], Any]

#: Makes what linear layers read whole, where each rank has some of the tokens.
Gather = Callable[[Any], Any]


def as_it_is(x: Any) -> Any:
    """The value itself."""
    return x


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of one layer.

    Attributes:
        name: the model's.
        family: llama (RMSNorm, rotary embedding, grouped-query attention, SwiGLU), gpt (LayerNorm
            before, GELU, biases) or bert (LayerNorm after, GELU, biases, no causal mask).
        width: features of a token.
        heads: of queries.
        kv_heads: of keys and values.
        head: features of a head.
        hidden: units between.
        tokens: of a prefill, where the command does not say.
    """

    name: str
    family: Family
    width: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    tokens: int

    @property
    def phases(self) -> tuple[Phase, ...]:
        return ("prefill",) if self.family == "bert" else ("prefill", "decode")

    def small(self) -> Model:
        """The same layer of a size that two cores compute at once."""
        kv_heads = 4 if self.kv_heads == self.heads else 2
        return replace(self, width=64, heads=4, kv_heads=kv_heads, head=16, hidden=96, tokens=24)


MODELS = (
    Model(
        name="llama-1b", family="llama", width=2048, heads=32, kv_heads=8, head=64, hidden=8192,
        tokens=512,
    ),
    Model(
        name="llama3-8b", family="llama", width=4096, heads=32, kv_heads=8, head=128, hidden=14336,
        tokens=2048,
    ),
    Model(
        name="llama3-70b", family="llama", width=8192, heads=64, kv_heads=8, head=128, hidden=28672,
        tokens=4096,
    ),
    Model(
        name="gpt3-175b", family="gpt", width=12288, heads=96, kv_heads=96, head=128, hidden=49152,
        tokens=2048,
    ),
    Model(
        name="minilm", family="bert", width=384, heads=12, kv_heads=12, head=32, hidden=1536,
        tokens=512,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer and how much goes through it.

    Attributes:
        model: the layer.
        phase: prefill: one sequence of `tokens`; decode: one token for each of `tokens` sequences,
            which attends to `cache` earlier ones and to itself.
        tokens: how many are computed.
        cache: positions of keys and values that are there before (decode).
    """

    model: Model
    phase: Phase
    tokens: int
    cache: int

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.phase}"

    @property
    def sizes(self) -> str:
        if self.phase == "prefill":
            return f"{self.tokens} tokens"
        return f"{self.tokens} rows, {self.cache} before"

    def linears(self) -> dict[str, tuple[int, int, int]]:
        """Name -> outputs, inputs, and the dim of the weight whose parts the ranks have."""
        m = self.model
        queries, keys = m.heads * m.head, m.kv_heads * m.head
        linears = {
            "q": (queries, m.width, 0),
            "k": (keys, m.width, 0),
            "v": (keys, m.width, 0),
            "o": (m.width, queries, 1),
            "up": (m.hidden, m.width, 0),
            "down": (m.width, m.hidden, 1),
        }
        if m.family == "llama":
            linears["gate"] = (m.hidden, m.width, 0)
        return linears

    def shapes(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Every input of the layer -> its shape, and the dim that is split along tp."""
        m, is_llama = self.model, self.model.family == "llama"
        rows, length = (self.tokens, 1) if self.phase == "decode" else (1, self.tokens)
        shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
            "x": ((rows, length, m.width), None)
        }
        if self.phase == "decode":
            past = (rows, m.kv_heads, self.cache, m.head)
            shapes |= {"keys": (past, 1), "values": (past, 1)}
        if is_llama:
            shapes |= {"cos": ((length, m.head), None), "sin": ((length, m.head), None)}
        for name, (outputs, inputs, dim) in self.linears().items():
            shapes[name] = (outputs, inputs), dim
            if not is_llama:
                shapes[f"{name}_bias"] = (outputs,), None if dim else 0
        for name in ("norm_1", "norm_2"):
            shapes[name] = (m.width,), None
            if not is_llama:
                shapes[f"{name}_bias"] = (m.width,), None
        return shapes

    def layouts(self, mesh: DeviceMesh, is_sequence: bool = False) -> dict[str, Layout]:
        """Heads and hidden units are split along tp, the rest is everywhere.

        Args:
            mesh: with an axis tp.
            is_sequence: the tokens of x are split, too.
        """
        dims = {name: dim for name, (_, dim) in self.shapes().items()}
        if is_sequence:
            dims["x"] = 1
        return {n: Layout(mesh, {} if d is None else {"tp": Shard(d)}) for n, d in dims.items()}

    def draw(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Random inputs of ordinary sizes, whole; the same on all ranks with such a device."""
        generator = torch.Generator(device).manual_seed(0)
        inputs: dict[str, Tensor] = {}
        for name, (shape, _) in self.shapes().items():
            drawn = torch.randn(shape, generator=generator, dtype=dtype, device=device)
            if name in self.linears():
                drawn *= shape[1] ** -0.5
            elif name.startswith("norm") and not name.endswith("bias"):
                drawn = 1 + drawn / 8
            elif name in ("cos", "sin"):
                drawn = getattr(torch, name)(_angles(self, device)).to(dtype)
            inputs[name] = drawn
        return inputs

    def layer(self, w: Mapping[str, Any], dense: Dense, gather: Gather = as_it_is) -> Any:
        """The layer's output.

        Args:
            w: its inputs, but those of the linear layers; tensors, or values of a fusion.
            dense: applies the linear layers.
            gather: called on what linear layers read behind each norm.
        """
        return _LAYERS[self.model.family](self, w, dense, gather)


def _angles(case: Case, device: torch.device) -> Tensor:
    """Tables of rotary embedding: [positions, features of a head]."""
    first, head = (case.cache, case.model.head) if case.phase == "decode" else (0, case.model.head)
    length = 1 if case.phase == "decode" else case.tokens
    positions = torch.arange(first, first + length, device=device, dtype=torch.float32)
    powers = torch.arange(0, head, 2, device=device, dtype=torch.float32) / head
    return torch.outer(positions, 500000.0**-powers).repeat(1, 2)


def _llama(case: Case, w: Mapping[str, Any], dense: Dense, gather: Gather) -> Any:
    x, width = w["x"], (case.model.width,)
    y = gather(F.rms_norm(x, width, w["norm_1"], 1e-5))
    x = x + _attention(case, w, dense, y)
    y = gather(F.rms_norm(x, width, w["norm_2"], 1e-5))
    return x + dense("down", F.silu(dense("gate", y)) * dense("up", y))


def _gpt(case: Case, w: Mapping[str, Any], dense: Dense, gather: Gather) -> Any:
    x = w["x"]
    x = x + _attention(case, w, dense, gather(_layer_norm(case, w, "norm_1", x)))
    y = gather(_layer_norm(case, w, "norm_2", x))
    return x + dense("down", F.gelu(dense("up", y), approximate="tanh"))


def _bert(case: Case, w: Mapping[str, Any], dense: Dense, gather: Gather) -> Any:
    x = w["x"]
    x = _layer_norm(case, w, "norm_1", x + _attention(case, w, dense, gather(x)))
    return _layer_norm(case, w, "norm_2", x + dense("down", F.gelu(dense("up", gather(x)))))


_LAYERS: dict[Family, Callable[[Case, Mapping[str, Any], Dense, Gather], Any]] = {
    "llama": _llama,
    "gpt": _gpt,
    "bert": _bert,
}


def _layer_norm(case: Case, w: Mapping[str, Any], name: str, x: Any) -> Any:
    return F.layer_norm(x, (case.model.width,), w[name], w[f"{name}_bias"], 1e-5)


def _attention(case: Case, w: Mapping[str, Any], dense: Dense, x: Any) -> Any:
    """Attention with its four linear layers; heads may be this rank's alone."""
    m = case.model
    rows, length, _ = x.shape
    q, k, v = (dense(n, x).view(rows, length, -1, m.head).transpose(1, 2) for n in "qkv")
    if m.family == "llama":
        q, k = (_rotated(y, w["cos"], w["sin"]) for y in (q, k))
    if case.phase == "decode":  # a fusion writes nothing in place, so the cache grows by a copy
        k, v = torch.cat((w["keys"], k), 2), torch.cat((w["values"], v), 2)
    mixed = F.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=m.family != "bert" and case.phase == "prefill",
        enable_gqa=m.kv_heads != m.heads,
    )
    return dense("o", mixed.transpose(1, 2).reshape(rows, length, -1))


def _rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding, with halves that turn as in Llama's published code for transformers."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def cases(
    models: list[str] | None, phase: Phase | None, tokens: int | None, cache: int, is_small: bool
) -> Iterator[Case]:
    """Return the cases to measure: all, or the chosen ones."""
    for model in MODELS:
        if models and model.name not in models:
            continue
        sized = model.small() if is_small else model
        for each in sized.phases:
            if phase in (None, each):
                rows = sized.tokens if each == "prefill" else min(16, sized.tokens)
                yield Case(model=sized, phase=each, tokens=tokens or rows, cache=cache)
