"""What the types of a global host program promise: its values on whole tensors, without ranks.

An op is torch's on whole tensors, a communication changes nothing, a chunk is a region of the whole
that it belongs to. What each rank then holds is a slice. Programs in which values vary, or which
send and receive by themselves, promise nothing of this kind.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from mdfuse.extents.expressions import Term, resolve
from mdfuse.hir import BufferType, HostProgram, Instruction
from mdfuse.ir.ops import TABLE


@dataclass(eq=False)
class Bound:
    """What a name stands for: a value of its own, or what it shows of another one."""

    value: Any = None
    of: Bound | None = None
    show: Callable[[Tensor], Tensor] = lambda x: x

    def read(self) -> Any:
        return self.show(self.of.read()) if self.of is not None else self.value

    def write(self, value: Tensor) -> None:
        if self.of is None:
            self.value = value
            return
        whole = self.of.read().clone()
        self.show(whole).copy_(value)
        self.of.write(whole)


COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": operator.add,
    "prod": operator.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "bor": operator.or_,
    "band": operator.and_,
}


def values(program: HostProgram, inputs: dict[str, Any]) -> list[Any]:
    """The global outputs of a program on global inputs."""
    run = _Run(program, {name: Bound(x) for name, x in inputs.items()})
    run.block(program.instructions)
    return [run.read(name) for name in program.outputs]


class _Run:
    def __init__(self, program: HostProgram, bound: dict[str, Bound]) -> None:
        self.program, self.bound = program, bound
        self.env: dict[str, int] = {}
        self.begun: set[str] = set()

    def number(self, index: Any) -> Any:
        return resolve(index, lambda t: self.env.get(t.name) if t.kind == "index" else None)

    def kind(self, name: str) -> BufferType:
        return self.program.types[name]

    def block(self, block: Iterable[Instruction]) -> None:
        for i in block:
            if i.op == "for":
                self.loop(i)
            elif i.op == "launch":
                self.block(i.body)
            elif i.op == "post":
                self.post(i)
            elif i.op == "free":
                for name in i.reads:
                    self.bound.pop(self.program.root(name), None)
            elif i.op == "alloc":
                name = self.program.root(i.outputs[0])
                self.bound.setdefault(name, Bound(self.empty(name)))
            elif i.op == "accumulate":
                self.accumulate(i)
            elif i.fn or i.op in _MOVES:
                self.compute(i)
            else:
                assert i.op in _SILENT, i.op

    def loop(self, i: Instruction) -> None:
        (index,) = i.outputs
        start, stop, step = (self.number(i.kwargs[k]) for k in ("start", "stop", "step"))
        made = {self.program.root(n) for inner in i.walk() for n in inner.outputs} - {*self.bound}
        for n in range(start, stop, step):
            self.env[index] = n
            for name in made:
                self.bound.pop(name, None)
            self.block(i.body)
        self.env.pop(index, None)

    def empty(self, name: str) -> Tensor:
        kind = self.kind(name)
        like = torch.zeros(kind.shape, dtype=kind.dtype)
        return torch.full_like(like, float("nan")) if kind.dtype.is_floating_point else like

    # -- reading and writing ---------------------------------------------------------------------

    def read(self, name: str) -> Any:
        return self.bound[self.program.root(name)].read()

    def write(self, name: str, value: Any) -> None:
        """Into what it shows, where it shows anything; of a chunk only the chunk's region."""
        root = self.program.root(name)
        bound, kind = self.bound.get(root), self.kind(name)
        if bound is None or kind.layout is None:
            self.bound[root] = Bound(value)
            return
        target = bound.read().clone()
        for region in self.regions(kind):
            target[region] = value.to(target.dtype)[region]
        bound.write(target)

    def regions(self, kind: BufferType) -> list[tuple[slice, ...]]:
        """What the ranks hold of a buffer."""
        assert kind.layout is not None
        boxes = set()
        for rank in kind.layout.mesh.ranks:

            def known(term: Term, rank: int = rank) -> int | None:
                return rank if term.kind == "rank" else self.env.get(term.name)

            boxes.add(kind.at(known).box(rank))
        return [tuple(slice(a, b) for a, b in box) for box in sorted(boxes)]

    # -- instructions ----------------------------------------------------------------------------

    def post(self, i: Instruction) -> None:
        """The value is the same before and after; the destination has its split dim in front."""
        comm, (source, destination) = i.comm, i.reads
        assert comm is not None
        value = self.read(source)
        if comm.kind == "AllToAll":
            assert comm.dim is not None
            value = value.movedim(comm.dim, 0)
        self.write(destination, value)

    def compute(self, i: Instruction) -> None:
        (name,) = i.outputs
        is_view = i.op in _SLICES or (i.fn in TABLE and TABLE[i.fn].is_view and i.order is None)
        if is_view and self.program.root(name) not in self.bound and isinstance(i.inputs[0], str):
            of = self.bound[self.program.root(i.reads[0])]
            self.bound[self.program.root(name)] = Bound(of=of, show=self.function(i))
            return
        layout = self.kind(name).layout
        is_part = layout is not None and layout.stream is not None and layout.stream.op is not None
        operands = [self.operand(x, is_part) for x in i.inputs]
        made = self.function(i)(*operands)
        if is_part and i.fn == "mean":  # of all rows, of which these are some
            made = made * operands[0].numel() / self.read(i.reads[0]).numel()
        self.write(name, made)

    def accumulate(self, i: Instruction) -> None:
        """Join the part of a chunk with those that came before."""
        name, (part,), layout = (
            self.program.root(i.outputs[0]),
            i.reads,
            self.kind(i.reads[0]).layout,
        )
        assert layout is not None and layout.stream is not None and layout.stream.op is not None
        value = self.read(part)
        if name in self.begun:
            value = COMBINE[layout.stream.op](self.read(name), value)
        self.begun.add(name)
        self.bound[name] = Bound(value)

    def operand(self, x: Any, is_part: bool = False) -> Any:
        if not isinstance(x, str):
            return self.number(x)
        return self.env[x] if x in self.env else self.rows(x) if is_part else self.read(x)

    def rows(self, name: str) -> Any:
        """Return only the rows of a chunk, on all ranks, where the other rows do not count."""
        kind, value = self.kind(name), self.read(name)
        chunk = kind.layout.stream if kind.layout is not None else None
        if chunk is None or chunk.op is not None:
            return value
        there = {(r[chunk.dim].start, r[chunk.dim].stop) for r in self.regions(kind)}
        rows = [n for start, stop in sorted(there) for n in range(start, stop)]
        return value.index_select(chunk.dim, torch.tensor(rows, dtype=torch.int64))

    def function(self, i: Instruction) -> Callable[..., Any]:
        """What an instruction computes on whole tensors."""
        attrs = {k: self.number(v) for k, v in i.attrs}
        if i.op == "select":
            extent = self.kind(i.reads[0]).shape[attrs["dim"]]
            return lambda x: x.select(attrs["dim"], attrs["index"] if extent != 1 else 0)
        if i.op == "unexpand":
            cut = tuple(
                slice(0, 1) if d in attrs["dims"] else slice(None)
                for d in range(len(self.kind(i.reads[0]).shape))
            )
            return lambda x: x[cut]
        if i.op in _MOVES:
            return lambda x: x
        if i.fn in ("reshape", "expand"):
            attrs["shape"] = self.kind(i.outputs[0]).shape
        return lambda *xs: TABLE[i.fn].call(*xs, **attrs)


_SLICES = ("chunk", "narrow", "select", "unexpand")
_MOVES = (*_SLICES, "pad", "pack", "term")
#: Parts of loops may take turns, but each iteration has values of its own: whole ones here.
_SILENT = ("wait", "next", "barrier", "return", "get_stream", "set_stream", "sync")


# -- what ranks hold -----------------------------------------------------------------------------


def parts(kind: BufferType, value: Tensor, ranks: int) -> list[Tensor | None]:
    """Random parts that make up a value: along Partial axes it takes all of them to know it."""
    assert kind.layout is not None
    layout, found = kind.layout, []
    generator = torch.Generator().manual_seed(7)
    for rank in range(ranks):
        coordinate = layout.mesh.coordinate(rank)
        if coordinate is None:
            found.append(None)
            continue
        part = value[tuple(slice(a, b) for a, b in kind.box(rank))].clone()
        for axis in layout.partial_axes:
            op, n = layout.placement(axis).op, layout.mesh.axis_size(axis)  # type: ignore[union-attr]
            at = coordinate[layout.mesh.axis_index(axis)]
            drawn = torch.randint(1, 4, value.shape, generator=generator.manual_seed(len(axis)))
            drawn = drawn[tuple(slice(a, b) for a, b in kind.box(rank))].to(part.dtype)
            if op == "sum":  # n - 1 ranks hold `drawn`, the last one what is left
                part = drawn if at < n - 1 else part - (n - 1) * drawn
            elif at < n - 1:
                part = part - drawn if op == "max" else part + drawn
        found.append(part)
    return found


def difference(kind: BufferType, value: Tensor, held: list[Tensor | None]) -> str | None:
    """How what the ranks hold differs from what the type of a value promises."""
    layout = kind.layout
    assert layout is not None
    if layout.varying_axes:
        return None
    sums: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
    partial = [layout.mesh.axis_index(a) for a in layout.partial_axes]
    for rank in layout.mesh.ranks:
        part, coordinate = held[rank], layout.mesh.coordinate(rank)
        if part is None or coordinate is None:
            return f"rank {rank} has nothing"
        key = tuple(-1 if at in partial else c for at, c in enumerate(coordinate))
        sums.setdefault(key, []).append((rank, part))
    ops = {layout.placement(a).op for a in layout.partial_axes}  # type: ignore[union-attr]
    for members in sums.values():
        rank, (op, *_) = members[0][0], (*ops, "sum")
        got = reduce(COMBINE[op], (part for _, part in members))
        want = value[tuple(slice(a, b) for a, b in kind.box(rank))]
        if got.shape != want.shape or not torch.allclose(got.double(), want.double()):
            return f"rank {rank} holds {got.tolist()}, promised is {want.tolist()}"
    return None
