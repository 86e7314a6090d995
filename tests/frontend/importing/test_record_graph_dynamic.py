"""Extents that each run chooses: batches, and lengths of sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny_models import MODELS
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, Shard
from mdfuse.trees import flattened

BATCHES: dict[str, tuple[str, ...]] = {
    "llama": ("input_ids",),
    "gpt2": ("input_ids",),
    "bert": ("input_ids", "attention_mask", "token_type_ids"),
    "vit": ("pixel_values",),
    "encoder": ("src",),
}


def resized(x: Tensor, rows: int, columns: int | None = None) -> Tensor:
    """Other rows, and columns, of the same kind of numbers."""
    x = torch.cat([x, x, x])[:rows]
    return x if columns is None else torch.cat([x, x.flip(1)], 1)[:, :columns]


def tensors(tree: Any) -> list[Tensor]:
    return [x for _, x in flattened(tree)[0] if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str) -> None:
    """One import serves all batches; its posts are those of a batch that is known."""
    tiny = MODELS[name]
    module = tiny.module()
    dynamic = {key: {0: "batch"} for key in BATCHES[name]}
    model = mf.from_torch(
        module, tiny.args, tiny.kwargs, mesh=DeviceMesh.arange(tp=2), layouts=tiny.layouts(),
        blocks=tiny.blocks, dynamic_shapes=dynamic,
    )  # fmt: skip
    program, weights = model.compile(), model.load()
    # of a small example, the table of words may be gathered instead of what is looked up
    assert len(program.communications) == sum(tiny.posts.values())
    for rows in (4, 3, 7):
        args = [resized(x, rows) for x in tiny.args]
        kwargs = {key: resized(x, rows) for key, x in tiny.kwargs.items()}
        given = [*weights, *model.inputs(*args, **kwargs)]
        found = model.outputs(mf.simulate(program, given).outputs)
        with torch.no_grad():
            wanted = module(*args, **kwargs)
        for x, y in zip(tensors(found), tensors(wanted), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_lengths(name: str) -> None:
    """Masks and positions are made by the run; a batch is split over ranks, unevenly."""
    tiny = MODELS[name]
    module = tiny.module()
    model = mf.from_torch(
        module, tiny.args, mesh=DeviceMesh.arange(dp=2, tp=2),
        layouts={**tiny.layouts(), "input:*": {"dp": Shard(0)}}, blocks=tiny.blocks,
        dynamic_shapes={"input_ids": {0: "batch", 1: torch.export.Dim("length", max=32)}},
    )  # fmt: skip
    program, weights = model.compile(), model.load()
    for rows, length in ((4, 8), (3, 5), (2, 11)):
        ids = resized(tiny.args[0], rows, length)
        found = model.outputs(mf.simulate(program, [*weights, ids]).outputs)
        with torch.no_grad():
            wanted = module(ids)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-6, atol=1e-9)


def test_a_dim_that_the_module_fixes_is_refused() -> None:
    """What torch says is passed on."""

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(4, 6)

    with pytest.raises(DefinitionError, match="Fixed cannot be exported: UserError"):
        mf.from_torch(
            Fixed(), (torch.ones(4, 6),), mesh=DeviceMesh.arange(tp=2),
            dynamic_shapes={"x": {0: "rows"}},
        )  # fmt: skip


def test_a_name_that_is_none() -> None:
    with pytest.raises(DefinitionError, match="these are input") as error:
        mf.from_torch(
            nn.Linear(6, 2), (torch.ones(4, 6),), mesh=DeviceMesh.arange(tp=2),
            dynamic_shapes={"y": {0: "rows"}},
        )  # fmt: skip
    assert "dynamic_shapes['y'] is no tensor among the arguments" in str(error.value)
