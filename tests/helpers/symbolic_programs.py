"""Programs with symbolic extents, and the same in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Shard, Stream

FOUR = DeviceMesh.arange(tp=4)


ROWS, COLUMNS = Layout(FOUR, {"tp": Shard(0)}), Layout(FOUR, {"tp": Shard(1)})


WHOLE, SUMMED = Layout(FOUR), Layout(FOUR, {"tp": Partial()})


Define = Callable[[mf.FusionDefinition], None]


#: program -> (shapes of the inputs, -1 is the extent; the same in plain torch)
CASES: dict[str, tuple[Define, Sequence[Sequence[int]], Callable[..., Tensor]]] = {}


def case(shapes: Sequence[Sequence[int]], plain: Callable[..., Tensor]) -> Callable[[Define], None]:
    def add(define: Define) -> None:
        CASES[define.__name__] = define, shapes, plain

    return add


@case([[-1, 6]], lambda x: torch.tanh(x) * 2)
def element_wise(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([-1, 6], mesh=ROWS, name="x")
    fd.add_output(fd.ops.tanh(x) * 2)


@case([[-1, 6]], lambda x: x + 1)
def gathered(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([-1, 6], mesh=ROWS, name="x")
    fd.add_output(fd.ops.set(x).on(WHOLE) + 1)


@case([[-1, 6]], lambda x: x + 1)
def reduce_scattered(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([-1, 6], mesh=SUMMED, name="x")
    fd.add_output(fd.ops.set(x).on(ROWS) + 1)


@case([[-1, 6]], lambda x: x * 2)
def all_to_all(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([-1, 6], mesh=ROWS, name="x")
    fd.add_output(fd.ops.set(x).on(COLUMNS) * 2)


@case([[3, -1], [-1, 8]], lambda x, w: x @ w)
def contraction(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([3, -1], mesh=COLUMNS, name="x")
    w = fd.define_tensor([-1, 8], mesh=ROWS, name="w")
    fd.add_output(fd.ops.set(x @ w).on(WHOLE))


@case([[-1, 8], [8, 4]], lambda x, w: torch.softmax(torch.relu(x @ w), 1))
def layer(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([-1, 8], mesh=WHOLE, name="x")
    w = fd.define_tensor([8, 4], mesh=COLUMNS, name="w")
    fd.add_output(fd.ops.softmax(fd.ops.relu(x @ w), 1))


@case([[-1, 8]], lambda x: x.reshape(len(x), 2, 4).permute(1, 0, 2).reshape(2, -1))
def reshaped(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([-1, 8], mesh=ROWS, name="x")
    heads = fd.ops.set(x.reshape(x.shape[0], 2, 4).permute(1, 0, 2)).on(WHOLE)
    fd.add_output(heads.reshape(2, -1))


@case([[-1, 6]], lambda x: x - x.sum(0, keepdim=True))
def reduced(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([-1, 6], mesh=ROWS, name="x")
    fd.add_output(x - fd.ops.sum(x, [0], keepdim=True))


@case([[-1, 4]], lambda x: torch.cat([x, x * 2])[1:])
def joined(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([-1, 4], mesh=ROWS, name="x")
    fd.add_output(fd.ops.cat([x, x * 2])[1:])


@case([[-1, 8], [8, 8]], lambda x, w: x @ w)
def streamed(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([-1, 8], mesh=ROWS, name="x")
    w = fd.define_tensor([8, 8], mesh=WHOLE, name="w")
    h = fd.ops.set(x).on(FOUR, {}, stream=Stream(0, 4))
    fd.add_output((h @ w).on(FOUR, {}, stream=Stream(0, 4)))


@case([[-1, 6], [-1, 6]], lambda x, y: x + y)
def two_meshes(fd: mf.FusionDefinition) -> None:
    other = DeviceMesh([2, 3, 4, 5], axes=("b",))
    x = fd.define_tensor([-1, 6], mesh=ROWS, name="x")
    y = fd.define_tensor([-1, 6], mesh=Layout(other, {"b": Shard(1)}), name="y")
    fd.add_output(y + fd.ops.set(x).on(other, {"b": Shard(1)}))


def defined(name: str) -> mf.FusionDefinition:
    with mf.FusionDefinition(name) as fd:
        CASES[name][0](fd)
    return fd


def inputs(name: str, n: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed + n)
    shapes = [[n if m == -1 else m for m in shape] for shape in CASES[name][1]]
    return [torch.randint(-3, 4, s, generator=generator).float() for s in shapes]


def guards(program: mf.Program) -> list[list[str]]:
    return [list(map(str, x.guards)) for x in program.lowerings]
