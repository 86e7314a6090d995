"""Layers of transformers in the styles that people write by hand, and the bytes that those need.

Each style states the layouts of parameters, of a layer's input and of its result; all other layouts
are inferred. Beside it stands the number of bytes that arrive at a rank along each axis in a
forward and a backward, as the source of the style gives it:

- data parallel: Li et al., PyTorch Distributed (arXiv:2006.15704): gradients are all-reduced.
- fully sharded: Zhao et al., PyTorch FSDP (arXiv:2304.11277): parameters are gathered in the
  forward and again in the backward, gradients are reduce-scattered; hybrid: and all-reduced.
  `torch.distributed.fsdp.fully_shard` cuts dim 0 of each parameter, or of the part that tensor
  parallelism left, by `torch.chunk`, and pads what it gathers and scatters to equal chunks.
- tensor parallel: Shoeybi et al., Megatron-LM (arXiv:1909.08053): two all-reduces of the hidden
  states each way.
- with sequences split: Korthikanti et al. (arXiv:2205.05198): an all-gather and a reduce-scatter in
  the place of each all-reduce. The paper gathers the inputs of products again in the backward; a
  plan that keeps them does not, and takes fewer bytes.

- pipelines: Narayanan et al. (arXiv:2104.04473): a stage receives the hidden states of the one
  before it, and their gradient from the one behind it.
- experts: Lepikhin et al., GShard (arXiv:2006.16668): each token goes to its experts and back by
  all-to-alls, and so do the gradients; all other parameters are data parallel. Counts of rows go
  ahead in 64 bits, by an all-to-all (torchtitan) or a gather along `ep` (Megatron-LM). Where
  matrices of experts are split inside, gradients of the weights of tokens are all-reduced, too.
- context parallel: Grattafiori et al., Llama 3 (arXiv:2407.21783): keys and values are gathered,
  and their gradients reduce-scattered; those of parameters are all-reduced.

A collective over n ranks brings a rank the share (n - 1) / n of the whole value, an all-reduce
twice that (Thakur et al., 2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
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
    """The extents of a layer: features, heads of queries and keys, their features, hidden units.

    With experts, these are hidden units of one of them, and `chosen` of them compute a token;
    queries and keys then have norms, as in Qwen3. Attention and MLP may be beside each other, as in
    GPT-J: both read one norm. With biases, norms have addends, too, and subtract means.
    """

    width: int
    heads: int
    kv_heads: int
    head: int
    hidden: int
    experts: int = 0
    chosen: int = 0
    length: int = 8192
    beside: bool = False
    biases: bool = False

    @property
    def parameters(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Name -> shape, and the dim that tensor parallelism splits."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        e = self.experts
        experts: dict[str, tuple[tuple[int, ...], int | None]] = {
            "q_norm": ((self.head,), None),
            "k_norm": ((self.head,), None),
            "router": ((e, self.width), None),
            "gate": ((e, self.width, self.hidden), 2),
            "up": ((e, self.width, self.hidden), 2),
            "down": ((e, self.hidden, self.width), 1),
        }
        plain: dict[str, tuple[tuple[int, ...], int | None]] = {
            "norm_1": ((self.width,), None),
            "q": ((q, self.width), 0),
            "k": ((kv, self.width), 0),
            "v": ((kv, self.width), 0),
            "o": ((self.width, q), 1),
            "norm_2": ((self.width,), None),
            "gate": ((self.hidden, self.width), 0),
            "up": ((self.hidden, self.width), 0),
            "down": ((self.width, self.hidden), 1),
            **(experts if e else {}),
        }
        if self.beside:
            del plain["norm_2"]
        biases = {
            f"{n}_b": (shape[:1], None if split else split) for n, (shape, split) in plain.items()
        }
        return {**plain, **(biases if self.biases else {})}

    @property
    def halves(self) -> int:
        """How often hidden states are gathered, and results are reduced, in a forward."""
        return 1 if self.beside else 2

    @property
    def vectors(self) -> int:
        """The parameters whose gradients ranks with parts of the positions add up."""
        return self.halves * (2 if self.biases else 1) + (2 if self.biases else 0)

    def padded(self, tp: int, parts: int) -> int:
        """The number of parameters of which over 1/64 would be padding of equal parts."""
        rows = [n // tp if split == 0 else n for (n, *_), split in self.parameters.values()]
        return sum(-n % parts * 64 > n for n in rows)

    def bytes(self, tp: int = 1, but: Collection[str] = (), parts: int = 1) -> float:
        """The bytes of the parameters that a rank has where tensor parallelism splits them.

        Args:
            tp: the ranks of tensor parallelism.
            but: parameters that are left out.
            parts: to how many equal parts the rows that are left are padded: FSDP's alone.
        """
        total = 0.0
        for name, ((rows, *others), split) in self.parameters.items():
            rows = rows // tp if split == 0 else rows
            size = math.prod(others) * BYTES * (name not in but) * parts * math.ceil(rows / parts)
            total += size / tp if split else size
        return total


MODELS = {
    "Llama-3 8B": Model(4096, 32, 8, 128, 14336),
    "Llama-3 70B": Model(8192, 64, 8, 128, 28672),
    "Llama-3 405B": Model(16384, 128, 8, 128, 53248),
    "Qwen3-30B-A3B": Model(2048, 32, 4, 128, 768, experts=128, chosen=8),
}

#: Models beside those of the table: with few heads of keys, small experts, or 40 of them, biases,
#: attention and MLP beside each other.
OTHERS = {
    "Gemma-3 1B": Model(1152, 4, 1, 256, 6912),
    "Gemma-2 2B": Model(2304, 8, 4, 256, 9216),
    "Qwen2.5 0.5B": Model(896, 14, 2, 64, 4864),
    "Phi-4": Model(5120, 40, 10, 128, 17920),
    "OLMoE": Model(2048, 16, 16, 128, 1024, experts=64, chosen=8),
    "Granite-3.0 3B": Model(1536, 24, 8, 64, 512, experts=40, chosen=8),
    "StarCoder2 7B": Model(4608, 36, 4, 128, 18432, biases=True),
    "GPT-J 6B": Model(4096, 16, 16, 256, 16384, beside=True, biases=True),
    "Command R": Model(8192, 64, 64, 128, 22528, beside=True),
}

#: The parameters of experts, which expert parallelism splits.
_EXPERTS = ("gate", "up", "down")


@dataclass(frozen=True)
class Style:
    """How a layer is laid out.

    Attributes:
        axes: the axes of the mesh that it uses, outermost first.
        batch: the axes that split the batch.
        received: model, axis -> ranks -> the bytes that arrive at a rank along each axis by hand.
        posts: the posts along each axis by hand without buckets: for each parameter, for each
            layer, and for each layer with experts beside these.
        sequence: the axes that split positions between layers.
        gather: the axes along which parameters are gathered before they are read.
        experts: the axes that split experts.
    """

    axes: tuple[str, ...]
    batch: tuple[str, ...]
    received: Callable[[Model, Mapping[str, int]], dict[str, float]]
    posts: Mapping[str, tuple[int, int, int]]
    sequence: tuple[str, ...] = ()
    gather: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()

    def posts_of(self, model: Model, axis: str, sizes: Mapping[str, int]) -> int:
        """The posts of a layer along an axis by hand, and one more for each gradient of few rows.

        Where these would be padded, and other axes are beside, they are scattered along another
        dim, and exchanged then: fewer bytes in two posts.
        """
        ranks, (each, layer, experts) = sizes[axis], self.posts[axis]
        total = each * len(model.parameters) + layer + (experts if model.experts else 0)
        if axis == "tp":
            total -= layer - self._of_halves(model)
        if axis in self.gather and len(sizes) > 1:
            total += model.padded(sizes.get("tp", 1), ranks)
        if axis == "tp" and model.heads % ranks:  # these, and weights where they are fewer bytes
            total += 6
        elif axis == "tp" and model.kv_heads % ranks:  # of keys, values, and their gradients
            total += 4 - (model.experts > 0)
        return total

    def _of_halves(self, model: Model) -> int:
        """The posts of a layer along tp for hidden states, and for gradients of vectors."""
        sequence = "tp" in self.sequence
        return 4 * model.halves + model.vectors if sequence else 2 * model.halves


def share(n: int) -> float:
    """The share of a whole value that a collective over n ranks brings each of them."""
    return (n - 1) / n


def _data(axis: str) -> Callable[[Model, Mapping[str, int]], dict[str, float]]:
    return lambda m, n: {axis: 2 * share(n[axis]) * m.bytes(n.get("tp", 1))}


def _sharded(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    return {"fsdp": 3 * share(n["fsdp"]) * m.bytes(n.get("tp", 1), parts=n["fsdp"])}


def _hybrid(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    part = m.bytes(n.get("tp", 1), parts=n["fsdp"]) / n["fsdp"]
    return {**_sharded(m, n), "dp": 2 * share(n["dp"]) * part}


def _tensor(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    """A row of the batch is on a rank."""
    reductions = 2 * m.halves
    return {"tp": reductions * 2 * share(n["tp"]) * m.length * m.width * BYTES + _of_heads(m, n)}


def _of_heads(m: Model, n: Mapping[str, int]) -> float:
    """What heads, and experts, need beside hidden states.

    With fewer heads of keys than ranks, keys and values are gathered, and gradients are scattered,
    or all-reduced where a norm reads whole heads. Norms of heads, and weights of tokens, are small.
    Heads that do not divide among ranks, which Megatron-LM refuses, are whole on each rank:
    queries, keys, values, and the gradient of what they yield, are gathered.
    """
    is_few, numbers = bool(m.kv_heads % n["tp"]), 0
    if m.heads % n["tp"]:
        numbers += 2 * (m.heads + m.kv_heads) * m.head * m.length
    elif is_few:
        numbers += (5 if m.experts else 4) * m.kv_heads * m.head * m.length
    if m.experts:
        numbers += 2 * (m.head * (1 if is_few else 2) + m.chosen * m.length)
    return share(n["tp"]) * numbers * BYTES


def _sequence(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    """Four gathers and four scatters, and the gradients of the factors of the norms."""
    vectors = m.vectors * 2 * share(n["tp"]) * m.width * BYTES
    states = 4 * m.halves * share(n["tp"]) * m.length * m.width * BYTES
    return {"tp": states + vectors + _of_heads(m, n)}


def _context(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    """Gathers and scatters of keys and values, and gradients of parameters."""
    keys_and_values = 2 * m.kv_heads * m.head * m.length * BYTES
    return {"cp": 2 * share(n["cp"]) * (m.bytes(1) + keys_and_values)}


def _both(*parts: Callable[[Model, Mapping[str, int]], dict[str, float]]) -> Any:
    return lambda m, n: {axis: size for part in parts for axis, size in part(m, n).items()}


def _stages(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    """The hidden states of a row, or their gradient."""
    return {"pp": m.length * m.width * BYTES}


def _parts_of_stages(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    """The same where positions are split between layers."""
    return {"pp": m.length * m.width * BYTES / n["tp"]}


def _experts(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    """Rows to experts and back, each way, their i64 counts, and gradients.

    Those of experts are all-reduced along axes but ep, those of other parameters along all.
    """
    rows = 4 * m.length * m.chosen * m.width * BYTES + 8 * m.experts
    received = {"ep": share(n["ep"]) * rows}
    others, outside = m.bytes(but=_EXPERTS), {a: k for a, k in n.items() if a != "ep"}
    for size, axes in ((others, n), ((m.bytes() - others) / n["ep"], outside)):
        for axis, part in _parts(axes).items():
            brought = part * 2 * share(math.prod(axes.values())) * size
            received[axis] = received.get(axis, 0) + brought
    return received


def _parts(sizes: Mapping[str, int]) -> dict[str, float]:
    """The part of what a collective along several axes, outermost first, brings along each.

    Ranks that differ in the outermost axis bring all that ranks of their place have together.
    """
    extents, total = [*sizes.values()], math.prod(sizes.values()) - 1
    inside = (math.prod(extents[n + 1 :]) for n in range(len(extents)))
    return {a: (k - 1) * n / max(total, 1) for (a, k), n in zip(sizes.items(), inside, strict=True)}


#: Posts of parameters. Where tp holds copies, each of them may reduce a share of a router's
#: gradient along dp or fsdp, and one post along tp brings the shares together.
_EACH, _SHARDED = (1, 0, 0), (3, 0, 0)

STYLES: dict[str, Style] = {
    "ddp": Style(("dp",), ("dp",), _data("dp"), {"dp": _EACH}),
    "fsdp": Style(("fsdp",), ("fsdp",), _sharded, {"fsdp": _SHARDED}, gather=("fsdp",)),
    "hsdp": Style(("dp", "fsdp"), ("dp", "fsdp"), _hybrid, {"dp": _EACH, "fsdp": _SHARDED},
                  gather=("fsdp",)),
    "tp": Style(("tp",), (), _tensor, {"tp": (0, 4, 3)}),
    # Routers read split tokens: choices and weights are gathered, the router's gradient is reduced.
    "tp + sequence": Style(("tp",), (), _sequence, {"tp": (0, 10, 6)}, sequence=("tp",)),
    "fsdp x tp": Style(("fsdp", "tp"), ("fsdp",), _both(_sharded, _tensor),
                       {"fsdp": _SHARDED, "tp": (0, 4, 4)}, gather=("fsdp",)),
    "fsdp x tp + sequence": Style(("fsdp", "tp"), ("fsdp",), _both(_sharded, _sequence),
                                  {"fsdp": _SHARDED, "tp": (0, 10, 4)}, ("tp",), ("fsdp",)),
    "hsdp x tp": Style(("dp", "fsdp", "tp"), ("dp", "fsdp"), _both(_hybrid, _tensor),
                       {"dp": _EACH, "fsdp": _SHARDED, "tp": (0, 4, 4)}, gather=("fsdp",)),
    "dp x tp + sequence": Style(("dp", "tp"), ("dp",), _both(_data("dp"), _sequence),
                                {"dp": _EACH, "tp": (0, 10, 4)}, sequence=("tp",)),
    "cp": Style(("cp",), (), _context, {"cp": (1, 4, 0)}, sequence=("cp",)),
    "pp x fsdp x tp": Style(("pp", "fsdp", "tp"), ("fsdp",),
                            _both(_stages, _sharded, _tensor),
                            {"pp": (0, 2, 0), "fsdp": _SHARDED, "tp": (0, 4, 4)}, gather=("fsdp",)),
    "pp x fsdp x tp + sequence": Style(("pp", "fsdp", "tp"), ("fsdp",),
                            _both(_parts_of_stages, _sharded, _sequence),
                            {"pp": (0, 2, 0), "fsdp": _SHARDED, "tp": (0, 10, 4)},
                            ("tp",), ("fsdp",)),
    "ep": Style(("ep",), ("ep",), _experts, {"ep": (1, 0, 2)}, experts=("ep",)),
    "dp x ep": Style(("dp", "ep"), ("dp", "ep"), _experts, {"dp": _EACH, "ep": (1, 0, 2)},
                     experts=("ep",)),
}  # fmt: skip


def models(style: Style, of: Mapping[str, Model] = MODELS) -> dict[str, Model]:
    """The models whose layers a style is for."""
    return {name: m for name, m in of.items() if m.experts or not style.experts}


def layer(
    model: Model, style: Style, mesh: DeviceMesh, dtype: torch.dtype = torch.bfloat16
) -> mf.FusionDefinition:
    """Define a layer's forward and backward; each rank of the batch's axes has one row.

    A pipeline has a layer on each of its meshes.
    """
    first, *_ = meshes = stages(mesh)
    rows = math.prod(first.axis_size(axis) for axis in style.batch)
    between = {a: Shard(0) for a in style.batch} | {a: Shard(1) for a in style.sequence}
    shape = [rows, model.length, model.width]
    parts = math.prod(first.axis_size(a) for a in (*style.batch, *style.sequence) if a != "tp")
    with mf.FusionDefinition("layer") as fd:
        x = fd.define_tensor(shape, dtype, first, between, name="x")
        dy = fd.define_tensor(shape, dtype, meshes[-1], between, name="dy")
        y, parameters = x, list[Any]()
        for on in meshes:
            y = F.set(y).on(on, between) if on != first else y
            some, read = _parameters(fd, model, style, on, dtype)
            there = {a: Shard(1) if a in style.experts else Shard(0) for a in style.batch}
            experts = mf.Layout(on, there) if style.experts else None
            y = F.set(computed(model, y, read, parts, experts)).on(on, between)
            parameters += some
        grads = mf.grad((y * dy).sum(), [x, *parameters])
        for value in (y, *grads):
            fd.add_output(value)
    return fd


def stages(mesh: DeviceMesh) -> list[DeviceMesh]:
    """The meshes of a pipeline's stages; of a mesh without an axis `pp`, itself."""
    if "pp" not in mesh.axes:
        return [mesh]
    ranks = torch.tensor(mesh.ranks).reshape(*(mesh.axis_size(a) for a in mesh.axes))
    axes = tuple(a for a in mesh.axes if a != "pp")
    return [DeviceMesh(of.tolist(), axes) for of in ranks.unbind(mesh.axes.index("pp"))]


def _parameters(
    fd: mf.FusionDefinition, model: Model, style: Style, mesh: DeviceMesh, dtype: torch.dtype
) -> tuple[list[Any], dict[str, Any]]:
    """The parameters of a layer as inputs, and as the layer reads them."""
    parameters, read = list[Any](), dict[str, Any]()
    for name, (extents, split) in model.parameters.items():
        inside = {"tp": Shard(split)} if split is not None and "tp" in mesh.axes else {}
        outside = {a: Shard(0) for a in style.gather}
        experts = {a: Shard(0) for a in style.experts} if name in _EXPERTS else {}
        order = {0: ("tp", *style.gather)} if split == 0 and inside and outside else {}
        layout = mf.Layout(mesh, {**outside, **inside, **experts}, order)
        w = fd.define_tensor(extents, dtype, layout)
        parameters.append(w)
        with mf.recompute():
            read[name] = F.set(w).on(mesh, inside) if outside else w
    return parameters, read


def computed(
    model: Model, x: Any, w: Mapping[str, Any], parts: int = 1, experts: mf.Layout | None = None
) -> Any:
    """The result of a layer, without rotations, which communicate nothing.

    Args:
        model: its extents.
        x: hidden states.
        w: parameters.
        parts: into how many the axes cut tokens.
        experts: where rows of experts are.
    """
    rows, length = x.shape[:2]
    normed = _normed(model, x, w, "norm_1")
    heads = (_product(normed, w, n).reshape(rows, length, -1, model.head) for n in "qkv")
    q, k, v = (
        (F.rms_norm(y, [model.head], w[f"{n}_norm"]) if f"{n}_norm" in w else y).permute(0, 2, 1, 3)
        for n, y in zip("qkv", heads, strict=True)
    )
    k, v = (y.repeat_interleave(model.heads // model.kv_heads, 1) for y in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    h = x + _product(y.permute(0, 2, 1, 3).reshape(rows, length, -1), w, "o")
    normed = normed if model.beside else _normed(model, h, w, "norm_2")
    if model.experts:
        return h + _by_experts(model, normed, w, parts, experts).reshape(*h.shape)
    hidden = F.silu(_product(normed, w, "gate")) * _product(normed, w, "up")
    return h + _product(hidden, w, "down")


def _normed(model: Model, x: Any, w: Mapping[str, Any], name: str) -> Any:
    if model.biases:
        return F.layer_norm(x, [model.width], w[name], w[f"{name}_b"])
    return F.rms_norm(x, [model.width], w[name])


def _product(x: Any, w: Mapping[str, Any], name: str) -> Any:
    return F.linear(x, w[name], w.get(f"{name}_b"))


def _by_experts(
    model: Model, x: Any, w: Mapping[str, Any], parts: int, experts: mf.Layout | None
) -> Any:
    """What the chosen experts of each token compute, rows brought to where experts are."""
    tokens = x.reshape(-1, model.width)
    weights, ids = F.softmax(F.linear(tokens, w["router"]), -1).topk(model.chosen, -1)
    n = F.counts(ids, experts=model.experts, parts=parts)
    grouped = F.group_rows(tokens, ids, n)
    grouped = grouped if experts is None else F.set(grouped).on(experts)
    hidden = F.silu(F.grouped_mm(grouped, w["gate"])) * F.grouped_mm(grouped, w["up"])
    y = F.grouped_mm(hidden, w["down"])
    if experts is not None:
        y = F.set(y).on(experts.mesh, {a: Shard(0) for _, axes in experts.splits for a in axes})
    return F.ungroup_rows(y, ids, weights)


@dataclass(frozen=True)
class Row:
    """A row of the table: bytes and posts along an axis, and those of a plan by hand."""

    axis: str
    received: float
    by_hand: float
    posts: int
    posts_by_hand: int


def _axes(communication: Any) -> tuple[str, ...]:
    """The axes of a communication, of an exchange those along which a layout changes."""
    before, after = communication.source, communication.destination
    if before.mesh != after.mesh:
        return ("pp",)
    changed = (a for a in before.mesh.axes if before.placement(a) != after.placement(a))
    return communication.axes or tuple(changed)


def rows(model: Model, style: Style, mesh: DeviceMesh) -> list[Row]:
    """Return a row of the table for each axis."""
    program = mf.compile(layer(model, style, mesh), mf.Options(overlap="never", context="gather"))
    sizes = {a: mesh.axis_size(a) for a in mesh.axes}
    by_hand = style.received(model, sizes)
    received, posts = dict.fromkeys(by_hand, 0.0), dict.fromkeys(by_hand, 0)
    for instruction, arrived in arriving(program.host, 0):
        for axis, part in _parts({a: sizes[a] for a in _axes(instruction.comm)}).items():
            received[axis] += part * arrived
            posts[axis] += 1
    return [
        Row(a, received[a], by_hand[a], posts[a], style.posts_of(model, a, sizes)) for a in by_hand
    ]


#: The sizes of axes in the table of docs/resharding.md.
SHOWN = {"dp": 4, "fsdp": 8, "tp": 8, "cp": 8, "pp": 2, "ep": 8}


def table(style: str) -> Iterator[str]:
    """Yield the lines of a style in the table of docs/resharding.md: MiB and posts of a layer."""
    mesh = DeviceMesh.arange(**{a: SHOWN[a] for a in STYLES[style].axes})
    of = {n: rows(model, STYLES[style], mesh) for n, model in models(STYLES[style]).items()}
    for n, axis in enumerate(next(iter(of.values()))):
        each = {model: row[n] for model, row in of.items()}
        cells = [_cell(each[m]) if m in each else "" for m in MODELS]
        posts = dict.fromkeys(f"{x.posts} ({x.posts_by_hand})" for x in each.values())
        yield f"| {style} | {axis.axis} | {' | '.join(cells)} | {', '.join(posts)} |"


def _cell(row: Row) -> str:
    return f"{row.received / 2**20:,.0f} ({row.by_hand / 2**20:,.0f})"
