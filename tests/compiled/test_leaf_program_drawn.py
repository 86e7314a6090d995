"""Drawn programs with same bits: one program, and equal results, on meshes of 1 to 8 ranks."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from fuzz.definitions import compare
from fuzz.whole import Whole
from helpers.oracle import local_part

import mdfuse as mf
from mdfuse import DeviceMesh, MdfuseError

SAME = mf.Options(same_bits=True, poison=True)

#: Sizes of the axes, by how many there are, beside one rank.
SIZES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((2,), (3,), (5,), (7,), (8,)),
    2: ((2, 1), (1, 3), (2, 2)),
}


class Resized(Whole):
    """A drawn program on a mesh of other sizes; all else is drawn alike."""

    def __init__(self, seed: int, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        super().__init__(seed)

    def drawn_meshes(self) -> list[DeviceMesh]:
        first, *others = super().drawn_meshes()
        if others or len(first.axes) != len(self.sizes):
            return [first, *others]
        ranks = torch.randperm(math.prod(self.sizes), generator=torch.Generator().manual_seed(1))
        return [DeviceMesh(ranks.reshape(self.sizes), axes=first.axes)]


def program_of(whole: Whole, options: mf.Options) -> mf.Program:
    if whole.kind != "pipeline":
        return mf.compile(whole.fd, options)
    batch = {whole.fd.fusion.inputs[n]: 0 for n in whole.batch}
    return mf.pipeline(whole.fd, microbatches=whole.count, batch=batch, options=options)


def results(seed: int, sizes: tuple[int, ...]) -> tuple[str, list[torch.Tensor]]:
    """The text of the program, without lines of users, and its results, checked against torch."""
    whole = Resized(seed, sizes)
    whole.define()
    program = program_of(whole, SAME)
    text = "\n".join(line.partition("  # ")[0].rstrip() for line in str(program).splitlines())
    inputs = [x.detach().clone() for x in whole.inputs]
    found = mf.simulate(program, inputs, options=SAME)
    for output, result in zip(whole.outputs, found.outputs, strict=True):
        compare(output.known, result, lambda: str(program))
    for name, result, at in zip(
        program.fusion.outputs, found.outputs, range(len(found.outputs)), strict=True
    ):
        layout = program.fusion.layout(name)
        for rank in layout.mesh.ranks:
            assert torch.equal(
                _bits(found.per_rank[rank][at]), _bits(local_part(result, layout, rank))
            )
    return text, found.outputs


def _bits(x: torch.Tensor) -> torch.Tensor:
    """NaN equals NaN, and -0.0 is not 0.0."""
    return x.reshape(-1).contiguous().view(torch.uint8)


def same_on_all(seed: int, counts: Counter[str]) -> None:
    """Check one drawn program on several meshes."""
    axes = len(Whole(seed).meshes[0].axes)
    if axes not in SIZES:
        return
    try:
        text, expected = results(seed, (1,) * axes)
    except MdfuseError as error:
        counts["refused" if "same_bits" in error.what else "other"] += 1
        return
    draw = random.Random(seed)
    for sizes in draw.sample(SIZES[axes], 2):
        other, found = results(seed, sizes)
        assert other == text, f"seed {seed}: another program on {sizes}"
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(_bits(a), _bits(b)), f"seed {seed}: other bits on {sizes}"
    counts["same"] += 1


@pytest.mark.parametrize("part", range(4))
def test_drawn_programs(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part * 12, part * 12 + 12):
        same_on_all(seed, counts)
    assert counts["same"] >= 3, counts
