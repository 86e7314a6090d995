"""All forms of `dynamic_shapes` that torch.export takes, and what is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import AdditionalInputs, Dim, ShapesCollection

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh

MESH = DeviceMesh.arange(tp=1)


class Many(nn.Module):
    """Takes arguments of all kinds; all rows are those of one batch."""

    def forward(
        self, x: Tensor, at: Tensor, *more: Tensor, scale: int = 2, mask: Any = None, **others: Any
    ) -> Tensor:
        y = x * scale + at
        for term in (*more, *others.values()):
            y = y + term
        return y if mask is None else y + mask["a"][0] - mask["a"][1]


@dataclass
class Record:
    ids: Tensor
    scale: int
    mask: Tensor


class OfRecord(nn.Module):
    def forward(self, b: Record) -> Tensor:
        return b.ids * b.scale + b.mask


class Joined(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], 1) * 2


class Repeated(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.repeat_interleave(2, 1) + y


def given(rows: int, *, more: int = 0, mask: bool = False, other: str = "") -> tuple[Any, Any]:
    """Arguments of `Many`."""
    args = torch.randn(rows, 6), torch.randn(6), *(torch.randn(rows, 6) for _ in range(more))
    kwargs: dict[str, Any] = {"scale": 3} if mask else {}
    kwargs |= {"mask": {"a": [torch.randn(rows, 6), torch.randn(6)]}} if mask else {}
    return args, kwargs | ({other: torch.randn(rows, 6)} if other else {})


N: dict[int, Any] = {0: "n"}
#: what is said, and which arguments there are besides
FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a dict": ({"x": N}, {}),
    "None": ({"x": N, "at": None}, {}),
    "a tuple": ((N, None), {}),
    "a list of tuples": ([("n", None), (None,)], {}),
    "numbers": ({"x": (Dim("n", max=9), 6), "at": {0: 6}}, {}),
    "static": ([(Dim("n"), Dim.STATIC), {0: Dim.STATIC}], {}),
    "auto": ({"x": (Dim.AUTO, Dim.STATIC), "at": None}, {}),
    "bounded": ({"x": {0: Dim.DYNAMIC(min=2, max=64)}, "at": None}, {}),
    "a negative dim": ({"x": {-2: "n"}}, {}),
    "*args": ({"x": N, "at": None, "more": (N, N)}, {"more": 2}),
    "*args by full names": ({"x": N, "more.0": N, "more.1": {0: Dim("n")}}, {"more": 2}),
    "kwargs": ({"x": N, "at": None, "scale": None, "mask": {"a": [N, None]}}, {"mask": True}),
    "kwargs by full names": ({"x": N, "mask.a.0": N}, {"mask": True}),
    "kwargs in a tuple": ((N, None, None, {"a": (N, None)}), {"mask": True}),
    "**kwargs": ({"x": N, "at": None, "others": {"z": N}}, {"other": "z"}),
    "**kwargs by name": ({"x": N, "z": N}, {"other": "z"}),
}


def check(module: nn.Module, model: mf.ImportedModel, args: Any, kwargs: Any) -> None:
    program = model.compile()
    found = mf.simulate(program, [*model.load(), *model.inputs(*args, **kwargs)]).outputs
    torch.testing.assert_close(model.outputs(found), module(*args, **kwargs))


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    said, there = FORMS[form]
    args, kwargs = given(4, **there)
    model = mf.from_torch(Many(), args, kwargs, mesh=MESH, dynamic_shapes=said)
    check(Many(), model, *given(3, **there))


@pytest.mark.parametrize("said", [
    {"b": {"ids": N, "mask": N}}, {"b": [N, None, N]}, {"b.ids": N, "b.mask": N}, ((N, None, N),),
])  # fmt: skip
def test_a_dataclass(said: Any) -> None:
    def record(rows: int) -> Record:
        return Record(torch.randn(rows, 6), 2, torch.randn(rows, 6))

    model = mf.from_torch(OfRecord(), (record(4),), mesh=MESH, dynamic_shapes=said)
    check(OfRecord(), model, (record(5),), {})


def test_extents_that_follow_from_others() -> None:
    dims = {"x": {0: "n", 1: Dim("k")}, "y": {0: "n", 1: 2 * Dim("k")}}
    example = torch.randn(4, 6), torch.randn(4, 12)
    model = mf.from_torch(Repeated(), example, mesh=MESH, dynamic_shapes=dims)
    check(Repeated(), model, (torch.randn(3, 5), torch.randn(3, 10)), {})


def test_what_torch_makes_of_arguments() -> None:
    args, _ = given(4)
    collected, others = ShapesCollection(), AdditionalInputs()
    collected[args[0]] = {0: Dim("n")}
    others.add(given(5)[0])
    for said in (collected, others):
        model = mf.from_torch(Many(), args, mesh=MESH, dynamic_shapes=said)
        check(Many(), model, *given(3))


@pytest.mark.parametrize("said", [None, {}, (), {"x": None, "at": None}, {"x": {}, "at": {}}])
def test_nothing_is_chosen(said: Any) -> None:
    args, kwargs = given(4)
    model = mf.from_torch(Many(), args, kwargs, mesh=MESH, dynamic_shapes=said)
    assert not model.definition.examples
    check(Many(), model, args, kwargs)


def test_a_tensor_that_is_passed_twice() -> None:
    """Each argument is an input of its own; so is a buffer of the module that is passed."""
    x = torch.randn(4, 6)
    model = mf.from_torch(Joined(), (x, x), mesh=MESH, dynamic_shapes={"x": N, "y": N})
    check(Joined(), model, (torch.randn(3, 6), torch.randn(3, 6)), {})
    norm = nn.BatchNorm1d(6).eval()
    assert norm.running_mean is not None
    both = nn.ModuleDict({"norm": norm})
    both.forward = lambda x, mean: norm(x) + mean  # type: ignore[method-assign]
    model = mf.from_torch(both, (x, norm.running_mean), mesh=MESH)
    check(both, model, (x, torch.randn(6)), {})


WRONG: dict[str, tuple[Any, str]] = {
    "no argument": ({"y": N}, "dynamic_shapes['y'] is no tensor among the arguments"),
    "no dim": ({"x": {2: "n"}}, "dynamic_shapes: dim 2 of x"),
    "a text for a dim": ({"x": {"0": "n"}}, "dynamic_shapes: dim '0' of x"),
    "a name for a tensor": ({"x": "n"}, "dynamic_shapes: 'n' for x"),
    "no name": ({"x": {0: "a b"}}, "dynamic_shapes: 'a b' for x"),
    "a fraction": ({"x": {0: 1.5}}, "dynamic_shapes: 1.5 for x"),
    "too short": ({"x": ("n",)}, "dynamic_shapes: 1 for 2 dims of x"),
    "too few arguments": ((N,), "dynamic_shapes: 1 for 3 arguments of dynamic_shapes"),
    "a number": (7, "dynamic_shapes: 7 for dynamic_shapes"),
    "a text": ("xx", "dynamic_shapes: 'xx' for dynamic_shapes"),
    "of a constant": ({"scale": Dim.AUTO}, "of scale, which is 3"),
    "no such item": ({"mask": {"b": [N, None]}}, "dynamic_shapes: mask has no 'b'"),
    "too few items": ({"mask": {"a": [N]}}, "dynamic_shapes: 1 for 2 items of mask.a"),
    "of a container": ({"mask": "n"}, "dynamic_shapes: 'n' for mask"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit(case: str) -> None:
    said, message = WRONG[case]
    args, kwargs = given(4, mask=True)
    if case == "too few arguments":
        kwargs = {"scale": 3}
    with pytest.raises(DefinitionError, match=re.escape(message)):
        mf.from_torch(Many(), args, kwargs, mesh=MESH, dynamic_shapes=said)
