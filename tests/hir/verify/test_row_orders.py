"""The order of counted rows: lowered programs that are broken by hand, and rows of both orders."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, ProgramError, Shard
from mdfuse.hir.text.parser import parse
from mdfuse.hir.verify.check import verify
from mdfuse.ir import packed_rows

SPLIT, THERE = {"ep": Shard(0)}, {"ep": Shard(1)}


@cache
def text() -> str:
    """A product and a bias on the ranks of four experts; both gradients."""
    mesh = DeviceMesh.arange(ep=2)
    with mf.FusionDefinition("orders") as fd:
        x = fd.define_tensor([8, 4], torch.float64, mesh, SPLIT, name="x")
        ids = fd.define_tensor([8, 2], torch.int64, mesh, SPLIT, name="ids")
        up = fd.define_tensor([4, 4, 4], torch.float64, mesh, SPLIT, name="up")
        bias = fd.define_tensor([4, 1, 4], torch.float64, mesh, SPLIT, name="bias")
        n = fd.ops.counts(ids, 4, 2)
        r = fd.ops.set(fd.ops.group_rows(x, ids, n)).on(mesh, THERE)
        y = fd.ops.set(fd.ops.grouped_mm(r, up) + bias).on(mesh, SPLIT)
        z = fd.ops.ungroup_rows(y, ids)
        for result in (z, *mf.grad((z * z).sum(), [up, bias])):
            fd.add_output(result)
    shown = [line.split("  #")[0].rstrip() for line in str(mf.compile(fd)).splitlines()]
    return "\n".join(line for line in shown if not line.startswith("  free"))


#: name -> what is written, what by hand instead; of the first such line.
BROKEN: dict[str, tuple[str, str]] = {
    "a product of rows by part": ("rows_mm(%r, ", "rows_mm(%r.by_part, "),
    "a product in the order of parts": ("%n.ep_S1, by_expert=True)", "%n.ep_S1)"),
    "a bias in the order of parts": (
        "spread_rows(%t_2, %t_1, %n.ep_S1, by_expert=True)", "spread_rows(%t_2, %t_1, %n.ep_S1)"),
    "rows sent in the order of experts": ("alltoall(%t_4.by_part)", "alltoall(%t_4)"),
    "rows turned twice": ("= rows_to_parts(", "= rows_to_experts("),
    "rows of both orders": ("= add(%t_1, %t_3)", "= add(%r.by_part, %t_3)"),
}  # fmt: skip


def test_the_program_is_right() -> None:
    verify(parse(text()))


@pytest.mark.parametrize("name", BROKEN)
def test_rows_in_another_order_are_seen(name: str) -> None:
    written, by_hand = BROKEN[name]
    assert written in text(), text()
    with pytest.raises(ProgramError, match="by expert"):
        verify(parse(text().replace(written, by_hand, 1)))


@pytest.mark.parametrize(
    "n", [[[2, 0, 3], [1, 4, 0]], [[0, 0], [0, 5], [2, 1]], [[3, 1]], [[2], [3]]]
)
@pytest.mark.parametrize("behind", [0, 2])
def test_rows_go_to_the_order_of_experts_and_back(n: list[list[int]], behind: int) -> None:
    """As they are on the host, and by the arithmetic of devices; rows behind them stay."""
    counts = torch.tensor(n)
    labels = [(p, e, i) for p, row in enumerate(n) for e, k in enumerate(row) for i in range(k)]
    wanted = sorted(labels, key=lambda x: (x[1], x[0], x[2]))
    rows, turned = (rows_of(x, behind) for x in (labels, wanted))
    assert torch.equal(packed_rows.to_experts(rows, counts), turned)
    assert torch.equal(packed_rows.to_parts(turned, counts), rows)
    at = packed_rows._by_expert(rows, counts)
    assert torch.equal(torch.empty_like(rows).index_copy_(0, at, rows), turned)


def rows_of(labels: list[tuple[int, int, int]], behind: int) -> Tensor:
    return torch.tensor([*labels, *[(-1, -1, k) for k in range(behind)]]).double().view(-1, 3)


def test_counts_over_the_room_are_no_error() -> None:
    """Behind such a run all ranks refuse it: rows are any, and nothing is out of bounds."""
    rows, n = torch.ones(3, 2), torch.tensor([[4, 1], [2, 2]])
    assert packed_rows.to_experts(rows, n).shape == rows.shape
    assert int(packed_rows._by_expert(rows, n).max()) < 3
