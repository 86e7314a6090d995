"""What every backend passes on four ranks, in few tests: its cases run one after the other.

A module of tests for one backend imports them and says which:

    pytestmark = pytest.mark.backend("mpi")
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import test_backend_c10d as kinds
import test_bad_input_ranks as bad_input
import test_host_programs_ranks as host_programs
import test_reshards_ranks as reshards
import test_two_stage_ranks as two_stage
import torch
from two_stage import CASES, MESHES

import mdfuse as mf

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
    each(kinds.test_allreduce, comm, kinds.TEAMS, REDUCED)
    each(kinds.test_reduce_scatter, comm, kinds.TEAMS, REDUCED)
    each(kinds.test_reduce, comm, kinds.TEAMS, REDUCED)
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
