"""Losses of split operands: what ranks exchange, and what comes of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DeviceMesh, Partial, Shard

GRID = DeviceMesh.arange(dp=2, tp=3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_classes_may_be_split(reduction: str, smoothing: float) -> None:
    """Three numbers per row are joined, whatever the number of classes; they divide unevenly."""
    how = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 3}
    with mf.FusionDefinition("loss") as fd:
        x = fd.define_tensor([8, 50], torch.float64, GRID, {"dp": Shard(0), "tp": Shard(1)})
        t = fd.define_tensor([8], torch.int64, GRID, {"dp": Shard(0)})
        fd.add_output(fd.ops.cross_entropy(x, t, **how))
    program = mf.compile(fd)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((8, 50), generator=generator, dtype=torch.float64) * 20
    target = torch.tensor([0, 49, 16, 17, 3, 33, 34, 3])
    check_everywhere(program, [logits, target], [F.cross_entropy(logits, target, **how)])
    along_classes = [c for c in program.communications if c.axis == "tp"]
    assert [(c.kind, c.reduce_op, len(c.shape)) for c in along_classes] == [
        ("Allreduce", "max", 2), ("Allreduce", "sum", 2), ("Allreduce", "sum", 1)
    ]  # fmt: skip
    assert all(c.shape in ((8,), (8, 1), ()) for c in program.communications)


def test_rows_that_no_class_of_a_rank_is_wanted_of() -> None:
    """Also where the logits are Partial, and where all rows are left out."""
    for layout in ({"tp": Partial("sum")}, {"dp": Shard(1), "tp": Shard(1)}, {"tp": Shard(0)}):
        with mf.FusionDefinition("loss") as fd:
            x = fd.define_tensor([4, 5], torch.float64, GRID, layout)
            t = fd.define_tensor([4], torch.int64, GRID)
            fd.add_output(fd.ops.cross_entropy(x, t))
        logits = torch.randint(-3, 4, (4, 5)).double()
        for target in (torch.zeros(4).long(), torch.full((4,), -100)):
            check_everywhere(mf.compile(fd), [logits, target], [F.cross_entropy(logits, target)])


def test_a_loss_has_the_dtype_of_what_is_compared() -> None:
    """A target of more bits, as a loader may give it."""
    with mf.FusionDefinition("loss") as fd:
        x = fd.define_tensor([6], torch.bfloat16, GRID, {"dp": Shard(0)})
        t = fd.define_tensor([6], torch.float64, GRID, {"dp": Shard(0)})
        fd.add_output(F.soft_margin_loss(x, t))
    given = torch.arange(6).bfloat16() / 4, torch.tensor([1.0, -1.0] * 3, dtype=torch.float64)
    (got,) = mf.simulate(mf.compile(fd), list(given)).outputs
    torch.testing.assert_close(got, F.soft_margin_loss(*given), rtol=2e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64], ids=str)
@pytest.mark.parametrize("split", [{}, {"tp": Shard(1)}], ids=["whole", "split"])
def test_targets_of_few_bits(dtype: torch.dtype, split: dict[str, Shard]) -> None:
    """More classes than their dtype counts, and class 156, which is -100 in 8 bits."""
    target = torch.tensor([0, 44, 156, 3, 255, 44]).clamp(max=torch.iinfo(dtype).max)
    for n in (256, 301):
        logits = torch.randn((6, n), generator=torch.Generator().manual_seed(n)).double()
        weight = torch.rand(n, generator=torch.Generator().manual_seed(n)).double()
        with mf.FusionDefinition("loss") as fd:
            x = fd.define_tensor([6, n], torch.float64, GRID, split)
            t = fd.define_tensor([6], dtype, GRID)
            w = fd.define_tensor([n], torch.float64, GRID)
            fd.add_output(fd.ops.cross_entropy(x, t))
            fd.add_output(fd.ops.nll_loss(x, t, w))
        long = target.long()
        wanted = [F.cross_entropy(logits, long), F.nll_loss(logits, long, weight)]
        check_everywhere(mf.compile(fd), [logits, target.to(dtype), weight], wanted)
