"""The bytes and posts of layers beside plans by hand, and decisions that they need."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hand_plans import (
    MODELS,
    OTHERS,
    STYLES,
    Model,
    Style,
    layer,
    models,
    rows,
    share,
    stages,
    table,
)
from torch.nn import functional

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard

#: Sizes of meshes, by axis; up to 1,024 ranks.
SIZES = [
    {"dp": 2, "fsdp": 2, "tp": 2, "cp": 4},
    {"dp": 4, "fsdp": 8, "tp": 8},
    {"dp": 2, "fsdp": 128, "tp": 4},
    {"dp": 8, "fsdp": 16, "tp": 8},
    {"dp": 8, "fsdp": 64, "tp": 2},
    {"dp": 128, "fsdp": 3, "tp": 2},
]

#: No plan may take more than this multiple of the bytes by hand.
MOST = 1.05


def _mesh(style: str, sizes: dict[str, int]) -> DeviceMesh:
    default = {"pp": 2, "dp": 2}
    return DeviceMesh.arange(**{a: sizes.get(a, default.get(a, 8)) for a in STYLES[style].axes})


ALL = MODELS | OTHERS


@pytest.mark.parametrize("length", [96, 1024, 8192, 131072])
@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "x".join(map(str, s.values())))
@pytest.mark.parametrize(
    ("style", "model"), [(name, m) for name, style in STYLES.items() for m in models(style, ALL)]
)
def test_a_layer_takes_no_more_bytes_than_by_hand(
    style: str, model: str, sizes: dict[str, int], length: int
) -> None:
    """Also where there are fewer rows, or heads, than ranks."""
    m, mesh = replace(ALL[model], length=length), _mesh(style, sizes)
    assert mesh.size <= 1024
    for row in rows(m, STYLES[style], mesh):
        assert row.received <= MOST * row.by_hand, row
        assert row.posts <= row.posts_by_hand, row


@pytest.mark.parametrize("style", STYLES)
def test_the_page_shows_what_programs_take(style: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "resharding.md").read_text(encoding="utf-8")
    assert f"| style | axis | {' | '.join(MODELS)} | posts |" in page
    assert "\n".join(table(style)) in page


def _printed(program: mf.Program, sizes: dict[str, int]) -> float:
    """The bytes that arrive at a rank by the text of a program, of parts that are equal."""
    total = 0.0
    for kind, dtype, shape, before, after, axes in POST.findall(str(program)):
        n = prod(sizes[a] for a in axes.split(","))
        whole = {"bf16": 2, "f32": 4}[dtype] * prod(map(int, shape.split(",")))
        part = {"allgather": after, "reducescatter": before, "allreduce": before}[kind]
        split = prod(sizes[a] for a in re.findall(r"(\w+)=S", part))
        total += (2 if kind == "allreduce" else 1) * share(n) * whole / split
    return total


POST = re.compile(
    r"post (\w+)\S*\(%\S+\) -> %\S+ (\w+)\[([\d,]+)\] "
    r"(?:of \S+ )?\((.*?)\) => \((.*?)\) axe?i?s=\[?([\w,]+)"
)


@pytest.mark.parametrize(
    "style", [name for name, s in STYLES.items() if "pp" not in s.axes and not s.experts]
)
def test_a_program_says_the_bytes_that_its_text_has(style: str) -> None:
    sizes = {"dp": 2, "fsdp": 4, "tp": 2, "cp": 4}
    mesh = _mesh(style, sizes)
    options = mf.Options(context="gather")
    program = mf.compile(layer(MODELS["Llama-3 8B"], STYLES[style], mesh), options)
    assert str(program).count("post ") == len(POST.findall(str(program)))
    for rank in (0, mesh.size - 1):
        assert program.bytes_received(rank) == _printed(program, sizes)


SMALL = Model(16, 4, 2, 4, 24, length=6)
SMALL_EXPERTS = replace(SMALL, experts=6, chosen=2)
SMALL_BESIDE = replace(SMALL, beside=True, biases=True)


def _whole(x: Any, w: dict[str, Any], model: Model) -> Any:
    """The layer on whole tensors, in torch."""
    n, length, _ = x.shape
    normed = _normed(x, w, "norm_1")
    q, k, v = (
        functional.linear(normed, w[name], w.get(f"{name}_b")).view(n, length, -1, model.head)
        for name in "qkv"
    )
    if model.experts:
        q, k = (
            functional.rms_norm(y, (model.head,), w[f"{name}_norm"])
            for name, y in (("q", q), ("k", k))
        )
    k, v = (y.repeat_interleave(model.heads // model.kv_heads, 2) for y in (k, v))
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = y.transpose(1, 2).reshape(n, length, -1)
    h = x + functional.linear(y, w["o"], w.get("o_b"))
    normed = normed if model.beside else _normed(h, w, "norm_2")
    if model.experts:
        return h + _by_experts(normed, w, model)
    gate, up = (functional.linear(normed, w[name], w.get(f"{name}_b")) for name in ("gate", "up"))
    return h + functional.linear(functional.silu(gate) * up, w["down"], w.get("down_b"))


def _normed(x: Any, w: dict[str, Any], name: str) -> Any:
    shape = x.shape[-1:]
    if f"{name}_b" in w:
        return functional.layer_norm(x, shape, w[name], w[f"{name}_b"])
    return functional.rms_norm(x, shape, w[name])


def _by_experts(x: Any, w: dict[str, Any], model: Model) -> Any:
    """All experts compute all tokens, and those that a token has not chosen weigh nothing."""
    weights, ids = (x @ w["router"].T).softmax(-1).topk(model.chosen, -1)
    of_each = torch.zeros(*x.shape[:-1], model.experts, dtype=x.dtype).scatter(-1, ids, weights)
    gate, up = (torch.einsum("btd,edh->bteh", x, w[name]) for name in ("gate", "up"))
    y = torch.einsum("bteh,ehd->bted", functional.silu(gate) * up, w["down"])
    return (y * of_each.unsqueeze(-1)).sum(2)


@pytest.mark.parametrize(
    ("style", "model"),
    [(name, m) for name, s in STYLES.items() for m in (SMALL, SMALL_EXPERTS, SMALL_BESIDE)
     if m.experts or not s.experts],
    ids=lambda x: x if isinstance(x, str) else f"experts={x.experts},beside={x.beside}",
)  # fmt: skip
def test_values_and_gradients_are_those_of_whole_tensors(style: str, model: Model) -> None:
    mesh = _mesh(style, {"dp": 2, "fsdp": 3, "tp": 2, "cp": 3, "ep": 3})
    program = mf.compile(layer(model, STYLES[style], mesh, torch.float64))
    n = prod(mesh.axis_size(a) for a in STYLES[style].batch)
    torch.manual_seed(n)
    x, dy = torch.randn(2, n, model.length, model.width, dtype=torch.float64)
    weights = [
        {
            name: torch.randn(shape, dtype=torch.float64, requires_grad=True)
            for name, (shape, _) in model.parameters.items()
        }
        for _ in stages(mesh)
    ]
    x.requires_grad_()
    y = x
    for some in weights:
        y = _whole(y, some, model)
    parameters = [w for some in weights for w in some.values()]
    grads = torch.autograd.grad(y, [x, *parameters], dy)
    given = [x, dy, *parameters]
    result = mf.simulate(program, [v.detach() for v in given], options=mf.Options(poison=True))
    for got, want in zip(result.outputs, [y, *grads], strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["tp", "tp + sequence", "fsdp x tp"])
@pytest.mark.parametrize(("heads", "shared", "ranks"), [(8, 2, 4), (12, 4, 6), (6, 1, 3)])
def test_fewer_heads_of_keys_than_ranks(heads: int, shared: int, ranks: int, name: str) -> None:
    """Keys and values are gathered, gradients scattered; those of queries stay where they are."""
    style, n = STYLES[name], 2 if name.startswith("fsdp") else 1
    model = Model(96, heads, shared, 12, 144, length=48)
    mesh = DeviceMesh.arange(**{a: {"fsdp": n, "tp": ranks}[a] for a in style.axes})
    for row in rows(model, style, mesh):
        assert row.received <= MOST * row.by_hand, row
        assert row.posts <= row.posts_by_hand, row
    small = replace(model, length=ranks)
    _check_whole(mf.compile(layer(small, style, mesh, torch.float64)), small, n)


def _check_whole(program: mf.Program, model: Model, n: int = 1) -> None:
    """Compare a layer of n rows with the layer on whole tensors."""
    torch.manual_seed(model.heads)
    x, dy = torch.randn(2, n, model.length, model.width, dtype=torch.float64)
    weights = {
        name: torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for name, (shape, _) in model.parameters.items()
    }
    x.requires_grad_()
    y = _whole(x, weights, model)
    grads = torch.autograd.grad(y, [x, *weights.values()], dy)
    given = [v.detach() for v in (x, dy, *weights.values())]
    outputs = mf.simulate(program, given, options=mf.Options(poison=True)).outputs
    for got, want in zip(outputs, [y, *grads], strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-7, atol=1e-7)


def _positions_and_heads(m: Model, n: Mapping[str, int]) -> dict[str, float]:
    """Along cp keys and values of a rank's heads, and gradients of parameters, norms' in f32."""
    keys, norms = 2 * m.kv_heads * m.head * m.length * 2 / n["tp"], 2 * m.width * 2
    along_tp = 8 * share(n["tp"]) * m.length * m.width * 2 / n["cp"]
    return {"cp": 2 * share(n["cp"]) * (m.bytes(n["tp"]) + keys + norms), "tp": along_tp}


@pytest.mark.parametrize("length", [96, 4096])
@pytest.mark.parametrize(
    "model",
    [Model(2048, 16, 16, 128, 8192), Model(1024, 16, 8, 128, 3072)],
    ids=lambda m: f"{m.heads} and {m.kv_heads} heads",
)
@pytest.mark.parametrize("axes", [{"cp": 4, "tp": 2}, {"tp": 2, "cp": 3}], ids=str)
def test_sums_of_keys_are_scattered_where_heads_are_split_too(
    axes: dict[str, int], model: Model, length: int
) -> None:
    """Gradients of keys are terms of ranks of cp; what products make of them, those of tp."""
    posts = {"cp": (1, 4, 0), "tp": (0, 4, 0)}
    style = Style((*axes,), (), _positions_and_heads, posts, sequence=("cp",))
    for row in rows(replace(model, length=length), style, DeviceMesh.arange(**axes)):
        assert row.received <= MOST * row.by_hand, row
        assert row.posts <= row.posts_by_hand, row
    small = Model(24, 4, model.kv_heads // 4, 6, 20, length=7)
    program = mf.compile(layer(small, style, DeviceMesh.arange(**axes), torch.float64))
    _check_whole(program, small)


@pytest.mark.parametrize("rows_of_batch", [1, 4], ids="dp={}".format)
def test_a_gradient_of_few_features_reads_long_rows_where_they_are(rows_of_batch: int) -> None:
    """To exchange the few features would take few bytes, but the rows are gathered already."""
    mesh = DeviceMesh.arange(dp=rows_of_batch, tp=8)
    batch = {"dp": Shard(0)}
    with mf.FusionDefinition("narrow") as fd:
        x = fd.define_tensor([4, 4096, 64], mesh=mesh, layout={**batch, "tp": Shard(1)})
        w = fd.define_tensor([16, 64], mesh=mesh, layout={"tp": Shard(0)})
        dy = fd.define_tensor([4, 4096, 16], mesh=mesh, layout={**batch, "tp": Shard(2)})
        dx, dw = mf.grad((mf.ops.linear(x, w) * dy).sum(), [x, w])
        fd.add_output(dx)
        fd.add_output(dw)
    kinds = [(c.kind, c.axes) for c in mf.compile(fd).communications if "tp" in c.axes]
    assert kinds == [("Allgather", ("tp",)), ("ReduceScatter", ("tp",))]


@pytest.mark.parametrize(("tokens", "kind"), [(24, "Allgather"), (512, "Allreduce")])
def test_the_gradient_of_a_router_reads_gathered_tokens(tokens: int, kind: str) -> None:
    """Few tokens: their gradients take fewer bytes than the router's, which is all-reduced else."""
    mesh, rows = DeviceMesh.arange(tp=4), {"tp": Shard(0)}
    shapes = ((tokens, 64), (32, 64), (4, 64), (tokens, 32), (tokens, 4))
    split = (rows, rows, {}, {"tp": Shard(1)}, rows)
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    def loss(linear: Any, x: Any, up: Any, router: Any, dy: Any, dr: Any) -> Any:
        return (linear(x, up) * dy).sum() + (linear(x, router).softmax(1) * dr).sum()

    with mf.FusionDefinition("router") as fd:
        each = [
            fd.define_tensor(shape, torch.float64, mesh, of)
            for shape, of in zip(shapes, split, strict=True)
        ]
        for g in mf.grad(loss(mf.ops.linear, *each), each[:3]):
            fd.add_output(g)
    program = mf.compile(fd)
    assert [c.kind for c in program.communications] == ["Allgather", kind, "ReduceScatter"]
    whole = [x.clone().requires_grad_() for x in inputs]
    want = torch.autograd.grad(loss(functional.linear, *whole), whole[:3])
    for got, gradient in zip(mf.simulate(program, inputs).outputs, want, strict=True):
        torch.testing.assert_close(got, gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows_of_batch", [1, 2], ids="dp={}".format)
def test_heads_are_gathered_before_they_are_repeated(rows_of_batch: int) -> None:
    mesh = DeviceMesh.arange(dp=rows_of_batch, cp=3)
    split = {"dp": Shard(0), "cp": Shard(2)}
    with mf.FusionDefinition("repeat") as fd:
        q, k = (
            fd.define_tensor([2, n, 9, 5], torch.float64, mesh, split, name=f"heads_{n}")
            for n in (12, 3)
        )
        many = k.repeat_interleave(4, 1)
        fd.add_output(fd.ops.scaled_dot_product_attention(q, many, many))
    program = mf.compile(fd)
    (gather,) = program.communications
    assert (gather.kind, gather.axes, gather.shape) == ("Allgather", ("cp",), (2, 3, 9, 5))
    queries, keys = (torch.randn(2, n, 9, 5, dtype=torch.float64) for n in (12, 3))
    (got,) = mf.simulate(program, [queries, keys], options=mf.Options(poison=True)).outputs
    repeated = keys.repeat_interleave(4, 1)
    want = functional.scaled_dot_product_attention(queries, repeated, repeated)
    torch.testing.assert_close(got, want)


#: How each of two products reads rows, [s, b, d].
READ_ROWS: dict[str, tuple[Any, ...]] = {
    "alike": (lambda x: x.reshape(-1, 8), lambda x: x.reshape(-1, 8)),
    "a view first": (lambda x: x.reshape(-1, 8), lambda x: x),
    "itself first": (lambda x: x, lambda x: x.reshape(-1, 8)),
    "otherwise": (lambda x: x.reshape(-1, 8), lambda x: x.unsqueeze(2)),
    "a view of a view": (lambda x: x.reshape(-1, 8).reshape(1, -1, 8), lambda x: x.unsqueeze(2)),
    "transposed": (lambda x: x.permute(0, 1, 2), lambda x: x.transpose(0, 1)),
}


@pytest.mark.parametrize("name", READ_ROWS)
@pytest.mark.parametrize(
    ("shape", "dim", "dp"), [((12, 2, 8), 0, 1), ((7, 2, 8), 0, 1), ((1, 5, 8), 1, 1),
                             ((2, 5, 8), 1, 2)]
)  # fmt: skip
def test_rows_are_gathered_once_for_all_views(
    shape: tuple[int, ...], dim: int, dp: int, name: str
) -> None:
    """Forwards and backwards, in whichever views products read them."""
    mesh, split = DeviceMesh.arange(dp=dp, tp=4), {"dp": Shard(1 - dim), "tp": Shard(dim)}
    given = [torch.randn(n, dtype=torch.float64) for n in (shape, (16, 8), (16, 8))]
    with mf.FusionDefinition("views") as fd:
        x = fd.define_tensor(shape, torch.float64, mesh, split, name="x")
        weights = [
            fd.define_tensor([16, 8], torch.float64, mesh, {"tp": Shard(0)}, name=f"w{n}")
            for n in range(2)
        ]
        y = x.sin()
        reads = [read(y) for read in READ_ROWS[name]]
        values = [mf.ops.linear(v, w) for v, w in zip(reads, weights, strict=True)]
        loss = sum((v * v).sum() for v in values)
        for value in (loss, *mf.grad(loss, [x, *weights])):
            fd.add_output(value)
    program = mf.compile(fd)
    wide = [c for c in program.communications if math.prod(c.shape) == math.prod(shape)]
    gathers = [c for c in wide if c.kind not in ("ReduceScatter", "ReduceExchange")]
    assert len(gathers) == 1, program
    leaves = [t.clone().requires_grad_() for t in given]
    want = sum(
        functional.linear(read(leaves[0].sin()), w).square().sum()
        for read, w in zip(READ_ROWS[name], leaves[1:], strict=True)
    )
    assert isinstance(want, torch.Tensor)
    grads = torch.autograd.grad(want, leaves)
    ran = mf.simulate(program, given, options=mf.Options(poison=True))
    for a, b in zip(ran.outputs, [want.detach(), *grads], strict=True):
        torch.testing.assert_close(a, b)


LAYOUTS: list[dict[str, Shard]] = [
    {}, {"tp": Shard(0)}, {"fsdp": Shard(0)}, {"fsdp": Shard(0), "tp": Shard(1)}, {"dp": Shard(1)},
]  # fmt: skip


@pytest.mark.parametrize(
    "order", [[0, 1, 2, 3, 4] * 2, [3, 1, 0, 0, 1, 3], [0, 0, 4], [1]], ids=str
)
def test_a_norm_of_gradients_split_differently_is_one_reduction(order: list[int]) -> None:
    mesh = DeviceMesh.arange(dp=2, fsdp=2, tp=2)
    with mf.FusionDefinition("clip") as fd:
        grads = [fd.define_tensor([4, 6], mesh=mesh, layout=LAYOUTS[n]) for n in order]
        clipped, norm = mf.optim.clip_by_global_norm(grads, 1.0)
        for value in (norm, *clipped):
            fd.add_output(value)
    program = mf.compile(fd)
    assert [c.kind for c in program.communications] == ["Allreduce"]
    given = [torch.randn(4, 6) for _ in order]
    want = torch.stack([x.norm() for x in given]).norm()
    got, *rest = mf.simulate(program, given, options=mf.Options(poison=True)).outputs
    torch.testing.assert_close(got, want)
    for x, y in zip(given, rest, strict=True):
        torch.testing.assert_close(y, x * min(1.0, float(1 / (want + 1e-6))))


def test_a_norm_of_gradients_of_two_stages_is_sent_once_each_way() -> None:
    """The running sum travels to the second stage, and the norm back; no square does."""
    first, second = DeviceMesh([0, 1], ("tp",)), DeviceMesh([2, 3], ("tp",))
    given = [torch.randn(4, 6) for _ in range(6)]
    with mf.FusionDefinition("clip") as fd:
        grads = [
            fd.define_tensor([4, 6], mesh=first if n < 3 else second, layout={"tp": Shard(0)})
            for n in range(6)
        ]
        for value in mf.optim.clip_by_global_norm(grads, 1.0)[0]:
            fd.add_output(value)
    program = mf.compile(fd)
    between = [c for c in program.communications if c.source.mesh != c.destination.mesh]
    assert [c.kind for c in between] == ["Reduce", "Broadcast", "Broadcast"], program
    norm = torch.stack([x.norm() for x in given]).norm()
    results = mf.simulate(program, given, options=mf.Options(poison=True)).outputs
    for x, y in zip(given, results, strict=True):
        torch.testing.assert_close(y, x * min(1.0, float(1 / (norm + 1e-6))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_a_replicated_addend_is_added_once(dtype: torch.dtype) -> None:
    mesh = DeviceMesh.arange(dp=2, tp=3)
    with mf.FusionDefinition("addends") as fd:
        x = fd.define_tensor([5], dtype, mesh, {"tp": Shard(0)})
        y = fd.define_tensor([], dtype, mesh)
        z = fd.define_tensor([4], dtype, mesh, {"dp": Shard(0)})
        fd.add_output(y + x.sum() + y + z.sum())
        fd.add_output((x.sum() + y).on(mesh, {"tp": Partial()}))
    program = mf.compile(fd)
    given = [torch.arange(n).to(dtype) for n in (5, 4)]
    given.insert(1, torch.tensor(7).to(dtype))
    total, term = mf.simulate(program, given, options=mf.Options(poison=True)).outputs
    assert total == 7 + 10 + 7 + 6
    assert term.dtype == dtype


@pytest.mark.parametrize("ops", [("sum", "max"), ("max", "sum"), ("sum", "avg"), ("avg", "sum")])
def test_scalars_of_other_reduce_ops_are_no_addends(ops: tuple[str, str]) -> None:
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("ops") as fd:
        a, b = (fd.define_tensor([], mesh=mesh, layout={"tp": Partial(op)}) for op in ops)
        fd.add_output(a + b + fd.define_tensor([], mesh=mesh))
    given = [torch.tensor(x) for x in (3.0, 5.0, 2.0)]
    (total,) = mf.simulate(mf.compile(fd), given, options=mf.Options(poison=True)).outputs
    assert total == 10


@pytest.mark.parametrize("order", ["fsdp first", "tp first"])
@pytest.mark.parametrize("dim", [0, -2], ids=str)
@pytest.mark.parametrize("features", [8, 9], ids=str)
def test_a_gathered_axis_splits_the_parts_of_others(order: str, dim: int, features: int) -> None:
    sizes = {"fsdp": 2, "tp": 2} if order == "fsdp first" else {"tp": 2, "fsdp": 2}
    module, x = torch.nn.Linear(4, features, bias=False), torch.randn(3, 4)
    mesh = DeviceMesh.arange(**sizes)
    split = {"weight": {"fsdp": Shard(0), "tp": Shard(dim)}}
    model = mf.from_torch(module, (x,), mesh=mesh, layouts=split, gather="fsdp")
    assert model.layout("weight").split_axes(0) == ("tp", "fsdp")
    assert "dim 0 by tp then fsdp" in model.report()
    program = model.compile()
    kind = "Allgather" if features == 8 else "Exchange"
    assert [c.kind for c in program.communications] == [kind]
    (y,) = mf.simulate(program, [*model.load(), x]).outputs
    torch.testing.assert_close(y, module(x).detach())
    stated = {"weight": mf.Layout(mesh, {"fsdp": Shard(0), "tp": Shard(0)})}
    as_stated = mf.from_torch(module, (x,), mesh=mesh, layouts=stated, gather="fsdp")
    assert as_stated.layout("weight") == stated["weight"]
    with pytest.raises(mf.MdfuseError, match="layout of 'wieght'"):
        model.layout("wieght")


def test_padded_parts_of_one_sum_among_small_ones() -> None:
    """Three unequal parts of 128 rows take 0.8 % more in two posts than in three."""
    mesh = DeviceMesh.arange(dp=4, fsdp=3)
    terms = mf.Layout(mesh, {"dp": Partial(), "fsdp": Partial()})
    with mf.FusionDefinition("sums") as fd:
        x = fd.define_tensor([128, 96], layout=terms, name="x")
        small = [fd.define_tensor([3], layout=terms, name=f"y{n}") for n in range(5)]
        for value in (x, *small):
            fd.add_output(fd.ops.set(value).on(mesh, {"fsdp": Shard(0)}))
    program = mf.compile(fd)
    kinds = [c.kind for c in program.communications if c.shape == (128, 96)]
    assert kinds == ["ReduceScatter", "Allreduce"], program
    given = [torch.randn(128, 96), *(torch.randn(3) for _ in small)]
    for got, want in zip(mf.simulate(program, given).outputs, given, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("rows_beside", "posts"), [(0, 3), (4096, 2)])
def test_few_rows_take_fewer_posts_for_bytes_that_many_rows_spare(
    rows_beside: int, posts: int
) -> None:
    """Five rows in four parts: a scatter and a sum take more bytes than three posts."""
    mesh = DeviceMesh.arange(dp=8, fsdp=4)
    terms = mf.Layout(mesh, {"dp": Partial(), "fsdp": Partial()})
    given = [torch.randn(n, 96) for n in (5, rows_beside) if n]
    with mf.FusionDefinition("few") as fd:
        for n, x in enumerate(given):
            value = fd.define_tensor(x.shape, layout=terms, name=f"x{n}")
            fd.add_output(fd.ops.set(value).on(mesh, {"fsdp": Shard(0)}))
    program = mf.compile(fd)
    assert sum(c.shape == (5, 96) for c in program.communications) == posts, program
    for got, want in zip(mf.simulate(program, given).outputs, given, strict=True):
        torch.testing.assert_close(got, want)
