"""Drawn host programs do what an interpreter on plain torch says: aliases, views, loops, frees."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.drawn_programs import ALIASES, Drawer, expected, program_text
from helpers.host_programs import alone, parse

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.rank.pipelines import project


def check(seed: int) -> bool:
    """Draw a program and run it in both ways; whether it had a meaning."""
    draw = random.Random(seed)
    block, aliases = Drawer(draw).block(), draw.choice(ALIASES)
    text = program_text(block, aliases)
    x = torch.tensor([draw.randint(-3, 3) for _ in range(4)]).float().view(2, 2)
    want = expected(block, aliases, x)
    for schedule in (None, seed):
        given = x.clone()
        if want is None:
            with pytest.raises(mf.ProgramError):
                alone(text, schedule, x=given)
            continue
        (got,) = alone(text, schedule, x=given)
        assert torch.equal(got.nan_to_num(99), want[0].nan_to_num(99)), f"{seed}\n{text}"
        assert torch.equal(given.nan_to_num(99), want[1].nan_to_num(99)), f"{seed}\n{text}"
    return want is not None


@pytest.mark.parametrize("start", range(0, 1000, 100))
def test_drawn_programs(start: int) -> None:
    has_meaning = [check(seed) for seed in range(start, start + 100)]
    assert sum(has_meaning) > 20


def test_their_text_reads_back() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        block, aliases = Drawer(draw).block(), draw.choice(ALIASES)
        if expected(block, aliases, torch.ones(2, 2)) is not None:
            program = parse(program_text(block, aliases))
            for printed in (program, project(program, 0)):
                assert hir.parse(str(printed)) == printed
