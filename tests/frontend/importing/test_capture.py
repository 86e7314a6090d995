"""Arguments, results and names of modules; what cannot be exported; what cannot be imported."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, MdfuseError, ProgramError, Shard, TensorSpec
from mdfuse.compiled.imported import ImportedModel

TP = DeviceMesh.arange(tp=2)
X = torch.arange(24.0).reshape(4, 6).sin()

Pair = namedtuple("Pair", "first second")


def run(model: ImportedModel, *args: Any, **kwargs: Any) -> Any:
    given = [*model.load(), *model.inputs(*args, **kwargs)]
    return model.outputs(mf.simulate(model.compile(), given).outputs)


class Trees(nn.Module):
    """Dicts, lists and tuples in and out, and what is no tensor."""

    def forward(
        self, parts: dict[str, Any], *more: Tensor, scale: float = 1.0, mask: Tensor | None = None
    ) -> Any:
        first, second = parts["a"], parts["list"][0]
        y = (first + second) * scale
        if mask is not None:
            y = torch.where(mask, y, 0.0)
        total = y
        for x in more:
            total = total + x
        return {"pair": Pair(y, [total, None]), "given": first, "again": y, "n": 3, "text": "t"}


@pytest.mark.parametrize("has_mask", [False, True])
def test_trees_of_arguments_and_results(has_mask: bool) -> None:
    parts = {"a": X, "list": [X + 1]}
    kwargs: dict[str, Any] = {"scale": 2.0} | ({"mask": X > 0} if has_mask else {})
    layouts = {"input:parts.a": {"tp": Shard(0)}, "input:parts.list.0": {"tp": Shard(1)},
               "input:more.*": {"tp": Shard(0)}, "output:pair.second.0": {}}  # fmt: skip
    model = mf.from_torch(Trees(), (parts, X, X * 3), kwargs, mesh=TP, layouts=layouts)
    names = ["parts.a", "parts.list.0", "more.0", "more.1", *(["mask"] if has_mask else [])]
    assert [*model.fusion.inputs] == names
    found = run(model, parts, X, X * 3, **kwargs)
    wanted = Trees()(parts, X, X * 3, **kwargs)
    assert isinstance(found["pair"], Pair) and found["pair"].second[1] is None
    assert found["n"] == 3 and found["text"] == "t"
    for path in (("given",), ("again",), ("pair", 0), ("pair", 1, 0)):
        x, y = found, wanted
        for key in path:
            x, y = x[key], y[key]
        torch.testing.assert_close(x, y)
    last = model.compile().host.types[model.compile().host.outputs[1]].layout
    assert last is not None and last.is_replicated


@dataclass
class Scaled:
    """What a user passes and returns, unknown to torch."""

    x: Any
    by: Any = 1.0


class Scales(nn.Module):
    def forward(self, given: Scaled) -> list[Scaled]:
        return [Scaled(given.x * given.by), given]


def test_dataclasses_as_arguments_and_results() -> None:
    given = Scaled(X, torch.tensor(3.0))
    model = mf.from_torch(Scales(), (given,), mesh=TP, layouts={"input:given.x": {"tp": Shard(0)}})
    assert model.fusion.inputs == ("given.x", "given.by")
    first, second = run(model, given)
    assert type(first) is type(second) is Scaled and first.by == 1.0
    torch.testing.assert_close((first.x, second.x, second.by), (X * 3, X, given.by))


def test_arguments_of_another_structure() -> None:
    model = mf.from_torch(Trees(), ({"a": X, "list": [X]},), mesh=TP)
    with pytest.raises(ProgramError, match="it was imported with"):
        model.inputs({"a": X, "list": [X, X]})


def test_only_shapes_and_dtypes_count() -> None:
    """Arguments may be specs, and tensors on another device; they are not written."""
    module = nn.Linear(6, 2)
    specs = TensorSpec((4, 6)), torch.empty(4, 6, device="meta"), X.clone().requires_grad_()
    for x in specs:
        model = mf.from_torch(module, (x,), mesh=TP, layouts={"weight": {"tp": Shard(0)}})
        torch.testing.assert_close(run(model, X), module(X).detach())


class Constant(nn.Module):
    """A result that depends on nothing, one given back, one twice."""

    def forward(self, x: Tensor) -> Any:
        y = x * 2
        return torch.arange(3), x, y, y


def test_results_that_no_program_computes() -> None:
    model = mf.from_torch(Constant(), (X,), mesh=TP)
    steps, given, *twice = run(model, X)
    assert torch.equal(steps, torch.arange(3)) and torch.equal(given, X)
    assert all(torch.equal(y, X * 2) for y in twice)


class Shared(nn.Module):
    """A parameter under two names, one that nothing reads, one named as the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.spare = nn.Linear(6, 3)
        self.x = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.x


def test_tied_and_unused_parameters() -> None:
    module = Shared()
    model = mf.from_torch(module, (X,), mesh=TP, layouts={"second.weight": {"tp": Shard(0)}})
    assert [*model.fusion.inputs] == ["x", "first.weight", "input.x"]
    report = model.report()
    assert "tied: first.weight = second.weight" in report
    assert "unused: 2: spare.weight, spare.bias" in report
    torch.testing.assert_close(run(model, X), module(X).detach())


# -- what is wrong ---------------------------------------------------------------------------------


class Deciding(nn.Module):
    """It looks at a number."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


def test_decisions_on_data_are_refused_with_their_line() -> None:
    with pytest.raises(DefinitionError) as error:
        mf.from_torch(Deciding(), (X,), mesh=TP)
    text = str(error.value)
    assert "Deciding cannot be exported" in text and "if x.sum() > 0:" in text
    assert error.value.__cause__ is not None


def test_arguments_that_forward_does_not_take() -> None:
    with pytest.raises(DefinitionError, match="Linear cannot be exported: TypeError"):
        mf.from_torch(nn.Linear(6, 2), (X, X), mesh=TP)


@pytest.mark.parametrize(
    ("module", "args", "text"),
    [
        (lambda x: x, (X,), "from_torch of function"),
        (nn.Linear(6, 2), X, "they are a tuple"),
        (nn.Linear(6, 2), TensorSpec((4, 6)), "they are a tuple"),
        (nn.Linear(6, 2), 3, "with 3 as arguments"),
    ],
)
def test_what_is_no_module_and_what_are_no_arguments(module: Any, args: Any, text: str) -> None:
    with pytest.raises(DefinitionError, match=text):
        mf.from_torch(module, args, mesh=TP)


@pytest.mark.parametrize("mesh", [None, 3, "tp=2"])
def test_a_mesh_that_is_none(mesh: Any) -> None:
    with pytest.raises(MdfuseError, match="mesh"):
        mf.from_torch(nn.Linear(6, 2), (X,), mesh=mesh, layouts={"weight": {"tp": Shard(0)}})
    with pytest.raises(MdfuseError, match="mesh"):
        mf.from_torch(nn.Linear(6, 2), (X,), mesh=mesh)


class Unknown(nn.Module):
    """Operations that are not there."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.special.bessel_j0(x) + torch.special.bessel_j0(x + 1)
        return torch.linalg.qr(y)[1] + torch.fft.fft(y).real


def test_unknown_operations_are_refused_at_once() -> None:
    with pytest.raises(DefinitionError) as error:
        mf.from_torch(Unknown(), (X,), mesh=TP)
    lines = str(error.value).splitlines()
    assert "operations that cannot be imported" in lines[0]
    assert any("2 x aten.special_bessel_j0.default" in n and "bessel_j0(x)" in n for n in lines)
    assert any("1 x aten.linalg_qr.default" in n and "return torch.linalg.qr" in n for n in lines)
    assert any("aten.fft_fft.default" in n for n in lines)


class Called(nn.Module):
    """A function as a module."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(x)


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.mT


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda x: torch.fft.fft(x).real, ("Fourier", "product with its matrix")),
        (lambda x: torch.fft.rfft(x).real, ("Fourier", "product with its matrix")),
        (
            lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
            ("test_capture.py", "depends on no numbers", "where(condition, a, b)"),
        ),
        (autocast, ("autocast chooses", "cast in the module")),
        (lambda x: x + torch.randn_like(x), ("only dropout draws", "an argument of the module")),
        (lambda x: (x > 0).nonzero(), ("numbers that only a run knows", "where(mask, x, other)")),
    ],
)
def test_a_reason_and_a_way_out(call: Any, told: tuple[str, ...]) -> None:
    with pytest.raises(DefinitionError) as error:
        mf.from_torch(Called(call), (X,), mesh=TP)
    assert all(text in str(error.value) for text in told)


class Masked(nn.Module):
    """Elements where a mask holds: how many is data."""

    def forward(self, x: Tensor) -> Tensor:
        return x[torch.tensor([True, False, True, False])]


class Counted(nn.Module):
    """Bags of rows whose gradients are divided by how often they come."""

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding_bag(x.long(), torch.ones(9, 2), scale_grad_by_freq=True)


@pytest.mark.parametrize(
    ("module", "text", "line"),
    [
        (Counted(), "scale_grad_by_freq", "return F.embedding_bag"),
    ],
)
def test_arguments_that_operations_lack(module: nn.Module, text: str, line: str) -> None:
    with pytest.raises(DefinitionError, match=text) as error:
        mf.from_torch(module, (X,), mesh=TP)
    assert line in str(error.value)


def test_a_mask_that_is_known_is_a_shape() -> None:
    model = mf.from_torch(Masked(), (X,), mesh=TP, layouts={"input:x": {"tp": Shard(0)}})
    found = mf.simulate(model.compile(), [*model.load(), X]).outputs
    torch.testing.assert_close(found[0], Masked()(X))


class Tables:
    """No tree: torch does not know what is in it."""

    def __init__(self, *tables: Tensor) -> None:
        self.scale, self.tables = 2.0, {"all": [*tables]}


class ByTables(nn.Module):
    def forward(self, x: Tensor, *, tables: Tables) -> Tensor:
        return sum(tables.tables["all"], x) * tables.scale


def test_an_object_that_holds_tensors_is_no_constant() -> None:
    """Its numbers would stand in the program, and those of later runs would be read by nobody."""
    with pytest.raises(DefinitionError, match=r"Tables for tables") as error:
        mf.from_torch(ByTables(), (X,), {"tables": Tables(X)}, mesh=TP)
    assert "its tables holds a tensor" in str(error.value)
    model = mf.from_torch(ByTables(), (X,), {"tables": (without := Tables())}, mesh=TP)
    torch.testing.assert_close(run(model, X, tables=without), X * 2)
