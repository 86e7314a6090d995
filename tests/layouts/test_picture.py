"""Pictures of layouts: what they show is what torch.chunk gives each rank."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from collections import defaultdict

import pytest
import torch
from helpers.golden import Golden
from hypothesis import given, settings
from hypothesis import strategies as st

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard, Stream
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.layouts.layout import Placement, Varies
from mdfuse.layouts.picture import Picture

FOUR = DeviceMesh.arange(dp=2, tp=2)


def test_two_axes_split_two_dims(golden: Golden) -> None:
    layout = Layout(FOUR, {"dp": Shard(0), "tp": Shard(1)})
    golden(str(layout.picture([8, 6])))


def test_uneven_parts_and_ranks_with_nothing(golden: Golden) -> None:
    golden(str(Layout(DeviceMesh.arange(tp=4), {"tp": Shard(0)}).picture([5])))


def test_terms_and_replicas(golden: Golden) -> None:
    golden(str(Layout(FOUR, {"tp": Partial("max")}).picture([5])))
    sums = Layout(FOUR, {"dp": Partial(), "tp": Shard(1)}).picture([5, 3])
    assert "│ 0 + 2 │ 1 + 3 │" in str(sums)
    assert "│ 0 1 2 3 │" in str(Layout(FOUR).picture([]))
    varies = Layout(FOUR, {"tp": Varies()}).picture([2])
    assert "│ (0 2) | (1 3) │" in str(varies)


def test_chunks_of_a_stream(golden: Golden) -> None:
    layout = Layout(FOUR, {"tp": Shard(0)}, stream=Stream(0, 2))
    golden(str(layout.picture([8, 4])))


def test_what_chunks_add_up_to_is_all_there_in_each() -> None:
    layout = Layout(FOUR, {"tp": Shard(0)})
    for index in (None, 1):
        parts = layout.with_stream(Stream.over("sum", 2, index))
        assert str(parts.picture([8, 4])) == str(layout.picture([8, 4]))


def test_a_rotating_stream_says_where_each_rank_begins() -> None:
    """The iteration in the picture is the one in which the rank's program has this chunk."""
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("turns") as fd:
        x = fd.define_tensor([8, 4], mesh=mesh, layout={"tp": Shard(0)}, name="x")
        y = (x * 2).on(mesh, {"tp": Shard(0)}, stream=Stream(0, 2, rotate="tp"))
        fd.add_output(y)
    host = mf.compile(fd).host
    (picture,) = (
        Layout(mesh, {"tp": Shard(0)}, stream=Stream(0, 2, rotate="tp")).picture([8, 4]).grids
    )
    shown = {
        (p.terms[0][0], p.iteration): p.box[0]
        for row in picture.parts
        for p in row
        if p is not None
    }
    for rank in range(2):
        flat = written_out(project(host, rank))
        made = [i for i in flat.instructions if i.fn == "mul"]
        boxes = [flat.types[i.outputs[0]].box(rank)[0] for i in made]
        assert boxes == [shown[rank, n] for n in range(2)]


def test_more_than_two_split_dims_are_several_grids() -> None:
    mesh = DeviceMesh.arange(dp=2, tp=2, pp=2)
    layout = Layout(mesh, {"tp": Shard(0), "dp": Shard(1), "pp": Shard(2)})
    text = str(layout.picture([8, 4, 6]))
    assert re.findall("^dim .*$", text, re.MULTILINE) == ["dim 2 0:3", "dim 2 3:6"]
    assert re.findall(r"\d+", text.split("dim 2 3:6")[1].split("rows")[0]) == [
        *["0", "2", "2", "4", "0", "4", "1", "5", "4", "8", "3", "7"],
    ]


def test_many_ranks_are_left_out() -> None:
    text = str(Layout(DeviceMesh.arange(tp=1024), {"tp": Shard(0)}).picture([4096, 4]))
    assert len(text.splitlines()) < 30 and "…" in text and "│ 1023 │" in text
    whole = str(Layout(DeviceMesh.arange(tp=1024)).picture([4]))
    assert "0 1 2 3 … (1024)" in whole


@pytest.mark.parametrize(
    ("layout", "shape", "what"),
    [
        (Layout(FOUR, {"tp": Shard(1)}), [4], "dim 1 is out of range"),
        (Layout(FOUR), [-4], r"a picture of \[-4\]"),
        (Layout(FOUR), ["n"], "a picture of"),
        (Layout(FOUR, stream=Stream(0, (3, 2))), [4], "4 rows on a rank"),
    ],
)
def test_what_cannot_be_drawn_is_refused(layout: Layout, shape: list[int], what: str) -> None:
    with pytest.raises(mf.LayoutError, match=what):
        str(layout.picture(shape))


PLACEMENTS = st.one_of(st.integers(0, 2).map(Shard), st.just(Replicate()), st.just(Partial("sum")))


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    shape=st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 7)),
    placements=st.tuples(PLACEMENTS, PLACEMENTS, PLACEMENTS),
)
@settings(max_examples=60, deadline=None)
def test_every_element_lies_where_torch_chunk_puts_it(
    sizes: tuple[int, ...], shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    mesh = DeviceMesh.arange(**dict(zip("abc", sizes, strict=True)))
    layout = Layout(mesh, dict(zip("abc", placements, strict=True)))
    numbers = torch.arange(shape[0] * shape[1] * shape[2]).reshape(shape)
    holders = defaultdict(set)
    for rank, at in enumerate(itertools.product(*map(range, sizes))):
        part = numbers
        for n, size, p in zip(at, sizes, placements, strict=True):
            if isinstance(p, Shard) and size > 1:
                chunks = part.chunk(size, p.dim)
                empty = part.narrow(p.dim, 0, 0)
                part = chunks[n] if n < len(chunks) else empty
        for element in part.flatten().tolist():
            holders[element].add(rank)
    shown: dict[int, set[int]] = {}
    for grid in Picture(layout, shape).grids:
        for p in (p for row in grid.parts for p in row):
            assert p is not None
            inside = numbers[tuple(slice(*i) for i in p.box)].flatten().tolist()
            assert shown.keys().isdisjoint(inside)
            shown.update({key: {r for t in p.terms for r in t} for key in inside})
    assert shown == holders


def test_svg_is_xml_with_a_box_for_each_part() -> None:
    picture = Layout(FOUR, {"dp": Shard(0), "tp": Shard(1)}).picture([8, 6])
    root = ET.fromstring(picture.svg())
    name = "{http://www.w3.org/2000/svg}"
    boxes = [
        [float(r.attrib[k]) for k in ("x", "y", "width", "height")]
        for r in root.iter(f"{name}rect")
    ]
    assert len(boxes) == 4
    widths, heights = {b[2] for b in boxes}, {b[3] for b in boxes}
    assert len(widths) == len(heights) == 1, "equal parts are equally large"
    assert {t.text for t in root.iter(f"{name}title")} == {
        f"dim 0 {a}, dim 1 {b}" for a in ("0:4", "4:8") for b in ("0:3", "3:6")
    }
    assert picture._repr_svg_() == picture.svg()


def test_svg_shows_uneven_parts_in_proportion() -> None:
    picture = Layout(DeviceMesh.arange(tp=2), {"tp": Shard(1)}).picture([4, 9])
    root = ET.fromstring(picture.svg())
    first, second = (
        float(r.attrib["width"]) for r in root.iter("{http://www.w3.org/2000/svg}rect")
    )
    assert first / second == pytest.approx(5 / 4, rel=1e-2)
