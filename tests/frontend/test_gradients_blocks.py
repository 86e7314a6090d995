"""Gradients of blocks of known models on each way to spread them, against torch in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

F = torch.nn.functional
FOUR, DATA, GRID = DeviceMesh.arange(tp=4), DeviceMesh.arange(dp=4), DeviceMesh.arange(dp=2, tp=2)
S0, S1 = Shard(0), Shard(1)

#: What becomes of a value that a layer adds to what it has: it may be placed.
Place = Callable[[Any], Any]
Body = Callable[[dict[str, Any], Any, Place], Any]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    """Extents of a block."""

    batch: int = 4
    length: int = 8
    heads: int = 4
    groups: int = 4
    head: int = 6
    hidden: int = 40

    @property
    def width(self) -> int:
        return self.heads * self.head


#: 5 sequences, lengths and widths that four ranks hold unevenly, a rank that holds no head.
UNEVEN = Sizes(batch=5, length=7, heads=3, groups=3, head=2, hidden=10)


def heads(of: Sizes, x: Any, count: int) -> Any:
    return x.view(of.batch, of.length, count, of.head).transpose(1, 2)


def joined(of: Sizes, x: Any) -> Any:
    return x.transpose(1, 2).reshape(of.batch, of.length, of.width)


def biased(name: str, inner: int, outer: int) -> Shapes:
    return {f"w{name}": (outer, inner), f"b{name}": (outer,)}


def encoder_shapes(of: Sizes) -> Shapes:
    w, h = of.width, of.hidden
    norms = dict.fromkeys(("g1", "n1", "g2", "n2"), (w,))
    attention = {k: v for name in "qkvo" for k, v in biased(name, w, w).items()}
    return {**attention, **biased("1", w, h), **biased("2", h, w), **norms}


def attended(of: Sizes, p: dict[str, Any], x: Any, **how: Any) -> Any:
    q, k, v = (heads(of, F.linear(x, p[f"w{n}"], p[f"b{n}"]), of.heads) for n in "qkv")
    found = F.scaled_dot_product_attention(q, k, v, **how)
    return F.linear(joined(of, found), p["wo"], p["bo"])


def minilm(of: Sizes) -> Body:
    """As BERT: norms behind what is added, attention with a mask that is computed."""

    def body(p: dict[str, Any], x: Any, place: Place) -> Any:
        mask = (x[:, :, 0] > -5.0).view(of.batch, 1, 1, of.length)
        x = x + place(attended(of, p, x, attn_mask=mask))
        x = F.layer_norm(x, (of.width,), p["g1"], p["n1"])
        h = F.gelu(F.linear(x, p["w1"], p["b1"]))
        x = x + place(F.linear(h, p["w2"], p["b2"]))
        return F.layer_norm(x, (of.width,), p["g2"], p["n2"])

    return body


def pre_norm(of: Sizes, is_causal: bool, approximate: str) -> Body:
    def body(p: dict[str, Any], x: Any, place: Place) -> Any:
        h = F.layer_norm(x, (of.width,), p["g1"], p["n1"])
        x = x + place(attended(of, p, h, is_causal=is_causal))
        h = F.layer_norm(x, (of.width,), p["g2"], p["n2"])
        h = F.gelu(F.linear(h, p["w1"], p["b1"]), approximate=approximate)
        return x + place(F.linear(h, p["w2"], p["b2"]))

    return body


def gpt2(of: Sizes) -> Body:
    return pre_norm(of, True, "tanh")


def vit(of: Sizes) -> Body:
    return pre_norm(of, False, "none")


def llama_shapes(of: Sizes) -> Shapes:
    w, h, kv = of.width, of.hidden, of.groups * of.head
    matrices = {"wq": (w, w), "wk": (kv, w), "wv": (kv, w), "wo": (w, w)}
    return {**matrices, "w1": (h, w), "w3": (h, w), "w2": (w, h), "g1": (w,), "g2": (w,)}


def rotated(x: Any, cos: Tensor, sin: Tensor) -> Any:
    """Rotary embedding, pairs of halves."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def llama(of: Sizes) -> Body:
    def body(p: dict[str, Any], x: Any, place: Place) -> Any:
        cos, sin = p["cos"], p["sin"]
        h = F.rms_norm(x, (of.width,), p["g1"], 1e-5)
        q = rotated(heads(of, F.linear(h, p["wq"]), of.heads), cos, sin)
        k = rotated(heads(of, F.linear(h, p["wk"]), of.groups), cos, sin)
        v = heads(of, F.linear(h, p["wv"]), of.groups)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + place(F.linear(joined(of, a), p["wo"]))
        h = F.rms_norm(x, (of.width,), p["g2"], 1e-5)
        h = F.silu(F.linear(h, p["w1"])) * F.linear(h, p["w3"])
        return x + place(F.linear(h, p["w2"]))

    return body


MODELS: dict[str, tuple[Callable[[Sizes], Body], Callable[[Sizes], Shapes]]] = {
    "minilm": (minilm, encoder_shapes),
    "gpt2": (gpt2, encoder_shapes),
    "vit": (vit, encoder_shapes),
    "llama": (llama, llama_shapes),
}

#: Parameters that tensor parallelism splits by what they yield; by what they take; vectors beside.
ROWS = ("wq", "wk", "wv", "w1", "w3", "bq", "bk", "bv", "b1")
COLUMNS = ("wo", "w2")


@dataclass(frozen=True)
class Style:
    mesh: DeviceMesh
    acts: dict[str, Shard]
    rows: dict[str, Shard]
    columns: dict[str, Shard]
    others: dict[str, Shard]
    #: how what a layer adds is placed
    sums: dict[str, Shard] | None = None
    #: the axis along which parameters are gathered
    gathers: str = ""
    is_recomputed: bool = False

    def of(self, name: str) -> dict[str, Shard]:
        return self.rows if name in ROWS else self.columns if name in COLUMNS else self.others


_ALONG_TP: dict[str, Any] = {"rows": {"tp": S0}, "columns": {"tp": S1}, "others": {}}
_DP, _BOTH = {"dp": S0}, {"dp": S0, "tp": S0}
_FSDP: dict[str, Any] = {"acts": _DP, "rows": _DP, "columns": _DP, "others": _DP, "gathers": "dp"}
STYLES = {
    "tp": Style(FOUR, {}, **_ALONG_TP),
    "sp": Style(FOUR, {"tp": S1}, **_ALONG_TP, sums={"tp": S1}),
    "dp": Style(DATA, _DP, {}, {}, {}),
    "dp x tp": Style(GRID, _DP, **_ALONG_TP),
    "dp x sp": Style(GRID, {**_DP, "tp": S1}, **_ALONG_TP, sums={**_DP, "tp": S1}),
    "fsdp": Style(DATA, **_FSDP),
    "fsdp, recomputed": Style(DATA, **_FSDP, is_recomputed=True),
    "fsdp x tp": Style(
        GRID, _DP, rows=_BOTH, columns={"dp": S0, "tp": S1}, others=_DP, sums=_DP, gathers="dp"
    ),
}


def gathered(style: Style, parameters: dict[str, Any]) -> dict[str, Any]:
    if not style.gathers:
        return parameters

    def whole() -> dict[str, Any]:
        return {
            name: mf.ops.set(w).on(
                style.mesh, {a: s for a, s in style.of(name).items() if a != style.gathers}
            )
            for name, w in parameters.items()
        }

    if style.is_recomputed:
        with mf.recompute():
            return whole()
    return whole()


def drawn(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """Numbers for values of these shapes; those of norms are about one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.4
        + (1.0 if name.startswith("g") else 0.0)
        for name, shape in shapes.items()
    }


def angles(of: Sizes) -> dict[str, Tensor]:
    places = torch.arange(of.length, dtype=torch.float64)
    speeds = 10.0 ** -torch.arange(of.head // 2, dtype=torch.float64)
    found = torch.outer(places, speeds)
    return {"cos": found.cos(), "sin": found.sin()}


def check(model: str, of: Sizes, style: Style, options: mf.Options | None = None) -> None:
    """Compare loss and gradients, of the input as well, with torch's on one device."""
    make, shapes_of = MODELS[model]
    body, shapes = make(of), shapes_of(of)
    data = drawn({"x": (of.batch, of.length, of.width), "t": (of.batch, of.length, of.width)}, 0)
    numbers, fixed = drawn(shapes, 1), angles(of)
    x, t = data["x"], data["t"]
    with mf.FusionDefinition(model) as fd:
        xs = [fd.define_tensor(v.shape, v.dtype, style.mesh, style.acts) for v in (x, t)]
        p = {
            n: fd.define_tensor(v.shape, v.dtype, style.mesh, style.of(n), name=n)
            for n, v in numbers.items()
        }
        rest = {n: fd.define_tensor(v.shape, v.dtype, style.mesh) for n, v in fixed.items()}
        place = (lambda y: y) if style.sums is None else (
            lambda y: fd.ops.set(y).on(style.mesh, style.sums)
        )  # fmt: skip
        loss = fd.ops.mse_loss(body({**gathered(style, p), **rest}, xs[0], place), xs[1])
        fd.add_output(loss)
        for g in mf.grad(loss, [xs[0], *p.values()]):
            fd.add_output(g)
    leaves = {n: v.clone().requires_grad_() for n, v in {"x": x, **numbers}.items()}
    expected = F.mse_loss(body({**leaves, **fixed}, leaves["x"], lambda y: y), t)
    gradients = torch.autograd.grad(expected, [*leaves.values()])
    given = [x, t, *numbers.values(), *fixed.values()]
    check_everywhere(mf.compile(fd, options), given, [expected.detach(), *gradients])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("model", MODELS)
def test_every_style(model: str, style: str) -> None:
    of = Sizes(groups=2 if model == "llama" and STYLES[style].mesh is not FOUR else 4)
    check(model, of, STYLES[style])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("model", MODELS)
def test_uneven_parts(model: str, style: str) -> None:
    check(model, UNEVEN, STYLES[style])


@pytest.mark.parametrize("model", MODELS)
def test_with_buckets(model: str) -> None:
    for style in ("dp x tp", "fsdp"):
        check(model, Sizes(), STYLES[style], mf.Options(bucket_bytes=4096))


@pytest.mark.parametrize("model", MODELS)
def test_with_prefetch(model: str) -> None:
    for style in ("fsdp, recomputed", "fsdp x tp"):
        check(model, Sizes(), STYLES[style], mf.Options(prefetch_bytes=8192))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", MODELS)
def test_drawn_layouts(model: str, seed: int) -> None:
    """Each group of parameters, inputs and sums lie as the draw says."""
    draw = random.Random(f"{model} {seed}")
    mesh = draw.choice([FOUR, GRID, DeviceMesh.arange(a=2, b=1, c=3)])

    def of(*dims: int) -> dict[str, Shard]:
        return {a: Shard(draw.choice(dims)) for a in mesh.axes if draw.random() < 0.6}

    some = of(0, 1, 2)
    style = Style(mesh, some, of(0), of(0, 1), of(0), draw.choice([None, of(0, 1, 2), some]))
    check(model, draw.choice([Sizes(), UNEVEN]), style)
