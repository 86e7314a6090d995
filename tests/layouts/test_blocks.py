"""Dims in blocks: values, texts, parts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Shard, hir
from mdfuse.layouts.blocks import part_of_blocks

TP, GRID = DeviceMesh.arange(tp=2), DeviceMesh.arange(a=2, b=2)


def test_one_form_for_the_same_blocks() -> None:
    assert Shard(0, blocks=1) == Shard(0, blocks=(7,)) == Shard(0, blocks=(7, 0)) == Shard(0)
    assert Shard(0, blocks=(4, 4, 4)) == Shard(0, blocks=3) != Shard(0)
    assert str(Shard(1, blocks=(4, 2, 2))) == "S1/[4,2,2]"
    assert hash(Shard(0, blocks=[4, 2])) == hash(Shard(0, blocks=(4, 2)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("placements", "rows"),
    [
        ({"tp": Shard(0, 3)}, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]),
        ({"tp": Shard(0, (7, 1, 4))}, [[0, 1, 2, 3, 7, 8, 9], [4, 5, 6, 10, 11]]),
        ({"tp": Shard(-1, 12)}, [[*range(12)], []]),
    ],
)
def test_a_part_is_a_piece_of_every_block(
    placements: dict[str, Shard], rows: list[list[int]]
) -> None:
    whole = torch.arange(12)
    parts = [mf.shard_tensor(whole, TP, placements, rank=r) for r in range(2)]
    assert [x.tolist() for x in parts] == rows
    layout = Layout(TP, placements).normalized(1)
    assert [layout.local_shape((12,), r) for r in range(2)] == [(len(x),) for x in rows]
    assert torch.equal(mf.unshard_tensor(parts, TP, placements), whole)


def test_axes_split_a_block_in_turn() -> None:
    layout = Layout(GRID, {"a": Shard(0, 2), "b": Shard(0, 2)}, {0: ("b", "a")})
    parts = [mf.shard_tensor(torch.arange(8), layout, rank=r).tolist() for r in range(4)]
    assert parts == [[0, 4], [2, 6], [1, 5], [3, 7]]


def test_a_plain_split_goes_through_all_pieces_as_one() -> None:
    """FSDP over tensor parallelism of a fused projection: what is left is one run of rows."""
    layout = Layout(GRID, {"a": Shard(0), "b": Shard(0, (6, 2, 2))}, {0: ("b", "a")})
    parts = [mf.shard_tensor(torch.arange(10), layout, rank=r) for r in range(4)]
    assert [x.tolist() for x in parts] == [[0, 1, 2], [3, 4, 5], [6, 8], [7, 9]]
    assert [layout.local_shape((10,), r) for r in range(4)] == [(3,), (3,), (2,), (2,)]
    assert torch.equal(mf.unshard_tensor(parts, layout), torch.arange(10))


@pytest.mark.parametrize(
    ("given", "order", "one"),
    [
        ({"a": Shard(0, 2), "b": Shard(0)}, None, "(a=S0, b=S0, order 0:b>a)"),
        ({"a": Shard(0), "b": Shard(0, 2)}, None, "(a=S0, b=S0)"),
        ({"a": Shard(0, 6), "b": Shard(0)}, None, "(a=S0/6, b=S0, order 0:b>a)"),
        ({"a": Shard(0, 3), "b": Shard(0)}, None, "(a=S0/3, b=S0)"),
        ({"a": Shard(0, 2), "b": Shard(0, 2)}, None, "(a=S0/2, b=S0/2)"),
    ],
)
def test_equal_layouts_have_one_form(
    given: dict[str, Shard], order: dict[int, tuple[str, ...]] | None, one: str
) -> None:
    layout = Layout(GRID, given, order)
    assert str(layout.normalized(1)) == one
    for rank in range(4):
        found = (x.rows((12,), rank)[0] for x in (layout, layout.normalized(1)))
        assert len({tuple(n for a, b in rows for n in range(a, b)) for rows in found}) == 1


def test_a_picture_shows_each_piece() -> None:
    picture = str(Layout(TP, {"tp": Shard(0, 2)}).picture((8,)))
    assert picture.splitlines()[:2] == [
        "[8] (tp=S0/2) on mesh(tp=2)",
        "  0:2   2:4   4:6   6:8",
    ]
    assert [c for c in picture.splitlines()[3] if c.isdigit()] == ["0", "1", "0", "1"]


def test_programs_are_read_again() -> None:
    with mf.FusionDefinition("gated") as fd:
        x = fd.define_tensor([2, 12], mesh=TP, layout={"tp": Shard(1, (8, 4))})
        fd.add_output(fd.ops.exp(x).on(TP, {"tp": Shard(1, 3)}))
    program = str(mf.compile(fd))
    assert "(tp=S1/[8,4]) => (tp=S1/3)" in program
    assert str(hir.parse(program)) == str(hir.parse(str(hir.parse(program))))


def test_what_is_whole_blocks() -> None:
    assert part_of_blocks((4, 2, 2), 8, (4, 8)) == 2
    assert part_of_blocks((4, 2, 2), 8, (4, 6)) is None
    assert part_of_blocks((4, 2, 2), 8, (2, 6)) == 0


def stated(split: Shard, *shape: int) -> None:
    with mf.FusionDefinition() as fd:
        fd.define_tensor(shape, mesh=TP, layout={"tp": split}, name="x")


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no number": (lambda: Shard(0, blocks=0), "blocks=0"),
    "a word": (lambda: Shard(0, blocks="3"), "how many equal ones"),  # type: ignore[arg-type]
    "less than nothing": (lambda: Shard(0, blocks=(4, -1)), "a list of their sizes"),
    "not the dim": (lambda: Layout(TP, {"tp": Shard(0, (4, 2))}).local_shape((7,)),
                    "they have 6 rows together"),
    "unequal": (lambda: Layout(TP, {"tp": Shard(0, 3)}).local_shape((7,)), "not 3 equal blocks"),
    "not the dim of a value": (lambda: stated(Shard(0, (4, 2)), 7, 3), "%x: blocks [4,2] of a dim"),
    "unequal, without elements": (lambda: stated(Shard(0, 3), 7, 0), "not 3 equal blocks"),
    "no rows": (lambda: stated(Shard(0, (4, 2)), 0, 3), "they have 6 rows together"),
    "different blocks": (lambda: Layout(GRID, {"a": Shard(0, 2), "b": Shard(0, 4)}),
                         "a and b split dim 0 in different blocks"),
    "blocks that a plain split cut": (lambda: Layout(GRID, {"a": Shard(0), "b": Shard(0, 3)}),
        "b splits the blocks of dim 0 inside of a"),
    "unequal blocks, shared out": (lambda: Layout(GRID, {"a": Shard(0), "b": Shard(0, (4, 2))}),
        "order={0: ('b', …)}"),
    "a stream of other chunks": (lambda: Layout(TP, {"tp": Shard(0, 2)}, stream=mf.Stream(0, 4)),
        "a piece of one of equal blocks"),
    "a stream of unequal blocks": (lambda: Layout(TP, {"tp": Shard(0, (1, 3))}, stream=mf.Stream(0,
        (1, 3))), "a piece of one of equal blocks"),
    "a stream beside a plain split": (lambda: Layout(GRID, {"a": Shard(0, 2), "b": Shard(0)},
        stream=mf.Stream(0, 2)), "a piece of one of equal blocks"),
    "a ring of blocks": (lambda: Layout(TP, {"tp": Shard(0, 2)}, stream=mf.Stream(0, 2,
                         rotate="tp")), "each rank starts at its own chunk"),
    "a stream between two axes": (lambda: Layout(GRID, {"a": Shard(0), "b": Shard(0)}, {0: ("a",
        "stream", "b")}, mf.Stream(0, 2)), "put the stream first"),
    "a stream of another dim in an order": (lambda: Layout(TP, {"tp": Shard(0)}, {0: ("stream",
        "tp")}, mf.Stream(1, 2)), "put the stream first"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_blocks(what: str) -> None:
    make, text = WRONG[what]
    with pytest.raises(mf.LayoutError) as caught:
        make()
    assert text in str(caught.value)
