"""Tensors that a module also reaches another way: by a list, or by a cache of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers.beside_module import MESHES, check_beside, numbers
from helpers.causal import greedy, model_of, prompts
from torch import Tensor, nn

import mdfuse as mf

MESH = mf.DeviceMesh.arange(tp=2)


class Elsewhere(nn.Module):
    """Writes and reads its buffers by a list and a dict; the counter has no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(5, 4))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scale", torch.arange(4.0))
        self.held = [self.rows, {"count": self.count}]

    def forward(self, x: Tensor) -> tuple[Tensor, Any, Tensor]:
        rows, counts = self.held
        place = counts["count"] + torch.arange(len(x))
        rows.index_copy_(0, place, x)
        counts["count"].add_(len(x))
        return torch.cat([rows, x * self.scale]), counts["count"], torch.stack((rows[0], rows[4]))


def steps(module: Any, xs: list[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """What simulated ranks return, one run after the other."""
    model = mf.from_torch(module, xs[0], mesh=MESH)
    program, results = model.compile(), []
    weights = dict(zip(model.fusion.inputs, model.load(), strict=False))
    for x in xs:
        outputs = mf.simulate(program, [*weights.values(), *model.inputs(*x)]).outputs
        named = dict(zip(model.fusion.outputs, outputs, strict=True))
        for name, old in model.fusion.reuse.items():
            weights[old] = named.pop(name)
        results.append([*named.values()])
    return results


def test_they_stay_buffers() -> None:
    xs = [(torch.randn(2, 4),) for _ in range(2)]
    results, module = steps(Elsewhere(), xs), Elsewhere()
    for x, got in zip(xs, results, strict=True):
        wanted = module(*x)
        for a, b in zip((got[0], got[-1]), (wanted[0], wanted[2]), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert module.count.item() == 4


def test_an_import_writes_nothing() -> None:
    """Not even a small tensor, which torch would write while it traces."""
    module = Elsewhere()
    model = mf.from_torch(module, (torch.ones(2, 4),), mesh=MESH)
    assert module.count.item() == 0 and not module.rows.any()
    assert {*model.fusion.reuse.values()} == {"rows", "count"}
    assert "writes 32 bytes" in str(model.compile())


class Pair(NamedTuple):
    y: Tensor
    rows: Tensor


@dataclass
class Named:
    y: Tensor
    rows: Tensor


@pytest.mark.parametrize("kind", [Pair, Named])
def test_returned_ones_are_written(kind: Any) -> None:
    """What stands for a buffer is returned in tuples with names, and in dataclasses."""

    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(4))
            self.held = kind(self.rows, self.rows)

        def forward(self, x: Tensor) -> Any:
            self.held.rows.add_(x.sum(0))
            return kind(x * 2, self.held.rows)

    x, module = torch.randn(3, 4), Returned()
    model = mf.from_torch(Returned(), (x,), mesh=MESH)
    back = model.outputs(mf.simulate(model.compile(), [*model.load(), x]).outputs)
    assert isinstance(back, kind)
    torch.testing.assert_close((back.y, back.rows), (module(x).y, module.rows), rtol=0, atol=0)


class Listed(nn.Module):
    """Reads its parameters by a dict, a tied one by its attributes too."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(16.0, dtype=torch.float64).reshape(4, 4).sin())
        self.b = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.tied = self.w
        self.all = {"w": [self.w], "b": self.b}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x @ self.tied, self.all["w"][0], self.all["b"]) * self.w[0]


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_in_a_dict_are_trained(mesh: str) -> None:
    check_beside(Listed(), (numbers(4, 4),), mesh)


class Assigned(nn.Module):
    """Assigns new tensors to its buffers; one is never read before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("before", torch.ones(4))
        self.register_buffer("steps", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.before
        self.before = self.mean
        self.mean = self.mean * 0.9 + x.mean(0)
        self.steps = torch.arange(4.0) + len(x)
        return y, self.mean * self.steps


def test_assigned_buffers_are_written() -> None:
    """A next run reads what a run assigned; one buffer takes the other's."""
    xs = [(torch.randn(3, 4),) for _ in range(4)]
    results, module = steps(Assigned(), xs), Assigned()
    for x, got in zip(xs, results, strict=True):
        torch.testing.assert_close(tuple(got), module(*x), rtol=0, atol=0)
    model = mf.from_torch(Assigned(), xs[0], mesh=MESH)
    assert {*model.fusion.reuse.values()} == {"mean", "before"}


class Two(list[Tensor]):
    """A list that two tensors make, not one iterable."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__([a, b])


#: how a forward reads one of its buffers before it assigns to that one
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda x: x.T, "mT": lambda x: x.mT, "real": lambda x: x.real, "row": lambda x: x[0],
    "named tuple": lambda x: torch.cat(Pair(x, x)).sum(0), "own list": lambda x: sum(Two(x, x)),
    "stacked list": lambda x: torch.stack(Two(x, x))[1], "results": lambda x: x.max(0).values,
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_each_way_of_reading_lets_an_assignment_stay(name: str) -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.arange(16.0).reshape(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = x + READS[name](self.rows)
            self.rows = x.T @ x
            return y

    xs = [(torch.randn(4, 4),) for _ in range(3)]
    module = Read()
    for x, (got,) in zip(xs, steps(Read(), xs), strict=True):
        torch.testing.assert_close(got, module(*x))


@pytest.mark.parametrize("kind", [Pair, Two])
@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_in_tuples_with_names_are_trained(mesh: str, kind: Any) -> None:
    """A call that takes a list of tensors takes these, too: their numbers are no constants."""

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            w = torch.arange(16.0, dtype=torch.float64).reshape(4, 4)
            self.w, self.u = nn.Parameter(w.sin()), nn.Parameter(w.cos())
            self.both = kind(self.w, self.u)

        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.stack(self.both).sum(0)

    check_beside(Held(), (numbers(4, 4),), mesh)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", ["copy", "packet", "rows", "all"])
def test_whole_copies_cast_and_expand(dtype: torch.dtype, how: str) -> None:
    """Into a buffer of another dtype, or with more dims; the forward reads the cast numbers."""

    class Copied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(3, 4, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.rows
            if how == "copy":
                self.rows.copy_(x.sum(0) * 3)
            elif how == "packet":
                torch.ops.aten.copy_(self.rows, x.sum(0) * 3)
            else:
                self.rows[: 3 if how == "rows" else None] = x.sum(0) * 3
            return y + self.rows

    xs = [(torch.randn(3, 4),) for _ in range(2)]
    module = Copied()
    for x, (got,) in zip(xs, steps(Copied(), xs), strict=True):
        torch.testing.assert_close(got, module(*x), rtol=0, atol=0)


class Cached(nn.Module):
    """A causal model with a static cache of transformers, whose tensors are buffers."""

    def __init__(self, model: Any, room: int) -> None:
        super().__init__()
        self.model, config = model, model.config
        self.cache = transformers.StaticCache(config=config, max_cache_len=room)
        self.cache.early_initialization(
            1, config.num_key_value_heads, config.head_dim, torch.float32, "cpu"
        )
        for n, layer in enumerate(self.cache.layers):
            for name in ("keys", "values", "cumulative_length"):
                self.register_buffer(f"{name}{n}", getattr(layer, name))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        said = {"past_key_values": self.cache, "use_cache": True}
        logits: Tensor = self.model(input_ids=ids, position_ids=positions, **said).logits
        return logits[:, -1]


def test_a_static_cache_of_transformers() -> None:
    """Written in place, a row a step: tokens are those of `generate`."""
    model = model_of("llama", num_hidden_layers=1)
    (ids,) = prompts([5])
    text = [*ids, *greedy(model, ids, 4)]
    xs = [(torch.tensor([[x]]), torch.tensor([[n]])) for n, x in enumerate(text)]
    module = Cached(model, 11)
    logits = [result for (result,) in steps(module, xs)]
    assert [int(x.argmax()) for x in logits[4:-1]] == text[5:]
    imported = mf.from_torch(module, xs[0], mesh=MESH)
    assert imported.fusion.reuse.keys() and module.cumulative_length0.item() == 0
    assert str(imported.compile()).count("writes 64 bytes") == 2
