"""The gradients of lookups and slices: rows of the op table beside torch's autograd."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, Partial, Shard, hir
from mdfuse.frontend.ops.recording import record

GRID = DeviceMesh.arange(dp=2, tp=3)
F64 = torch.float64
Places = dict[str, Any]


def numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-3, 4, shape, generator=generator).to(F64)


def of_rows(indices: torch.Tensor, ct: torch.Tensor, rows: int) -> torch.Tensor:
    table = torch.zeros((rows, ct.shape[-1]), dtype=ct.dtype, requires_grad=True)
    if not rows:
        return table.detach()
    (made,) = torch.autograd.grad(F.embedding(indices, table), table, ct)
    return made


def lookup(
    shape: tuple[int, ...], rows: int, d: int, places: tuple[Places, Places], law: Any
) -> Any:
    with mf.FusionDefinition("lookup") as fd:
        i = fd.define_tensor(shape, torch.int64, GRID, places[0])
        ct = fd.define_tensor((*shape, d), F64, GRID, places[1])
        made = record("embedding_grad", i, ct, shape=(rows, d))
        fd.add_output(made if law is None else made.on(GRID, law))
    return mf.compile(fd)


def test_ranks_make_their_own_rows() -> None:
    """The same indices on all ranks, rows of the table split: nobody sends anything."""
    for law in ({"tp": Shard(0)}, {"tp": Shard(1)}, {"dp": Shard(0), "tp": Shard(0)}):
        program = lookup((4, 3), 7, 5, ({}, {}), law)
        i, ct = numbers(4, 3).long().remainder(7), numbers(4, 3, 5)
        check_everywhere(program, [i, ct], [of_rows(i, ct, 7)], exact=True)
        assert not program.communications


def test_indices_that_are_split_add_up() -> None:
    """One reduction: of data that is parallel, or scattered to the rows of each rank."""
    split = {"dp": Shard(0)}
    for law, kind in ((None, "Allreduce"), ({"dp": Shard(0)}, "ReduceScatter")):
        program = lookup((4, 3), 8, 5, (split, split), law)
        i, ct = numbers(4, 3).long().remainder(8), numbers(4, 3, 5)
        check_everywhere(program, [i, ct], [of_rows(i, ct, 8)], exact=True)
        assert [c.kind for c in program.communications] == [kind]


@pytest.mark.parametrize("seed", range(40))
def test_drawn_lookups(seed: int) -> None:
    draw = random.Random(seed)
    shape = draw.choice([(), (5,), (4, 3), (0,), (2, 1, 3)])
    rows, d = draw.choice([1, 2, 7]), draw.choice([0, 1, 4])
    program = lookup(
        shape, rows, d,
        (places(draw, len(shape), False), places(draw, len(shape) + 1, True)),
        draw.choice([None, places(draw, 2, False)]),
    )  # fmt: skip
    assert hir.parse(str(program)) == program.host
    i, ct = numbers(*shape).long().remainder(rows), numbers(*shape, d)
    check_everywhere(program, [i, ct], [of_rows(i, ct, rows)], exact=True)


def places(draw: random.Random, ndim: int, may_add: bool) -> Places:
    options: list[Any] = [*map(Shard, range(ndim)), *([Partial("sum")] if may_add else [])]
    return {a: draw.choice(options) for a in GRID.axes if options and draw.random() < 0.7}


def cut(shape: tuple[int, ...], where: tuple[slice, ...], given: Places, law: Any) -> Any:
    """A program of a slice's gradient, and what it gives for a cotangent."""
    at = [s.indices(n) for s, n in zip(where, shape, strict=True)]
    ct = numbers(*(len(range(*x)) for x in at))
    with mf.FusionDefinition("cut") as fd:
        h = fd.define_tensor(ct.shape, F64, GRID, given)
        starts, steps = tuple(x[0] for x in at), tuple(x[2] for x in at)
        made = record("slice_grad", h, shape=shape, starts=starts, steps=steps)
        fd.add_output(made if law is None else made.on(GRID, law))
    want = torch.zeros(shape, dtype=F64)
    want[where] = ct
    return mf.compile(fd), ct, want


def test_a_part_of_the_zeros_is_made_where_it_lives() -> None:
    where = (slice(2, 9, 3), slice(None))
    for law in ({"tp": Shard(0)}, {"dp": Shard(0), "tp": Shard(0)}, {"tp": Shard(1)}):
        program, ct, want = cut((10, 6), where, {}, law)
        check_everywhere(program, [ct], [want], exact=True)
        assert not program.communications
        parts = [i for i in program.host if i.fn == "slice_grad"]
        kind = program.host.types[parts[0].outputs[0]]
        assert kind.local_shape() < (10, 6)  # the zeros are never whole


@pytest.mark.parametrize("seed", range(60))
def test_drawn_slices(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.choice([0, 1, 5, 8]) for _ in range(draw.randint(1, 3)))
    where = tuple(
        slice(None) if draw.random() < 0.4 else slice(draw.randint(0, n), draw.randint(0, n),
        draw.randint(1, 3)) for n in shape
    )  # fmt: skip
    given = places(draw, len(shape), True)
    program, ct, want = cut(
        shape, where, given, draw.choice([None, places(draw, len(shape), False)])
    )
    assert hir.parse(str(program)) == program.host
    check_everywhere(program, [ct], [want], exact=True)


def test_what_does_not_fit_is_refused() -> None:
    with mf.FusionDefinition():
        x = mf.ops.zeros(4, 3)
        for shape, starts in (((5, 3), (2, 0)), ((4, 2), (0, 0)), ((4,), (0,))):
            steps = (1,) * len(shape)
            with pytest.raises(DefinitionError, match="slice_grad"):
                record("slice_grad", x, shape=shape, starts=starts, steps=steps)
        i = mf.ops.arange(4)
        for shape in ((7, 2), (7,)):
            with pytest.raises(DefinitionError, match="embedding_grad"):
                record("embedding_grad", i, x, shape=shape)
