"""Tokens drawn from logits: their distribution is that of transformers' own processors."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from transformers.generation import logits_process as reference

import mdfuse as mf
from mdfuse.layouts.layout import Layout
from mdfuse.serving import token_choice

WORDS = 40


def expected(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Probabilities of [words] logits, by transformers in f64."""
    scores, ids = logits.double()[None], torch.zeros(1, 1, dtype=torch.int64)
    for process in (
        reference.TemperatureLogitsWarper(temperature),
        reference.TopKLogitsWarper(top_k),
        reference.TopPLogitsWarper(top_p),
    ):
        scores = process(ids, scores)
    return scores[0].softmax(-1)


def numbers(temperature: float, top_k: int, top_p: float, drawn: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor([temperature, top_k, top_p], dtype=torch.float64).expand(len(drawn), 3)
    return torch.cat((rows, drawn[:, None].double()), 1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, WORDS, 1.0), (0.6, 7, 1.0), (1.7, WORDS, 0.8), (1.2, 12, 0.5), (3.0, 1, 1.0),
     (1.0, WORDS, 1e-9)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["drawn", "ties", "inf"])
def test_frequencies_are_probabilities(
    kind: str, temperature: float, top_k: int, top_p: float
) -> None:
    """Even steps of the drawn number pick each token as often as its probability says."""
    logits = torch.randn(WORDS, generator=torch.Generator().manual_seed(2)) * 2
    if kind == "ties":
        logits = logits.round()
    if kind == "inf":
        logits[5:30] = -math.inf
    count = 4000
    drawn = torch.arange(count, dtype=torch.float64) / count
    tokens = token_choice.choice(
        logits.expand(count, -1), numbers(temperature, top_k, top_p, drawn)
    )
    found = torch.bincount(tokens, minlength=WORDS) / count
    wanted = expected(logits, temperature, top_k, top_p)
    if kind == "ties" and top_p < 1:  # which of equal tokens the sum reaches last is nobody's
        found, wanted = (by_value(logits, x) for x in (found, wanted))
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1.01 / count)


def by_value(logits: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    values = logits.unique()
    return torch.stack([shares[logits == x].double().sum() for x in values])


def test_temperature_0_and_the_largest_number() -> None:
    logits = torch.randn(3, WORDS, generator=torch.Generator().manual_seed(2))
    zero = numbers(0.0, WORDS, 1.0, torch.tensor([0.0, 0.5, 1 - 2**-53]))
    assert token_choice.choice(logits, zero).tolist() == logits.argmax(-1).tolist()
    last = token_choice.choice(logits, numbers(1.0, 3, 1.0, torch.full((3,), 1 - 2**-53)))
    assert last.tolist() == logits.topk(3).indices[:, 2].tolist()


@pytest.mark.parametrize("placed", [{}, {"tp": mf.Shard(1)}], ids=str)
def test_ranks_choose_alike(placed: Any) -> None:
    """As a program, also of logits that are split by words: as in torch, on every rank."""
    layout = Layout(mf.DeviceMesh.arange(tp=3), placed)
    program = mf.compile(token_choice.define(4, WORDS, layout))
    draw = random.Random(1)
    logits = torch.randn(4, WORDS, generator=torch.Generator().manual_seed(2))
    said = numbers(0.8, 9, 0.9, torch.tensor([draw.random() for _ in range(4)]))
    (tokens,) = mf.simulate(program, [logits, said]).outputs
    assert tokens.tolist() == token_choice.choice(logits, said).tolist()
    assert [c.kind for c in program.communications] == ["Allgather"] * len(placed)
