"""What a torch user types works on handles, and means the same.

Each row is one Python function; it is run on tensors, and on the handles of a fusion.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import is_close, simulate_shares
from helpers.surface_cases import CASES, OWN, operands
from torch import Tensor

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, FusionDefinition, Layout, Shard
from mdfuse.frontend import ops as frontend
from mdfuse.frontend.handle import Handle

#: Extents do not divide by 2 or 3, so that parts are uneven.
LAYOUTS: dict[str, Callable[[int], Layout | None]] = {
    "rows": lambda rank: Layout(DeviceMesh([1, 0]), {"x": Shard(0)} if rank else {}),
    "columns": lambda rank: Layout(DeviceMesh.arange(x=3), {"x": Shard(rank - 1)} if rank else {}),
}


def as_list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, list | tuple) else [x]


def define(
    program: Callable[..., Any],
    tensors: Sequence[Tensor],
    layout: Callable[[int], Layout | None] = lambda rank: None,
) -> FusionDefinition:
    with FusionDefinition("surface") as fd:
        handles = [
            fd.define_tensor(x.shape, x.dtype, layout(x.ndim), name=f"x{i}")
            for i, x in enumerate(tensors)
        ]
        for result in as_list(program(*handles)):
            assert all(result is not h for h in handles), "a result is a value of its own"
            fd.add_output(result)
    return fd


def check(program: Callable[..., Any], plain: Callable[..., Any], names: str) -> None:
    """The same on one device, and in parts."""
    tensors = operands(names)
    expected = as_list(plain(*tensors))
    fd = define(program, tensors)
    for result, whole in zip(mf.reference(fd, tensors), expected, strict=True):
        assert is_close(result, whole), f"{fd}\n{result}\nexpected\n{whole}"
    for layout in LAYOUTS.values():
        compiled = mf.compile(define(program, tensors, layout))
        found = simulate_shares(compiled, tensors).outputs
        for result, whole in zip(found, expected, strict=True):
            assert is_close(result, whole), f"{compiled}\n{result}\nexpected\n{whole}"


@pytest.mark.parametrize("name", CASES)
def test_spelled_as_torch_spells_it(name: str) -> None:
    names, program = CASES[name]
    check(program, program, names)


@pytest.mark.parametrize("name", OWN)
def test_own_spellings(name: str) -> None:
    names, program, plain = OWN[name]
    check(lambda *handles: program(mf.ops, *handles), plain, names)


def test_every_operation_has_a_row() -> None:
    covered = {name.split("-")[0] for name in (*CASES, *OWN)}
    drawn = {"uniform", "dropout"}  # tests/frontend/test_ops.py
    assert frontend.BY_NAME.keys() - covered == drawn


def test_what_tensors_have_as_a_method_handles_have() -> None:
    wanted = {name for name in frontend.BY_NAME if hasattr(Tensor, name)}
    assert {name for name in wanted if not hasattr(Handle, name)} == set()


# -- errors --------------------------------------------------------------------------------------

#: A row: what is typed with a handle x of f32[5,4] (or fd.ops), and words that the message has.
Typed = Callable[[Any, Any], Any]
WRONG: dict[str, tuple[Typed, tuple[str, ...]]] = {
    # -- values are computed once
    "add_": (lambda ops, x: x.add_(1), ("%x.add_ writes", "computed once", "x = x.add(...)")),
    "copy_": (lambda ops, x: x.copy_(x), ("%x.copy_",)),
    "setitem": (lambda ops, x: operator.setitem(x, 0, 1), ("%x[…] = …", "where", "cat")),
    "torch in place": (lambda ops, x: F.relu(x, inplace=True), ("inplace", "leave")),
    # -- a handle is no number and no list of numbers
    "float": (lambda ops, x: float(x), ("float(%x)", "does not exist yet")),
    "int": (lambda ops, x: int(x), ("int(%x)",)),
    "complex": (lambda ops, x: complex(x), ("complex(%x)",)),
    "range": (lambda ops, x: range(x), ("operator.index(%x)",)),
    "list place": (lambda ops, x: [1, 2][x], ("operator.index(%x)",)),
    "if": (lambda ops, x: 1 if x > 0 else 2, ("truth", "where")),
    "not": (lambda ops, x: not x, ("truth",)),
    "iteration": (lambda ops, x: list(x.sum()), ("cannot be iterated", "no dims")),
    "len of a scalar": (lambda ops, x: len(x.sum()), ("len(", "no dims")),
    "item": (lambda ops, x: x.item(), ("no 'item'", "does not exist yet")),
    "numpy": (lambda ops, x: x.numpy(), ("no 'numpy'",)),
    "cuda": (lambda ops, x: x.cuda(), ("no 'cuda'", "device")),
    "device": (lambda ops, x: x.device, ("no 'device'",)),
    "backward": (lambda ops, x: x.backward(), ("forward only",)),
    "misspelled": (lambda ops, x: x.squeze(0), ("no 'squeze'", "docs/operations.md")),
    "unique": (lambda ops, x: x.unique(), ("no 'unique'", "only when the program runs", "sort")),
    "mask": (lambda ops, x: x[x > 0], ("%x[mask]", "only when the program runs", "where")),
    "topk of too many": (lambda ops, x: x.topk(5), ("with k=5", "4 elements", "from 0 to 4")),
    "topk of fewer than none": (lambda ops, x: ops.topk(x, -1, 0), ("k=-1", "5 elements")),
    "sort along no dim": (lambda ops, x: x.sort(2), ("dims (2,)", "from -2 to 1")),
    "bincount": (lambda ops, x: torch.bincount(x.int()), ("torch.bincount", "one_hot(i, 4)")),
    "unheard": (lambda ops, x: x.qqqq, ("no 'qqqq'", "docs/operations.md")),
    # -- arguments
    "dim and dims": (lambda ops, x: ops.sum(x, dim=0, dims=1), ("dim=0 and dims=1", "leave one")),
    "dim and dims of a method": (lambda ops, x: x.squeeze(0, dims=1), ("dim=0 and dims=1",)),
    "a value as a setting": (lambda ops, x: ops.gelu(x, approximate=x), ("gelu", "approximate")),
    "device of to": (lambda ops, x: x.to("cuda"), ("%x.to(cuda)", "layout", "set(x).on")),
    "dtype and more": (lambda ops, x: x.to(torch.half, True), ("%x.to(",)),
    "view of bits": (lambda ops, x: x.view(torch.int32), ("view(torch.int32)", "x.to(")),
    "size": (lambda ops, x: x.size(2), ("size(2)", "2 dims")),
    "slice of fractions": (lambda ops, x: x[0.5:], ("slice(0.5", "slice of integers")),
    "slice to a value": (lambda ops, x: x[: x.sum()], ("slice of integers",)),
    "tensor as an index": (lambda ops, x: x[torch.tensor([0])], ("tensor([0])", "fd.ops.tensor")),
    "a step of zero": (lambda ops, x: x[::0], ("positive",)),
    "rounding": (lambda ops, x: x.div(2, rounding_mode="up"), ("'up'", "floor")),
    "fraction into integers": (
        lambda ops, x: x.int().masked_fill(x > 0, 0.5), ("0.5", "torch.int32")),
    "t of a cube": (lambda ops, x: x[None].t(), ("more than two dims", "mT")),
    "movedim": (lambda ops, x: x.movedim((0, 1), (0, 0)), ("movedim", "one place")),
    "repeat": (lambda ops, x: x.repeat(2), ("repeat(%x, (2,))", "2 dims")),
    "repeats by a list": (lambda ops, x: x.repeat_interleave([1, 2], 0), ("[1, 2]", "shape")),
    "narrow": (lambda ops, x: x.narrow(0, 3, 3), ("narrow(%x, 0, 3, 3)", "0 to 5")),
    "select": (lambda ops, x: x.select(0, 5), ("index 5", "dim 0")),
    "split": (lambda ops, x: x.split([2, 2]), ("[2, 2]", "5 long")),
    "split of size 0": (lambda ops, x: x.split(0), ("size 0",)),
    "split along no dim": (lambda ops, x: x.split(2, 3), ("dims (3,)",)),
    "chunk": (lambda ops, x: x.chunk(0), ("0 chunks",)),
    "stack of nothing": (lambda ops, x: ops.stack([]), ("stack of no tensors",)),
    "stack": (lambda ops, x: torch.stack([x, x[0]]), ("stack of %x: f32[5,4]", "differ")),
    "mm": (lambda ops, x: torch.mm(x, x[0]), ("mm of", "2 dims", "matmul")),
    "mv": (lambda ops, x: x.mv(x), ("mv of %x", "1 dim")),
    "bmm": (lambda ops, x: torch.bmm(x[None], x.expand(2, 5, 4).mT), ("their batches differ",)),
    "softmax without a dim": (lambda ops, x: F.softmax(x), ("dim = None", "an integer")),
    "glu": (lambda ops, x: F.glu(x, 0), ("glu(%x, 0)", "two halves")),
    "rms_norm": (lambda ops, x: F.rms_norm(x, (5,)), ("rms_norm(%x, (5,))", "(4,)")),
    "heads": (
        lambda ops, x: F.scaled_dot_product_attention(x, x, x, enable_gqa=True),
        ("enable_gqa", "heads"),
    ),
    "nuclear": (lambda ops, x: torch.norm(x, "nuc"), ("p='nuc'", "fro")),
    "bool as a dim": (lambda ops, x: torch.var(x, False), ("dims (False,)",)),
    "loss of old": (lambda ops, x: F.mse_loss(x, x, size_average=False), ("'size_average'",)),
    "table first": (lambda ops, x: torch.embedding(x, x[0].int()), ("torch.embedding",)),
    "loss": (lambda ops, x: F.mse_loss(x, x, reduction="median"), ("'median'", "'mean'")),
    "targets of other rows": (
        lambda ops, x: F.cross_entropy(x, x.argmax(0)), ("cross_entropy of %x", "i64[4]")),
    "classes of integers": (
        lambda ops, x: F.cross_entropy(x.long(), x.argmax(1)), ("i64[5,4]", "[rows, classes]")),
    "smoothing": (
        lambda ops, x: F.cross_entropy(x, x.argmax(1), label_smoothing=2), ("from 0 to 1",)),
    "weights of classes": (
        lambda ops, x: F.cross_entropy(x, x.argmax(1), x[0]), ("cross_entropy",)),
    "a value instead of a list": (lambda ops, x: torch.stack(x), ("one value", "x.unbind(0)")),
    "a tensor to be": (lambda ops, x: torch.tensor(x), ("len(", "a tensor that exists")),
    "a numpy array": (lambda ops, x: np.ones(4) * x, ("ndarray is no operand",)),
    # -- functions of torch
    "svd": (lambda ops, x: torch.linalg.svd(x), ("linalg_svd", "no operation", "make it an input")),
    "one dim of several": (lambda ops, x: ops.sum(x, dim=()), ("dim = ()", "dims=()")),
    "dropout": (lambda ops, x: F.dropout(x), ("torch.nn.functional.dropout", "seed=")),
    "einsum": (lambda ops, x: torch.einsum("ijk->i", x), ("einsum('ijk->i')", "'ijk' stands for")),
    "out": (lambda ops, x: torch.exp(x, out=x), ("torch.exp", "'out'")),
    "axis": (lambda ops, x: torch.sum(x, axis=1), ("torch.sum", "'axis'", "dim")),
    "function of a tensor": (
        lambda ops, x: torch.add(torch.ones(4), x), ("torch.add", "Tensor", "define_tensor")),
    "list with a tensor": (lambda ops, x: torch.cat([torch.ones(5, 4), x]), ("torch.cat",)),
    "own function of a tensor": (
        lambda ops, x: ops.softmax(torch.ones(3), 5), ("Tensor is no operand", "define_tensor")),
    "tensor on the left": (lambda ops, x: torch.ones(4) - x, ("Tensor", "define_tensor")),
    "tensor on the right": (lambda ops, x: x * torch.ones(4), ("Tensor", "define_tensor")),
    "a module": (lambda ops, x: torch.nn.Linear(4, 2)(x), ("Parameter", "define_tensor")),
    "index of a tensor": (lambda ops, x: torch.ones(4)[x.int(),], ("__getitem__", "define_tensor")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    typed, says = WRONG[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([5, 4], name="x")
        with pytest.raises(DefinitionError) as caught:
            typed(fd.ops, x)
    for words in (*says, "test_methods.py:"):
        assert words in str(caught.value), caught.value


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    """So that `hasattr` says what it should."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([5, 4])
    assert not hasattr(x, "unique") and not hasattr(x, "__array__") and hasattr(x, "softmax")


def test_in_place_operators_bind_a_new_value() -> None:
    def program(x: Any) -> Any:
        y = x
        y += 1
        y *= x
        return y, x * 1

    check(program, lambda x: ((x + 1) * x, x * 1), "x")


def test_numbers_of_numpy_are_numbers() -> None:
    check(lambda x: (np.float64(2) * x, x / np.sqrt(3)), lambda x: (2 * x, x / 3**0.5), "x")


# -- the user's lines ----------------------------------------------------------------------------


def helper(x: Any) -> Any:
    return torch.nn.functional.normalize(x)  # helper


@mf.fusion
def traced(x: Any) -> Any:
    y = (
        x.var(-1, keepdim=True)  # traced
        + helper(x).sum()  # traced
    )
    parts = [p.logsumexp(0) for p in y.split(2)]  # traced
    return (lambda p, *others: p + others[0])(*parts), F.softmax(y, dim=0)  # traced


def marked(word: str) -> set[int]:
    """The lines of this file that end so."""
    with open(__file__, encoding="utf-8") as file:
        return {n for n, line in enumerate(file, 1) if line.rstrip().endswith(f"# {word}")}


def test_every_expression_has_the_line_of_the_user() -> None:
    spec = mf.TensorSpec((5, 4), mesh=DeviceMesh.arange(x=2), layout={"x": Shard(0)})
    fd = traced.define(spec)
    lines = [e.source.line for e in fd.fusion.exprs if e.source is not None]
    assert len(lines) == len(fd.fusion.exprs)
    assert set(lines) == marked("traced") | marked("helper")
    program = mf.compile(fd)
    shown = [f"# test_methods.py:{n}" for n in lines]
    for text in (str(fd), str(program)):
        printed = [line for line in text.splitlines() if " = " in line and "input" not in line]
        assert all("# test_methods.py:" in line for line in printed), text
        assert all(any(line.endswith(place) for line in printed) for place in shown), text


def test_an_error_while_lowering_names_the_line() -> None:
    with FusionDefinition("streamed") as fd:
        x = fd.define_tensor([4, 4], mesh=DeviceMesh.arange(x=2))
        y = torch.softmax(x, 0).on(DeviceMesh.arange(x=2), stream=mf.Stream(0, 2))  # lowered
        fd.add_output(y)
    with pytest.raises(mf.LoweringError) as caught:
        mf.compile(fd)
    (line,) = marked("lowered")
    assert f"test_methods.py:{line}" in str(caught.value)


def test_an_error_of_a_run_names_the_line() -> None:
    with FusionDefinition("looked_up") as fd:
        i = fd.define_tensor([3], torch.int64, mesh=DeviceMesh([0]))
        w = fd.define_tensor([4, 2], mesh=DeviceMesh([0]))
        fd.add_output(torch.nn.functional.embedding(i, w))  # ran
    program = mf.compile(fd)
    (line,) = marked("ran")
    with pytest.raises(Exception, match="index out of range") as caught:
        mf.simulate(program, [torch.tensor([0, 9, 1]), torch.ones(4, 2)])
    notes = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert any(f"test_methods.py:{line}" in note for note in notes), notes


# -- symbolic extents ----------------------------------------------------------------------------


def test_extents_that_each_run_chooses() -> None:
    def program(x: Any) -> Any:
        a, b = x.chunk(2, dim=-1)
        y = torch.stack([a, b], 1).flatten(1).repeat_interleave(2, 1)
        return torch.logsumexp(y, 1, keepdim=True) + x.view(x.size(0), -1).var(0).sum()

    mesh = DeviceMesh.arange(x=2)
    with FusionDefinition("symbolic") as fd:
        fd.add_output(program(fd.define_tensor([-1, 4], torch.float64, mesh, {"x": Shard(0)})))
    compiled = mf.compile(fd)
    for rows in (5, 8):
        x = torch.rand(rows, 4, dtype=torch.float64)
        assert is_close(mf.reference(fd, [x])[0], program(x))
        assert is_close(mf.simulate(compiled, [x]).outputs[0], program(x))
    assert len(compiled.lowerings) == 1
