"""Wrong input: an error of the right class whose text says what, where and what to do.

Each row is the smallest wrong program. Its message must hold the listed values, the line of this
file that is wrong, and a remedy; nothing may hang, crash in torch, or give a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import (
    DefinitionError,
    DeviceMesh,
    FusionDefinition,
    Layout,
    LayoutError,
    LoweringError,
    MdfuseError,
    MeshError,
    Partial,
    ProgramError,
    Shard,
    Stream,
)
from mdfuse.config import options_from_environment

MESH = DeviceMesh.arange(x=4)
GRID = DeviceMesh.arange(dp=2, tp=2)
I64 = torch.int64

Wrong = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """Something wrong.

    Attributes:
        name: of the test.
        error: the class.
        wrong: what raises it.
        says: what its text must hold.
        is_located: it names a line of this file; errors of one rank's arguments name the rank.
    """

    name: str
    error: type[MdfuseError]
    wrong: Wrong
    says: tuple[str, ...]
    is_located: bool = True

    def __str__(self) -> str:
        return self.name

    def check(self, call: Callable[[], Any]) -> None:
        with pytest.raises(MdfuseError) as caught:
            call()
        text = str(caught.value)
        assert type(caught.value) is self.error or issubclass(type(caught.value), self.error), text
        for words in self.says:
            assert words in text, text
        if self.is_located:
            assert "test_errors.py:" in text, text
        assert "\n  try  " in text, text


def from_variable(name: str, text: str) -> None:
    options_from_environment(None, {name: text})


# -- meshes and layouts --------------------------------------------------------------------------

MESHES = [
    Row("duplicate ranks", MeshError, lambda: DeviceMesh([0, 1, 1, 2, 2]), ("1, 2", "once")),
    Row("ragged", MeshError, lambda: DeviceMesh([[0, 1], [2]]), ("[[0, 1], [2]]", "array")),
    Row("negative", MeshError, lambda: DeviceMesh([0, -1]), ("-1", "count from 0")),
    Row("a number", MeshError, lambda: DeviceMesh(4), ("4 is no array", "arange(x=4)")),
    Row("a layout", MeshError, lambda: DeviceMesh({"x": Shard(0)}), ("Shard", "(mesh, {...})")),
    Row("sizes", MeshError, lambda: DeviceMesh((2, 2)), ("once", "arange(x=2, y=2)")),
    Row("no ranks", MeshError, lambda: DeviceMesh([]), ("[]", "at least one")),
    Row("fractions", MeshError, lambda: DeviceMesh([0.5]), ("0.5", "integers")),
    Row("bools", MeshError, lambda: DeviceMesh([True]), ("True", "integers")),
    Row("text", MeshError, lambda: DeviceMesh("01"), ("'01'", "integers")),
    Row("float tensor", MeshError, lambda: DeviceMesh(torch.ones(2)), ("1.0", "integers")),
    Row("too few names", MeshError, lambda: DeviceMesh([[0, 1], [2, 3]], axes=("dp",)),
        ("('dp',)", "(2, 2)")),
    Row("one name twice", MeshError, lambda: DeviceMesh([[0, 1], [2, 3]], axes=("a", "a")),
        ("('a', 'a')", "share")),
    Row("no identifier", MeshError, lambda: DeviceMesh([0], axes=("a b",)), ("a b",)),
    Row("stream", MeshError, lambda: DeviceMesh([0], axes=("stream",)), ("stream",)),
    Row("four axes without names", MeshError, lambda: DeviceMesh([[[[0]]]]), ("4 axes",)),
    Row("axis of size 0", MeshError, lambda: DeviceMesh.arange(tp=0), ("'tp': 0",)),
    Row("rank outside", MeshError, lambda: MESH.team(9, "x"), ("rank 9", "0, 1, 2, 3")),
    Row("team of no axis", MeshError, lambda: MESH.team(0, "tp"), ("'tp'", "'x'")),
    Row("axis of a layout", MeshError, lambda: Layout(MESH, {"tp": Shard(0)}), ("'tp'", "'x'")),
    Row("no placement", LayoutError, lambda: Layout(MESH, {"x": 0}), ("axis x", "Shard(dim)")),  # type: ignore[dict-item]
    Row(
        "stream as placement",
        LayoutError,
        lambda: Layout(MESH, {"x": Stream(0, 2)}),  # type: ignore[dict-item]
        ("axis x", "stream="),
    ),
    Row("no mesh", LayoutError, lambda: Layout([0, 1]), ("[0, 1]", "DeviceMesh(")),  # type: ignore[arg-type]
    Row("dim that is no integer", LayoutError, lambda: Shard("x"), ("'x'", "Shard(0)")),  # type: ignore[arg-type]
    Row("no reduce op", LayoutError, lambda: Partial("mean"), ("'mean'", "avg")),
    Row("order with an axis missing", LayoutError,
        lambda: Layout(GRID, {"dp": Shard(0), "tp": Shard(0)}, {0: ("tp",)}),
        ("('tp',)", "('dp', 'tp')")),
    Row("order of another dim", LayoutError, lambda: Layout(GRID, {"dp": Shard(0)}, {1: ("dp",)}),
        ("dim 1",)),
    Row("streams", ProgramError, lambda: mf.Options(streams=0), ("streams=0",)),
    Row("timeout", ProgramError, lambda: mf.Options(timeout_s=-1), ("timeout_s=-1",)),
    Row("graph", ProgramError, lambda: mf.Options(graph="yes"), ("'yes'",)),  # type: ignore[arg-type]
    *(
        Row(f"option {name}", ProgramError, lambda given=given: mf.Options(**given), (what,))  # type: ignore[misc]
        for name, given, what in (
            ("nan", {"timeout_s": float("nan")}, "timeout_s=nan"),
            ("inf", {"timeout_s": float("inf")}, "timeout_s=inf"),
            ("text", {"streams": "4"}, "streams='4'"),
            ("true", {"plans": True}, "plans=True"),
            ("huge", {"streams": 10**5000}, "streams=a number of thousands of digits"),
            ("one", {"verify": 1}, "verify=1"),
            ("none", {"backend": None}, "backend=None"),
            ("path", {"reports": 3}, "reports=3"),
        )
    ),
    *(
        Row(name, ProgramError, lambda n=name, t=text: from_variable(n, t), (f"{name}={text!r}",))
        for name, text in (
            ("MDFUSE_VERIFY", "off"),
            ("MDFUSE_POISON", "true"),
            ("MDFUSE_STREAMS", "0"),
            ("MDFUSE_PLANS", "٣"),
            ("MDFUSE_TIMEOUT_S", "nan"),
            ("MDFUSE_GRAPH", "Auto"),
            ("MDFUSE_BACKEND", "gloo,nccl"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", MESHES, ids=str)
def test_meshes_and_layouts(row: Row) -> None:
    row.check(row.wrong)


# -- definitions ---------------------------------------------------------------------------------


def twice_placed(fd: Any, x: Any, y: Any) -> None:
    z = (x + y).on(MESH, {"x": Shard(0)})
    z.on(MESH, {"x": Shard(1)})


def placed_after_use(fd: Any, x: Any, y: Any) -> None:
    z = x + y
    _ = z * 2
    z.on(MESH, {"x": Shard(0)})


def duplicate_output(fd: Any, x: Any, y: Any) -> None:
    z = x + y
    fd.add_output(z)
    fd.add_output(z)


def reused_twice(fd: Any, x: Any, y: Any) -> None:
    fd.add_output(x + y, reuse=x)
    fd.add_output(x - y, reuse=x)


PLACED = [
    Row("placed twice", LayoutError, twice_placed, ("%z", "(x=S1)", "(x=S0)", "stated at", "set(")),
    Row("input placed again", LayoutError, lambda fd, x, y: x.on(MESH), ("%x", "stated at")),
    Row("placed after use", LayoutError, placed_after_use, ("%z", "used at", "first use")),
    Row("scalar", LayoutError, lambda fd, x, y: fd.define_scalar(2.0).on(MESH), ("scalar",)),
    Row("dim out of range", LayoutError, lambda fd, x, y: (x + y).on(MESH, {"x": Shard(2)}),
        ("dim 2", "axis x", "-2 to 1")),
    Row("negative dim out of range", LayoutError, lambda fd, x,
        y: (x + y).on(MESH, {"x": Shard(-3)}), ("dim -3", "-2 to 1")),
    Row("dim of no dims", LayoutError, lambda fd, x, y: fd.ops.sum(x).on(MESH, {"x": Shard(0)}),
        ("dim 0", "0 dims")),
    Row("axis that does not exist", MeshError, lambda fd, x, y: (x + y).on(MESH, {"tp": Shard(0)}),
        ("'tp'", "'x'")),
    Row("average of integers", LayoutError, lambda fd, x,
        y: fd.define_tensor([8], I64, MESH, {"x": Partial("avg")}), ("'avg'", "int64")),
    Row("bits of floats", LayoutError, lambda fd, x, y: (x + y).on(MESH, {"x": Partial("band")}),
        ("'band'", "float32", "integers")),
    Row("sum of bools", LayoutError, lambda fd, x, y: (x > y).on(MESH, {"x": Partial("sum")}),
        ("'sum'", "bool")),
    Row("layout and placements", LayoutError, lambda fd, x,
        y: (x + y).on(Layout(MESH), {"x": Shard(0)}), ("at once",)),
    Row("bad mesh", MeshError, lambda fd, x, y: (x + y).on([0, 0]), ("twice or more: 0",)),
]  # fmt: skip

DEFINED = [
    Row("layout without mesh", LayoutError, lambda fd, x,
        y: fd.define_tensor([8], layout={"x": Shard(0)}), ("no mesh", "mesh=")),
    Row("dtype by name", DefinitionError, lambda fd, x, y: fd.define_tensor([8], dtype="float32"),
        ("'float32'", "torch.float32")),
    Row("python type", DefinitionError, lambda fd, x, y: fd.define_tensor([8], dtype=float),
        ("float", "torch.float32")),
    Row("negative extent", DefinitionError, lambda fd, x, y: fd.define_tensor([3, -2]),
        ("[3, -2]", "at least 0")),
    Row("fraction", DefinitionError, lambda fd, x, y: fd.define_tensor([3.0]), ("[3.0]",)),
    Row("no list", DefinitionError, lambda fd, x, y: fd.define_tensor(3), ("shape 3", "list")),
    Row("negative", DefinitionError, lambda fd, x, y: fd.define_tensor([-2, 3]), ("[-2, 3]",)),
    Row("stride order", DefinitionError, lambda fd, x,
        y: fd.define_tensor([3, 4], stride_order=[0, 0]), ("(0, 0)", "permutation of 0..1")),
    Row("name", DefinitionError, lambda fd, x, y: fd.define_tensor([3], name="a b"), ("'a b'",)),
    Row("no number", DefinitionError, lambda fd, x, y: fd.define_scalar("a"), ("'a'",)),
    Row("scalar of another dtype", DefinitionError, lambda fd, x,
        y: fd.define_scalar(2.5, dtype=int), ("2.5", "int")),
    Row("scalar dtype", DefinitionError, lambda fd, x, y: fd.define_scalar(dtype=str), ("str",)),
]  # fmt: skip

OUTPUTS = [
    Row("output twice", DefinitionError, duplicate_output, ("%z", "already")),
    Row("output that is a scalar", DefinitionError, lambda fd, x,
        y: fd.add_output(fd.define_scalar(2.0)), ("%s", "scalar")),
    Row("output that is a tensor", DefinitionError, lambda fd, x, y: fd.add_output(torch.ones(2)),
        ("tensor([1., 1.])", "@bad")),
    Row("stride order of an output", DefinitionError, lambda fd, x,
        y: fd.add_output(x + y, stride_order=[0]), ("(0,)", "permutation")),
    Row("reuse of another shape", DefinitionError, lambda fd, x,
        y: fd.add_output((x + y)[1:], reuse=x), ("f32[7,3]", "%x", "f32[8,3]")),
    Row("reuse of another dtype", DefinitionError, lambda fd, x,
        y: fd.add_output((x + y).to(torch.float64), reuse=x), ("f64[8,3]", "f32[8,3]")),
    Row("reuse of no input", DefinitionError, lambda fd, x, y: fd.add_output(x + y, reuse=x * 2),
        ("reuse=", "define_tensor")),
    Row("reuse of a tensor", DefinitionError, lambda fd, x,
        y: fd.add_output(x + y, reuse=torch.ones(2)), ("tensor([1., 1.])",)),
    Row("reuse twice", DefinitionError, reused_twice, ("%x", "twice")),
    Row("an input into another one", DefinitionError, lambda fd, x, y: fd.add_output(y, reuse=x),
        ("%y is an input and an output", "fd.ops.set(y)")),
    Row("an input that is overwritten, and returned", DefinitionError, lambda fd, x,
        y: (fd.add_output(x), fd.add_output(x + y, reuse=x)),
        ("%x is an input and an output", "fd.ops.set(x)")),
    Row("an input that is returned, and overwritten", DefinitionError, lambda fd, x,
        y: (fd.add_output(x + y, reuse=x), fd.add_output(x)),
        ("%x is an input and an output", "fd.ops.set(x)")),
]  # fmt: skip

HANDLES = [
    Row("truth value", DefinitionError, lambda fd, x, y: x if x > y else y,
        ("truth", "where(condition, a, b)")),
    Row("membership", DefinitionError, lambda fd, x, y: x in [y], ("truth",)),
    Row("text operand", DefinitionError, lambda fd, x, y: x + "a", ("add", "str")),
    Row("tensor operand", DefinitionError, lambda fd, x, y: x + torch.ones(8, 3),
        ("add", "Tensor", "define_tensor")),
    Row("tensor on the left", DefinitionError, lambda fd, x, y: torch.ones(8, 3) * x,
        ("mul", "Tensor", "define_tensor")),
    Row("index", DefinitionError, lambda fd, x, y: x[8], ("index 8", "dim 0", "%x", "-8 to 7")),
    Row("negative index", DefinitionError, lambda fd, x, y: x[0, -4], ("index -4", "dim 1")),
    Row("fraction", DefinitionError, lambda fd, x, y: x[1.5], ("1.5",)),
    Row("bool index", DefinitionError, lambda fd, x, y: x[True], ("True",)),
    Row("mask index", DefinitionError, lambda fd, x, y: x[x > y], ("%x", "embedding")),
    Row("three indices", DefinitionError, lambda fd, x, y: x[0, 0, 0], ("3 indices", "2 dims")),
    Row("two ellipses", DefinitionError, lambda fd, x, y: x[..., ...], ("two `...`",)),
    Row("backwards", DefinitionError, lambda fd, x, y: x[::-1], ("positive",)),
]  # fmt: skip

OPERATIONS = [
    Row("unknown", DefinitionError, lambda fd, x, y: fd.ops.frobnicate(x),
        ("'frobnicate'", "docs/operations.md")),
    Row("misspelled", DefinitionError, lambda fd, x, y: fd.ops.layernorm(x),
        ("'layernorm'", "docs/operations.md")),
    Row("matmul", DefinitionError, lambda fd, x, y: x @ y,
        ("matmul(%x: f32[8,3], %y: f32[8,3])", "torch says")),
    Row("matmul of two dtypes", DefinitionError, lambda fd, x, y: x @ fd.define_tensor([3, 4], I64),
        ("matmul", "f32[8,3]", "i64[3,4]")),
    Row("linear", DefinitionError, lambda fd, x, y: fd.ops.linear(x, fd.define_tensor([4, 5])),
        ("linear", "f32[4,5]")),
    Row("bias", DefinitionError, lambda fd, x, y: fd.ops.linear(x, y, fd.define_tensor([5])),
        ("linear", "f32[5]")),
    Row("broadcasting", DefinitionError, lambda fd, x, y: x + fd.define_tensor([5]),
        ("add", "f32[8,3]", "f32[5]")),
    Row("bits of floats", DefinitionError, lambda fd, x, y: ~x, ("bitwise_not", "f32[8,3]")),
    Row("where without a mask", DefinitionError, lambda fd, x, y: fd.ops.where(x, x, y),
        ("where(%x: f32[8,3]",)),
    Row("embedding of floats", DefinitionError, lambda fd, x, y: fd.ops.embedding(x, y),
        ("embedding", "indices")),
    Row("softmax of integers", DefinitionError, lambda fd, x,
        y: fd.ops.softmax(fd.define_tensor([3], I64)), ("softmax", "i64[3]")),
    Row("mean of integers", DefinitionError, lambda fd, x,
        y: fd.ops.mean(fd.define_tensor([3], I64)), ("mean", "i64[3]")),
    Row("maximum of nothing", DefinitionError, lambda fd, x,
        y: fd.ops.amax(fd.define_tensor([0, 3]), 0), ("max", "f32[0,3]")),
    *(
        Row(
            f"{op} of dim {dims}",
            DefinitionError,
            lambda fd, x, y, op=op, dims=dims: getattr(fd.ops, op)(x, dims),
            (f"dims {dims if isinstance(dims, tuple) else (dims,)}", "%x", "f32[8,3]", "-2 to 1"),
        )
        for op in ("sum", "prod", "amax", "mean", "any", "softmax", "log_softmax", "squeeze")
        for dims in (2, -3, *(((0, 5),) if "softmax" not in op else ()))
    ),
    Row("a dim twice", DefinitionError, lambda fd, x, y: fd.ops.prod(x, (0, -2)),
        ("dims (0, -2)", "once")),
    Row("no dim", DefinitionError, lambda fd, x, y: fd.ops.sum(x, 1.5), ("1.5", "-2 to 1")),
    Row("permute", DefinitionError, lambda fd, x, y: fd.ops.permute(x, (0, 0)),
        ("permute", "(0, 0)")),
    Row("transpose", DefinitionError, lambda fd, x, y: x.transpose(0, 2), ("(0, 2)", "-2 to 1")),
    Row("flatten", DefinitionError, lambda fd, x, y: fd.ops.flatten(x, 0, 5), ("5", "-2 to 1")),
    Row("unsqueeze", DefinitionError, lambda fd, x, y: x.unsqueeze(4), ("4",)),
    Row("reshape", DefinitionError, lambda fd, x, y: x.reshape(5, 5), ("f32[8,3]", "(5, 5)")),
    Row("two unknowns", DefinitionError, lambda fd, x, y: x.reshape(-1, -1), ("(-1, -1)",)),
    Row("seven rows", DefinitionError, lambda fd, x, y: x.reshape(7, -1), ("f32[8,3]", "7")),
    Row("expand", DefinitionError, lambda fd, x, y: x.expand(9, 3), ("expand", "(9, 3)")),
    Row("broadcast", DefinitionError, lambda fd, x, y: fd.ops.broadcast(x, [True, False]),
        ("[True, False]", "2 times False")),
    Row("slice", DefinitionError, lambda fd, x, y: fd.ops.slice(x, [0], [1]),
        ("slice(%x", "2 dims")),
    Row("cat", DefinitionError, lambda fd, x, y: fd.ops.cat([x, fd.define_tensor([8, 4])]),
        ("cat", "f32[8,4]")),
    Row("cat of nothing", DefinitionError, lambda fd, x, y: fd.ops.cat([]), ("no tensors",)),
    Row("cat dim", DefinitionError, lambda fd, x, y: fd.ops.cat([x, y], 2), ("cat", "dim=2")),
    Row("cast", DefinitionError, lambda fd, x, y: fd.ops.cast(x, "float"), ("cast", "float")),
    Row("clamp", DefinitionError, lambda fd, x, y: fd.ops.clamp(x), ("clamp", "min=None")),
    Row("layer norm", DefinitionError, lambda fd, x, y: fd.ops.layer_norm(x, 4),
        ("layer_norm", "(4,)")),
    Row("rms norm", DefinitionError, lambda fd, x, y: fd.ops.rms_norm(x, 4), ("rms_norm", "(4,)")),
    Row("rms norm of no dim", DefinitionError, lambda fd, x, y: fd.ops.rms_norm(x, ()),
        ("rms_norm", "the last ones")),
    Row("rms norm of a number", DefinitionError, lambda fd, x,
        y: fd.ops.rms_norm(fd.define_tensor([])), ("rms_norm", "reshape(1)")),
    Row("weight of an rms norm", DefinitionError, lambda fd, x,
        y: fd.ops.rms_norm(x, None, fd.define_tensor([1])), ("rms_norm", "f32[1]")),
    Row("complex weight of an rms norm", DefinitionError, lambda fd, x,
        y: fd.ops.rms_norm(x, None, fd.define_tensor(x.shape[-1:], dtype=torch.complex64)),
        ("rms_norm", "multiply afterwards")),
    Row("dropout in attention", DefinitionError, lambda fd, x,
        y: fd.ops.scaled_dot_product_attention(x, x, y, dropout_p=0.1),
        ("dropout_p=0.1", "softmax")),
    Row("dropout", DefinitionError, lambda fd, x, y: fd.ops.dropout(x, 1.5), ("p=1.5",)),
    Row("uniform integers", DefinitionError, lambda fd, x, y: fd.ops.uniform([3], dtype=I64),
        ("int64", "cast")),
    Row("uniform shape", DefinitionError, lambda fd, x, y: fd.ops.uniform([-3]), ("(-3,)",)),
    Row("seed", DefinitionError, lambda fd, x, y: fd.ops.uniform([3], seed=1.5), ("seed=1.5",)),
    Row("float scalar as seed", DefinitionError, lambda fd, x,
        y: fd.ops.dropout(x, 0.5, seed=fd.define_scalar()), ("seed=%s", "dtype=int")),
    Row("arithmetic of scalars", DefinitionError, lambda fd, x, y: ~fd.define_scalar(2.0),
        ("bitwise_not",)),
]  # fmt: skip


@pytest.mark.parametrize("row", [*PLACED, *DEFINED, *OUTPUTS, *HANDLES, *OPERATIONS], ids=str)
def test_definitions(row: Row) -> None:
    def define() -> None:
        with FusionDefinition("bad") as fd:
            x = fd.define_tensor([8, 3], mesh=MESH, layout={"x": Shard(0)})
            y = fd.define_tensor([8, 3], mesh=MESH)
            row.wrong(fd, x, y)

    row.check(define)


def done(name: str) -> tuple[FusionDefinition, Any]:
    """A definition whose block has ended, and its input."""
    with FusionDefinition(name) as fd:
        x = fd.define_tensor([3])
        fd.add_output(x + 1)
    return fd, x


def other_definition() -> None:
    _, x = done("first")
    with FusionDefinition("second") as fd:
        _ = fd.define_tensor([3]) + x


def other_definition_in_an_operation() -> None:
    _, x = done("first")
    with FusionDefinition("second") as fd:
        fd.ops.where(fd.define_tensor([3], torch.bool), x, 0.0)


def still_open() -> None:
    with FusionDefinition("open") as fd:
        fd.add_output(fd.define_tensor([3]) + 1)
        mf.compile(fd)


LIVES = [
    Row("other definition", DefinitionError, other_definition, ("@first", "@second")),
    Row(
        "operands of two definitions",
        DefinitionError,
        other_definition_in_an_operation,
        ("@first", "@second"),
    ),
    Row("use after the block", DefinitionError, lambda: done("f")[1] + 1, ("@f", "`with` block")),
    Row("placed after the block", DefinitionError, lambda: done("f")[1].on(MESH), ("@f",)),
    Row("input after the block", DefinitionError, lambda: done("f")[0].define_tensor([3]), ("@f",)),
    Row("output after the block", DefinitionError, lambda: done("f")[0].add_output(1), ("@f",)),
    Row("entered twice", DefinitionError, lambda: done("f")[0].__enter__(), ("@f", "new")),
    Row("compiled in its block", DefinitionError, still_open, ("@open", "`with` block")),
    Row("no definition", DefinitionError, lambda: mf.ops.uniform([3]), ("needs a definition",)),
    Row("compile a function", DefinitionError, lambda: mf.compile(print), ("builtin", "define")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("row", LIVES, ids=str)
def test_the_life_of_a_definition(row: Row) -> None:
    row.check(row.wrong)


# -- lowering ------------------------------------------------------------------------------------


def streamed(fd: Any, x: Any, y: Any) -> None:
    fd.add_output(fd.ops.softmax(x + y, dim=0).on(MESH, stream=Stream(0, 2)))


def into_partial(fd: Any, x: Any, y: Any) -> None:
    part = fd.define_tensor([8, 3], mesh=MESH, layout={"x": Partial("sum")})
    fd.add_output(fd.ops.set(part).on(MESH, {"x": Partial("max")}))


def reuse_placed_elsewhere(fd: Any, x: Any, y: Any) -> None:
    z = (x + y).on(MESH, {"x": Shard(1)})
    fd.add_output(z, reuse=x)


LOWERED = [
    Row("stream", LoweringError, streamed, ("softmax", "dim 0", "leave stream= out")),
    Row("into partial", LayoutError, into_partial, ("set(%part)", "P(max)", "P(sum)", "Replicate")),
    Row("reuse elsewhere", LayoutError, reuse_placed_elsewhere, ("%z", "(x=S1)", "%x", "(x=S0)")),
]


@pytest.mark.parametrize("row", LOWERED, ids=str)
def test_lowering(row: Row) -> None:
    with FusionDefinition("bad") as fd:
        x = fd.define_tensor([8, 3], mesh=MESH, layout={"x": Shard(0)})
        y = fd.define_tensor([8, 3], mesh=MESH)
        row.wrong(fd, x, y)
    row.check(lambda: mf.compile(fd))


# -- arguments -----------------------------------------------------------------------------------


def pair() -> FusionDefinition:
    """x on ranks 1 and 2 of 0..2, and an integer."""
    with FusionDefinition("pair") as fd:
        x = fd.define_tensor([7, 3], mesh=DeviceMesh([1, 2]), layout={"x": Shard(0)})
        s = fd.define_scalar(dtype=int)
        fd.add_output(x * s)
    return fd


X = torch.ones(7, 3)
FIRST, SECOND = torch.ones(4, 3), torch.ones(3, 3)
GOOD: list[dict[str, Any]] = [{"x": None, "s": 2}, {"x": FIRST, "s": 2}, {"x": SECOND, "s": 2}]


def per_rank(rank: int, **changes: Any) -> list[dict[str, Any]]:
    rows = [dict(row) for row in GOOD]
    rows[rank].update(changes)
    return rows


GLOBAL_ARGUMENTS: list[tuple[str, list[Any], tuple[str, ...]]] = [
    ("none", [], ("@pair", "0 arguments for 2", "x, s")),
    ("one", [X], ("1 argument for 2", "x, s")),
    ("three", [X, 2, 3], ("3 arguments for 2",)),
    ("shape", [X[1:], 2], ("%x", "(6, 3)", "(7, 3)")),
    ("one rank's part", [FIRST, 2], ("%x", "(4, 3)", "whole tensor")),
    ("dtype", [X.double(), 2], ("%x", "torch.float64", "pass x.to(torch.float32)")),
    ("array", [X.numpy(), 2], ("%x", "ndarray", "pass a tensor of torch")),
    ("None", [None, 2], ("%x", "NoneType", "(7, 3)")),
    ("list", [[1.0], 2], ("%x", "list")),
    ("sparse", [X.to_sparse(), 2], ("%x", "sparse", "to_dense")),
    ("fraction for an integer", [X, 2.5], ("%s", "2.5", "int64")),
    ("tensor for a number", [X, X], ("%s", "(7, 3)", "int64")),
    ("text for a number", [X, "2"], ("%s", "'2'", "int64")),
    ("None for a number", [X, None], ("%s", "None", "int64")),
]


@pytest.mark.parametrize(("name", "inputs", "says"), GLOBAL_ARGUMENTS, ids=lambda x: str(x)[:24])
def test_global_arguments(name: str, inputs: list[Any], says: tuple[str, ...]) -> None:
    """The simulator and the reference refuse alike."""
    fd = pair()
    row = Row(name, ProgramError, fd, says, is_located=False)  # type: ignore[arg-type]
    row.check(lambda: mf.simulate(mf.compile(fd), inputs))
    row.check(lambda: mf.reference(fd, inputs))


RANK_ARGUMENTS: list[tuple[str, list[dict[str, Any]], tuple[str, ...]]] = [
    ("too few ranks", GOOD[:2], ("2 dicts", "3 ranks")),
    ("tensor outside the mesh", per_rank(0, x=FIRST), ("%x", "rank 0", "pass None")),
    ("None inside the mesh", per_rank(2, x=None), ("%x", "rank 2", "NoneType")),
    ("missing", [{"s": 2}, {"s": 2}, GOOD[2]], ("%x", "rank 1")),
    ("another rank's part", per_rank(1, x=SECOND), ("%x", "rank 1", "(3, 3)", "(4, 3)")),
    ("the whole", per_rank(2, x=X), ("%x", "rank 2", "(7, 3)", "shard_tensor")),
    ("dtype", per_rank(2, x=SECOND.half()), ("%x", "torch.float16", "torch.float32")),
    ("device", per_rank(2, x=SECOND.to("meta")), ("%x", "rank 2", "meta", "cpu")),
    ("sparse", per_rank(1, x=FIRST.to_sparse()), ("%x", "rank 1", "to_dense")),
    ("scalar", per_rank(1, s=None), ("%s", "rank 1", "int64")),
    ("unknown name", per_rank(1, y=FIRST), ("'y'", "rank 1", "x, s")),
]


@pytest.mark.parametrize(("name", "rows", "says"), RANK_ARGUMENTS, ids=lambda x: str(x)[:24])
def test_arguments_of_ranks(name: str, rows: list[dict[str, Any]], says: tuple[str, ...]) -> None:
    row = Row(name, ProgramError, pair, says, is_located=False)
    row.check(lambda: mf.simulate(mf.compile(pair()), per_rank=rows))


def test_good_arguments_are_taken() -> None:
    """What the rows above spoil."""
    program = mf.compile(pair())
    assert torch.equal(mf.simulate(program, per_rank=GOOD).outputs[0], X * 2)
    for number in (2, 2.0, torch.tensor(2), True + 1):
        assert torch.equal(mf.simulate(program, [X, number]).outputs[0], X * 2)


SIMULATED = [
    Row("extents", ProgramError, lambda p: mf.simulate(p, [X, 2], {"x.0": 7}), ("x.0",)),
    Row("both", ProgramError, lambda p: mf.simulate(p, [X, 2], per_rank=GOOD), ("at once",)),
    Row(
        "dict", ProgramError, lambda p: mf.simulate(p, {"x": X, "s": 2}), ("a dict of x, s", "list")
    ),  # type: ignore[arg-type]
    Row(
        "options",
        ProgramError,
        lambda p: mf.compile(pair(), {"graph": "never"}),  # type: ignore[arg-type]
        ("{'graph': 'never'}", "mf.Options("),
    ),
    Row("no program", ProgramError, lambda p: mf.simulate(3, [X]), ("int", "compile")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("row", SIMULATED, ids=str)
def test_calls_of_the_simulator(row: Row) -> None:
    row.check(lambda: row.wrong(mf.compile(pair())))


PARTS = [
    Row("rank", MeshError, lambda: mf.shard_tensor(X, MESH, rank=9), ("rank 9",)),
    Row("dim", LayoutError, lambda: mf.shard_tensor(X, MESH, {"x": Shard(2)}, rank=0), ("dim 2",)),
    Row("parts", LayoutError, lambda: mf.unshard_tensor([X], MESH), ("1 part", "4 ranks")),
    Row("no parts", LayoutError, lambda: mf.unshard_tensor([], MESH), ("no parts",)),
    Row(
        "part shapes",
        LayoutError,
        lambda: mf.unshard_tensor([X, X, FIRST, X], MESH, {"x": Shard(1)}),
        ("rank 2", "(4, 3)", "(7, 3)"),
    ),
]


@pytest.mark.parametrize("row", PARTS, ids=str)
def test_parts(row: Row) -> None:
    row.check(row.wrong)


def test_a_wrong_definition_leaves_no_trace() -> None:
    """An error inside a block ends that definition; the next one starts clean."""
    with pytest.raises(DefinitionError), FusionDefinition("bad") as fd:
        fd.ops.sum(fd.define_tensor([3]), 7)
    with pytest.raises(DefinitionError, match="needs a definition"):
        mf.ops.uniform([3])
    with FusionDefinition("good") as fd:
        fd.add_output(mf.ops.uniform([3]))
    assert isinstance(mf.reference(fd, [])[0], Tensor)


def test_a_refused_output_leaves_no_trace() -> None:
    """Who goes on after it has the definition that he had before, without the reuse."""
    with FusionDefinition("refused") as fd:
        x, y = fd.define_tensor([3], name="x"), fd.define_tensor([3], name="y")
        fd.add_output(x)
        for output in (x + y, y):
            with pytest.raises(DefinitionError, match="is an input and an output"):
                fd.add_output(output, reuse=x)
        fd.add_output(x - y, reuse=y)
    program = mf.compile(fd)
    assert len(program.host.outputs) == 2 and len(program.host.aliases) == 1
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, 7.0, 9.0])
    found = mf.simulate(program, [a, b]).outputs
    assert torch.equal(found[0], a) and torch.equal(found[1], torch.tensor([-4.0, -5.0, -6.0]))
