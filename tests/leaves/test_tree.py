"""The tree of a reduction gives the same bits, whoever has which of its terms."""

from __future__ import annotations

import random

import pytest
import torch

from mdfuse.leaves import tree
from mdfuse.plan.tensor_meta import form_of

#: Terms whose sum depends on the order in which they are added.
TERMS = [
    torch.tensor([1e8, 1.0, -1e8, 3.0, 1e-3, -2e7, 7.0, 1e7][n:] + [0.5] * n) for n in range(8)
]


def by_hand(op: str, terms: list[torch.Tensor]) -> torch.Tensor:
    """Halve the terms, the first half full, and combine the halves."""
    if len(terms) == 1:
        return terms[0]
    half = 1
    while half * 2 < len(terms):
        half *= 2
    a, b = by_hand(op, terms[:half]), by_hand(op, terms[half:])
    functions = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}
    return functions[op](a, b)


@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
@pytest.mark.parametrize("count", range(1, 9))
def test_owners_do_not_matter(op: str, count: int) -> None:
    terms, rng = TERMS[:count], random.Random(count)
    expected = by_hand(op, terms)
    for _ in range(6):
        owners = [rng.randrange(4) for _ in terms]
        known = {}
        for rank in range(4):
            held = {n for n, owner in enumerate(owners) if owner == rank}
            spans = tree.subtrees(held, count)
            assert sorted(n for span in spans for n in range(*span)) == sorted(held)
            for span in spans:
                known[span] = tree.reduced(op, span, {(n, n + 1): terms[n] for n in held})
        assert torch.equal(tree.total(op, count, known), expected)


def test_the_order_matters() -> None:
    """The terms above would show another order."""
    assert not torch.equal(by_hand("sum", TERMS), sum(TERMS[1:], TERMS[0]))


def test_few_numbers_travel() -> None:
    """A rank with half, or a quarter, of the terms sends as many numbers as one term has."""
    assert tree.subtrees(range(4, 8), 8) == [(4, 8)]
    assert tree.subtrees(range(2, 4), 8) == [(2, 4)]
    assert len(tree.subtrees(range(3, 6), 8)) == 2


def test_narrow_floats_and_averages() -> None:
    """Terms of 16 bits are added in f32; an average is divided once."""
    terms = {(n, n + 1): torch.tensor([256.0, 1.0], dtype=torch.bfloat16) for n in range(3)}
    assert tree.total("sum", 3, terms).tolist() == [768.0, 3.0]
    assert tree.total("avg", 3, terms).tolist() == [256.0, 1.0]
    flags = {(0, 1): torch.tensor([True, False]), (1, 2): torch.tensor([False, False])}
    assert tree.total("sum", 2, flags).tolist() == [True, False]


def test_one_kernel_has_the_bits_of_the_calls() -> None:
    """A GPU adds large terms in one kernel; it may not pair or round them otherwise."""
    torch.manual_seed(0)
    terms = {(n, n + 1): (torch.randn(1001) * 100.0 ** (n % 3)).bfloat16() for n in range(5)}
    used: list[tree.Span] = []
    nest = tree._nest((0, 5), terms, used)
    values = [terms[span] for span in used]
    kernel = tree._fused("sum", nest, tuple(map(form_of, values)))
    assert kernel is not None
    expected = by_hand("sum", [x.float() for x in values])
    assert torch.equal(kernel(*values)[0], expected)
    assert torch.equal(tree.reduced("sum", (0, 5), terms), expected)


def test_the_kernel_that_adds_writes_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is in memory in f32; a term that is written over is left to the calls."""
    torch.manual_seed(0)
    terms = {(n, n + 1): (torch.randn(1008) * 100.0 ** (n % 3)).bfloat16() for n in range(8)}
    expected = by_hand("sum", [x.float() for x in terms.values()]).bfloat16()
    monkeypatch.setattr(tree, "_is_large", lambda x: True)
    monkeypatch.setattr(tree, "total", lambda *args: pytest.fail("a sum of its own"))
    out = torch.full([1008], torch.nan, dtype=torch.bfloat16)
    tree.write(out, "sum", 8, terms, compiles=True)
    assert torch.equal(out, expected)
    monkeypatch.undo()
    monkeypatch.setattr(tree, "_is_large", lambda x: True)
    monkeypatch.setattr(tree, "_fused_into", lambda *args: pytest.fail("a term is written over"))
    tree.write(terms[0, 1], "sum", 8, terms, compiles=True)
    assert torch.equal(terms[0, 1], expected)


@pytest.mark.parametrize("op", ["avg", "max"])
def test_other_reductions_are_written_by_calls(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terms, out = {(n, n + 1): torch.randn(33) for n in range(4)}, torch.empty(33)
    monkeypatch.setattr(tree, "_is_large", lambda x: x is out)
    monkeypatch.setattr(tree, "_fused_into", lambda *args: pytest.fail("another rounding"))
    tree.write(out, op, 4, terms, compiles=True)
    assert torch.equal(out, tree.total(op, 4, terms))


def test_terms_are_added_by_calls_unless_kernels_may_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, terms = list[str](), {(n, n + 1): torch.randn(33) for n in range(4)}
    monkeypatch.setattr(tree, "_is_large", lambda x: True)
    monkeypatch.setattr(tree, "_fused", lambda op, nest, forms: asked.append(op))
    assert torch.equal(tree.total("avg", 4, terms), tree.total("avg", 4, terms, compiles=False))
    assert not asked
    tree.total("avg", 4, terms, compiles=True)
    tree.total("max", 4, terms, compiles=True)  # its bits depend on the kernel
    assert asked == ["avg"]
