"""What is brought somewhere for one expression serves the others: never at the expense of all."""

from __future__ import annotations

import pytest
import torch
from helpers.drawn_reads import Reads

import mdfuse as mf
from mdfuse.passes import readers

#: What choices that count on each other may take, of what each alone takes.
BOUND = 1.0


@pytest.mark.parametrize("seed", range(250))
def test_readers_that_know_of_each_other_take_no_more(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each choice counts on what others need, and does so for no more bytes than alone."""
    reads = Reads(seed)
    program = mf.compile(reads.definition)
    ran = mf.simulate(program, reads.given, options=mf.Options(poison=True))
    for got, want in zip(ran.outputs, reads.expected, strict=True):
        torch.testing.assert_close(got, want)
    mf.debug.FusionCache.reset()
    monkeypatch.setattr(readers.Readers, "read", lambda *_: None)
    alone = mf.compile(reads.definition)
    ranks = range(reads.mesh.size)
    most, least = (max(map(p.bytes_received, ranks)) for p in (program, alone))
    assert most <= BOUND * least
