"""Tokens drawn from logits: their distribution is that of transformers' own processors."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as reference

import mdfuse as mf
from mdfuse.layouts.layout import Layout
from mdfuse.serving import token_choice

WORDS = 40

#: What the largest logits are drawn by: how many of them are put in order.
LARGEST = 0, 12, WORDS


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


def by_hand(logits: torch.Tensor, said: torch.Tensor) -> int:
    """The token of a row, by lists: cut, sorted, summed up."""
    temperature, top_k, top_p, drawn = said.tolist()
    values = logits.double().tolist()
    top = max(values)
    if temperature == 0:
        return values.index(top)
    weights = [1.0 if x == top else math.exp((x - top) / temperature) for x in values]
    order = sorted(range(len(values)), key=lambda n: (-values[n], n))
    least = values[order[int(top_k) - 1]]
    order = [n for n in order if values[n] >= least]
    whole, before, stay = math.fsum(weights[n] for n in order), 0.0, []
    for n in order:
        if top_p == 1 or not stay or before < top_p * whole * (1 - 1e-12):
            stay.append(n)
        before += weights[n]
    stay = sorted(n for n in stay if weights[n])
    limit, total = drawn * math.fsum(weights[n] for n in stay), 0.0
    for n in stay:
        total += weights[n]
        if total > limit * (1 + 1e-14):
            return n
    return stay[-1]


def numbers(temperature: float, top_k: int, top_p: float, drawn: torch.Tensor) -> torch.Tensor:
    rows = torch.tensor([temperature, top_k, top_p], dtype=torch.float64).expand(len(drawn), 3)
    return torch.cat((rows, drawn[:, None].double()), 1)


def chosen(logits: torch.Tensor, said: torch.Tensor) -> list[int]:
    """The tokens by each number of logits put in order that is enough: all are the same."""
    least = token_choice.ordered(said.numpy(), WORDS)
    most = int(said[(said[:, 1] < WORDS) | (said[:, 2] < 1), 1].max()) if least else 0
    tokens = [token_choice.choice(logits, said, n).tolist() for n in LARGEST if n >= most]
    assert all(x == tokens[0] for x in tokens)
    return tokens[0]


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
    tokens = chosen(logits.expand(count, -1), numbers(temperature, top_k, top_p, drawn))
    shares = torch.bincount(torch.tensor(tokens), minlength=WORDS) / count
    wanted = expected(logits, temperature, top_k, top_p)
    if kind == "ties" and top_p < 1:  # which of equal tokens the sum reaches last is nobody's
        shares, wanted = (by_value(logits, x) for x in (shares, wanted))
    torch.testing.assert_close(shares.double(), wanted, rtol=0, atol=1.01 / count)


def by_value(logits: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    values = logits.unique()
    return torch.stack([shares[logits == x].double().sum() for x in values])


SPECIAL = {
    "temperature": (0.0, 1e-4, 0.5, 1.0, 2.5, 1e30),
    "top_k": (1, 2, 5, 12, WORDS),
    "top_p": (1e-300, 0.1, 0.3, 0.5, 0.9, 1 - 2**-53, 1.0),
    "drawn": (0.0, 0.25, 0.5, 1 - 2**-53),
}


@pytest.mark.parametrize("kind", ["f32", "bf16", "few values", "equal", "-inf", "inf", "all -inf"])
def test_tokens_are_those_by_hand(kind: str) -> None:
    """Drawn settings, special ones among them; rows of all settings side by side."""
    count, draw = 600, random.Random(kind)
    logits = torch.randn(count, WORDS, generator=torch.Generator().manual_seed(3)) * 3
    if kind == "bf16":
        logits = logits.bfloat16()
    if kind == "few values":
        logits = logits.round()
    if kind in ("equal", "all -inf"):
        logits = torch.full_like(logits, 1.5 if kind == "equal" else -math.inf)
    if kind == "-inf":
        logits[:, 3:37] = -math.inf
    if kind == "inf":
        logits[:, [7, 21]] = math.inf
    said = torch.tensor(
        [
            [draw.choice(SPECIAL[name]) for name in ("temperature", "top_k", "top_p")]
            + [draw.choice([*SPECIAL["drawn"], draw.random()])]
            for _ in range(count)
        ],
        dtype=torch.float64,
    )
    wanted = [by_hand(*pair) for pair in zip(logits, said, strict=True)]
    assert token_choice.choice(logits, said, WORDS).tolist() == wanted
    without = said[:, 0] == 0
    for rows, largest in (
        (without | (said[:, 1] == WORDS) & (said[:, 2] == 1), 0),
        (without | (said[:, 1] < WORDS) | (said[:, 2] == 1), 12),
    ):
        assert 0 < rows.sum() < count
        tokens = token_choice.choice(logits[rows], said[rows], largest).tolist()
        assert tokens == [x for x, is_one in zip(wanted, rows.tolist(), strict=True) if is_one]


def test_only_rows_that_need_it_are_put_in_order() -> None:
    words = 1000

    def row(temperature: float, top_k: int, top_p: float) -> list[float]:
        return [temperature, top_k, top_p, 0.5]

    greedy, plain = row(0, 5, 0.5), row(1, words, 1)
    few, many, nucleus = row(1, 50, 0.9), row(1, 700, 1), row(1, words, 0.9)
    for rows, largest in (
        ([greedy], 0),
        ([greedy, plain], 0),
        ([few, greedy], token_choice.FEW),
        ([plain, few], token_choice.FEW),
        ([many, few], words),
        ([nucleus, plain], words),
    ):
        assert token_choice.ordered(np.array(rows, dtype=np.float64), words) == largest
    assert token_choice.ordered(np.array([row(1, 5, 1)]), 40) == 40


def test_temperature_0_and_the_largest_number() -> None:
    logits = torch.randn(3, WORDS, generator=torch.Generator().manual_seed(2))
    zero = numbers(0.0, WORDS, 1.0, torch.tensor([0.0, 0.5, 1 - 2**-53]))
    assert chosen(logits, zero) == logits.argmax(-1).tolist()
    last = chosen(logits, numbers(1.0, 3, 1.0, torch.full((3,), 1 - 2**-53)))
    assert last == logits.topk(3).indices.amax(-1).tolist()


@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.parametrize("placed", [{}, {"tp": mf.Shard(1)}], ids=str)
def test_ranks_choose_alike(placed: Any, largest: int) -> None:
    """As a program, also of logits that are split by words: as in torch, on every rank."""
    layout = Layout(mf.DeviceMesh.arange(tp=3), placed)
    program = mf.compile(token_choice.define(4, WORDS, layout, largest))
    draw = random.Random(1)
    logits = torch.randn(4, WORDS, generator=torch.Generator().manual_seed(2))
    drawn = torch.tensor([draw.random() for _ in range(4)])
    said = numbers(0.8, 9, 0.9, drawn) if largest else numbers(0.8, WORDS, 1.0, drawn)
    (tokens,) = mf.simulate(program, [logits, said]).outputs
    assert tokens.tolist() == [by_hand(*pair) for pair in zip(logits, said, strict=True)]
    assert [c.kind for c in program.communications] == ["Allgather"] * len(placed)
    text = str(program)
    assert ("sort(" in text, "topk(" in text) == (largest == WORDS, largest == 12)
