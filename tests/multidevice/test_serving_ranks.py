"""Engines on real ranks: rank 0 takes requests, and tokens are those of one rank."""

from __future__ import annotations

import random

import pytest
from helpers.causal import drain, greedy, model_of, prompts

import mdfuse as mf
from mdfuse import DeviceMesh


def served(comm: mf.Communicator, mesh: DeviceMesh, **sizes: int) -> None:
    """Requests of drawn lengths that come one after the other, some cancelled, some drawn."""
    model = model_of("llama")
    engine = mf.generate(model, mesh, max_batch=3, context=32, **sizes)
    if comm.rank:
        with pytest.raises(mf.ProgramError, match="rank 0 takes requests"):
            engine.submit([1])
        engine.follow()
        return
    draw, asked = random.Random(5), dict[int, tuple[list[int], int]]()
    for n, ids in enumerate(prompts([draw.randint(1, 20) for _ in range(9)])):
        count = draw.randint(1, 9)
        asked[engine.submit(ids, count)] = ids, count
        if n % 3 == 2:
            engine.cancel(engine.submit(ids, count))
            engine.step()
    drawn = [engine.submit([7, 9], 5, temperature=1.2, top_p=0.9, seed=4) for _ in range(2)]
    drain(engine)
    for id_, (ids, count) in asked.items():
        assert engine.result(id_).tokens == greedy(model, ids, count)
    assert engine.result(drawn[0]).tokens == engine.result(drawn[1]).tokens
    engine.close()


@pytest.mark.world(2)
def test_two_ranks(comm: mf.Communicator) -> None:
    served(comm, DeviceMesh.arange(tp=2), chunk=4, pages=9, page_size=5)


@pytest.mark.world(4)
def test_four_ranks(comm: mf.Communicator) -> None:
    """Heads are fewer than ranks along tp and cp together; positions are split, too."""
    served(comm, DeviceMesh.arange(tp=2, cp=2), chunk=0)
