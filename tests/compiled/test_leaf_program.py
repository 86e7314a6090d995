"""Programs with same bits: refusals, what is told, state in place, a Llama's steps to the bit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from helpers import sampling
from helpers.drawn import drawn
from helpers.tiny_models import llama
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, MdfuseError, Partial, ProgramError, Shard, Stream
from mdfuse.compiled.leaf_program import LeafProgram

SAME = mf.Options(same_bits=True)
ROWS = {"dp": Shard(0)}


def mean(
    mesh: DeviceMesh, rows: int = 24, layout: Any = None, options: mf.Options = SAME
) -> mf.Program:
    """A mean of squares, a sum of columns, and the rows themselves."""
    with mf.FusionDefinition("mean") as fd:
        x = fd.define_tensor([rows, 3], name="x", mesh=mesh, layout=layout or ROWS)
        fd.add_output((x * x).mean())
        fd.add_output(x.sum(0))
        fd.add_output(x.exp())
    return mf.compile(fd, options)


def text(program: mf.Program) -> str:
    return "\n".join(line.partition("  # ")[0].rstrip() for line in str(program).splitlines())


def test_one_program_for_all_numbers_of_ranks() -> None:
    x = drawn(24, 3)
    texts, results = set(), []
    for n in range(1, 9):
        program = mean(DeviceMesh.arange(dp=n))
        texts.add(text(program))
        run = mf.simulate(program, [x])
        results.append(run.outputs)
        parts = [shown[2] for shown in run.per_rank]
        assert torch.equal(torch.cat(parts), run.outputs[2]) and len(parts) == n
    assert len(texts) == 1 and "mesh(dp=8)" in texts.pop()
    for found in results:
        assert all(map(torch.equal, found, results[0]))
    torch.testing.assert_close(results[0][:2], [(x * x).mean(), x.sum(0)])


def test_default_options_round_otherwise() -> None:
    """The test above would show sums in the order of ranks: these inputs have other bits then."""
    x = drawn(2400, 3)
    usual = [mf.simulate(mean(DeviceMesh.arange(dp=n), 2400, options=mf.Options()), [x]).outputs
             for n in range(1, 9)]  # fmt: skip
    assert not all(torch.equal(found[1], usual[0][1]) for found in usual)
    same = [mf.simulate(mean(DeviceMesh.arange(dp=n), 2400), [x]).outputs for n in (1, 5, 8)]
    assert all(torch.equal(found[1], same[0][1]) for found in same)


def test_threads_do_not_matter() -> None:
    """torch adds up in as many parts as there are threads: leaves compute with one."""
    x, before = drawn(160_000, 3), torch.get_num_threads()
    program = mean(DeviceMesh.arange(dp=1), 160_000)
    try:
        results = []
        for n in (1, 3):
            torch.set_num_threads(n)
            results.append(mf.simulate(program, [x]).outputs)
            assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_memory_of_the_caller_does_not_matter() -> None:
    """Transposed, and off the boundaries to which new tensors are aligned."""
    x = drawn(24, 3)
    transposed = torch.empty(3, 24).copy_(x.T).T
    shifted = torch.empty(24 * 3 + 1)[1:].view(24, 3).copy_(x)
    program = mean(DeviceMesh.arange(dp=1))
    first, *others = [program.run(given) for given in (x, transposed, shifted)]
    for found in others:
        assert all(map(torch.equal, found, first))


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_strides_of_one_column_do_not_matter(ranks: int) -> None:
    """A row transposed is contiguous, yet BLAS adds its products in another sequence."""
    mesh = DeviceMesh.arange(dp=ranks)
    with mf.FusionDefinition("product") as fd:
        w, x = (fd.define_tensor(s, mesh=mesh, layout={}) for s in ((1, 64), (64, 1)))
        fd.add_output(w @ x)
    program, w, row = mf.compile(fd, SAME), drawn(1, 64), drawn(1, 64, seed=1)
    column = torch.empty(64, 1).copy_(row.T)
    assert row.T.is_contiguous() and row.T.stride() != column.stride()
    (first,), (found,) = (mf.simulate(program, [w, x]).outputs for x in (column, row.T))
    assert torch.equal(found, first)
    torch.testing.assert_close(found, (w.double() @ row.T.double()).float())


@pytest.mark.parametrize("rows", [0, 1, 3, 8, 12, 13])
def test_few_and_uneven_rows(rows: int) -> None:
    """Leaves without rows, ranks without leaves' rows, parts that are no parts of leaves."""
    x = drawn(rows, 3)
    x[:1] = float("inf")
    expected = [(x * x).mean(), x.sum(0), x.exp()]
    first = mf.simulate(mean(DeviceMesh.arange(dp=1), rows), [x]).outputs
    for found, right in zip(first, expected, strict=True):
        torch.testing.assert_close(found, right, equal_nan=True)
    for n in (3, 5, 7):
        run = mf.simulate(mean(DeviceMesh.arange(dp=n), rows), [x])
        for found, right in zip(run.outputs, first, strict=True):
            assert torch.equal(found.nan_to_num(7.0), right.nan_to_num(7.0))


def test_what_is_told() -> None:
    told = mean(DeviceMesh.arange(dp=3), 12).explain()
    assert "leaves along dp: 8 on 3 ranks (3, 3, 2)" in told
    assert "up to 3 times on a rank" in told
    assert "gathered before each run, since parts of ranks are no parts of leaves: %x" in told
    assert "Allreduce[sum] axis=dp" in told
    even = mean(DeviceMesh.arange(dp=4), 16).explain()
    assert "gathered" not in even and "up to 2 times" in even
    assert "no leaf is left for ranks 4, idle" in mean(DeviceMesh.arange(dp=5), 16).explain()
    assert "in one compiled kernel on GPUs" in even
    by_calls = mean(
        DeviceMesh.arange(dp=4), 16, options=mf.Options(same_bits=True, compile="never")
    )
    assert "no unit is compiled" in by_calls.explain() and "kernel on" not in by_calls.explain()


def test_bytes_of_a_run() -> None:
    """Each of two ranks sends the other one sum of its four leaves; more ranks, more terms."""
    bytes_of = {}
    for n in (1, 2, 4, 8):
        program = mean(DeviceMesh.arange(dp=n), 16)
        run = mf.simulate(program, [drawn(16, 3)])
        assert [program.bytes_received(rank) for rank in range(n)] == [*run.bytes_received]
        bytes_of[n] = run.bytes_received[0]
    assert bytes_of == {1: 0, 2: 4 * 4, 4: 3 * 4 * 4, 8: 7 * 4 * 4}


def test_state_is_written_in_place() -> None:
    mesh = DeviceMesh.arange(dp=1)
    with mf.FusionDefinition("count") as fd:
        n = fd.define_tensor([16], name="n", mesh=mesh, layout=ROWS)
        w = fd.define_tensor([3], name="w", mesh=mesh)
        fd.add_output(n + 1, reuse=n)
        fd.add_output(w * 2, reuse=w)
        fd.add_output(n.sum())
    step = mf.Step(mf.compile(fd, SAME), {"n": torch.zeros(16), "w": torch.ones(3)})
    given = dict(step.state)
    assert [float(step()) for _ in range(3)] == [0.0, 16.0, 32.0]
    assert all(step.state[k] is x for k, x in given.items())
    assert torch.equal(given["n"], torch.full((16,), 3.0)) and given["w"].tolist() == [8.0] * 3


def test_copies_and_buffers() -> None:
    program, x = mean(DeviceMesh.arange(dp=1)), drawn(24, 3)
    results = program.run(x)
    for again in (copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert isinstance(again, LeafProgram) and all(map(torch.equal, again.run(x), results))
    out = [torch.empty_like(y) for y in results]
    assert [a is b for a, b in zip(program.run(x, out=out), out, strict=True)] == [True] * 3
    assert all(map(torch.equal, out, results))
    with pytest.raises(ProgramError, match="expected"):
        program.run(x[:3])


MESH = DeviceMesh.arange(dp=2)
EXPERTS = (16, 5), (16, 4), (4, 5, 3)


def without_mesh(fd: mf.FusionDefinition) -> None:
    fd.add_output(fd.define_tensor([2]) + 1)


def of_any_extent(fd: mf.FusionDefinition) -> None:
    fd.add_output(fd.define_tensor([-1], mesh=MESH, layout=ROWS) + 1)


def on_two_meshes(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([4], mesh=MESH, layout=ROWS)
    fd.add_output(fd.ops.set(x).on(DeviceMesh([0]), {}))


def of_partial(fd: mf.FusionDefinition) -> None:
    fd.add_output(fd.define_tensor([4], name="x", mesh=MESH, layout={"dp": Partial()}))


def on_nine(fd: mf.FusionDefinition) -> None:
    fd.add_output(fd.define_tensor([4], mesh=DeviceMesh.arange(dp=9)) + 1)


def in_a_ring(fd: mf.FusionDefinition) -> None:
    x = fd.define_tensor([16, 4], mesh=MESH, layout=ROWS)
    fd.add_output(fd.ops.set(x).on(MESH, {}, stream=Stream(0, 8, "dp")).exp())


def of_counted_rows(fd: mf.FusionDefinition, parts: int, mesh: DeviceMesh) -> None:
    """Tokens go to experts, which other ranks have."""
    x, scores, w = (fd.define_tensor(s, mesh=mesh, layout=ROWS) for s in EXPERTS)
    weights, ids = scores.softmax(-1).topk(2, -1)
    n = fd.ops.counts(ids, experts=4, parts=parts)
    rows = fd.ops.set(fd.ops.group_rows(x, ids, n)).on(mesh, {"dp": Shard(1)})
    y = fd.ops.set(fd.ops.grouped_mm(rows, w)).on(mesh, ROWS)
    y = fd.ops.ungroup_rows(y, ids, weights)
    for result in (y, *mf.grad((y * y).sum(), [x, w])):
        fd.add_output(result)


@pytest.mark.parametrize(
    ("define", "says"),
    [
        (without_mesh, "no mesh"),
        (of_any_extent, "a run chooses"),
        (on_two_meshes, "2 meshes"),
        (of_partial, "%x is Partial"),
        (on_nine, "9 ranks along dp"),
        (in_a_ring, "a ring"),
    ],
)
def test_refused_definitions(define: Callable[[mf.FusionDefinition], None], says: str) -> None:
    with mf.FusionDefinition("refused") as fd:
        define(fd)
    with pytest.raises(MdfuseError, match=f"same_bits.*{says}|same_bits with {says}"):
        mf.compile(fd, SAME)


@pytest.mark.parametrize("counts", ["host", "device"])
def test_rows_of_experts_are_dense(counts: Any) -> None:
    """Whatever number of parts a definition states, results and gradients are those of one rank."""
    given = [drawn(*shape, seed=n) for n, shape in enumerate(EXPERTS)]
    for parts, microbatches in ((8, 1), (8, 2), (2, 1)):
        results = []
        for ranks in (1, 2, 3, 8):
            with mf.FusionDefinition("experts") as fd:
                of_counted_rows(fd, parts, DeviceMesh.arange(dp=ranks))
            options = mf.Options(same_bits=True, counts=counts)
            batch = {"in": 0, "in_1": 0}
            how: dict[str, Any] = {"microbatches": microbatches, "batch": batch, "options": options}
            program = mf.pipeline(fd, **how) if microbatches > 1 else mf.compile(fd, options)
            results.append(mf.simulate(program, given).outputs)
        for others in results[1:]:
            assert all(map(torch.equal, others, results[0]))
        x, scores, w = (x.double().requires_grad_() for x in given)
        weights, ids = scores.softmax(-1).topk(2, -1)
        rows = torch.stack([(x[:, None] @ w[ids[:, k]])[:, 0] for k in range(2)], 1)
        y = (rows * weights[..., None]).sum(1)
        wanted = y, *torch.autograd.grad((y * y).sum(), (x, w))
        for found, right in zip(results[0], wanted, strict=True):
            torch.testing.assert_close(found, right.float())


def test_refused_uses() -> None:
    program, doubled = mean(MESH), mf.FusionDefinition("doubled")
    with pytest.raises(ProgramError, match="timeline"):
        program.timeline(mf.seeing.H100)
    with pytest.raises(ProgramError, match="schedule=3"):
        mf.simulate(program, [drawn(24, 3)], schedule=3)
    with doubled as fd:
        fd.add_output(fd.define_tensor([4], mesh=DeviceMesh([0])) * 2)
    recorded = mf.differentiable(doubled, SAME)
    with pytest.raises(ProgramError, match="with same_bits"):
        recorded(torch.ones(4, requires_grad=True))


@pytest.mark.parametrize(
    "said", [{"graph": "always"}, {"compile": "always"}, {"overlap": "measure"}, {"trace": "x"},
             {"ranges": "torch"}, {"sizes": {"x.0": (1,)}}],
)  # fmt: skip
def test_options_that_exclude_it(said: dict[str, Any]) -> None:
    with pytest.raises(ProgramError, match="with same_bits=True"):
        mf.Options(same_bits=True, **said)


@pytest.mark.parametrize("stream", [Stream(1, 2), Stream(0, 2)])
def test_chunks_of_a_stream(stream: Stream) -> None:
    """A loop of the user's has its chunks inside of leaves."""
    x, results = drawn(24, 4), []
    for n in (1, 4):
        mesh = DeviceMesh.arange(dp=n)
        with mf.FusionDefinition() as fd:
            v = fd.define_tensor([24, 4], mesh=mesh, layout=ROWS)
            y = fd.ops.set(v).on(mesh, {}, stream=stream)
            fd.add_output(y.exp())
            fd.add_output(v.sum(0))
        results.append(mf.simulate(mf.compile(fd, SAME), [x]).outputs)
    assert all(map(torch.equal, *results))
    torch.testing.assert_close(results[0][0], x.exp())


# -- a Llama -------------------------------------------------------------------------------------

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
LAYOUTS = {
    "input:*": ROWS,
    **{f"*{name}.weight": {"tp": Shard(0)} for name in COLUMNS},
    **{f"*{name}.weight": {"tp": Shard(1)} for name in ("o_proj", "down_proj")},
}


def batch(n: int, rows: int) -> Tensor:
    return torch.randint(64, (rows, 8), generator=torch.Generator().manual_seed(n))


@cache
def losses(
    dp: int,
    tp: int | None,
    dtype: torch.dtype,
    microbatches: int = 1,
    steps: int | None = None,
    recompute: str | int | None = None,
) -> tuple[str, list[bytes]]:
    """The program, and the losses of some steps, as bytes, of an imported Llama of one layer.

    Four steps have moments that earlier gradients changed; ten run with --whole.
    """
    steps = steps or sampling.of(10, 4)
    rows = 6 if microbatches == 1 else 16
    torch.manual_seed(0)
    module = llama(1).to(dtype)
    mesh = DeviceMesh.arange(dp=dp) if tp is None else DeviceMesh.arange(dp=dp, tp=tp)
    model = mf.from_torch(
        module, (batch(0, rows),), {"labels": batch(0, rows), "use_cache": False}, mesh=mesh,
        layouts=LAYOUTS if tp is not None else {"input:*": ROWS}, recompute=recompute,
    )  # fmt: skip
    step = model.training_step(
        optimizer=mf.optim.adamw, clip=0.5, master=dtype == torch.bfloat16,
        microbatches=microbatches,
    )  # fmt: skip
    weights, program = model.load(), step.compile(SAME)
    state, found = step.state(weights), []
    for n in range(steps):
        ids = batch(n, rows)
        given = step.arguments(weights, state, ids, ids, torch.tensor(1e-2))
        outputs = mf.simulate(program, given).outputs
        state = step.updated(outputs)
        found.append(outputs[0].float().numpy(force=True).tobytes())
    assert len({*found}) == steps
    return text(program), found


@pytest.mark.parametrize("dp", [2, 3, 8])
def test_losses_of_a_llama(dp: int) -> None:
    assert losses(dp, None, torch.float32) == losses(1, None, torch.float32)


def test_losses_of_a_llama_in_16_bits() -> None:
    assert losses(4, None, torch.bfloat16) == losses(1, None, torch.bfloat16)


def test_losses_of_a_llama_in_microbatches() -> None:
    assert losses(2, None, torch.float32, 2) == losses(1, None, torch.float32, 2)


@pytest.mark.parametrize("recompute", ["model.layers.*", 20_000])
def test_losses_of_a_llama_with_recompute(recompute: str | int) -> None:
    """What is computed again is the same, whatever a number of bytes chooses on each mesh."""
    again, found = losses(3, None, torch.float32, 2, 2, recompute)
    usual, expected = losses(1, None, torch.float32, 2)
    assert found == expected[:2] and again != usual


def test_losses_of_a_llama_that_ranks_split() -> None:
    """Four heads on eight leaves: passes decide alike for any number of ranks."""
    assert losses(1, 2, torch.float32, steps=2) == losses(2, 1, torch.float32, steps=2)
