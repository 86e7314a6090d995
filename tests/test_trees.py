"""Trees of tensors: dataclasses that torch does not know are taken apart and put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mdfuse import DeviceMesh, TensorSpec, from_torch, simulate
from mdfuse.trees import flattened, key_text, unflattened


@dataclass(frozen=True, slots=True)
class Point:
    """A dataclass of a user."""

    x: Any
    y: Any = None
    name: str = "p"
    known: int = field(init=False, default=7)


def test_dataclasses_within_others_and_within_lists() -> None:
    tree = {"a": [Point(1.5, Point((2.5, 3.5)))], "b": 4.5}
    leaves, structure = flattened(tree)
    paths = {key_text(path): x for path, x in leaves}
    assert paths == {"a.0.x": 1.5, "a.0.y.x.0": 2.5, "a.0.y.x.1": 3.5, "a.0.y.y": None,
                     "a.0.y.name": "p", "a.0.name": "p", "b": 4.5}  # fmt: skip
    assert unflattened([x for _, x in leaves], structure) == tree
    doubled = unflattened([x * 2 if isinstance(x, float) else x for _, x in leaves], structure)
    assert doubled == {"a": [Point(3.0, Point((5.0, 7.0)))], "b": 9.0}
    assert structure == flattened({"a": [Point(0, Point((0, 0)))], "b": 0})[1]
    assert structure != flattened({"a": [Point(0, Point([0, 0]))], "b": 0})[1]


def test_what_is_one_leaf() -> None:
    """Specs of tensors, a dataclass itself, and one that cannot be made of its fields."""
    closed = dataclass(init=False)(type("Closed", (), {"__annotations__": {"x": int}}))
    for one in (TensorSpec((2, 3)), Point, closed()):
        assert flattened([one])[0][0][1] is one


def test_a_tensor_may_have_others_as_attributes() -> None:
    """Optimizers hang a `main_grad` on parameters; the tensor is an input all the same."""
    x = torch.nn.Parameter(torch.ones(2, 3))
    x.main_grad = torch.zeros(2, 3)
    layer, mesh = torch.nn.Linear(3, 3).requires_grad_(False), DeviceMesh.arange(tp=1)
    model = from_torch(layer, (x,), mesh=mesh)
    (y,) = simulate(model.compile(), [*model.load(), x.detach()]).outputs
    torch.testing.assert_close(y, layer(x.detach()))
