"""Streamed programs against plain torch on whole tensors: values, memory, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import sampling
from helpers.oracle import (
    check_everywhere,
    dense_strides,
    has_strides,
    is_close,
    local_part,
    memory_order,
    simulate_shares,
)
from helpers.stream_cases import CASES, Case, line

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Shard, Stream, hir
from mdfuse.hir.rank.unrolled import written_out

ALL = list(CASES.values())
OF_ANY_SIZE = [case for case in ALL if not case.fixed]
POLICIES = (
    mf.Options(streams=2, stream_policy="round_robin"),
    mf.Options(streams=3, stream_policy="copy_compute"),
)


def few(case: Case) -> int:
    """As many ranks as it takes: on more, local operations do the same."""
    return 2 if case.family == "local" else 4


def check(case: Case, program: mf.Program, schedule: int | None = None) -> None:
    inputs = case.inputs(program)
    expected = case.expected(inputs)
    check_everywhere(program, inputs, expected, exact=case.is_exact, schedule=schedule)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_in_lockstep(case: Case) -> None:
    program = case.compile()
    check(case, program)
    assert hir.parse(str(program)) == program.host
    for rank in range(program.host.last_rank + 1):
        local = program.for_rank(rank)
        assert hir.parse(str(local)) == local


@pytest.mark.parametrize("case", ALL, ids=str)
def test_in_any_order(case: Case) -> None:
    """Streams and transfers go on in a random order, so that a missing sync or wait shows.

    The order is another one for each commit; --whole tries twenty.
    """
    program = case.compile(n=few(case), rows=8 if case.fixed else 7)
    for seed in sampling.window(20, 20):
        check(case, program, schedule=seed)


@pytest.mark.parametrize("case", OF_ANY_SIZE, ids=str)
def test_short_and_empty_chunks(case: Case) -> None:
    for rows in (3, 1, 0):
        check(case, case.compile(n=few(case), rows=rows), schedule=rows)


@pytest.mark.parametrize("case", OF_ANY_SIZE, ids=str)
def test_other_numbers_of_ranks(case: Case) -> None:
    for n in (2, 6) if case.family == "meshes" else (3,):
        check(case, case.compile(n=n, rows=13))


@pytest.mark.parametrize("case", OF_ANY_SIZE, ids=str)
def test_policies(case: Case) -> None:
    for options in POLICIES:
        check(case, case.compile(n=few(case), rows=7, options=options), schedule=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("rotate", [None, "tp"])
def test_dtypes(dtype: torch.dtype, rotate: str | None) -> None:
    mesh, stream = line(4), Stream(0, 4, rotate)
    with mf.FusionDefinition("both_ways") as fd:
        x = fd.define_tensor([7, 6], dtype, mesh, {"tp": Shard(0)})
        w = fd.define_tensor([6, 5], dtype, mesh)
        p = fd.define_tensor([7, 5], dtype, mesh, {"tp": Partial("sum")})
        y = (x @ w).on(mesh, stream=stream)
        z = fd.ops.set(p).on(mesh, {"tp": Shard(0)}, stream=stream)
        fd.add_output(y)
        fd.add_output(z)
    program = mf.compile(fd)
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randint(-3, 4, s, generator=generator) for s in ((7, 6), (6, 5), (7, 5)))
    inputs = [t.to(dtype) for t in (a, b, c)]
    for schedule in (None, 0, 1):
        check_everywhere(program, inputs, [(a @ b).to(dtype), inputs[2]], schedule=schedule)


# -- buffers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL, ids=str)
def test_computed_outputs_lie_as_on_one_device(case: Case) -> None:
    program = case.compile()
    inputs = case.inputs(program)
    result = simulate_shares(program, inputs)
    for i, whole in enumerate(case.expected(inputs)):
        if program.fusion.producers[program.fusion.outputs[i]].op == "set":
            continue  # communicated: it keeps the order left behind
        for outputs in result.per_rank:
            if outputs[i] is not None:
                strides = dense_strides(outputs[i].shape, memory_order(whole))
                assert has_strides(outputs[i], strides), f"{outputs[i].stride()}\n{program}"


NAMES = (
    "one_op",
    "inner_dim",
    "host_unit",
    "permuted_at_the_end",
    "read_afterwards",
    "gather_by_broadcasts",
    "gather_by_ring",
    "scatter_by_reductions",
    "scatter_by_ring",
    "gather_matmul",
    "matmul_reduce",
    "send_to_a_mesh",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schedule", [None, 1])
def test_preallocated_outputs(name: str, schedule: int | None) -> None:
    """Results are written into exactly the buffers that are passed."""
    case = CASES[name]
    program = case.compile(rows=7)
    inputs = case.inputs(program)
    plain = simulate_shares(program, inputs).per_rank
    given: list[dict[str, object]] = [{} for _ in plain]
    for name_, x in zip(program.fusion.inputs, inputs, strict=True):
        layout = program.fusion.layout(name_)
        for rank in layout.mesh:
            given[rank][name_] = mf.shard_tensor(x, layout, rank=rank)
    for rank, outputs in enumerate(plain):
        for name_, y in zip(program.fusion.outputs, outputs, strict=True):
            if y is not None:
                given[rank][name_] = torch.full_like(y, -77)
    # Partial inputs are given whole here: the sums are others than with random shares.
    want = mf.simulate(
        program,
        per_rank=[{n: x for n, x in g.items() if n in program.fusion.inputs} for g in given],
    ).per_rank
    got = mf.simulate(program, per_rank=given, schedule=schedule).per_rank
    for rank, outputs in enumerate(got):
        for name_, y, expected in zip(program.fusion.outputs, outputs, want[rank], strict=True):
            if y is None:
                continue
            buffer = given[rank][name_]
            assert torch.equal(y, expected)
            assert torch.equal(buffer, expected), f"%{name_} of rank {rank}"


def test_a_streamed_output_in_an_input() -> None:
    case = CASES["reused_by_a_loop"]
    program = case.compile()
    (x,) = case.inputs(program)
    given = [{"x": x.clone()} for _ in range(4)]
    result = mf.simulate(program, per_rank=given)
    for row, (y, z) in zip(given, result.per_rank, strict=True):
        assert y.data_ptr() == row["x"].data_ptr()
        assert torch.equal(y, (x + 1) * 2)
        assert torch.equal(z, x.sum(0))


def chain(chunks: int, fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([32, 64], mesh=line(4))
    y = (x + 1).on(line(4), stream=Stream(0, chunks))
    z = fd.ops.exp(y).on(line(4), stream=Stream(0, chunks))
    fd.add_output((z * 2).on(line(4), stream=Stream(0, chunks)))


def reduced(chunks: int, fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([32, 64], mesh=line(4), layout={"tp": Shard(1)})
    w = fd.define_tensor([48, 64], mesh=line(4), layout={"tp": Shard(1)})
    b = fd.define_tensor([48], mesh=line(4))
    fd.add_output(fd.ops.linear(x, w, b).on(line(4), stream=Stream(0, chunks)))


def exchanged(chunks: int, fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([32, 64], mesh=line(4), layout={"tp": Shard(0)})
    w = fd.define_tensor([64, 4], mesh=line(4))
    fd.add_output((x @ w).on(line(4), stream=Stream(0, chunks)))


@pytest.mark.parametrize("define", [chain, reduced, exchanged])
def test_more_chunks_need_no_more_memory(define: object) -> None:
    peaks = []
    for chunks in (2, 4, 8, 16, 32):
        with mf.FusionDefinition("loop") as fd:
            define(chunks, fd)  # type: ignore[operator]
        program = mf.compile(fd)
        inputs = [torch.ones(program.fusion.values[n].shape) for n in program.fusion.inputs]
        peaks.append(max(mf.simulate(program, inputs).peak_bytes))
    assert peaks == sorted(peaks, reverse=True), peaks


# -- loops ---------------------------------------------------------------------------------------

LOOPS = {
    "two_sets": 1,
    "plain_between": 1,
    "several_loops": 3,
    "read_whole": 2,
    "host_unit": 1,
    "perceptron": 2,
    "perceptron_in_one_loop": 1,
    "gathered_weights": 1,
    "send_to_a_mesh": 1,
    "scatter_whole": 0,
}


@pytest.mark.parametrize(("name", "count"), LOOPS.items())
def test_neighbours_share_a_loop(name: str, count: int) -> None:
    program = CASES[name].compile(options=mf.Options(streams=1))
    assert sum(i.op == "for" for i in program) == count


def test_names_that_programs_also_use() -> None:
    """A loop's index, a handle and streams get names that no value has."""
    mesh = line(2)
    with mf.FusionDefinition("names") as fd:
        i = fd.define_tensor([4, 4], mesh=mesh, layout={"tp": Shard(0)})
        s = fd.ops.set(i).on(mesh, stream=Stream(0, 2))
        c0 = (s + 1).on(mesh, stream=Stream(0, 2))
        caller = (c0 * 2).on(mesh)
        j = (caller - 1).on(mesh, stream=Stream(0, 2))
        fd.add_output(j)
    program = mf.compile(fd)
    assert {"i", "s", "c0", "caller", "j"} <= program.fusion.values.keys()
    assert hir.parse(str(program)) == program.host
    x = torch.arange(16.0).reshape(4, 4)
    check_everywhere(program, [x], [(x + 1) * 2 - 1], exact=True)


# -- what is posted ------------------------------------------------------------------------------


def kinds(name: str, **more: int) -> list[str]:
    return [c.kind for c in CASES[name].compile(**more).communications]


def test_what_cannot_be_cut_is_posted_whole() -> None:
    for name in ("scatter_whole", "rotated_not_innermost", "rotated_gather_of_another_dim"):
        program = CASES[name].compile(n=6)
        assert not any(i.op == "for" for i in program), program
        assert program.communications
    assert kinds("scatter_whole") == ["ReduceScatter"]


@pytest.mark.parametrize("sizes", [{"a": 2, "b": 2}, {"b": 2, "a": 3}, {"a": 2, "b": 3, "c": 2}])
@pytest.mark.parametrize("shape", [(3, 5), (7, 4), (2, 3)])
@pytest.mark.parametrize("after", [{}, {"b": Shard(1)}])
def test_uneven_rows_move_while_chunks_turn_along_another_axis(
    sizes: dict[str, int], shape: tuple[int, int], after: dict[str, Any]
) -> None:
    """Ranks along the other axis are at other chunks: none of these exchanges rows with them."""
    mesh, dim = DeviceMesh.arange(**sizes), 1 if not after else 2
    with mf.FusionDefinition("turning") as fd:
        x = fd.define_tensor([*shape, 5], torch.float64, mesh, {"b": Shard(0)})
        fd.add_output(fd.ops.set(x).on(mesh, after, stream=Stream(dim, 3, "a")))
    given = torch.arange(5.0 * shape[0] * shape[1], dtype=torch.float64).reshape(*shape, 5)
    check_everywhere(mf.compile(fd), [given], [given], exact=True)


@pytest.mark.parametrize(("ring", "shape"), [(2, (0, 0)), (2, (0, 4)), (2, (6, 0)), (1, (6, 4))])
def test_rows_are_cut_in_zigzag_order_while_no_chunk_turns(
    ring: int, shape: tuple[int, int]
) -> None:
    """There are no rows, or one rank in the ring."""
    mesh = DeviceMesh.arange(a=ring, b=2)
    with mf.FusionDefinition("empty") as fd:
        x = fd.define_tensor(shape, torch.float64, mesh)
        law = {"b": Shard(0, zigzag=True)}
        fd.add_output(fd.ops.set(x).on(mesh, law, stream=Stream(1, 2, "a")))
    given = torch.randn(shape, dtype=torch.float64)
    check_everywhere(mf.compile(fd), [given], [given], exact=True)


def test_nobody_lacks_anything() -> None:
    assert kinds("local_slices") == []


def test_an_expanded_dim_does_not_travel() -> None:
    (gather,) = CASES["expanded"].compile().communications
    assert gather.shape == (8, 1, 3)


@pytest.mark.parametrize("how", ["broadcasts", "exchanges", "ring"])
def test_each_row_arrives_once(how: str) -> None:
    program = CASES[f"gather_by_{how}"].compile()
    lacking = (8 - 2) * 3 * 4  # rows, columns, bytes
    assert [program.bytes_received(rank) for rank in range(4)] == [lacking] * 4


def test_every_rank_posts_for_every_chunk() -> None:
    """Also for empty ones: two rows, four chunks."""
    program = CASES["gather_by_broadcasts"].compile(rows=2)
    for rank in range(4):
        written = written_out(program.for_rank(rank))
        posts = [i.comm.root(rank) for i in written if i.op == "post"]
        assert posts == [0, 1, 2, 3]


# -- a layer of a model --------------------------------------------------------------------------


def layer(chunks: int | None, rotate: str | None = None) -> mf.Program:
    """Column-parallel, then row-parallel, with a residual, as in MiniLM: 13 tokens of width 24."""
    mesh = line(4)
    stream = Stream(1, chunks, rotate) if chunks else None
    with mf.FusionDefinition("layer") as fd:
        x = fd.define_tensor([2, 13, 24], mesh=mesh, layout={"tp": Shard(1)})
        w1 = fd.define_tensor([96, 24], mesh=mesh, layout={"tp": Shard(0)})
        b1 = fd.define_tensor([96], mesh=mesh, layout={"tp": Shard(0)})
        w2 = fd.define_tensor([24, 96], mesh=mesh, layout={"tp": Shard(1)})
        b2 = fd.define_tensor([24], mesh=mesh)
        h = fd.ops.linear(x, w1, b1).on(mesh, {"tp": Shard(2)}, stream=stream)
        y = fd.ops.linear(fd.ops.gelu(h), w2, b2)
        fd.add_output(fd.ops.layer_norm(x + y, [24]))
    return mf.compile(fd)


@pytest.mark.parametrize(("chunks", "rotate"), [(4, None), (4, "tp"), (3, None), (16, None)])
def test_one_annotation_changes_nothing(chunks: int, rotate: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    plain, streamed = layer(None), layer(chunks, rotate)
    assert not any(i.op == "for" for i in plain)
    assert any(i.op == "for" for i in streamed)
    shapes = [plain.fusion.values[n].shape for n in plain.fusion.inputs]
    inputs = [torch.randn(s, generator=generator) for s in shapes]
    (want,) = simulate_shares(plain, inputs).outputs
    for schedule in (None, 0, 1):
        (got,) = simulate_shares(streamed, inputs, schedule).outputs
        assert is_close(got, want)


def test_streamed_inputs_are_given_whole() -> None:
    layout = Layout(DeviceMesh.arange(tp=2), {"tp": Shard(0)}, stream=Stream(0, 3))
    x = torch.arange(12.0).reshape(6, 2)
    for rank in range(2):
        assert torch.equal(mf.shard_tensor(x, layout, rank=rank), local_part(x, layout, rank))
