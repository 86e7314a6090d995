"""The gathers of a layer's parameters are one group of posts, and so are its reductions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.hir.passes.post_layers import layer_of
from mdfuse.hir.verify.check import verify

ONE_BY_ONE = mf.Options(bucket_bytes=0, prefetch_bytes=0)
#: Rows, and widths that no number of ranks divides, so that last shards are smaller.
ROWS, WIDE, UNITS, WORDS = 6, 5, 7, 11


class Layer(nn.Module):
    """Two products, of two dtypes where `is_mixed` says so."""

    def __init__(self, is_mixed: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDE, UNITS), nn.Linear(UNITS, WIDE, bias=False)
        if is_mixed:
            self.b.float()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)).to(self.b.weight.dtype)
        return x + self.b(h).to(x.dtype)


class Net(nn.Module):
    """Words, layers, and a head that may be tied; a scale that all layers may read."""

    def __init__(
        self,
        layers: int = 3,
        is_tied: bool = False,
        is_mixed: bool = False,
        is_shared: bool = False,
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDE)
        self.layers = nn.ModuleList(Layer(is_mixed) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDE)
        self.scale = nn.Linear(WIDE, WIDE, bias=False) if is_shared else None
        self.head = nn.Linear(WIDE, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x if self.scale is None else self.scale(x))
        y: Tensor = self.head(self.norm(x))
        return y


def network(frozen: str = "", **how: Any) -> Net:
    torch.manual_seed(0)
    net = Net(**how).double()
    for layer in net.layers if how.get("is_mixed") else ():
        layer.b.float()  # type: ignore[union-attr, operator]
    for name, x in net.named_parameters():
        x.requires_grad_(not (frozen and name.startswith(frozen)))
    return net


def step_of(net: nn.Module, ranks: int) -> tuple[Any, mf.TrainingStep]:
    split = {"fsdp": Shard(0)}
    ids = mf.TensorSpec((ROWS,), torch.int64)
    mesh = DeviceMesh.arange(fsdp=ranks)
    layouts = {"*": split, "input:*": split}
    model = mf.from_torch(net, (ids,), mesh=mesh, layouts=layouts, gather="fsdp")
    return model, model.training_step(lambda y: (y * y).mean(), optimizer=mf.optim.sgd, clip=1.0)


def posts(program: mf.Program) -> list[tuple[str, ...]]:
    """What each post of a layer's parameters, or their gradients, sends; groups are one post."""
    groups, is_open = list[list[str]](), False
    for i in program.host:
        if i.op == "group_start":
            groups.append([])
            is_open = True
        elif i.op == "group_end":
            is_open = False
        elif (
            i.op == "post" and i.comm is not None and i.comm.kind in ("Allgather", "ReduceScatter")
        ):
            if not is_open:
                groups.append([])
            groups[-1].append(i.comm.kind)
    return [tuple(x) for x in groups]


def torch_step(net: nn.Module, ids: Tensor, lr: float) -> tuple[Tensor, dict[str, Tensor]]:
    y = net(ids)
    loss = (y * y).mean()
    trained = {n: x for n, x in net.named_parameters() if x.requires_grad}
    gradients = torch.autograd.grad(loss, [*trained.values()])
    norm = torch.sqrt(sum((g.double().square().sum() for g in gradients), torch.zeros(())))
    scale = min(1.0, 1.0 / (float(norm) + 1e-6))
    pairs = zip(trained.items(), gradients, strict=True)
    return loss.detach(), {n: x.detach() - lr * scale * g for (n, x), g in pairs}


NETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"is_tied": True},
    "several dtypes": {"is_mixed": True},
    "a parameter of all layers": {"is_shared": True},
    "frozen layers": {"frozen": "layers.1"},
    "one layer": {"layers": 1},
}


@pytest.mark.parametrize("how", NETS.values(), ids=NETS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_values(ranks: int, how: dict[str, Any]) -> None:
    net, ids, lr = network(**how), torch.arange(ROWS) % 4, 0.1
    model, step = step_of(net, ranks)
    weights, results = model.load(), list[Any]()
    for options in (ONE_BY_ONE, mf.Options(), mf.Options(bucket_bytes=400, prefetch_bytes=300)):
        program = step.compile(options)
        verify(program.host)
        given = step.arguments(weights, step.state(weights), ids, torch.tensor(lr))
        results.append(mf.simulate(program, given).outputs)
    plain, *others = results
    for outputs in others:
        for x, y in zip(plain, outputs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    loss, expected = torch_step(net, ids, lr)
    assert torch.allclose(plain[0].double(), loss, rtol=1e-6)
    state = step.updated(others[0])
    for name, x in expected.items():
        torch.testing.assert_close(state[name], x, rtol=1e-6, atol=1e-8)


def test_one_post_per_layer_and_direction() -> None:
    """Three layers: words, layers, norm and head; backwards all but the last layer again."""
    _, step = step_of(network(), 2)
    each = Counter(x[0] for x in posts(step.compile()))
    assert each == {"Allgather": 1 + 3 + 1 + 2, "ReduceScatter": 1 + 3 + 1}
    before = Counter(x[0] for x in posts(step.compile(ONE_BY_ONE)))
    assert before["Allgather"] > 20


def test_explain_says_which_posts_go_together() -> None:
    _, step = step_of(network(), 2)
    lines = [x.strip() for x in step.compile().explain().splitlines() if "groups: " in x]
    assert [x.split(", one")[0] for x in lines] == [
        "groups: 16 Allgather in 6 posts",
        "groups: 12 ReduceScatter in 4 posts",
    ]
    assert "groups: " not in step.compile(ONE_BY_ONE).explain()


def test_the_gather_of_the_next_layer_is_ahead_of_this_one() -> None:
    _, step = step_of(network(), 2)
    order, is_open, count = list[str](), False, 0
    for i in step.compile().host:
        is_open = (is_open or i.op == "group_start") and i.op != "group_end"
        if i.op == "group_start" or (i.op == "post" and not is_open):
            order.append(f"post {count}")
            count += 1
        elif i.fn == "linear":
            order.append("linear")
    assert order[:4] == ["post 0", "post 1", "post 2", "linear"]
    assert order[5:7] == ["post 3", "linear"]


def test_reductions_are_awaited_before_those_of_the_next_layer() -> None:
    """So gradients of one layer, not of all, are in memory until they are sent."""
    _, step = step_of(network(), 2)
    under_way, most = set[str](), 0
    for i in step.compile().host:
        if i.op == "post" and i.comm is not None and i.comm.kind == "ReduceScatter":
            under_way.update(i.outputs)
        elif i.op == "wait":
            under_way.difference_update(i.reads)
        most = max(most, len(under_way))
    assert most == 3


def test_frozen_weights_are_gathered_twice_and_never_reduced() -> None:
    net = network(frozen="layers")
    for name, x in net.named_parameters():
        x.requires_grad_(name.startswith(("emb", "layers.0.a")))
    _, step = step_of(net, 2)
    groups = posts(step.compile())
    assert Counter(x[0] for x in groups)["Allgather"] == 1 + 3 + 1 + 2
    assert sum(x.count("ReduceScatter") for x in groups) == 3  # words, and two of one layer


def test_the_peak_is_no_higher_than_one_by_one() -> None:
    net, ids = network(layers=6), torch.arange(ROWS) % 4
    model, step = step_of(net, 2)
    weights = model.load()
    given = step.arguments(weights, step.state(weights), ids, torch.tensor(0.1))
    peaks = [
        max(mf.simulate(step.compile(options), given).peak_bytes)
        for options in (ONE_BY_ONE, mf.Options(prefetch_bytes=0))
    ]
    layer = sum(x.nbytes for x in net.layers[0].parameters())
    assert peaks[1] <= peaks[0] + layer


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("layers.0.q.weight", "layers.0"),
        ("model.layers.12.mlp.experts.3.w", "model.layers.12"),
        ("0.weight", "0"),
        ("norm.weight", ""),
        ("weights.0", ".0"),
    ],
)
def test_layer_of(name: str, layer: str) -> None:
    assert layer_of(name) == layer
