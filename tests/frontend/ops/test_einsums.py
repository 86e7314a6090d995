"""Contractions, masks, distances and scans of split operands: what ranks send, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.layout_claims import Claim, check
from helpers.oracle import check_everywhere

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh, FusionDefinition, Layout, Shard

T = (10, 7)

CLAIMS: dict[str, Claim] = {
    "summed over the split dim": Claim(
        [((6, 7), 1), ((7, 5), 0)], lambda x, y: torch.einsum("ij,jk->ik", x, y),
        [("Allreduce", (6, 5))]),
    "rows": Claim([((6, 7), 0), ((7, 5), None)], lambda x, y: torch.einsum("ij,jk", x, y), []),
    "heads": Claim(
        [((2, 4, 7, 3), 1), ((2, 4, 5, 3), 1)], lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
        []),
    "heads into features": Claim(
        [((2, 7, 4, 3), 2), ((4, 3, 5), 0)], lambda v, w: torch.einsum("bqhd,hdo->bqo", v, w),
        [("Allreduce", (2, 7, 5))]),
    "three": Claim(
        [((6, 7, 4), 2), ((7, 4, 5), 1), ((5, 2), None)],
        lambda x, y, z: torch.einsum("ijh,jhk,kl->il", x, y, z), [("Allreduce", (6, 2))]),
    "outer": Claim([((6,), 0), ((5,), None)], lambda x, y: torch.einsum("i,j->ij", x, y), []),
    "tensordot": Claim(
        [((6, 7, 4), 1), ((7, 4, 5), 0)], torch.tensordot, [("Allreduce", (6, 5))]),
    "triangle": Claim([(T, 0)], lambda x: x.tril(), []),
    "trace": Claim([((7, 7), 0)], lambda x: x.trace(), [("Allreduce", ())]),
    "diagonal of whole columns": Claim([((5, 7, 7), 0)], lambda x: x.diagonal(1, 1, 2) * 1, []),
    "rows of ones": Claim([((8,), 0, 5)], lambda i: F.one_hot(i, 5), []),
    "buckets": Claim([(T, 0), ((4,), None)], lambda x, v: torch.bucketize(x, v.sort()[0]), []),
    "bins": Claim([(T, 0)], lambda x: torch.histc(x, 4, -1, 1), [("Allreduce", (4,))]),
    "among": Claim(
        [((8,), 0, 5), ((3,), None, 5)], torch.isin, []),
    "padded beside": Claim([(T, 0)], lambda x: F.pad(x, (1, 2)), []),
    "padded along": Claim([(T, 0)], lambda x: F.pad(x, (0, 0, 1, 2)), [("Exchange", T)]),
    "turned beside": Claim([(T, 0)], lambda x: x.flip(1).roll(2, 1), []),
    "turned along": Claim([(T, 0)], lambda x: x.flip(0), [("Allgather", T)]),
    "sums beside": Claim([(T, 0)], lambda x: x.cumsum(1), []),
    "batches of inverses": Claim([((5, 3, 3), 0)], lambda x: (x @ x.mT + 1).inverse(), []),
    "columns of solutions": Claim(
        [((3, 3), None), ((3, 7), 1)], lambda a, b: torch.linalg.solve(a, b), []),
    "distances": Claim([(T, 0), ((6, 7), None)], lambda x, y: torch.cdist(x, y), []),
    "angles": Claim(
        [(T, 1), (T, 1)], lambda x, y: F.cosine_similarity(x, y),
        [("Allreduce", (10, 1)), ("Allreduce", (10, 1)), ("Allreduce", (10,))]),
    "classes": Claim(
        [(T, 1), ((10,), None, 7)], lambda x, t: F.nll_loss(x, t), [("Allreduce", (10,))]),
    "median beside": Claim([(T, 0)], lambda x: x.median(1).values, []),
}  # fmt: skip


@pytest.mark.parametrize("name", CLAIMS)
def test_what_is_sent(name: str) -> None:
    assert check(CLAIMS[name]) == CLAIMS[name].sends


@pytest.mark.parametrize(("bins", "low", "high"), [(4, 0, 3), (14, 0, 49), (5, 2, 9)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_bins_of_integers(dtype: torch.dtype, bins: int, low: int, high: int) -> None:
    """In exact arithmetic, as torch counts them on GPUs; on CPUs it refuses integers."""
    x = torch.randint(60, (200,), generator=torch.Generator().manual_seed(0)).to(dtype)
    with FusionDefinition() as fd:
        fd.add_output(torch.histc(fd.define_tensor([200], dtype), bins, low, high))
    (counts,) = mf.reference(fd, [x])
    places = (x.long() - low) * bins // (high - low)
    places[x == high] = bins - 1
    inside = (x >= low) & (x <= high)
    assert torch.equal(counts, torch.bincount(places[inside], minlength=bins).to(dtype))


@pytest.mark.parametrize("x", [torch.randn(5, 3), torch.zeros(4), torch.tensor([7.0])])
def test_one_bin_has_all_elements(x: torch.Tensor) -> None:
    """As where a layer has one expert: its range, from 0 to 0, is that of x."""
    layout = Layout(DeviceMesh.arange(tp=2), {"tp": Shard(0)})
    for low in (0, 2):
        with FusionDefinition() as fd:
            fd.add_output(torch.histc(fd.define_tensor(x.shape, layout=layout), 1, low, low))
        check_everywhere(mf.compile(fd), [x], [torch.histc(x, 1, low, low)])


def test_a_matrix_without_an_inverse_gives_nan() -> None:
    """An error of one rank would leave the others in a communication."""
    x = torch.stack([torch.ones(2, 2), torch.eye(2)])
    with FusionDefinition() as fd:
        h = fd.define_tensor([2, 2, 2])
        for y in (h.inverse(), torch.linalg.solve(h, h), torch.linalg.cholesky(2 * h - 1)):
            fd.add_output(y)
    inverse, solution, root = mf.reference(fd, [x])
    for found in (inverse, solution):
        assert found[0].isnan().all() and torch.equal(found[1], torch.eye(2))
    assert root[1].isnan().all()


#: what is typed with x: f32[5,4] and i: i64[5] -> words that the error has
WRONG: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "terms": (lambda ops, x, i: torch.einsum("ij->i", x, x), ("it has 1 term",)),
    "letters": (lambda ops, x, i: torch.einsum("ijk->i", x), ("'ijk' stands for",)),
    "a strange one": (lambda ops, x, i: torch.einsum("i1->i", x), ("each letter",)),
    "one that is nowhere": (lambda ops, x, i: torch.einsum("ij->k", x), ("each letter",)),
    "extents": (lambda ops, x, i: torch.einsum("ij,jk->ik", x, x), ("j is 4, and 5",)),
    "tensordot": (lambda ops, x, i: torch.tensordot(x, x, 1), ("dim 1", "is 4", "5")),
    "tensordot over more": (lambda ops, x, i: torch.tensordot(x, x, 3), ("as many dims",)),
    "inverse": (lambda ops, x, i: x.inverse(), ("square matrices", "[…, n, n]")),
    "solve": (lambda ops, x, i: torch.linalg.solve(x[:4], x), ("as many rows",)),
    "inner": (lambda ops, x, i: torch.inner(x, x[:, :2]), ("of one extent",)),
    "tril of a vector": (lambda ops, x, i: x[0].tril(), ("rows and columns",)),
    "a diagonal of one dim": (lambda ops, x, i: x.diagonal(0, 1, -1), ("along two dims",)),
    "trace of a vector": (lambda ops, x, i: i.trace(), ("it takes a matrix",)),
    "classes not told": (lambda ops, x, i: F.one_hot(i), ("num_classes=-1", "is known when")),
    "bins not told": (lambda ops, x, i: torch.histc(x, 4), ("from 0 to 0", "min < max")),
    "bins of one integer": (lambda ops, x, i: torch.histc(i, 4, 0.2, 0.9), ("from 0.2 to 0.9",)),
    "boundaries": (lambda ops, x, i: torch.bucketize(x, x), ("are a vector", "searchsorted")),
    "sides": (
        lambda ops, x, i: torch.searchsorted(x, x, side="left", right=True), ("side='left'",)),
    "kthvalue": (lambda ops, x, i: x.kthvalue(5), ("k=5", "from 1 to 4")),
    "quantile": (lambda ops, x, i: x.quantile(1.5), ("q=1.5", "from 0 to 1")),
    "quantile of integers": (lambda ops, x, i: i.quantile(0.5), ("float32 or float64",)),
    "running truth": (lambda ops, x, i: x.cumsum(0, dtype=torch.bool), ("truth values",)),
    "logcumsumexp": (lambda ops, x, i: i.logcumsumexp(0), ("floating",)),
    "roll": (lambda ops, x, i: x.roll((1, 2), 0), ("one shift for each dim",)),
    "rot90": (lambda ops, x, i: x.rot90(1, (0, 0)), ("two different dims",)),
    "pad": (lambda ops, x, i: F.pad(x, (1,)), ("two numbers for each",)),
    "pad by a mirror": (lambda ops, x, i: F.pad(x, (4, 0), mode="reflect"), ("4 elements",)),
    "cut by padding": (lambda ops, x, i: F.pad(x, (-3, -3)), ("more is cut than there is",)),
    "unfold": (lambda ops, x, i: x.unfold(1, 5, 1), ("windows of 5", "4 elements")),
    "pixels": (lambda ops, x, i: F.pixel_shuffle(x, 2), ("a multiple of the square",)),
    "cross": (lambda ops, x, i: torch.linalg.cross(x, x), ("three elements",)),
    "cdist": (lambda ops, x, i: torch.cdist(x, x[:, :2]), ("rows of one length",)),
    "matrix norm": (lambda ops, x, i: torch.linalg.norm(x, "nuc"), ("'nuc'", "no singular")),
    "isclose": (lambda ops, x, i: torch.isclose(x, x.int()), ("one dtype",)),
    "nll_loss": (lambda ops, x, i: F.nll_loss(x, i[:2]), ("x: [rows, classes]",)),
    "bce": (lambda ops, x, i: F.binary_cross_entropy(x, i), ("each number has a target",)),
    "huber": (lambda ops, x, i: F.huber_loss(x, x, delta=0), ("delta=0",)),
    "pairs": (lambda ops, x, i: torch.view_as_complex(x), ("real and the imaginary",)),
    "no pairs": (lambda ops, x, i: torch.view_as_real(x), ("it is real",)),
    "lstm": (lambda ops, x, i: torch.lstm_cell(x, (x,), x, x), ("a state and a cell",)),
    "gates": (lambda ops, x, i: torch.gru_cell(x, x, x[:, :2], x), ("[3*n,k]", "%x: f32[")),
    "gates of 0-d": (lambda ops, x, i: torch.rnn_tanh_cell(x, x[0, 0], x, x), ("[1*n,k]",)),
    "routes of 0-d": (lambda ops, x, i: ops.routed_mm(x[0, 0], x, i), ("[t,k]",)),
    "linspace": (lambda ops, x, i: ops.linspace(0, 1, -1), ("linspace(0, 1, -1)",)),
    "meshgrid": (lambda ops, x, i: torch.meshgrid(x, x), ("a vector or a number",)),
    "nothing to join": (lambda ops, x, i: ops.hstack([]), ("hstack of no tensors",)),
    "prelu": (lambda ops, x, i: F.prelu(x, x[:, 0]), ("one for each place of dim 1",)),
    "threshold": (lambda ops, x, i: F.threshold(i, 0.5, 1), ("of that dtype",)),
    "inplace": (lambda ops, x, i: F.dropout(x, 0.0, inplace=True), ("computed once",)),
    "heads": (
        lambda ops, x, i: F.multi_head_attention_forward(
            x[None], x[None], x[None], 4, 3, x, None, None, None, False, 0.0, x, None),
        ("with 3 heads",)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    typed, says = WRONG[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([5, 4], name="x")
        i = fd.define_tensor([5], torch.int64, name="i")
        with pytest.raises(DefinitionError) as caught:
            typed(fd.ops, x, i)
    for words in (*says, "test_einsums.py:"):
        assert words in str(caught.value), caught.value
