"""What a second simulation of the same projections finds ready, and what it does anew."""

from __future__ import annotations

import pytest
import torch
from helpers.programs import program_text

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.rank.pipelines import project
from mdfuse.simulation import prepared

RING = program_text("prepared/ring")


def projections() -> list[hir.HostProgram]:
    program = hir.parse(RING)
    return [project(program, rank) for rank in range(2)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is verified and built."""
    found: list[str] = []
    for name in ("verify", "build"):
        plain = getattr(prepared, name)

        def note(*args, name=name, plain=plain, **kwargs):  # type: ignore[no-untyped-def]
            found.append(name)
            return plain(*args, **kwargs)

        monkeypatch.setattr(prepared, name, note)
    return found


def test_projections_are_verified_and_built_once(counted: list[str]) -> None:
    """Random orders have plans of their own, whose posts arrive late, once for all of them."""
    ranks = projections()
    for seed, schedule in enumerate((None, None, 0, 1, 2)):
        x = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        given = [{ranks[0].inputs[0]: part} for part in x.chunk(2)]
        got = mf.simulate(ranks, per_rank=given, schedule=schedule)
        assert torch.equal(torch.cat([row[0] for row in got.per_rank]), x.roll(2))
    assert counted == ["verify", *["build"] * 4]


def test_other_projections_are_verified_anew(counted: list[str]) -> None:
    """Programs of the same text, one of them exchanged: the second rank waits for nobody."""
    ranks = projections()
    given = [{ranks[0].inputs[0]: part} for part in torch.arange(4.0).chunk(2)]
    mf.simulate(ranks, per_rank=given)
    mf.simulate(projections(), per_rank=given)
    assert counted.count("verify") == 2
    alone = project(hir.parse(RING.replace("  wait %c1\n", "")), 1)
    for _ in range(2):  # what was wrong is wrong again
        with pytest.raises(mf.MdfuseError):
            mf.simulate([ranks[0], alone], per_rank=given)
    assert counted.count("verify") == 4
