"""What every backend passes, in few tests: its cases run one after the other.

A module of tests for one backend imports them and says which:

    pytestmark = pytest.mark.backend("mpi")
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import test_backend_c10d as kinds
import test_bad_input_ranks as bad_input
import test_host_programs_ranks as host_programs
import test_reshards_ranks as reshards
import test_two_stage_ranks as two_stage
import torch
from torch import Tensor
from two_stage import CASES, MESHES

import mdfuse as mf
from mdfuse.backends.base import Call

four = pytest.mark.world(4)
MOVED = [*kinds.FLOATS, *kinds.INTEGERS, torch.bool, *kinds.MOVED_ONLY]
REDUCED = [*kinds.FLOATS, *kinds.INTEGERS, torch.bool]

#: A quarter of the matrix: all families and meshes, extents that divide and that do not.
TWO_STAGES = [case for case in CASES if case.dim == 1 and case.units == "ops"]


def each(run: Callable[..., None], comm: Any, *choices: Any) -> None:
    """Run a test for every combination; an error says which one."""
    for case in product(*choices):
        try:
            run(comm, *case)
        except BaseException as error:
            error.add_note(f"case: {run.__name__}{case}")
            raise


@four
def test_what_is_moved(comm: Any) -> None:
    each(kinds.test_allgather, comm, kinds.TEAMS, MOVED, [0, 5])
    each(kinds.test_broadcast, comm, kinds.TEAMS, MOVED, [0, 5])
    each(kinds.test_all_to_all, comm, kinds.TEAMS, MOVED, [kinds._counts, kinds._one_to_one])


@four
def test_what_is_reduced(comm: Any) -> None:
    each(kinds.test_allreduce, comm, kinds.TEAMS, REDUCED, [7])
    each(kinds.test_reduce_scatter, comm, kinds.TEAMS, REDUCED, [3])
    each(kinds.test_reduce, comm, kinds.TEAMS, REDUCED, [7])
    each(kinds.test_reductions_of_nothing, comm, kinds.TEAMS)


@four
def test_what_goes_between_pairs(comm: Any) -> None:
    for dtype, count in product(MOVED, [0, 3]):
        for gather in kinds.GATHERS:
            kinds.test_gather(comm, *gather, dtype, count)
        for scatter in kinds.SCATTERS:
            kinds.test_scatter(comm, *scatter, dtype, count)
    teams = [(0, 1, 2, 3), (2, 0, 3, 1)]
    each(kinds.test_exchange, comm, ["Exchange", "SendRecv"], kinds.EXCHANGES, teams, MOVED)


@four
@pytest.mark.parametrize("before", MESHES)
def test_two_stages(before: str, comm: Any) -> None:
    each(
        lambda comm, case: two_stage.check(case, comm),
        comm,
        [c for c in TWO_STAGES if c.before == before],
    )


@four
def test_reshards(comm: Any) -> None:
    draws = map(random.Random, range(0, reshards.CASES, 2))
    each(lambda comm, draw: reshards.check_reshard(draw, reshards.MESHES, comm), comm, draws)


@four
def test_wrong_arguments(comm: mf.Communicator) -> None:
    each(
        lambda comm, what, guilty: bad_input.test_one_wrong_argument(what, guilty, comm),
        comm,
        bad_input.WRONG,
        [0, 2],
    )
    bad_input.test_the_world_is_usable_afterwards(comm)
    bad_input.test_all_ranks_refuse_a_later_run(comm)


test_a_program_from_text = host_programs.test_a_program_from_text
test_buffers_are_seen_as_flat = four(kinds.test_buffers_are_seen_as_flat_in_memory_order)
test_many_posts_in_flight = four(kinds.test_many_posts_in_flight_keep_their_order_and_their_buffers)
test_teams_are_made_by_their_members_alone = four(kinds.test_teams_are_made_by_their_members_alone)
test_binding = four(kinds.test_binding_needs_a_prepared_team_and_a_known_kind)


# -- on GPUs ---------------------------------------------------------------------------------------

#: How long what a post needs is held up on its device, cycles: some milliseconds.
HELD_UP = 5_000_000

TWO = [(0, 1), (1, 0)]
GATHERS = [((0, 1), 1, (0, 1)), ((1, 0), 0, (1,)), ((0, 1), 0, (1, 0))]
SCATTERS = [((0, 1), 1, (0, 1), (0, 1), None), ((1, 0), 0, (1, 0), (1, 1), 3)]
PIECES = [(0, 1, 5), (1, 0, 3), (0, 1, 1), (0, 1, 0), (1, 0, 200_000), (0, 1, 300_001)]


def held_up(comm: Any, call: Call, srcs: Sequence[Tensor], dsts: Sequence[Tensor]) -> list[Tensor]:
    """As `kinds.post`, from a stream that is still to write what is sent, and to read what is
    where it arrives; the wait is on another stream."""
    comm.prepare([call.team])
    given, into = ([x.to(comm.device, copy=True) for x in buffers] for buffers in (srcs, dsts))
    there = [torch.full_like(x.view(torch.uint8), 85).view(x.dtype) for x in given]
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        torch.cuda._sleep(HELD_UP)
        for x, values in zip(there, given, strict=True):
            x.copy_(values)
        before = [x.clone() for x in into]
        work = comm.poster(call)(there, into)
    work.wait()
    work.wait()
    got = [x.cpu() for x in into]
    own.synchronize()
    for x, values in zip([*there, *before], [*srcs, *dsts], strict=True):
        kinds.same(x.cpu(), values, "a source was written to, or a destination too early")
    return got


@pytest.fixture
def holding_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "post", held_up)
    monkeypatch.setitem(kinds.EXCHANGES, "two", PIECES)


@pytest.mark.gpu
@pytest.mark.world(2)
@pytest.mark.usefixtures("holding_up")
def test_what_is_moved_after_queued_work(comm: Any) -> None:
    each(kinds.test_allgather, comm, TWO, MOVED, [0, 5, 300_001])
    each(kinds.test_broadcast, comm, TWO, MOVED, [0, 5, 300_001])
    each(kinds.test_all_to_all, comm, TWO, MOVED, [kinds._counts, lambda s, r: 90_000 * s + r])
    each(kinds.test_exchange, comm, ["Exchange", "SendRecv"], ["two"], TWO, MOVED)
    for dtype, count in product(MOVED, [0, 3, 300_001]):
        for gather in GATHERS:
            kinds.test_gather(comm, *gather, dtype, count)
        for scatter in SCATTERS:
            kinds.test_scatter(comm, *scatter, dtype, count)


@pytest.mark.gpu
@pytest.mark.world(2)
@pytest.mark.usefixtures("holding_up")
def test_what_is_reduced_after_queued_work(comm: Any) -> None:
    for dtypes, counts in (REDUCED, [7]), ([torch.bfloat16, torch.float32, torch.int32], [300_001]):
        each(kinds.test_allreduce, comm, TWO, dtypes, counts)
        each(kinds.test_reduce_scatter, comm, TWO, dtypes, counts)
        each(kinds.test_reduce, comm, TWO, dtypes, counts)


@pytest.mark.gpu
@pytest.mark.world(2)
def test_posts_on_several_streams(comm: Any) -> None:
    """Waits, in another order than the posts, on a stream that is busy itself."""
    comm.prepare([(0, 1)])
    call = Call(kind="Allreduce", team=(0, 1), rank=comm.rank, reduce_op="sum")
    post, n, k = comm.poster(call), 12, 400_000
    streams = [torch.cuda.Stream() for _ in range(3)]
    totals, works = [], []
    for i in range(n):
        with torch.cuda.stream(streams[i % 3]):
            torch.cuda._sleep(HELD_UP)
            source = torch.full((k,), 100.0 * comm.rank + i, device=comm.device)
            totals.append(torch.zeros_like(source))
            works.append(post([source], [totals[-1]]))
    torch.cuda._sleep(4 * HELD_UP)
    for work in reversed(works):
        work.wait()
    copies = torch.stack(totals)
    torch.cuda.synchronize()
    assert torch.equal(copies.cpu(), (100.0 + 2 * torch.arange(n)).unsqueeze(1).expand(n, k))
