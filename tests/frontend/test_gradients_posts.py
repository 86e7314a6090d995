"""What the backward of a transformer block posts, for each way to place it on a mesh."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, hir_lowering
from mdfuse.frontend import gradients
from mdfuse.ir.graph import Fusion
from mdfuse.layouts.layout import Placement
from mdfuse.passes import settle_partials

F = torch.nn.functional
BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 4, 8, 32, 4, 64
COLUMNS, ROWS, VECTORS = ("wq", "wk", "wv", "w1"), ("wo", "w2"), ("g1", "b1", "g2", "b2")
SHAPES = {
    **dict.fromkeys(("wq", "wk", "wv", "wo"), (WIDTH, WIDTH)),
    "w1": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH), **dict.fromkeys(VECTORS, (WIDTH,)),
}  # fmt: skip
FOUR, GRID = DeviceMesh.arange(tp=4), DeviceMesh.arange(dp=2, tp=2)
DATA = DeviceMesh.arange(dp=4)

Where = dict[str, Placement]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a block is placed: activations, weights by columns, by rows, vectors.

    Attributes:
        sums: where the sums of row-parallel products are placed; None: nowhere.
        is_gathered: whether parameters are split along dp, and gathered to compute.
        is_recomputed: whether they are gathered again for the backward.
    """

    mesh: DeviceMesh
    acts: Where
    columns: Where
    rows: Where
    vectors: Where
    sums: Where | None = None
    is_gathered: bool = False
    is_recomputed: bool = False

    def of(self, name: str) -> Where:
        return {**dict.fromkeys(COLUMNS, self.columns), **dict.fromkeys(ROWS, self.rows)}.get(
            name, self.vectors
        )


S0, S1 = Shard(0), Shard(1)
_TP: dict[str, Any] = {"columns": {"tp": S1}, "rows": {"tp": S0}, "vectors": {}}
_FSDP: dict[str, Any] = {
    "mesh": DATA, "acts": {"dp": S0}, "columns": {"dp": S0}, "rows": {"dp": S0},
    "vectors": {"dp": S0}, "is_gathered": True,
}  # fmt: skip
STYLES = {
    "tp": Style(mesh=FOUR, acts={}, **_TP),
    "sp": Style(mesh=FOUR, acts={"tp": S1}, sums={"tp": S1}, **_TP),
    "dp": Style(mesh=DATA, acts={"dp": S0}, columns={}, rows={}, vectors={}),
    "fsdp": Style(**_FSDP),
    "fsdp, recomputed": Style(**_FSDP, is_recomputed=True),
    "fsdp x tp": Style(
        mesh=GRID, acts={"dp": S0}, columns={"dp": S0, "tp": S1}, rows={"dp": S1, "tp": S0},
        vectors={"dp": S0}, sums={"dp": S0}, is_gathered=True,
    ),
}  # fmt: skip


def block(p: dict[str, Any], x: Any, place: Callable[[Any], Any] = lambda y: y) -> Any:
    """A pre-norm block, written for tensors and for handles."""
    h = F.layer_norm(x, (WIDTH,), p["g1"], p["b1"])
    shape = BATCH, LENGTH, HEADS, WIDTH // HEADS
    q, k, v = ((h @ p[n]).view(shape).transpose(1, 2) for n in ("wq", "wk", "wv"))
    weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS), -1)
    heads = (weights @ v).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)
    x = x + place(heads @ p["wo"])
    h = F.layer_norm(x, (WIDTH,), p["g2"], p["b2"])
    return x + place(F.gelu(h @ p["w1"]) @ p["w2"])


def gathered(style: Style, parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters as the block reads them."""
    if not style.is_gathered:
        return parameters

    def whole() -> dict[str, Any]:
        found = {}
        for name, w in parameters.items():
            kept = {a: s for a, s in style.of(name).items() if a != "dp"}
            found[name] = mf.ops.set(w).on(style.mesh, kept)
        return found

    if style.is_recomputed:
        with mf.recompute():
            return whole()
    return whole()


def define(style: Style) -> mf.FusionDefinition:
    """The loss of the block and the gradients of its parameters."""
    with mf.FusionDefinition("block") as fd:
        x, t = (
            fd.define_tensor([BATCH, LENGTH, WIDTH], torch.float32, style.mesh, style.acts)
            for _ in range(2)
        )
        parameters = {
            n: fd.define_tensor(shape, torch.float32, style.mesh, style.of(n), name=n)
            for n, shape in SHAPES.items()
        }
        sums = style.sums
        y = block(
            gathered(style, parameters), x,
            (lambda y: y) if sums is None else lambda y: fd.ops.set(y).on(style.mesh, sums),
        )  # fmt: skip
        loss = fd.ops.mse_loss(y, t)
        fd.add_output(loss)
        for g in mf.grad(loss, list(parameters.values())):
            fd.add_output(g)
    return fd


def posts(program: mf.Program) -> dict[str, int]:
    """How many posts of each kind: of more than 64 elements, and (in lower case) of fewer."""
    found: Counter[str] = Counter()
    for i in program.host.walk():
        if i.comm is not None:
            size = math.prod(program.host.types[i.reads[0]].shape)
            found[i.comm.kind if size > 64 else i.comm.kind.lower()] += 1
    return dict(found)


#: 4 all-reduces of [4,8,32] in f32: 4 x 2 x 3/4 x 4096 bytes.
ACTIVATIONS = 24576
#: All-reduces of all parameters, [8320], and of the loss.
PARAMETERS = 49928

TABLE: dict[str, tuple[dict[str, int], int]] = {
    "tp": ({"Allreduce": 4}, ACTIVATIONS),
    "sp": ({"Allgather": 4, "ReduceScatter": 4, "allreduce": 5}, ACTIVATIONS + 4 * 192 + 8),
    "dp": ({"Allreduce": 6, "allreduce": 5}, PARAMETERS),
    "fsdp": (
        {"Allgather": 6, "allgather": 4, "ReduceScatter": 6, "reducescatter": 4, "allreduce": 1},
        PARAMETERS,
    ),
    "fsdp, recomputed": (
        {"Allgather": 12, "allgather": 5, "ReduceScatter": 6, "reducescatter": 4, "allreduce": 1},
        # the six matrices and one vector, gathered once more: 3/4 of them
        PARAMETERS + 3 * (8192 + 32),
    ),
    "fsdp x tp": (
        {
            "Allgather": 6, "allgather": 4, "ReduceScatter": 6, "reducescatter": 4,
            "Allreduce": 4, "allreduce": 1,
        },
        # of half the batch along tp; half of each matrix, and each vector, along dp; the loss
        2 * 4 * 2048 + 2 * 2 * (8192 // 2) // 2 + 512 + 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STYLES)
def test_posts_and_bytes(name: str) -> None:
    program = mf.compile(define(STYLES[name]))
    assert (posts(program), max(map(program.bytes_received, range(4)))) == TABLE[name], program


#: The same with buckets: sums of gradients that lie alike are one post.
TOGETHER: dict[str, dict[str, int]] = {
    "tp": {"Allreduce": 4},
    "sp": {"Allgather": 4, "ReduceScatter": 4, "Allreduce": 1},
    "dp": {"Allreduce": 1},
    "fsdp": {"Allgather": 6, "allgather": 4, "ReduceScatter": 1, "allreduce": 1},
    "fsdp, recomputed": {"Allgather": 12, "allgather": 5, "ReduceScatter": 1, "allreduce": 1},
    "fsdp x tp": {
        "Allgather": 6, "allgather": 4, "ReduceScatter": 7, "Allreduce": 4, "allreduce": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", STYLES)
def test_posts_with_buckets(name: str) -> None:
    definition = define(STYLES[name])
    program = mf.compile(definition, mf.Options(bucket_bytes=1 << 20))
    assert posts(program) == TOGETHER[name]
    assert program.bytes_received(0) == mf.compile(definition).bytes_received(0)


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5


@pytest.mark.parametrize("bucket", [0, 4096], ids=["alone", "buckets"])
@pytest.mark.parametrize("name", STYLES)
def test_the_gradients_are_those_of_one_device(name: str, bucket: int) -> None:
    x, t = (numbers((BATCH, LENGTH, WIDTH), i) for i in range(2))
    parameters = {n: numbers(shape, 2 + i) for i, (n, shape) in enumerate(SHAPES.items())}
    leaves = {n: w.clone().requires_grad_() for n, w in parameters.items()}
    loss = F.mse_loss(block(leaves, x), t)
    expected = [loss.detach(), *torch.autograd.grad(loss, list(leaves.values()))]
    program = mf.compile(define(STYLES[name]), mf.Options(bucket_bytes=bucket))
    check_everywhere(program, [x, t, *parameters.values()], expected)


def test_without_settled_partials_more_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: each reader of a Partial passes it on."""

    def unchanged(fusion: Fusion) -> Fusion:
        return fusion

    others = tuple(
        (name, unchanged if name == settle_partials.name else run)
        for name, run in hir_lowering.PASSES
    )
    monkeypatch.setattr(hir_lowering, "PASSES", others)
    mf.FusionCache.reset()
    program = mf.compile(define(STYLES["sp"]))
    mf.FusionCache.reset()
    assert posts(program) != TABLE["sp"][0]
    assert max(map(program.bytes_received, range(4))) > TABLE["sp"][1]


def stages() -> mf.FusionDefinition:
    """Two products on each of two meshes; what goes from one to the other is split by rows."""
    first, second = DeviceMesh([0, 1], ["tp"]), DeviceMesh([2, 3], ["tp"])
    with mf.FusionDefinition("stages") as fd:
        x = fd.define_tensor([8, 16], mesh=first)
        t = fd.define_tensor([8, 16], mesh=second)
        w0, w1, w2, w3 = weights = [
            fd.define_tensor([16, 16], mesh=mesh, layout={"tp": Shard(d)}, name=f"w{i}")
            for i, (mesh, d) in enumerate(((first, 1), (first, 0), (second, 1), (second, 0)))
        ]
        h = fd.ops.set((x @ w0).tanh() @ w1).on(first, {"tp": S0})
        h = fd.ops.set(h).on(second, {"tp": S0})
        loss = fd.ops.mse_loss((h @ w2).tanh() @ w3, t)
        fd.add_output(loss)
        for g in mf.grad(loss, weights):
            fd.add_output(g)
    return fd


#: Forwards a reduce-scatter, a send, an all-gather, an all-reduce; backwards the transposed ones,
#: and what was sent is gathered once more for the gradient of the weight that reads it.
STAGES = {"ReduceScatter": 2, "SendRecv": 2, "Allgather": 2, "Allreduce": 1}


def test_two_stages_on_meshes_of_their_own() -> None:
    """The activation is sent on, its cotangent back; each stage reduces along its own axis."""
    program = mf.compile(stages())
    assert posts(program) == STAGES, program
    x, t = numbers((8, 16), 0), numbers((8, 16), 1)
    weights = [numbers((16, 16), 2 + i) for i in range(4)]
    leaves = [w.clone().requires_grad_() for w in weights]
    y = ((x @ leaves[0]).tanh() @ leaves[1] @ leaves[2]).tanh() @ leaves[3]
    loss = F.mse_loss(y, t)
    expected = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    check_everywhere(program, [x, t, *weights], expected)


def test_without_the_law_of_sets_stages_send_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: what comes back through a set lies anywhere."""
    monkeypatch.setattr(gradients._Backward, "returned", lambda self, ct, expr: ct)
    mf.FusionCache.reset()
    program = mf.compile(stages())
    mf.FusionCache.reset()
    assert posts(program) != STAGES, program


# -- what is posted backwards for a change of layout ---------------------------------------------


P, R = mf.Partial(), mf.Replicate()
OTHER = DeviceMesh([4, 5, 6, 7], ["tp"])
#: forwards: before, after; what comes back; posts forwards; posts backwards.
DUALS: dict[str, tuple[Any, Any, Any, list[str], list[str]]] = {
    "all-gather": (S0, R, P, ["Allgather"], ["ReduceScatter"]),
    "all-gather, whole": (S0, R, R, ["Allgather"], []),
    "all-reduce": (P, R, R, ["Allreduce"], []),
    "reduce-scatter": (P, S0, S0, ["ReduceScatter"], ["Allgather"]),
    "all-to-all": (S0, S1, S1, ["AllToAll"], ["AllToAll"]),
    "slice": (R, S0, S0, [], ["Allgather"]),
    "zeros": (R, P, R, [], []),
    "the same": (S0, S0, S0, [], []),
}  # fmt: skip


@pytest.mark.parametrize("name", DUALS)
def test_a_change_of_layout_and_its_transpose(name: str) -> None:
    before, after, back, forwards, backwards = DUALS[name]
    with mf.FusionDefinition("set") as fd:
        x = fd.define_tensor([8, 16], mesh=FOUR, layout={"tp": before})
        seed = fd.define_tensor([8, 16], mesh=FOUR, layout={"tp": back})
        y = fd.ops.set(x).on(FOUR, {"tp": after})
        (dx,) = mf.grad(y, [x], seed=seed)
        fd.add_output(y)
        fd.add_output(dx)
    program = mf.compile(fd)
    by_note: dict[str, list[str]] = {"": [], "backward": []}
    for i in program.host.walk():
        if i.comm is not None and i.source is not None:
            by_note[i.source.note].append(i.comm.kind)
    assert by_note == {"": forwards, "backward": backwards}, program
    given, ct = numbers((8, 16), 0), numbers((8, 16), 1)
    check_everywhere(program, [given, ct], [given, ct])


def test_a_send_and_its_transpose() -> None:
    with mf.FusionDefinition("send") as fd:
        x = fd.define_tensor([8, 16], mesh=FOUR, layout={"tp": S0})
        y = fd.ops.set(x).on(OTHER, {"tp": S0})
        (dx,) = mf.grad((y * y).sum(), [x])
        fd.add_output(dx)
    program = mf.compile(fd)
    assert posts(program) == {"SendRecv": 2}
    assert program.fusion.layout("dx").mesh == FOUR
    given = numbers((8, 16), 0)
    check_everywhere(program, [given], [2 * given])


def test_a_slice_of_a_computed_value_asks_for_nothing() -> None:
    """The cotangent of what was whole may stay split."""
    with mf.FusionDefinition("slice") as fd:
        x, w = (fd.define_tensor([8, 16], mesh=FOUR) for _ in range(2))
        h = fd.ops.set(x * w).on(FOUR, {"tp": S0})
        (dw,) = mf.grad(h.tanh().sum(), [w])
        fd.add_output(dw)
    assert posts(mf.compile(fd)) == {"Allgather": 1}


def test_state_that_is_split_beside_a_whole_parameter() -> None:
    """The gradient of a copy of the parameter has no law: it is reduced to where it is read."""
    with mf.FusionDefinition("zero") as fd:
        x = fd.define_tensor([8, 16], mesh=DATA, layout={"dp": S0})
        w = fd.define_tensor([16, 16], mesh=DATA, name="w")
        v = fd.define_tensor([16, 16], mesh=DATA, layout={"dp": S0})
        copy = fd.ops.set(w)
        loss = (x @ copy).tanh().sum()
        (dw,) = mf.grad(loss, [copy])
        new, velocity = mf.optim.sgd(w, dw, v, lr=0.1, momentum=0.9)
        assert velocity is not None
        fd.add_output(velocity, reuse=v)
        fd.add_output(new, reuse=w)
    assert posts(mf.compile(fd)) == {"ReduceScatter": 1, "Allgather": 1}


def test_a_split_vocabulary() -> None:
    """Three numbers for each row, forwards; backwards nothing but the gradient of what is whole."""
    with mf.FusionDefinition("head") as fd:
        x = fd.define_tensor([32, 16], torch.float64, FOUR)
        table = fd.define_tensor([64, 16], torch.float64, FOUR, {"tp": S0})
        targets = fd.define_tensor([32], torch.int64, FOUR)
        loss = F.cross_entropy(F.linear(x, table), targets)
        fd.add_output(loss)
        for g in mf.grad(loss, [x, table]):
            fd.add_output(g)
    program = mf.compile(fd)
    assert posts(program) == {"allreduce": 3, "Allreduce": 1}
    leaves = [numbers((n, 16), n).double().requires_grad_() for n in (32, 64)]
    places = torch.arange(32) * 7 % 64
    whole = F.cross_entropy(F.linear(*leaves), places)
    expected = [whole.detach(), *torch.autograd.grad(whole, leaves)]
    check_everywhere(program, [*(x.detach() for x in leaves), places], expected)
