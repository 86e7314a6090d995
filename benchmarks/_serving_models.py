"""Decoders that the contenders of serving.py compute: a Llama by hand, transformers', one layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from _whole_nets import Block, Llama, Size, angles, turned
from torch import Tensor, nn


class CachingBlock(Block):
    """A layer of one new token of each row, which keeps keys and values in buffers."""

    kc: Tensor
    vc: Tensor

    def __init__(self, size: Size, recompute: bool = False) -> None:
        super().__init__(size, recompute)
        shape = size.rows, size.kv_heads, size.tokens, size.head
        for name in ("kc", "vc"):
            self.register_buffer(name, torch.zeros(shape))

    def token(self, x: Tensor, at: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        """Write keys and values of a token at its position, and attend to those that it sees."""
        rows, tokens, _ = x.shape
        h = self.n1(x)
        q, k, v = (
            linear(h).view(rows, tokens, -1, self.head).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        self.kc.index_copy_(2, at, turned(k, cos, sin))
        self.vc.index_copy_(2, at, v)
        y = F.scaled_dot_product_attention(
            turned(q, cos, sin), self.kc, self.vc, attn_mask=seen, enable_gqa=True
        )
        x = x + self.left(self.o(y.transpose(1, 2).reshape(rows, tokens, -1)))
        h = self.n2(x)
        out: Tensor = x + self.left(self.d(F.silu(self.g(h)) * self.u(h)))
        return out


class SplitBlock(CachingBlock):
    """A layer some of whose heads and units this rank has."""

    def left(self, x: Tensor) -> Tensor:
        """Return sums over all ranks."""
        world: Any = dist.group.WORLD
        summed: Tensor = functional.all_reduce(x, "sum", world.group_name)
        return summed


class Decoder(Llama):
    """Tokens to the next ones: a step of a decode with caches of `size.tokens` positions."""

    seen: Tensor

    def __init__(self, size: Size, block: type[CachingBlock] = CachingBlock) -> None:
        super().__init__(size, block=block)
        self.register_buffer("seen", torch.empty(size.tokens, size.tokens, dtype=torch.bool))

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        """Return the most probable tokens, [rows, 1], behind ids, [rows, 1], at a position [1]."""
        return self.logits(ids, at).argmax(-1, keepdim=True)

    def logits(self, ids: Tensor, at: Tensor) -> Tensor:
        """Return the logits, [rows, words], of the next tokens."""
        x = self.emb(ids)
        cos, sin, seen = self.cos[at], self.sin[at], self.seen[at][None, None]
        for layer in self.layers:
            x = layer.token(x, at, cos, sin, seen)  # type: ignore[operator, union-attr]
        logits: Tensor = self.head(self.norm(x))[:, -1]
        return logits


def decoder(size: Size, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Return a decoder on the CPU, whose parameters are drawn on the device."""
    with torch.device("meta"):
        net = Decoder(size)
    net = net.to(dtype).to_empty(device="cpu")
    of_positions = {**angles(size), "seen": torch.ones(size.tokens, size.tokens).tril()}
    for name, x in net.named_buffers():
        x.copy_(of_positions.get(name, torch.zeros(())))
    return drawn(net, device)


#: Parameters and caches that ranks split, as patterns of names, and the dim: heads, and units.
HEADS = {
    **dict.fromkeys((f"*.{x}.weight" for x in "qkvgu"), 0),
    **dict.fromkeys((f"*.{x}.weight" for x in "od"), 1),
    **dict.fromkeys(("*.kc", "*.vc"), 1),
}


def split_decoder(net: Decoder, size: Size, rank: int, ranks: int) -> Decoder:
    """Return this rank's heads and units of a decoder, by hand; the sums are all-reduces."""
    with torch.device("meta"):
        part = Decoder(size, SplitBlock).requires_grad_(False)
    for name, x in [*net.named_parameters(), *net.named_buffers()]:
        dims = [dim for pattern, dim in HEADS.items() if fnmatch(name, pattern)]
        mine = x.chunk(ranks, dims[0])[rank].clone() if dims else x
        owner, _, leaf = name.rpartition(".")
        is_parameter = isinstance(x, nn.Parameter)
        value = nn.Parameter(mine, requires_grad=False) if is_parameter else mine
        setattr(part.get_submodule(owner), leaf, value)
    return part.eval()


def causal(size: Size, dtype: torch.dtype, device: torch.device) -> Any:
    """Return transformers' Llama on the CPU, whose parameters are drawn on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        vocab_size=size.words, hidden_size=size.hidden, intermediate_size=size.units,
        num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, head_dim=size.head, rms_norm_eps=1e-5,
        max_position_embeddings=8192, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        dtype=dtype,
    )  # fmt: skip
    with torch.device("meta"):
        net = LlamaForCausalLM(config)
    net = net.to(dtype).to_empty(device="cpu")
    net.model.rotary_emb = LlamaRotaryEmbedding(config)
    return drawn(net, device)


def drawn(module: Any, device: torch.device) -> Any:
    """Return the module with numbers that are drawn on the device; norms have ones."""
    generator: Any = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for x in module.parameters():
            values = torch.ones(x.shape, dtype=x.dtype, device=device)
            x.copy_(values if x.ndim < 2 else values.normal_(0, 0.02, generator=generator))
    return module.requires_grad_(False).eval()


def behind(logits: Tensor, tokens: Tensor) -> float:
    """Return how far logits of chosen tokens lie behind the largest, in deviations of a row.

    Args:
        logits: [n, words].
        tokens: [n].
    """
    chosen = logits.gather(-1, tokens[:, None])[:, 0]
    return float(((logits.amax(-1) - chosen) / logits.std(-1)).max())


def behind_decoder(net: Decoder, tokens: Tensor) -> float:
    """Return how far tokens, [rows, n], that follow each other from position 0 on, lie behind.

    Args:
        net: in float64.
    """
    worst = 0.0
    for n in range(tokens.shape[1] - 1):
        at = torch.tensor([n], device=tokens.device)
        worst = max(worst, behind(net.logits(tokens[:, n : n + 1], at), tokens[:, n + 1]))
    return worst


def behind_causal(
    net: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device
) -> float:
    """Return the same of prompts and the tokens behind them, by transformers' forward.

    Each module's numbers are widened to float64 while it computes, so that a model of 16 bits needs
    no second copy. Norms compute in float32.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        judge = AutoModelForCausalLM.from_config(
            net.config, dtype=net.dtype, attn_implementation="sdpa"
        )
    judge.load_state_dict(net.state_dict(), assign=True)
    judge.model.rotary_emb = type(net.model.rotary_emb)(net.config).to(device)
    modules = [judge.model.embed_tokens, *judge.model.layers, judge.model.norm, judge.lm_head]
    for module in modules:
        numbers = {name: x.to(device) for name, x in module.state_dict().items()}
        module.register_forward_pre_hook(partial(_widened, numbers))
        module.register_forward_hook(lambda m, *_: _without_numbers(m))
        _without_numbers(module)
    worst = 0.0
    for prompt, tokens in pairs:
        given = torch.tensor([[*prompt, *tokens]], device=device)
        logits = judge(given, logits_to_keep=len(tokens) + 1, use_cache=False).logits[0, :-1]
        worst = max(worst, behind(logits, given[0, len(prompt) :]))
    return worst


def _widened(numbers: Mapping[str, Tensor], module: nn.Module, _: Any) -> None:
    wide = {name: x.double() for name, x in numbers.items()}
    module.load_state_dict(wide, assign=True)


def _without_numbers(module: nn.Module) -> None:
    module.to("meta")


#: Writes rows into a cache, [rows, features]: (cache, at, rows) -> the cache.
Write = Callable[[Any, Any, Any], Any]


def layer(
    w: Mapping[str, Any], x: Any, at: Any, rows: Any, seen: Any, size: Size, write: Write
) -> list[Any]:
    """Compute a token of each of some slots, for tensors and in a fusion.

    Args:
        w: matrices, and caches k, v, [slots · positions, heads of keys · features].
        x: [n, hidden].
        at: [n], the row of the caches that a token is written to.
        rows: [n, positions], the rows of its slot.
        seen: [n, positions], which of these it sees.
        write: writes into a cache.

    Returns:
        the caches, and [n, hidden].
    """
    n, head, heads = x.shape[0], size.head, size.kv_heads
    h = F.rms_norm(x, (size.hidden,))
    q = F.linear(h, w["q"]).reshape(n, heads, size.heads // heads, head)
    caches = [write(w[name], at, F.linear(h, w[f"to_{name}"])) for name in "kv"]
    k, v = (
        F.embedding(rows, cache).reshape(n, size.tokens, heads, head).transpose(1, 2)
        for cache in caches
    )
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])
    x = x + F.linear(y.reshape(n, size.hidden), w["o"])
    h = F.rms_norm(x, (size.hidden,))
    x = x + F.linear(F.silu(F.linear(h, w["g"])) * F.linear(h, w["u"]), w["d"])
    return [*caches, x]


def layer_shapes(size: Size) -> dict[str, tuple[int, int]]:
    """Return the shapes of matrices and caches of `layer`; it has `size.rows` slots."""
    few = size.kv_heads * size.head
    caches = dict.fromkeys("kv", (size.rows * size.tokens, few))
    matrices = {
        "q": (size.hidden, size.hidden), "o": (size.hidden, size.hidden),
        "to_k": (few, size.hidden), "to_v": (few, size.hidden),
        "g": (size.units, size.hidden), "u": (size.units, size.hidden),
        "d": (size.hidden, size.units),
    }  # fmt: skip
    return {**matrices, **caches}
