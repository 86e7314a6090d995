"""Which stream an instruction goes to, and what one rank runs: the printed programs."""

from __future__ import annotations

import pytest
from helpers.golden import Golden
from helpers.stream_cases import CASES, text

import mdfuse as mf

ROUND_ROBIN = mf.Options(stream_policy="round_robin")
COPY_COMPUTE = mf.Options(stream_policy="copy_compute")

POLICIES = {
    "one_stream": ("gather_matmul", mf.Options(streams=1)),  # that of the caller
    "two_streams": ("one_op", mf.Options(streams=2)),
    "round_robin": ("gather_matmul", ROUND_ROBIN),  # also where a loop communicates
    "copy_compute": ("one_op", COPY_COMPUTE),  # a loop without transfers uses one stream
    # Iterations that all write one buffer write it on one stream.
    "round_robin_where_iterations_add_up": ("scatter_by_ring", ROUND_ROBIN),
}

PROJECTIONS = {
    "gather_matmul_of_rank_1": ("gather_matmul", 1),
    "ring_of_rank_1": ("gather_matmul_in_a_ring", 1),  # its own chunk first, then that of rank 2, …
    "sender": ("send_to_a_mesh", 0),  # has nothing to compute on the ranks of the other mesh
    "receiver": ("send_to_a_mesh", 3),
}


@pytest.mark.parametrize(("case", "options"), POLICIES.values(), ids=POLICIES)
def test_policy(golden: Golden, case: str, options: mf.Options) -> None:
    golden(text(CASES[case].compile(options=options)))


@pytest.mark.parametrize(("case", "rank"), PROJECTIONS.values(), ids=PROJECTIONS)
def test_rank(golden: Golden, case: str, rank: int) -> None:
    golden(text(CASES[case].compile().for_rank(rank)))
