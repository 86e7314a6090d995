"""Engines on one process, and on simulated ranks: tokens are those of transformers' `generate`."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from helpers import sampling
from helpers.causal import MODELS, drain, greedy, model_of, prompts

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.serving.engine import _mesh_of

LENGTHS = 1, 3, 9, 14, 5, 20


@cache
def llama() -> Any:
    return model_of("llama")


@pytest.fixture(scope="module")
def engine() -> Any:
    """Three slots, chunks of four tokens, texts of 32."""
    return mf.generate(llama(), max_batch=3, chunk=4, context=32)


@pytest.fixture(scope="module")
def paged() -> Any:
    """Six pages of five positions, without chunks."""
    return mf.generate(llama(), max_batch=3, chunk=0, context=33, pages=6, page_size=5)


def check(engine: Any, model: Any, lengths: tuple[int, ...] = LENGTHS, count: int = 7) -> None:
    asked = prompts(lengths)
    ids = [engine.submit(x, max_tokens=count) for x in asked]
    drain(engine)
    for x, id_ in zip(asked, ids, strict=True):
        assert engine.result(id_).tokens == greedy(model, x, count)
        assert engine.result(id_).state == "length"


# -- values ----------------------------------------------------------------------------------------


def test_tokens_are_those_of_generate(engine: Any) -> None:
    check(engine, llama())


@pytest.mark.parametrize("name", [x for x in MODELS if x != "llama"])
def test_models(name: str) -> None:
    model = model_of(name)
    mesh = DeviceMesh.arange(ep=2) if name == "gpt_oss" else None
    check(mf.generate(model, mesh, max_batch=2, chunk=3, context=28), model)


@pytest.mark.parametrize(
    "mesh",
    [DeviceMesh.arange(tp=2), DeviceMesh.arange(cp=3), DeviceMesh.arange(cp=2, tp=2)],
    ids=str,
)
def test_meshes(mesh: DeviceMesh) -> None:
    """A context of 29 is no multiple of the ranks that share it."""
    check(mf.generate(llama(), mesh, max_batch=2, chunk=3, context=29), llama())


def test_two_ranks_gather_once_for_each_layer() -> None:
    """Results and sums of softmaxes: no key, and nothing else."""
    engine = mf.generate(llama(), DeviceMesh.arange(cp=2), max_batch=2, chunk=3, context=28)
    layers = llama().config.num_hidden_layers
    for has_chunk, program in engine.programs.programs.items():
        kinds = [c.kind for c in program.communications]
        assert kinds == ["Allgather"] * layers * (1 + has_chunk)


def test_pages(paged: Any) -> None:
    """Each waits until there are pages; at the end all are free."""
    check(paged, llama())
    assert sorted(paged._turns.pages) == [1, 2, 3, 4, 5, 6]


def test_a_request_is_the_same_beside_others(engine: Any) -> None:
    """Drawn tokens too: in whatever slot, and whatever comes and goes."""
    said = {"max_tokens": 6, "temperature": 1.3, "top_k": 30, "top_p": 0.9, "seed": 11}
    (ids,) = prompts([7])

    def drawn(before: int) -> tuple[int, ...]:
        others = [engine.submit(x, 4, 0.7) for x in prompts([12, 2, 5], before)[:before]]
        engine.step()
        mine = engine.submit(ids, **said)
        engine.step()
        for x in others[1:]:
            engine.cancel(x)
        drain(engine)
        return engine.result(mine).tokens

    alone = drawn(0)
    assert len(alone) == 6 and drawn(1) == drawn(2) == drawn(3) == alone
    other = engine.submit(ids, **{**said, "seed": 12})
    drain(engine)
    assert engine.result(other).tokens != alone


def test_requests_that_come_and_go(engine: Any) -> None:
    """A request ends, another is cancelled, a third comes, while a fourth is in its prompt."""
    long, short, gone, late = prompts([20, 2, 8, 5], 5)
    ids = [engine.submit(long, 5), engine.submit(short, 2), engine.submit(gone, 9)]
    waiting = engine.submit(short, 3)
    assert engine.result(waiting) == ((), "waiting", "all 3 slots are busy")
    for _ in range(2):
        engine.step()
    engine.cancel(ids[2])
    ids.append(engine.submit(late, 4))
    drain(engine)
    assert engine.result(ids[0]).tokens == greedy(llama(), long, 5)
    assert engine.result(ids[1]).tokens == greedy(llama(), short, 2)
    assert engine.result(ids[2]).state == "cancelled"
    assert engine.result(ids[3]).tokens == greedy(llama(), late, 4)
    assert engine.result(waiting).tokens == greedy(llama(), short, 3)
    engine.cancel(ids[0])  # it is over
    assert engine.result(ids[0]).state == "length"


# -- ends ------------------------------------------------------------------------------------------


def test_a_stop_ends_it(engine: Any) -> None:
    (ids,) = prompts([4])
    whole = greedy(llama(), ids, 8)
    one = engine.submit(ids, 8, stop=[whole[3]])
    other = next(x for x in range(97) if x not in whole)
    pair = engine.submit(ids, 8, stop=[other, whole[4:6]])
    engine.eos = (whole[2],)
    own, none = engine.submit(ids, 8), engine.submit(ids, 8, stop=[])
    engine.eos = ()
    drain(engine)
    first = whole.index(whole[3]) + 1
    assert engine.result(one) == (whole[:first], "stop", "")
    assert engine.result(pair).tokens[-2:] == whole[4:6]
    assert engine.result(own).tokens == whole[: whole.index(whole[2]) + 1]
    assert engine.result(none).tokens == whole


def test_the_context_is_full(engine: Any) -> None:
    """Up to its last position; without `max_tokens` that is the end."""
    (ids,) = prompts([30])
    id_ = engine.submit(ids)
    drain(engine)
    assert engine.result(id_) == (greedy(llama(), ids, 2), "length", "")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"ids": []}, "an empty prompt"),
        ({"ids": [1] * 32}, "the context of this engine has 32 tokens"),
        ({"ids": [1] * 30, "max_tokens": 3}, "ask for at most 2 tokens"),
        ({"ids": [97]}, "the vocabulary has 97 tokens"),
        ({"ids": [-1]}, "the vocabulary has 97 tokens"),
        ({"ids": "text"}, "a list of numbers of tokens"),
        ({"ids": [1.0]}, "a whole number"),
        ({"max_tokens": 0}, "a whole number of at least 1"),
        ({"temperature": -1.0}, "it divides logits"),
        ({"temperature": float("nan")}, "it divides logits"),
        ({"temperature": "hot"}, "it is a number"),
        ({"top_p": 0.0}, "a share of all probability"),
        ({"top_p": 1.5}, "a share of all probability"),
        ({"top_k": -1}, "a whole number of at least 0"),
        ({"seed": 1.5}, "a whole number"),
        ({"stop": [[]]}, "an empty sequence"),
    ],
)
def test_what_cannot_be_asked_is_an_error_of_this_request(
    engine: Any, said: dict[str, Any], why: str
) -> None:
    with pytest.raises(mf.MdfuseError, match=why):
        engine.submit(**{"ids": [1], **said})
    assert engine.step() == 0


def test_a_mesh_has_all_ranks() -> None:
    """One that it lacks would end in another error, and the others wait for it."""
    for mesh in (DeviceMesh.arange(tp=2), DeviceMesh.arange(tp=4), DeviceMesh([0], ["tp"])):
        with pytest.raises(mf.DefinitionError, match="each of the 3 ranks computes each step"):
            _mesh_of(mesh, 3)
        assert _mesh_of(mesh, 1) is mesh
    assert _mesh_of(DeviceMesh([2, 0, 1], ["tp"]), 3).ranks == (2, 0, 1)


def test_a_request_that_no_pages_suffice_for(paged: Any) -> None:
    with pytest.raises(mf.MdfuseError, match="7 pages of 5, and there are 6"):
        paged.submit([1] * 5, 26)
    with pytest.raises(mf.MdfuseError, match="no such one was submitted"):
        paged.result(10**6)
    with pytest.raises(mf.MdfuseError, match="no such one was submitted"):
        paged.cancel(10**6)


# -- many ------------------------------------------------------------------------------------------


def test_cancels_in_prefill_and_before_it() -> None:
    """Pages of a prompt that is half computed go to who waits, whose tokens do not see them."""
    engine = mf.generate(llama(), max_batch=3, chunk=3, context=24, pages=6, page_size=4)
    first, second, third = prompts([14, 13, 5], 8)
    half, other = engine.submit(first, 6), engine.submit(third, 2)
    waiting, never = engine.submit(second, 7), engine.submit(third, 3)
    assert engine.result(half).state == "running"
    assert engine.result(other).because == "2 pages needed, 1 free"
    assert engine.result(waiting).because == engine.result(never).because == "others wait before it"
    engine.step()
    engine.cancel(half)
    engine.cancel(never)
    assert engine.result(other).state == "running"
    assert engine.result(waiting).because == "5 pages needed, 4 free"
    drain(engine)
    assert engine.result(half) == engine.result(never) == ((), "cancelled", "")
    assert engine.result(other).tokens == greedy(llama(), third, 2)
    assert engine.result(waiting).tokens == greedy(llama(), second, 7)
    assert sorted(engine._turns.pages) == [*range(1, 7)]
    with pytest.raises(mf.ProgramError, match="no such one was submitted"):
        engine.cancel(99)


def test_many_requests_leave_nothing_behind(paged: Any) -> None:
    """Requests of drawn lengths, some cancelled: all are right, and pages and plans are as few."""
    draw, asked = random.Random(3), dict[int, tuple[list[int], int]]()
    left = [*range(sampling.of(1000, 40))]
    while left or paged._turns.running:
        while left and len(paged._turns.waiting) < 4:
            (ids,) = prompts([draw.randint(1, 9)], left.pop())
            length = draw.randint(1, 8)
            asked[paged.submit(ids, length)] = ids, length
        if draw.random() < 0.05 and not paged.result(gone := draw.choice([*asked])).is_over:
            paged.cancel(gone)
            del asked[gone]
        paged.step()
    for id_, (ids, length) in draw.sample([*asked.items()], sampling.of(len(asked), 8)):
        assert paged.result(id_).tokens == greedy(llama(), ids, length)
    turns = paged._turns
    assert sorted(turns.pages) == [1, 2, 3, 4, 5, 6] and len(turns._slots) == 3
    assert not turns._all and not turns._table.any()
