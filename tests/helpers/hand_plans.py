"""Layers of transformers in the styles that people write by hand, and the bytes that those need.

Each style states the layouts of parameters, of a layer's input and of its result; all other layouts
are inferred. Beside it stands the number of bytes that arrive at a rank along each axis in a
forward and a backward, as the source of the style gives it:

- data parallel: Li et al., PyTorch Distributed (arXiv:2006.15704): gradients are all-reduced.
- fully sharded: Zhao et al., PyTorch FSDP (arXiv:2304.11277): parameters are gathered in the
  forward and again in the backward, gradients are reduce-scattered; hybrid: and all-reduced.
- tensor parallel: Shoeybi et al., Megatron-LM (arXiv:1909.08053): two all-reduces of the hidden
  states each way.
- with sequences split: Korthikanti et al. (arXiv:2205.05198): an all-gather and a reduce-scatter in
  the place of each all-reduce. The paper gathers the inputs of products again in the backward; a
  plan that keeps them does not, and takes fewer bytes.

- context parallel: Grattafiori et al., Llama 3 (arXiv:2407.21783): keys and values are gathered,
  and their gradients reduce-scattered; those of parameters are all-reduced.

A collective over n ranks brings a rank the share (n - 1) / n of the whole value, an all-reduce
twice that (Thakur et al., 2005).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.hir.traffic import received as arriving

F = mf.ops
#: Bytes of a number in bf16.
BYTES = 2


@dataclass(frozen=True)
class Model:
    """The extents of a layer: features, heads of queries and keys, their features, hidden units."""

    width: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    length: int = 8192

    @property
    def parameters(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Name -> shape, and the dim that tensor parallelism splits."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        return {
            "norm_1": ((self.width,), None),
            "q": ((q, self.width), 0),
            "k": ((kv, self.width), 0),
            "v": ((kv, self.width), 0),
            "o": ((self.width, q), 1),
            "norm_2": ((self.width,), None),
            "gate": ((self.hidden, self.width), 0),
            "up": ((self.hidden, self.width), 0),
            "down": ((self.width, self.hidden), 1),
        }

    def bytes(self, tp: int) -> float:
        """The bytes of the parameters that a rank has where tensor parallelism splits them."""
        total = 0.0
        for shape, split in self.parameters.values():
            size = torch.Size(shape).numel() * BYTES
            total += size if split is None else size / tp
        return total


MODELS = {
    "Llama-3 8B": Model(4096, 32, 8, 128, 14336),
    "Llama-3 70B": Model(8192, 64, 8, 128, 28672),
    "Llama-3 405B": Model(16384, 128, 8, 128, 53248),
}


@dataclass(frozen=True)
class Style:
    """How a layer is laid out.

    Attributes:
        axes: the axes of the mesh that it uses, outermost first.
        batch: the axes that split the batch.
        received: model, axis -> ranks -> the bytes that arrive at a rank along each axis by hand.
        posts: the posts per layer along each axis, by hand without buckets.
        sequence: the axes that split positions between layers.
        gather: the axes along which parameters are gathered before they are read.
    """

    axes: tuple[str, ...]
    batch: tuple[str, ...]
    received: Callable[[Model, Mapping[str, int]], dict[str, float]]
    posts: Mapping[str, int]
    sequence: tuple[str, ...] = ()
    gather: tuple[str, ...] = ()


def share(n: int) -> float:
    """The share of a whole value that a collective over n ranks brings each of them."""
    return (n - 1) / n


def _data(axis: str) -> Callable[[Model, Mapping[str, int]], dict[str, float]]:
    return lambda m, n: {axis: 2 * share(n[axis]) * m.bytes(n.get("tp", 1))}


def _sharded(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    return {"fsdp": 3 * share(n["fsdp"]) * m.bytes(n.get("tp", 1))}


def _hybrid(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    return {**_sharded(m, n), "dp": 2 * share(n["dp"]) * m.bytes(n.get("tp", 1)) / n["fsdp"]}


def _tensor(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    """A row of the batch is on a rank."""
    return {"tp": 4 * 2 * share(n["tp"]) * m.length * m.width * BYTES}


def _sequence(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    """Four gathers and four scatters, and the gradients of the factors of the norms."""
    norms = 2 * 2 * share(n["tp"]) * m.width * BYTES
    return {"tp": 8 * share(n["tp"]) * m.length * m.width * BYTES + norms}


def _context(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    """Gathers and scatters of keys and values, and gradients of parameters."""
    keys_and_values = 2 * m.kv_heads * m.head * m.length * BYTES
    return {"cp": 2 * share(n["cp"]) * (m.bytes(1) + keys_and_values)}


def _both(*parts: Callable[[Model, Mapping[str, int]], dict[str, float]]) -> Any:
    return lambda m, n: {axis: size for part in parts for axis, size in part(m, n).items()}


#: How many parameters a layer has; each has posts of its own.
_EACH = 9

STYLES: dict[str, Style] = {
    "ddp": Style(("dp",), ("dp",), _data("dp"), {"dp": _EACH}),
    "fsdp": Style(("fsdp",), ("fsdp",), _sharded, {"fsdp": 3 * _EACH}, gather=("fsdp",)),
    "hsdp": Style(("dp", "fsdp"), ("dp", "fsdp"), _hybrid,
                  {"dp": _EACH, "fsdp": 3 * _EACH}, gather=("fsdp",)),
    "tp": Style(("tp",), (), _tensor, {"tp": 4}),
    "tp + sequence": Style(("tp",), (), _sequence, {"tp": 10}, sequence=("tp",)),
    "fsdp x tp": Style(("fsdp", "tp"), ("fsdp",), _both(_sharded, _tensor),
                       {"fsdp": 3 * _EACH, "tp": 4}, gather=("fsdp",)),
    "fsdp x tp + sequence": Style(("fsdp", "tp"), ("fsdp",), _both(_sharded, _sequence),
                                  {"fsdp": 3 * _EACH, "tp": 10}, ("tp",), ("fsdp",)),
    "hsdp x tp": Style(("dp", "fsdp", "tp"), ("dp", "fsdp"), _both(_hybrid, _tensor),
                       {"dp": _EACH, "fsdp": 3 * _EACH, "tp": 4}, gather=("fsdp",)),
    "dp x tp + sequence": Style(("dp", "tp"), ("dp",), _both(_data("dp"), _sequence),
                                {"dp": _EACH, "tp": 10}, sequence=("tp",)),
    "cp": Style(("cp",), (), _context, {"cp": _EACH + 4}, sequence=("cp",)),
}  # fmt: skip


def layer(
    model: Model, style: Style, mesh: DeviceMesh, dtype: torch.dtype = torch.bfloat16
) -> mf.FusionDefinition:
    """Define a layer's forward and backward; each rank of the batch's axes has one row."""
    rows = 1
    for axis in style.batch:
        rows *= mesh.axis_size(axis)
    between = {a: Shard(0) for a in style.batch} | {a: Shard(1) for a in style.sequence}
    shape = [rows, model.length, model.width]
    with mf.FusionDefinition("layer") as fd:
        x = fd.define_tensor(shape, dtype, mesh, between, name="x")
        dy = fd.define_tensor(shape, dtype, mesh, between, name="dy")
        parameters, read = list[Any](), dict[str, Any]()
        for name, (extents, split) in model.parameters.items():
            inside = {"tp": Shard(split)} if split is not None and "tp" in mesh.axes else {}
            outside = {a: Shard(0) for a in style.gather}
            order = {0: ("tp", *style.gather)} if split == 0 and inside and outside else {}
            layout = mf.Layout(mesh, {**outside, **inside}, order)
            w = fd.define_tensor(extents, dtype, layout, name=name)
            parameters.append(w)
            with mf.recompute():
                read[name] = F.set(w).on(mesh, inside) if outside else w
        y = F.set(computed(model, x, read)).on(mesh, between)
        grads = mf.grad((y * dy).sum(), [x, *parameters])
        for value in (y, *grads):
            fd.add_output(value)
    return fd


def computed(model: Model, x: Any, w: Mapping[str, Any]) -> Any:
    """The result of a layer, without rotations, which communicate nothing."""
    rows, length = x.shape[:2]
    normed = F.rms_norm(x, [model.width], w["norm_1"])
    q, k, v = (
        F.linear(normed, w[n]).reshape(rows, length, -1, model.head).permute(0, 2, 1, 3)
        for n in "qkv"
    )
    k, v = (y.repeat_interleave(model.heads // model.kv_heads, 1) for y in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    h = x + F.linear(y.permute(0, 2, 1, 3).reshape(rows, length, -1), w["o"])
    normed = F.rms_norm(h, [model.width], w["norm_2"])
    return h + F.linear(F.silu(F.linear(normed, w["gate"])) * F.linear(normed, w["up"]), w["down"])


@dataclass(frozen=True)
class Row:
    """A row of the table: bytes and posts along an axis, and those of a plan by hand."""

    axis: str
    received: int
    by_hand: float
    posts: int
    posts_by_hand: int


def _axes(communication: Any) -> tuple[str, ...]:
    """The axes of a communication, of an exchange those along which a layout changes."""
    before, after = communication.source, communication.destination
    changed = (a for a in before.mesh.axes if before.placement(a) != after.placement(a))
    return communication.axes or tuple(changed)


def rows(model: Model, style: Style, mesh: DeviceMesh) -> list[Row]:
    """Return a row of the table for each axis."""
    program = mf.compile(layer(model, style, mesh), mf.Options(overlap="never", context="gather"))
    by_hand = style.received(model, {a: mesh.axis_size(a) for a in mesh.axes})
    received, posts = dict.fromkeys(by_hand, 0), dict.fromkeys(by_hand, 0)
    for instruction, size in arriving(program.host, 0):
        for axis in _axes(instruction.comm):
            received[axis] += size
            posts[axis] += 1
    return [Row(a, received[a], by_hand[a], posts[a], style.posts[a]) for a in by_hand]


#: The sizes of axes in the table of docs/resharding.md.
SHOWN = {"dp": 4, "fsdp": 8, "tp": 8, "cp": 8}


def table() -> Iterator[str]:
    """Yield the lines of the table of docs/resharding.md: MiB and posts of a layer."""
    yield f"| style | axis | {' | '.join(MODELS)} | posts |"
    yield "|---" * (len(MODELS) + 3) + "|"
    for name, style in STYLES.items():
        mesh = DeviceMesh.arange(**{a: SHOWN[a] for a in style.axes})
        for each in zip(*(rows(model, style, mesh) for model in MODELS.values()), strict=True):
            cells = [f"{x.received / 2**20:,.0f} ({x.by_hand / 2**20:,.0f})" for x in each]
            (posts,) = {f"{x.posts} ({x.posts_by_hand})" for x in each}
            yield f"| {name} | {each[0].axis} | {' | '.join(cells)} | {posts} |"
