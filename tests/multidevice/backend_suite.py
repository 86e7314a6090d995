"""What every backend passes on two and four ranks, in few tests: its cases run one after the other.

A module of tests for one backend imports them and says which:

    pytestmark = pytest.mark.backend("mpi")
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import test_backend_c10d as kinds
import test_bad_input_ranks as bad_input
import test_compiled_ranks as compiled_ranks
import test_counted_ranks as counted_ranks
import test_host_instructions_ranks as host_instructions
import test_host_programs_ranks as host_programs
import test_reshards_ranks as reshards
import test_two_stage_ranks as two_stage
import torch
from helpers.stand_in_compiler import StandIn
from helpers.two_stage import MESHES
from torch import Tensor

import mdfuse as mf
from mdfuse import evaluator
from mdfuse.layouts.call import Call

two, four = pytest.mark.world(2), pytest.mark.world(4)
MOVED, REDUCED = kinds.MOVED, kinds.REDUCED


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
    each(kinds.test_extremes_of_what_is_no_number, comm, kinds.TEAMS)
    each(kinds.test_reductions_of_complex_numbers, comm, kinds.TEAMS)


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
def test_what_is_one_element(comm: Any) -> None:
    kinds.test_one_element_of_any_stride(comm)


@two
def test_groups_of_several_dtypes(comm: mf.Communicator) -> None:
    each(
        lambda comm, x: host_instructions.test_one_group_of_several_dtypes(x, comm),
        comm,
        host_instructions.MIXED,
    )


@four
@pytest.mark.parametrize("before", MESHES)
def test_two_stages(before: str, comm: Any) -> None:
    two_stage.check_all([c for c in two_stage.ONE_WAY if c.before == before], comm)


@two
def test_two_stages_of_two(comm: Any) -> None:
    two_stage.check_all(two_stage.CASES_OF_2, comm)


@two
def test_compiled_launches(comm: mf.Communicator, compiler: StandIn) -> None:
    compiled_ranks.test_ranks_compile_each_function_once(comm, compiler)


@four
def test_reshards(comm: Any) -> None:
    run_reshards(comm, reshards.MESHES)


@two
def test_reshards_of_two(comm: Any) -> None:
    run_reshards(comm, reshards.MESHES_OF_2)


def run_reshards(comm: mf.Communicator, meshes: tuple[mf.DeviceMesh, ...]) -> None:
    draws = map(random.Random, range(0, reshards.CASES, 2))
    each(lambda comm, draw: reshards.check_reshard(draw, meshes, comm), comm, draws)


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


def two_axes() -> mf.FusionDefinition:
    """Partial sums along tp, reduce-scattered, then gathered along dp."""
    mesh = mf.DeviceMesh([[2, 0], [3, 1]], axes=("dp", "tp"))
    with mf.FusionDefinition("two_axes") as fd:
        x = fd.define_tensor([4, 6], mesh=mesh, layout={"dp": mf.Shard(0), "tp": mf.Shard(1)})
        w = fd.define_tensor([6, 8], mesh=mesh, layout={"tp": mf.Shard(0)})
        h = fd.ops.set(x @ w).on(mesh, {"dp": mf.Shard(0), "tp": mf.Shard(1)})
        fd.add_output(fd.ops.set(h * 2.0).on(mesh, {"tp": mf.Shard(1)}))
    return fd


@four
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_another_backend_along_an_axis(
    axis: str, comm: mf.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which one carries which team is seen at what is bound; both carry the right bytes."""
    bound, posters = {}, evaluator.posters

    def spy(comm: mf.Communicator, run: int) -> Any:
        made = posters(comm, run)

        def bind(poster: Any, call: Call) -> Any:
            found = poster(call)
            bound[call.kind] = type(found).__module__.removeprefix("mdfuse.backends.")
            return found

        return lambda: partial(bind, made())

    monkeypatch.setattr(evaluator, "posters", spy)
    fd, generator = two_axes(), torch.Generator().manual_seed(0)
    program = mf.compile(fd, mf.Options(backend=f"{axis}=gloo"))
    whole = [torch.randn(shape, generator=generator) for shape in ((4, 6), (6, 8))]
    layouts = [program.fusion.values[name].layout for name in program.fusion.inputs]
    pairs = zip(whole, layouts, strict=True)
    mine = [mf.shard_tensor(x, at, rank=comm.rank).to(comm.device) for x, at in pairs]
    if comm.device.type == "cuda":
        with pytest.raises(mf.BackendError, match="backend 'gloo' does not carry these"):
            program.run(*mine)
        return
    (got,) = program.run(*mine)
    expected = (whole[0] @ whole[1] * 2.0).chunk(2, dim=1)[0 if comm.rank in (2, 3) else 1]
    torch.testing.assert_close(got, expected)
    along = {"tp": "ReduceScatter", "dp": "Allgather"}
    assert {kind: x == "c10d.c10d_backend" for kind, x in bound.items()} == {
        kind: name == axis for name, kind in along.items()
    }


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
    where it arrives; the waits are on two other streams."""
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
    with torch.cuda.stream(torch.cuda.Stream()):
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


@four
def test_counted_rows(comm: Any) -> None:
    for case in counted_ranks.FOUR:
        counted_ranks.check(case, comm)


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
