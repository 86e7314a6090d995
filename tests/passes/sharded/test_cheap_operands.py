"""Products of what is repeated: operands are gathered, not the product; terms of a sum go on."""

from __future__ import annotations

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.ir.graph import dtype_name


def checked(fd: mf.FusionDefinition) -> mf.Program:
    """The program, after its values were compared with those of whole tensors."""
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(fd.fusion.values[x].shape, generator=generator, dtype=torch.float64)
        for x in fd.fusion.inputs
    ]
    program = mf.compile(fd, mf.Options(poison=True))
    got = mf.simulate(program, given, options=mf.Options(poison=True)).outputs
    for mine, want in zip(got, mf.reference(fd, given), strict=True):
        torch.testing.assert_close(mine, want, msg=lambda text: f"{text}\n{program}")
    return program


def sent(program: mf.Program) -> list[tuple[str, tuple[int, ...], str]]:
    return [(c.kind, c.shape, dtype_name(c.dtype)) for c in program.communications]


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 13])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_product_of_repeated_rows(rows: int, ranks: int) -> None:
    """Eight copies of a row, times a number each, which a matrix of columns reads whole."""
    mesh = DeviceMesh.arange(tp=ranks)
    with mf.FusionDefinition("product") as fd:
        x = fd.define_tensor([rows, 1, 6], torch.float64, mesh, {"tp": Shard(0)}, name="x")
        w = fd.define_tensor([rows, 8, 1], torch.float64, mesh, {"tp": Shard(0)}, name="w")
        a = fd.define_tensor([5, 6], torch.float64, mesh, {"tp": Shard(0)}, name="a")
        fd.add_output(mf.ops.linear(x.expand(rows, 8, 6) * w, a))
    shapes = {shape for _, shape, _ in sent(checked(fd))}
    if rows > 2:
        assert shapes == {(rows, 1, 6), (rows, 8, 1)}


def test_a_product_that_is_read_split_stays_split() -> None:
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("product") as fd:
        x = fd.define_tensor([8, 1, 6], torch.float64, mesh, {"tp": Shard(0)}, name="x")
        w = fd.define_tensor([8, 8, 1], torch.float64, mesh, {"tp": Shard(0)}, name="w")
        fd.add_output((x.expand(8, 8, 6) * w).exp())
    assert sent(checked(fd)) == []


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_factor_is_gathered_where_terms_are_added_up_behind(rows: int, is_first: bool) -> None:
    """The terms of eight rows each, times a number for each row, become one row."""
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("factor") as fd:
        x = fd.define_tensor([rows, 8, 4], torch.float64, mesh, {"tp": Shard(2)}, name="x")
        a = fd.define_tensor([4, 6], torch.float64, mesh, {"tp": Shard(0)}, name="a")
        w = fd.define_tensor([rows, 8, 1], torch.float64, mesh, {"tp": Shard(0)}, name="w")
        y = x @ a
        y = (y * w if is_first else w * y).sum(1)
        fd.add_output(fd.ops.set(y).on(mesh, {"tp": Shard(0)}))
    program = checked(fd)
    if rows == 8:
        assert sorted(x[:2] for x in sent(program)) == [
            ("Allgather", (8, 8, 1)), ("ReduceScatter", (8, 6)),
        ]  # fmt: skip


def test_terms_are_reduced_before_a_rounded_factor_where_nothing_is_added_up() -> None:
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("factor") as fd:
        x = fd.define_tensor([8, 8, 4], torch.float64, mesh, {"tp": Shard(2)}, name="x")
        a = fd.define_tensor([4, 6], torch.float64, mesh, {"tp": Shard(0)}, name="a")
        w = fd.define_tensor([8, 8, 1], torch.float64, mesh, {"tp": Shard(0)}, name="w")
        fd.add_output(fd.ops.set((x @ a) * w).on(mesh, {"tp": Shard(0)}))
    assert [x[:2] for x in sent(checked(fd))] == [("ReduceScatter", (8, 8, 6))]


@pytest.mark.parametrize("inner", [1, 3, 8])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_all_ranks_have_is_cut_to_become_terms(inner: int, ranks: int) -> None:
    """A product of whole operands beside a Partial: each rank computes a share of it."""
    mesh = DeviceMesh.arange(dp=2, tp=ranks)
    with mf.FusionDefinition("terms") as fd:
        rows = {"dp": Shard(0)}
        x = fd.define_tensor([4, 6, 8], torch.float64, mesh, {**rows, "tp": Shard(2)}, name="x")
        a = fd.define_tensor([8, 5], torch.float64, mesh, {"tp": Shard(0)}, name="a")
        p = fd.define_tensor([24, inner], torch.float64, mesh, rows, name="p")
        b = fd.define_tensor([inner, 5], torch.float64, mesh, name="b")
        y = (x @ a).reshape(24, 5) + p @ b
        fd.add_output(fd.ops.set(y.reshape(4, 6, 5)).on(mesh, {**rows, "tp": Shard(1)}))
    assert [kind for kind, *_ in sent(checked(fd))] == ["ReduceScatter"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_mask_of_classes_is_made_where_it_is_read(ranks: int) -> None:
    """The numbers of classes that it compares are gathered, not what they are compared with."""
    mesh = DeviceMesh.arange(tp=ranks)
    generator = torch.Generator().manual_seed(ranks)
    x, y = torch.randn(8, 96, dtype=torch.float64), torch.randint(96, (8,), generator=generator)
    with mf.FusionDefinition("mask") as fd:
        logits = fd.define_tensor(x.shape, x.dtype, mesh, {"tp": Shard(1)})
        classes = fd.define_tensor(y.shape, y.dtype, mesh, {"tp": Shard(0)})
        mask = mf.ops.arange(96) == classes.unsqueeze(1)
        fd.add_output(mf.ops.where(mask, logits, 0.0).exp().sum(0))
    program = mf.compile(fd)
    assert {c.shape for c in program.communications} <= {(8,), (8, 1)}, program
    (got,) = mf.simulate(program, [x, y], options=mf.Options(poison=True)).outputs
    chosen = torch.where(torch.arange(96) == y.unsqueeze(1), x, 0.0)
    torch.testing.assert_close(got, chosen.exp().sum(0))


@pytest.mark.parametrize("split", [{}, {"tp": Shard(0)}], ids=["whole", "split"])
@pytest.mark.parametrize("form", ["x + p + q", "p + q + x", "(p + b) + (q + b)", "x - p + (q + b)"])
def test_terms_of_nested_sums_are_reduced_once(form: str, split: dict[str, Shard]) -> None:
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("nested") as fd:
        x = fd.define_tensor([8, 6], torch.float64, mesh, split, name="x")
        b = fd.define_tensor([6], torch.float64, mesh, name="b")
        p, q = (
            mf.ops.matmul(
                fd.define_tensor([8, 4], torch.float64, mesh, {"tp": Shard(1)}, name=f"a{n}"),
                fd.define_tensor([4, 6], torch.float64, mesh, {"tp": Shard(0)}, name=f"w{n}"),
            )
            for n in range(2)
        )
        y = eval(form, {"x": x, "p": p, "q": q, "b": b})
        fd.add_output(mf.ops.set(y.on(mesh, split)).sin())
        fd.add_output(x * 2)
    kind = "ReduceScatter" if split else "Allreduce"
    assert [x for x, _, _ in sent(checked(fd))] == [kind]


def test_terms_that_others_read_whole_are_reduced_for_them() -> None:
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("shared") as fd:
        x = fd.define_tensor([8, 6], torch.float64, mesh, name="x")
        p, q = (
            fd.define_tensor([8, 4, 6], torch.float64, mesh, {"tp": Shard(1)}, name=name).sum(1)
            for name in "pq"
        )
        first = x + p
        fd.add_output(first + q)
        fd.add_output(first.exp())
    assert [x for x, _, _ in sent(checked(fd))] == ["Allreduce"] * 2
