"""Values between drawn layouts on drawn meshes, by every reduce op, and what may not be posted."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.oracle import check_everywhere
from layouts.test_exchange import layouts

import mdfuse as mf
from mdfuse import (
    CommunicationError,
    DeviceMesh,
    Layout,
    MdfuseError,
    Partial,
    Replicate,
    Shard,
    hir,
)
from mdfuse.communication import Communication
from mdfuse.hir.verify.check import verify
from mdfuse.hir.verify.kind_layouts import transition_problem
from mdfuse.reshard import Step, steps, with_type
from mdfuse.reshard.refined import on_common_mesh

MESHES = (
    DeviceMesh.arange(a=2, b=4),
    DeviceMesh([3, 1, 9, 4], axes=("q",)),
    DeviceMesh([[1, 2], [3, 0], [5, 7]]),
    DeviceMesh.arange(p=2, q=2, r=2),
    DeviceMesh([[16, 17], [20, 21]]),
    DeviceMesh([[0, 4], [1, 5], [2, 6], [3, 7]], ("u", "v")),
    DeviceMesh.arange(x=8),
    DeviceMesh([3]),
    DeviceMesh([7]),
)
OPS = {
    torch.float64: ("sum", "max", "prod", "min"),
    torch.int32: ("sum", "bxor", "max", "band", "bor"),
    torch.complex64: ("sum", "prod"),
}
SHAPES = ((8, 8), (16, 8), (5, 3), (13, 9), (1, 4), (0, 3), (64, 24))


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_drawn_changes(first: int) -> None:
    for seed in range(first, first + 20):
        draw = random.Random(seed)
        dtype = draw.choice([*OPS])
        op = Partial(draw.choice(OPS[dtype]))
        source, goal = (draw.choice([*layouts(draw.choice(MESHES), op)]) for _ in range(2))
        shape = draw.choice(SHAPES)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(-3, 4, shape, generator=generator).to(dtype)
        with mf.FusionDefinition("drawn") as fd:
            fd.add_output(fd.ops.set(fd.define_tensor(shape, dtype, source)).on(goal))
        program = mf.compile(fd)
        check_everywhere(program, [x], [x])
        bare = [line.partition(" # ")[0].rstrip() for line in str(program.host).splitlines()]
        assert str(hir.parse(str(program.host))).splitlines() == bare


@pytest.mark.parametrize(
    ("other", "want"),
    [
        (DeviceMesh.arange(p=4, q=2), {"a": 2, "b0": 2, "b1": 2}),
        (DeviceMesh.arange(x=8), {"a": 2, "b": 4}),
        (DeviceMesh([[0, 4], [1, 5], [2, 6], [3, 7]]), {"a": 2, "b": 4}),
        (DeviceMesh([3, 1, 0, 2, 4, 5, 6, 7]), None),
        (DeviceMesh([8, 1, 2, 3, 4, 5, 6, 7]), None),
        (DeviceMesh.arange(x=4), None),
    ],
    ids=str,
)
def test_the_common_mesh(other: DeviceMesh, want: dict[str, int] | None) -> None:
    found = on_common_mesh(Layout(MESHES[0]), Layout(other), (8, 8))
    assert (found is None) == (want is None)
    if found is not None and want is not None:
        mesh = found[0].mesh
        assert dict(zip(mesh.axes, mesh.shape, strict=True)) == want
        assert mesh == found[1].mesh and mesh.ranks == tuple(range(8))


def test_uneven_parts_have_no_common_mesh() -> None:
    """Ten rows over 4 are 3, 3, 3, 1; over 2 and 2 they are 3, 2, 3, 2."""
    one, other = DeviceMesh.arange(x=4), DeviceMesh.arange(a=2, b=2)
    assert on_common_mesh(Layout(one, {"x": Shard(0)}), Layout(other), (10,)) is None
    assert on_common_mesh(Layout(one, {"x": Shard(0)}), Layout(other), (8,)) is not None


GRID = DeviceMesh.arange(a=2, b=2)
P = Partial()


def test_a_partial_that_stays_on_another_mesh_is_not_reduced() -> None:
    there = DeviceMesh([[8, 9], [6, 7]], axes=("p", "q"))
    path = steps(Layout(GRID, {"b": Partial("prod")}), Layout(there, {"p": Partial("prod")}), (4,))
    assert [getattr(step, "reduce_op", None) for step in path] == [None]
    assert [step.kind for step in path] == ["Exchange"]


@pytest.mark.parametrize(
    ("kind", "source", "goal", "more", "why"),
    [
        ("Allgather", {"a": Shard(0), "b": Shard(0)}, {}, {"dim": 0}, "do not divide"),
        ("Allgather", {"a": Shard(1), "b": Shard(0)}, {}, {"dim": 0}, "not the innermost axes"),
        ("Allreduce", {"a": P}, {}, {"reduce_op": "sum"}, "is R along b"),
        ("Allreduce", {"a": P, "b": P}, {"a": P}, {"reduce_op": "sum"}, "it makes"),
    ],
    ids=str,
)
def test_what_does_not_go_along_two_axes(
    kind: str, source: dict, goal: dict, more: dict, why: str
) -> None:
    comm = Communication(
        kind=kind, source=Layout(GRID, source), destination=Layout(GRID, goal), axes=("a", "b"),
        shape=(6 if "divide" in why else 8, 8), dtype=torch.float32, **more,
    )  # fmt: skip
    assert why in str(transition_problem(comm))


@pytest.mark.parametrize("axes", [("a", "b"), ("a", "a")])
def test_kinds_along_one_axis(axes: tuple[str, str]) -> None:
    kind = "AllToAll" if axes == ("a", "b") else "Allreduce"
    more = {"dim": 0, "to_dim": 1} if kind == "AllToAll" else {"reduce_op": "sum"}
    with pytest.raises(CommunicationError, match="along a"):
        Communication(
            kind=kind, source=Layout(GRID), destination=Layout(GRID), axes=axes,
            shape=(8, 8), dtype=torch.float32, **more,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("source", "goal", "op", "why"),
    [
        ({"a": P}, {"b": Shard(0)}, "max", "not to be reduced by max"),
        ({"a": P}, {"a": Partial("max")}, "sum", "do not have the same terms"),
        ({"a": Shard(0)}, {}, "sum", "not to be reduced by sum"),
    ],
    ids=str,
)
def test_what_is_no_reduce_exchange(source: dict, goal: dict, op: str, why: str) -> None:
    comm = Communication(
        kind="ReduceExchange", source=Layout(GRID, source), destination=Layout(GRID, goal),
        shape=(8, 8), dtype=torch.float32, reduce_op=op,
    )  # fmt: skip
    assert why in str(transition_problem(comm))


def test_a_term_needs_a_neutral_element() -> None:
    text = """
host @bad on mesh(a=2) {
  input %x: f32[4] (a=R)
  %y: f32[4] (a=P(avg)) = term(%x)
  return %y
}"""
    with pytest.raises(MdfuseError, match="neutral element"):
        verify(hir.parse(text))


def test_an_axis_and_several() -> None:
    text = """
host @bad on mesh(a=2, b=2) {
  input %x: f32[4] (a=P(sum), b=P(sum))
  %y: f32[4] (a=R, b=R) = alloc
  %c = post allreduce[sum](%x) -> %y f32[4] (a=P(sum), b=P(sum)) => (a=R, b=R) axis=a axes=[a,b]
  wait %c
  return %y
}"""
    with pytest.raises(MdfuseError, match="axis= and axes="):
        hir.parse(text)
    good = hir.parse(text.replace("axis=a ", ""))
    assert good.communications[0].axes == ("a", "b")
    assert "axes=[a,b]" in str(good)


def test_terms_by_every_op_that_has_a_neutral_element() -> None:
    mesh = DeviceMesh.arange(a=2)
    for op, dtype in [("band", torch.uint8), ("max", torch.float8_e4m3fn), ("min", torch.bool)]:
        with mf.FusionDefinition("terms") as fd:
            x = fd.define_tensor([5], dtype, Layout(mesh, {"a": Shard(0)}))
            fd.add_output(fd.ops.set(x).on(Layout(mesh, {"a": Partial(op)})))
        x = torch.tensor([1, 0, 1, 1, 0]).to(dtype)
        program = mf.compile(fd)
        assert program.communications == ()
        found = mf.simulate(program, [x]).outputs[0]
        assert torch.equal(found.float(), x.float()), op
    assert Replicate() == Layout(mesh).placement("a")


@pytest.mark.parametrize("op", ["max", "sum", "avg"])
@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (Layout(DeviceMesh([0])), "Scatter"),
        (Layout(DeviceMesh([0, 1, 2, 3])), "Exchange"),
        (Layout(DeviceMesh([0, 1, 2, 3]), {"x": Shard(0)}), "SendRecv"),
    ],
    ids=str,
)
def test_terms_elsewhere_are_sent_once(source: Layout, kind: str, op: str) -> None:
    """Each rank of the other mesh gets a part, the rest of its term changes nothing; but of avg."""
    goal = Layout(DeviceMesh([4, 5, 6, 7]), {"x": Partial(op)})
    path = steps(source, goal, (8, 3))
    found = [step.kind for step in path]
    if op == "avg":
        assert found[-1] == "slice"
    else:
        assert found == [kind, "term"]
        assert sum(_bytes(step) for step in path) == 8 * 3
    x = torch.arange(24.0).reshape(8, 3) - 9
    with mf.FusionDefinition("terms") as fd:
        fd.add_output(fd.ops.set(fd.define_tensor([8, 3], torch.float32, source)).on(goal))
    check_everywhere(mf.compile(fd), [x], [x])


def _bytes(step: Step) -> int:
    """What a step brings to all ranks, of elements of one byte."""
    typed = with_type(step, (8, 3), torch.uint8)
    ranks = {*step.source.mesh, *step.destination.mesh}
    return sum(map(typed.bytes_received, ranks)) if isinstance(typed, Communication) else 0


def test_terms_of_a_number_are_reduced_where_they_arrive() -> None:
    text = """
host @number on m0=mesh(a=2), m1=mesh(x=3: 1..3) {
  input %x: i8[] m0(a=P(bxor))
  %y: i8[] m1(x=R) = alloc
  %c = post reduceexchange[bxor](%x) -> %y i8[] m0(a=P(bxor)) => m1(x=R)
  wait %c
  return %y
}"""
    given = [{"x": torch.tensor(n, dtype=torch.int8)} for n in (6, 3)] + [{}, {}]
    found = mf.simulate(hir.parse(text), per_rank=given).per_rank
    assert [None if y is None else y.item() for (y,) in found] == [None, 5, 5, 5]
