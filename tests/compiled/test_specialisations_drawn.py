"""What is lowered with symbols is, for every extent it may serve, what is lowered with numbers.

A drawn program is lowered once with symbolic extents. For several extents its host program, with
their numbers in place, is compared as text with that of the same fusion lowered with the numbers;
where parts are uneven another text will do, which gives every rank the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from helpers import sampling
from helpers.drawn_views import Printed, layouts, mesh_pairs
from helpers.oracle import POISON, is_close, shares
from hypothesis import given, settings

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, MdfuseError, Stream, hir_lowering
from mdfuse.hir.program import BufferType, HostProgram
from mdfuse.ir.symbolic import with_known_extents

#: Some of the same examples each time: some that other seeds draw take minutes.
SAME_EVERY_TIME = settings(
    max_examples=sampling.of(150, 4), derandomize=True, deadline=None, database=None
)

#: Extents that are tried; the ends of what four or six ranks share are among them.
EXTENTS = (8, 24, 12, 36, 5, 7, 6, 1, 2, 3, 4, 9, 13, 16, 31, 64, 0)

#: What four or six ranks share evenly. Reshards of uneven parts are weighed by numbers, rank by
#: rank, so that a shared lowering may be another one.
EVENLY = 12


@dataclass(frozen=True)
class Step:
    """An operation on a handle that asks it for its extents, and a law on the result."""

    text: str
    apply: Callable[[mf.FusionDefinition, Any], Any]
    law: Layout | None = None

    def __repr__(self) -> str:
        return self.text + (f" on {self.law.mesh} {self.law}" if self.law else "")


@dataclass(frozen=True)
class Drawn(Printed):
    """A program over inputs of a shape in which -1 is symbolic."""

    shape: tuple[int, ...]
    source: Layout
    steps: tuple[Step, ...]

    def __repr__(self) -> str:
        head = f"{list(self.shape)} on {self.source.mesh} {self.source}"
        return "\n    ".join((head, *map(repr, self.steps)))

    def define(self) -> mf.FusionDefinition:
        with mf.FusionDefinition("drawn") as fd:
            h = fd.define_tensor(self.shape, torch.float32, self.source, name="x")
            for step in self.steps:
                h = step.apply(fd, h)
                if step.law is not None:
                    h.on(step.law)
            fd.add_output(h)
        return fd


def _matmul(columns: int, where: Layout) -> Callable[[mf.FusionDefinition, Any], Any]:
    def apply(fd: mf.FusionDefinition, h: Any) -> Any:
        is_number = type(h.shape[-1]) is int
        w = fd.define_tensor([h.shape[-1] if is_number else -1, columns], mesh=where, name="w")
        return h @ w

    return apply


def _linear(where: Layout) -> Callable[[mf.FusionDefinition, Any], Any]:
    def apply(fd: mf.FusionDefinition, h: Any) -> Any:
        is_number = type(h.shape[-1]) is int
        w = fd.define_tensor([4, h.shape[-1] if is_number else -1], mesh=where, name="w")
        return fd.ops.linear(h, w, fd.define_tensor([4], mesh=where.mesh, name="b"))

    return apply


def _add(where: Layout) -> Callable[[mf.FusionDefinition, Any], Any]:
    def apply(fd: mf.FusionDefinition, h: Any) -> Any:
        is_number = type(h.shape[-1]) is int
        return h + fd.define_tensor([h.shape[-1] if is_number else -1], mesh=where, name="y")

    return apply


def _expand(d: int) -> Callable[[mf.FusionDefinition, Any], Any]:
    def apply(fd: mf.FusionDefinition, h: Any) -> Any:
        return fd.ops.sum(h, [d], keepdim=True).expand(h.shape)

    return apply


def _output(fd: mf.FusionDefinition, h: Any) -> Any:
    fd.add_output(h * 2)
    return h


def _merge(d: int) -> Callable[[mf.FusionDefinition, Any], Any]:
    return lambda fd, h: h.reshape((*h.shape[:d], h.shape[d] * h.shape[d + 1], *h.shape[d + 2 :]))


def _cut(d: int) -> Callable[[mf.FusionDefinition, Any], Any]:
    return lambda fd, h: h.reshape((*h.shape[:d], -1, 2, *h.shape[d + 1 :]))


def _window(d: int, window: slice) -> Callable[[mf.FusionDefinition, Any], Any]:
    return lambda fd, h: h[(*[slice(None)] * d, window)]


@st.composite
def steps(
    draw: st.DrawFn, ndim: int, meshes: Sequence[DeviceMesh], kinds: list[str]
) -> tuple[Step, int]:
    """An operation on a tensor with some dims, and how many the result has."""
    d = draw(st.integers(0, ndim - 1))
    kind = draw(st.sampled_from(kinds))
    match kind:
        case "permute":
            dims = tuple(draw(st.permutations(range(ndim))))
            return Step(f"permute {dims}", lambda fd, h: h.permute(dims)), ndim
        case "sum" if ndim > 1:
            return Step(f"sum {d}", lambda fd, h: h.sum([d])), ndim - 1
        case "max":
            return Step(f"max {d}", lambda fd, h: fd.ops.max(h, [d], keepdim=True)), ndim
        case "softmax":
            return Step(f"softmax {d}", lambda fd, h: fd.ops.softmax(h, d)), ndim
        case "matmul":
            where = draw(layouts(draw(st.sampled_from(meshes)), 2))
            return Step(f"matmul {where}", _matmul(draw(st.sampled_from([3, 8])), where)), ndim
        case "merge" if ndim > 1:
            d = min(d, ndim - 2)
            return Step(f"merge {d}", _merge(d)), ndim - 1
        case "cut":
            return Step(f"cut {d}", _cut(d)), ndim + 1
        case "window":
            window = draw(st.sampled_from([slice(1, None), slice(None, -1), slice(0, 5)]))
            return Step(f"{d}: {window}", _window(d, window)), ndim
        case "cat":
            return Step(f"cat {d}", lambda fd, h: fd.ops.cat([h, h * 2], d)), ndim
        case "unsqueeze":
            return Step(f"unsqueeze {d}", lambda fd, h: h.unsqueeze(d)), ndim + 1
        case "linear":
            where = draw(layouts(draw(st.sampled_from(meshes)), 2))
            return Step(f"linear {where}", _linear(where)), ndim
        case "layer norm":
            return Step("layer norm", lambda fd, h: fd.ops.layer_norm(h)), ndim
        case "rms norm":
            return Step("rms norm", lambda fd, h: fd.ops.rms_norm(h)), ndim
        case "expand":
            return Step(f"expand {d}", _expand(d)), ndim
        case "add":
            where = draw(layouts(draw(st.sampled_from(meshes)), 1))
            return Step(f"add {where}", _add(where)), ndim
        case "output":
            return Step("output", _output), ndim
        case "add row":
            return Step("add row", lambda fd, h: h + h.sum([0], keepdim=True)), ndim
    law = draw(layouts(draw(st.sampled_from(meshes)), ndim))
    if kind == "stream" and law.blocked.get(d) != "zigzag":
        law = law.with_stream(Stream(d, draw(st.sampled_from([2, 4]))))
    return Step("set", lambda fd, h: fd.ops.set(h), law), ndim


_KINDS = [
    "set", "set", "set", "permute", "sum", "max", "softmax", "matmul", "merge", "cut", "window",
    "cat", "unsqueeze", "add row", "stream", "linear", "layer norm", "rms norm", "expand", "add",
    "output",
]  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> Drawn:
    before, after = draw(mesh_pairs())
    ndim = draw(st.integers(1, 3))
    shape = tuple(draw(st.sampled_from([-1, -1, 4, 6])) for _ in range(ndim))
    shape = shape if -1 in shape else (-1, *shape[1:])
    source = draw(layouts(before, ndim, draw(st.sampled_from([None, None, "sum"]))))
    found = []
    for i in range(draw(st.integers(2, 5))):
        kinds = ["set"] if i == 1 else _KINDS
        step, ndim = draw(steps(ndim, [before, after], kinds))
        found.append(step)
    return Drawn(shape, source, tuple(found))


@given(drawn=programs(), numbers=st.lists(st.sampled_from(EXTENTS), min_size=8, max_size=8))
@SAME_EVERY_TIME
def test_a_shared_lowering_is_the_one_of_these_extents(drawn: Drawn, numbers: list[int]) -> None:
    try:
        definition = drawn.define()
        program = mf.compile(definition)
    except MdfuseError:
        return
    symbols = list(definition.examples)
    n = len(numbers)
    tried = [tuple(numbers[(at + i) % n] for i in range(len(symbols))) for at in range(n - 1)]
    for extents in dict.fromkeys(tried):  # numbers may be drawn twice
        check_same(definition, program, dict(zip(symbols, extents, strict=True)))


def check_same(
    definition: mf.FusionDefinition, program: mf.Program, extents: dict[str, int]
) -> None:
    """Both ways give one text for even parts, one value for others, or both refuse the extents.

    What is joined is in blocks only of numbers, also in a result: there the whole values are one.
    """
    try:
        *_, fresh = hir_lowering.lower(with_known_extents(definition.fusion, extents))
        definition.check_extents(extents)  # else the definition would be another one
    except (MdfuseError, ZeroDivisionError):
        try:
            program.host_for(extents)
        except MdfuseError:
            return
        raise
    shared = program.host_for(extents)
    has_blocks = any(k.layout is not None and k.layout.blocked for k in fresh.types.values())
    evenly = math.lcm(EVENLY, *(len([*mesh]) for mesh in fresh.meshes))
    is_uneven = any(n % evenly for n in extents.values()) or any(
        map(_is_uneven, fresh.types.values())
    )
    if (is_uneven or has_blocks) and str(shared) != str(fresh):
        check_same_values(shared, fresh)
        return
    assert str(shared) == str(fresh), f"{extents}\n" + "\n".join(map(str, program.lowerings))


def _is_uneven(kind: BufferType) -> bool:
    """Whether ranks have parts of several sizes, also of a dim that is no symbol."""
    if kind.layout is None:
        return False
    sizes = kind.layout.mesh.axis_size
    return any(kind.shape[d] % math.prod(map(sizes, axes)) for d, axes in kind.layout.splits)


def check_same_values(shared: HostProgram, fresh: HostProgram) -> None:
    """Every rank gets the same of two programs, from parts and terms that are drawn.

    Where it has another part of a result, the whole results are the same.
    """
    given: list[dict[str, torch.Tensor]] = [{} for _ in range(fresh.last_rank + 1)]
    for seed, name in enumerate(fresh.inputs):
        kind, generator = fresh.types[name], torch.Generator().manual_seed(seed)
        x = torch.randint(-3, 4, kind.shape, generator=generator).to(kind.dtype)
        for rank, part in shares(x, kind.layout).items():
            given[rank][name] = part
    one, other = (mf.simulate(host, per_rank=given, options=POISON) for host in (shared, fresh))
    if any(shared.types[x].layout != fresh.types[x].layout for x in fresh.outputs):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert is_close(a, b), f"{a}\nnot\n{b}\n{shared}\n{fresh}"
        return
    for rank, (ours, theirs) in enumerate(zip(one.per_rank, other.per_rank, strict=True)):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or is_close(a, b), f"rank {rank}: {a}\nnot\n{b}\n{shared}\n{fresh}"
