"""A Llama in plain torch, its numbers, and the tokens of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from _positions import positions
from _ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: How the ranks share a step: parameters split, heads and units split, parameters of groups that
#: split heads and units, batches split, positions and parameters split, one rank.
Style = Literal["fsdp", "tp", "fsdp_tp", "ddp", "cp", "alone"]

#: Training batches, which follow each other in turns.
_BATCHES = 2

#: The device's name -> products of 16 bits per second, dense.
_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


@dataclass(frozen=True, kw_only=True)
class Size:
    """The extents of a model and of its batches.

    Attributes:
        hidden, heads, kv_heads, units, words: of the model.
        layers: how many.
        rows, tokens: the sequences of a rank (of all ranks that share sequences), their length.
    """

    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    units: int = 8192
    words: int = 128_256
    layers: int = 16
    rows: int = 2
    tokens: int = 4096

    @property
    def head(self) -> int:
        return self.hidden // self.heads


SIZES = {
    "llama-1b": Size(),
    "llama3-8b": Size(hidden=4096, units=14_336, layers=32, rows=1, tokens=8192),
}
SMALL = Size(hidden=64, heads=4, kv_heads=2, units=128, words=256, layers=2, rows=2, tokens=32)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of a head's numbers (arXiv:2104.09864)."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Block(nn.Module):
    """A layer: attention with grouped heads, and gated units."""

    def __init__(self, size: Size, recompute: bool) -> None:
        super().__init__()
        self.head, self.recompute = size.head, recompute
        few = size.kv_heads * size.head
        self.n1, self.n2 = (nn.RMSNorm(size.hidden, 1e-5) for _ in range(2))
        self.q = nn.Linear(size.hidden, size.hidden, bias=False)
        self.k, self.v = (nn.Linear(size.hidden, few, bias=False) for _ in range(2))
        self.o = nn.Linear(size.hidden, size.hidden, bias=False)
        self.g, self.u = (nn.Linear(size.hidden, size.units, bias=False) for _ in range(2))
        self.d = nn.Linear(size.units, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.recompute:
            y: Tensor = checkpoint(  # type: ignore[no-untyped-call]
                self.inside, x, cos, sin, use_reentrant=False, preserve_rng_state=False
            )
            return y
        return self.inside(x, cos, sin)

    def inside(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute the layer."""
        x = x + self.left(self.attended(self.entered(self.n1(x)), cos, sin))
        h = self.entered(self.n2(x))
        return x + self.left(self.d(F.silu(self.g(h)) * self.u(h)))

    def attended(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend, and project; heads are as many as the matrices have."""
        rows, tokens, _ = h.shape
        q, k, v = (
            linear(h).view(rows, tokens, -1, self.head).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = self.averaged(turned(q, cos, sin), turned(k, cos, sin), v)
        projected: Tensor = self.o(y.transpose(1, 2).reshape(rows, tokens, -1))
        return projected

    def averaged(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the causal attention of heads, [rows, heads, tokens, head]."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def entered(self, x: Tensor) -> Tensor:
        """Return all tokens; ranks that split heads gather them."""
        return x

    def left(self, x: Tensor) -> Tensor:
        """Return whole sums; ranks that split heads scatter them."""
        return x


class Llama(nn.Module):
    """Tokens to the logits of the next ones."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size, recompute: bool = False, block: type[Block] = Block) -> None:
        super().__init__()
        self.emb = nn.Embedding(size.words, size.hidden)
        self.layers = nn.ModuleList(block(size, recompute) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden, 1e-5)
        self.head = nn.Linear(size.hidden, size.words, bias=False)
        for name, numbers in angles(size).items():
            self.register_buffer(name, numbers, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.through(self.emb(ids))))
        return logits

    def through(self, x: Tensor) -> Tensor:
        """Pass values through all layers."""
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def angles(size: Size) -> dict[str, Tensor]:
    """Return cosines and sines of each position, [tokens, head]."""
    with torch.device("cpu"):
        exponents = -torch.arange(0, size.head, 2).float() / size.head
        turns = torch.outer(torch.arange(size.tokens).float(), 500000.0**exponents).repeat(1, 2)
        return {"cos": turns.cos(), "sin": turns.sin()}


def empty(size: Size, recompute: bool = False, block: type[Block] = Block) -> Llama:
    """Return a model without numbers, which costs no time."""
    with torch.device("meta"):
        net = Llama(size, recompute, block)
    return net.to("meta")  # the angles, too


def filled(
    size: Size, numbers: dict[str, Tensor], recompute: bool, block: type[Block] = Block
) -> Llama:
    """Return a model of the given tensors, which it shares."""
    net = empty(size, recompute, block)
    for name, numbers_of in numbers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(net.get_submodule(owner), leaf, nn.Parameter(numbers_of))
    device = next(iter(numbers.values())).device
    for name, numbers_of in angles(size).items():
        setattr(net, name, numbers_of.to(device))
    return net


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss in f32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@dataclass(kw_only=True)
class Case:
    """A model and its training step, as all contenders take it.

    Attributes:
        ranks: the ranks that train.
        style: how they share the step.
        size: of the model.
        recompute: layers are computed again in the backward.
        compiler: the backend of torch.compile.
        numbers: of each parameter, f32, on the CPU.
        batches: ids and labels of this rank, on its device.
        heads_split: how many ranks split heads and units.
        whole_rows: sequences of all ranks.
    """

    ranks: Ranks
    style: Style
    size: Size
    recompute: bool
    compiler: str
    numbers: dict[str, Tensor]
    heads_split: int = 1
    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    whole_rows: int = 0

    def __post_init__(self) -> None:
        comm, size = self.ranks.comm, self.size
        self.whole_rows = size.rows * (comm.size if self.splits_batches else 1)
        drawn = torch.Generator().manual_seed(1)
        for _ in range(_BATCHES):
            pair = [
                torch.randint(size.words, (self.whole_rows, size.tokens), generator=drawn)
                for _ in range(2)
            ]
            ids, labels = (self._mine(x).to(comm.device) for x in pair)
            self.batches.append((ids, labels))

    def _mine(self, tokens: Tensor) -> Tensor:
        comm = self.ranks.comm
        if self.style == "cp":
            return tokens[:, positions(self.size.tokens, comm.size, comm.rank, is_zigzag=True)]
        split = comm.size // self.heads_split
        return tokens.chunk(split)[comm.rank // self.heads_split]

    @property
    def splits_batches(self) -> bool:
        """Return whether a batch has sequences for each rank."""
        return self.style not in ("tp", "cp", "alone")

    @property
    def shared_by(self) -> int:
        """Return how many ranks share each sequence, in what `utilisation` and rates count."""
        return self.ranks.comm.size if self.style in ("tp", "cp") else 1

    @property
    def axes(self) -> dict[str, int]:
        """Return the axes of the mesh, with their sizes."""
        count, tp = self.ranks.comm.size, self.heads_split
        if self.style == "fsdp_tp":
            return {"fsdp": count // tp, "tp": tp}
        return {"one" if self.style == "alone" else self.style: count}

    @property
    def name(self) -> str:
        again = ", recompute" if self.recompute else ""
        axes = {"alone": 1} if self.style == "alone" else self.axes
        return " x ".join(f"{axis}={n}" for axis, n in axes.items()) + again

    @property
    def sizes(self) -> str:
        size = self.size
        return f"{size.rows} x {size.tokens}, {size.hidden} wide, {size.layers} deep"

    @property
    def floats(self) -> float:
        """Operations of a step on one rank: products, and attention to earlier tokens."""
        size, count = self.size, sum(x.numel() for x in self.numbers.values())
        rows = self.size.rows
        products = 6 * (count - size.words * size.hidden) * rows * size.tokens
        attention = 6 * size.layers * rows * size.tokens**2 * size.hidden
        return (products + attention) / self.shared_by

    def utilisation(self, seconds: float) -> float | None:
        """Return the share of the device's products per second; None on unknown devices."""
        if self.ranks.device.type != "cuda":
            return None
        device = torch.cuda.get_device_name()
        peak = next((x for name, x in _PEAKS.items() if name in device), None)
        return None if peak is None else self.floats / seconds / peak


def drawn_numbers(size: Size, device: torch.device) -> dict[str, Tensor]:
    """Return each parameter in f32 on the CPU; they are drawn on the device, alike on all ranks."""
    generator: Any = torch.Generator(device).manual_seed(0)

    def numbers() -> Iterator[tuple[str, Tensor]]:
        for name, x in empty(size).named_parameters():
            values = torch.ones(x.shape, device=device)
            if x.ndim > 1:
                values.normal_(0, 0.02, generator=generator)
            yield name, values.cpu()

    return dict(numbers())
