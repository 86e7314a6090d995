"""Engines that begin a step before the last one is read: tokens are those of engines that wait."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from helpers import sampling
from helpers.causal import drain, greedy, model_of, prompts

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.serving.decoder import LAST

SIZES: dict[str, dict[str, Any]] = {
    "whole": {"max_batch": 3, "chunk": 0, "context": 24},
    "chunks": {"max_batch": 3, "chunk": 4, "context": 24},
    "pages": {"max_batch": 3, "chunk": 3, "context": 23, "pages": 8, "page_size": 4},
    "one": {"max_batch": 1, "chunk": 2, "context": 24, "pages": 5, "page_size": 5},
    "simulated": {"max_batch": 2, "chunk": 3, "context": 20, "mesh": DeviceMesh.arange(tp=2)},
}


@cache
def pair(sizes: str) -> tuple[Any, Any]:
    """An engine that waits for each step, and one that goes ahead."""
    model = model_of("llama", num_hidden_layers=1)
    return tuple(mf.generate(model, ahead=x, **SIZES[sizes]) for x in (False, True))  # type: ignore[return-value]


def asked(draw: random.Random, has_stops: bool) -> dict[str, Any]:
    """What a request says: some are drawn, some end by a stop that comes soon or never."""
    (ids,) = prompts([draw.randint(1, 14)], draw.randrange(50))
    said: dict[str, Any] = {"ids": ids, "max_tokens": draw.randint(1, 6), "stop": []}
    if has_stops:
        said["stop"] = [*draw.sample(range(97), draw.choice((0, 30))), draw.sample(range(97), 2)]
    if draw.random() < 0.4:
        said |= {"temperature": 1.5, "seed": draw.randrange(9), "top_p": draw.choice((1.0, 0.9))}
        said["top_k"] = draw.choice((None, 1, 20))
    return said


def is_empty(engine: Any) -> bool:
    turns = engine._turns
    pages = sorted(turns.pages) == [*range(1, engine.shape.pages)]
    return pages and len(turns._slots) == engine.shape.slots and not turns._table.any()


@pytest.mark.parametrize("sizes", SIZES)
def test_each_step_shows_the_same(sizes: str) -> None:
    """Where all come at once and only limits end them, pages and slots are given alike, too."""
    draw = random.Random(1)
    said = [asked(draw, has_stops=False) for _ in range(7)]
    waits, ahead = pair(sizes)
    ids = [[x.submit(**s) for s in said] for x in (waits, ahead)]
    counts = []
    while not counts or counts[-1]:
        counts.append(waits.step())
        assert ahead.step() == counts[-1]
        for a, b in zip(*ids, strict=True):
            assert waits.result(a) == ahead.result(b)
    assert is_empty(waits) and is_empty(ahead)


@pytest.mark.parametrize("sizes", SIZES)
def test_tokens_are_the_same_whatever_comes_and_goes(sizes: str) -> None:
    """Stops are seen a step late, requests come a step late; a cancel leaves what was read."""
    draw, left = random.Random(2), sampling.of(60, 20)
    results: list[dict[int, Any]] = [{}, {}]
    cancelled: set[int] = set()
    engines, live = pair(sizes), dict[int, list[int]]()
    while left or live:
        if left and draw.random() < 0.6:
            said, left = asked(draw, has_stops=True), left - 1
            live[left] = [x.submit(**said) for x in engines]
        if live and draw.random() < 0.1:
            gone = draw.choice([*live])
            cancelled.add(gone)
            for x, id_ in zip(engines, live[gone], strict=True):
                x.cancel(id_)
        for x in engines:
            x.step()
        for n, ids in [*live.items()]:
            both = [x.result(id_) for x, id_ in zip(engines, ids, strict=True)]
            if all(r.is_over for r in both):
                for to, r in zip(results, both, strict=True):
                    to[n] = r
                del live[n]
    for n, mine in results[1].items():
        if n not in cancelled:
            assert mine == results[0][n]
        else:
            one, other = (r.tokens for r in (mine, results[0][n]))
            few = min(len(one), len(other))
            assert one[:few] == other[:few]
    assert {r.state for r in results[1].values()} >= {"stop", "length"}
    for x in engines:
        drain(x)
        assert is_empty(x)


def test_the_host_reads_a_token_while_the_next_one_is_computed() -> None:
    """The device has the last token: a step says so in its place."""
    _, engine = pair("chunks")
    (ids,) = prompts([3])
    model = model_of("llama", num_hidden_layers=1)
    mine = engine.submit(ids, 5, stop=[])
    engine.step()
    (slot,) = engine._turns.running
    assert engine._begun[0].integers[slot] == LAST
    assert engine._turns._all[mine].length == len(ids) + 2
    assert engine.result(mine).tokens == greedy(model, ids, 1)
    drain(engine)
    assert engine.result(mine).tokens == greedy(model, ids, 5)


def test_a_step_that_nobody_waits_for_is_dropped() -> None:
    """All of it was cancelled; the pages and rows serve a request that comes then."""
    _, engine = pair("pages")
    first, second = prompts([9, 11], 4)
    gone = engine.submit(first, 6, stop=[])
    while len(engine.result(gone).tokens) < 2:
        engine.step()
    engine.cancel(gone)
    late = engine.submit(second, 4, stop=[])
    drain(engine)
    assert engine.step() == 0
    model = model_of("llama", num_hidden_layers=1)
    assert engine.result(gone) == (greedy(model, first, 2), "cancelled", "")
    assert engine.result(late).tokens == greedy(model, second, 4)
    assert is_empty(engine)
