"""What errors propose computes what torch's function of that name computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.oracle import is_close

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Shard
from mdfuse.frontend.hints import DRAWN, REPLACEMENTS, hint_for

INPUTS = {
    "x": torch.tensor([[-2.0, 0.25, 3.0, 1.5]] * 2 + [[4.0, -0.75, 0.5, float("inf")]] * 3),
    "y": torch.arange(20.0).view(5, 4) - 7,
    "p": (torch.arange(20.0).view(5, 4) + 1) / 32,
    "i": torch.tensor([3, 0, 1, 1, 2]),
    "v": torch.tensor([1.0, -2.0, 0.5, 3.0]),
}
FINITE = {**INPUTS, "x": INPUTS["x"].clamp(max=9.0)}

#: What torch calls it: of the inputs by name.
PLAIN: dict[str, Callable[..., Any]] = {
    "bincount": lambda x, y, p, i, v: torch.bincount(i),
    "sum_to_size": lambda x, y, p, i, v: x.sum_to_size(1, 4),
}


def as_list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, tuple | list) else [x]


def run(text: str, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """A replacement on tensors whose first dim is split over three ranks."""
    mesh = DeviceMesh.arange(tp=3)
    with FusionDefinition("hint") as fd:
        names = {
            name: fd.define_tensor(t.shape, t.dtype, mesh, {"tp": Shard(0)}, name=name)
            for name, t in inputs.items()
        }
        for result in as_list(eval(text, {"fd": fd}, names)):
            fd.add_output(result)
    return mf.simulate(mf.compile(fd), list(inputs.values())).outputs


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_a_replacement_computes_the_same(name: str) -> None:
    plain = PLAIN.get(name) or (lambda x, y, p, i, v: getattr(torch, name)(x))
    expected = as_list(plain(**FINITE))
    for result, whole in zip(run(REPLACEMENTS[name], FINITE), expected, strict=True):
        assert is_close(result, whole), f"{name}\n{result}\nexpected\n{whole}"


@pytest.mark.parametrize("name", DRAWN)
def test_a_replacement_that_draws(name: str) -> None:
    (result,) = run(DRAWN[name].split(":")[0], FINITE)
    assert result.shape == (5, 4) and 0 < result.isfinite().sum() == result.numel()


def test_names_that_are_there_have_no_replacement() -> None:
    there = {*mf.ops.BY_NAME} - {"dropout"}  # torch's own takes no seed
    assert not there & {*REPLACEMENTS, *DRAWN}


@pytest.mark.parametrize("name", ["medoid", "squeze", "frobnicate"])
def test_a_name_that_looks_alike_is_not_proposed(name: str) -> None:
    assert hint_for(name) == "docs/operations.md lists what there is"
