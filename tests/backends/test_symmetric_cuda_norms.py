"""Small sums on GPUs with a norm behind them, in one kernel; without a GPU.

The kernel itself runs in Triton's interpreter, where Triton is, on ranks that are forks, with
inboxes in memory that they share.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mdfuse.backends.symmetric import cuda_norms
from mdfuse.backends.symmetric.cuda_norms import Norms, launch
from mdfuse.backends.symmetric.cuda_sums import CHUNK, Inbox
from mdfuse.errors import BackendError
from mdfuse.hir.row_norms import WIDEST, RowNorm
from mdfuse.layouts.call import Call
from mdfuse.torch_private import HashStore, PrefixStore

from .test_symmetric_cuda_sums import forks

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

NORM = RowNorm(
    width=6144, eps=1e-5, dtype=BF16, weight_dtype=BF16, has_residual=True, has_total=True,
    is_rounded=False,
)  # fmt: skip


@pytest.mark.parametrize("width", [1, 5, 100, 4096, 6144, 8192, 12_288, WIDEST])
@pytest.mark.parametrize("members", [2, 3, 8])
def test_rows_that_fit_have_places_of_their_own(width: int, members: int) -> None:
    """The most rows lie in a member's places, with a flag each, and one row always fits."""
    for dtype in (BF16, F32):
        norm, inbox = replace(NORM, width=width, dtype=dtype), Inbox(members)
        rows = max(n for n in range(300) if norm.fits(n, members))
        assert rows and norm.stride % 16 == 0 and norm.stride >= width * dtype.itemsize
        assert rows * norm.stride <= inbox.chunks * CHUNK and rows <= inbox.chunks
        assert 2 * members * inbox.chunks * CHUNK == inbox.flags
        assert inbox.chunks >= 2  # two numbers lie behind the flags
    assert not NORM.fits(0, members) and not NORM.fits(1, 200)


# -- the kernel --------------------------------------------------------------------------------


def cases(width: int, seed: int) -> list[tuple[RowNorm, int]]:
    """Norms, each with rows: dtypes and operands in turns, and posts of different sizes."""
    draw = torch.Generator().manual_seed(seed)
    done = []
    for n in range(12):
        norm = replace(
            NORM,
            width=width,
            dtype=(F32, F16)[n % 2],
            weight_dtype=(None, F32, F16)[n % 3],
            has_residual=bool(n & 2),
            has_total=bool(n & 4),
            is_rounded=bool(n & 8) and n % 3 > 0,
        )
        done.append((norm, int(torch.randint(1, 5, (), generator=draw))))
    return done


def right(norm: RowNorm, terms: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The total and the result in float64, rounded where separate operations round."""
    total = terms.double().sum(0).to(norm.dtype)
    if norm.has_residual:
        total = (total.double() + residual.double()).to(norm.dtype)
    y = total.double() * (total.double().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    if norm.is_rounded:
        y = y.to(norm.dtype).double()
    return total, y * weight.double() if norm.weight_dtype is not None else y


def check_rank(index: int, members: int, table: Tensor, kernel: Any, width: int) -> None:
    """Posts of one rank, each compared with what is right; results begin as NaN."""
    inbox = Inbox(members)
    for n, (norm, rows) in enumerate(cases(width, members)):
        draw = torch.Generator().manual_seed(n)
        terms = torch.randn(members, rows, width, generator=draw).to(norm.dtype)
        residual = torch.randn(rows, width, generator=draw).to(norm.dtype)
        weight = torch.randn(width, generator=draw).to(norm.weight_dtype or F32)
        total, y = (torch.full_like(residual, torch.nan) for _ in range(2))
        given = [terms[index].clone(), *[residual] * norm.has_residual]
        given += [weight] * (norm.weight_dtype is not None)
        given += [*[total] * norm.has_total, y]
        launch(kernel, norm, rows, [x.view(-1) for x in given], table, index, inbox)
        want = right(norm, terms, residual, weight)
        error = 1e-6 if norm.dtype == F32 else 2e-3
        if norm.has_total:
            torch.testing.assert_close(total.float(), want[0].float(), rtol=error, atol=1e-6)
        torch.testing.assert_close(y.double(), want[1], rtol=8 * error, atol=8 * error)


@pytest.mark.triton
@pytest.mark.parametrize(("members", "width"), [(2, 96), (3, 50)])
def test_ranks_compute_sums_and_norms(
    members: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Posts of other rows follow each other, and no rank waits for good."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from mdfuse.backends.symmetric.cuda_norms_kernels import add_and_norm

    memory = [mmap.mmap(-1, Inbox(members).bytes) for _ in range(members)]
    table = torch.tensor([ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in memory])

    def rank(index: int) -> None:
        check_rank(index, members, table, add_and_norm, width)

    ends = [os.waitstatus_to_exitcode(os.waitpid(x, 0)[1]) for x in forks(members, rank)]
    assert ends == [0] * members
    turns = Inbox(members).turns
    for m in memory:  # how many posts there were; no block has begun another one
        assert [*m[turns : turns + 8]] == [len(cases(width, members)), 0, 0, 0, 0, 0, 0, 0]


# -- who computes so ---------------------------------------------------------------------------


def members_of(problems: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[Norms]:
    """Both ranks of a team; a problem is an error of the compiler there."""
    team, store = (4, 7), HashStore()

    def get(_: Any) -> Any:
        return SimpleNamespace(multi_processor_count=132)

    monkeypatch.setattr(torch.cuda, "get_device_properties", get)
    members = [
        Norms(
            team=team, index=n, addresses=[0, 0], device=torch.device("cpu"),
            store=PrefixStore("norms", store), timeout_s=30.0,
        )
        for n in range(2)
    ]  # fmt: skip
    for member, problem in zip(members, problems, strict=True):

        def compiled(norm: RowNorm, rows: int, *given: Tensor, why: str = problem) -> None:
            assert rows == 0 and len(given) == 5
            if why:
                raise ValueError(why)

        monkeypatch.setattr(member, "queue", compiled)
    return members


def both(members: Sequence[Norms], norm: RowNorm, rows: int) -> list[bool]:
    """Whether each member has a kernel; they are asked at once."""
    answers = [False] * len(members)

    def ask(n: int) -> None:
        call = Call(kind="Allreduce", team=(4, 7), rank=(4, 7)[n], reduce_op="sum")
        answers[n] = members[n].kernel(call, norm, rows) is not None

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return answers


@pytest.mark.parametrize("problem", ["", "no room for shared memory\nand more"])
def test_a_kernel_that_one_rank_cannot_compile_is_used_by_none(
    problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    members = members_of(["", problem], monkeypatch)
    with caplog.at_level(logging.WARNING, "mdfuse.comm"):
        assert both(members, NORM, 6) == [not problem] * 2
        assert both(members, NORM, 7) == [not problem] * 2  # asked once
    said = "ranks (4, 7): a sum and the norm behind it are computed apart: rank 7: no room for"
    assert [said in m for m in caplog.messages] == [True] * bool(problem)
    assert both(members, NORM, 161) == [False] * 2


def test_a_rank_that_does_not_say_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    member, _ = members_of(["", ""], monkeypatch)
    member.timeout_s = 0.05
    call = Call(kind="Allreduce", team=(4, 7), rank=4, reduce_op="sum")
    with pytest.raises(BackendError, match=r"rank 4 with the team \(4, 7\)"):
        member.kernel(call, NORM, 6)


def test_other_sums_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    member, _ = members_of(["", ""], monkeypatch)
    for kind, op in (("Allreduce", "max"), ("ReduceScatter", "sum")):
        call = Call(kind=kind, team=(4, 7), rank=4, reduce_op=op)
        assert member.kernel(call, NORM, 6) is None
    assert cuda_norms._PROCESSORS <= 132


def test_a_gpu_of_few_processors_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    members = members_of(["", ""], monkeypatch)
    few = SimpleNamespace(multi_processor_count=64)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: few)
    assert both(members, NORM, 6) == [False, False]
