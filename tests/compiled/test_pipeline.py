"""Pipelines: every schedule gives what torch gives on one device, in blocks that survive."""

from __future__ import annotations

import contextlib
import random
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.pipelines import HIDDEN, WIDTH, Net, batch_of, meshes, network, sines

import mdfuse as mf
from mdfuse import DeviceMesh, Shard, hir
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.hir.verify.check import verify
from mdfuse.seeing.memory_use import memory_of

NAMES = ["forward", "gpipe", "1f1b", "interleaved", "zb1p", "zbv", "dualpipev"]
POISON = mf.Options(poison=True)


def check(net: Net, program: mf.Program, **how: Any) -> None:
    given = [x.clone() if isinstance(x, torch.Tensor) else x for x in net.inputs]
    found = mf.simulate(program, given, options=POISON, **how).outputs
    for got, want in zip(found, net.wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def pipeline(net: Net, count: int, schedule: Any = None) -> mf.Program:
    return mf.pipeline(net.definition, microbatches=count, batch=batch_of(net), schedule=schedule)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_equals_torch(schedule: str, stages: int, count: int) -> None:
    net = network(meshes(stages), batch=16 if count == 8 else 12)
    program = pipeline(net, count, schedule)
    check(net, program)
    assert hir.parse(str(program)) == program.host


def places_of(schedule: str, stages: int) -> list[DeviceMesh]:
    """A mesh for each stage; for schedules that turn, two stages on each, if they are even."""
    if schedule not in ("zbv", "dualpipev") or stages == 1:
        return meshes(stages)
    half = meshes(stages // 2)
    return [*half, *reversed(half)]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("schedule", NAMES)
def test_every_schedule_equals_torch_or_is_refused(schedule: str, stages: int, count: int) -> None:
    """Microbatches are uneven, and some are empty: of 11 rows in 8 parts, the last two."""
    net = sines(places_of(schedule, stages), batch=11, trains=schedule != "forward")
    needs = {"zbv": stages % 2 == 0, "dualpipev": stages % 2 == 0 and count >= stages}
    if needs.get(schedule, True):
        check(net, pipeline(net, count, schedule))
    else:
        with pytest.raises(mf.DefinitionError, match=r"cannot have(.|\n)*two stages on each"):
            pipeline(net, count, schedule)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_eight_stages_that_turn(schedule: str) -> None:
    net = sines(places_of(schedule, 8), batch=8)
    check(net, pipeline(net, 8, schedule))


SPLIT = [("zb1p", [0, 1]), ("zb1p", [0, 1, 2, 3]), ("interleaved", [0, 1, 0, 1])]
TURNS = [("zbv", [0, 1, 1, 0]), ("dualpipev", [0, 1, 1, 0]), ("zbv", [0, 0])]


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize(("schedule", "order"), [*SPLIT, *TURNS, ("gpipe", [0, 1, 0])])
def test_each_schedule_gives_the_same(schedule: str, order: list[int], count: int) -> None:
    every = meshes(1 + max(order))
    net = network([every[n] for n in order], batch=16)
    program = pipeline(net, count, schedule)
    assert program.schedule is not None
    assert program.schedule.stages == len(order)
    check(net, program)


def test_a_table() -> None:
    rows = [["0F1", "0F0", "0B1", "0I0", "0W0"], ["1F1", "1F0", "1I1", "1B0", "1W1"]]
    net = network(meshes(2))
    program = pipeline(net, 2, mf.Schedule.from_rows(rows))
    check(net, program)


def test_forward_only() -> None:
    net = network(meshes(2), trains=False)
    program = pipeline(net, 3)
    check(net, program)
    assert [str(i) for i in program.host if i.op == "call"]
    assert program.schedule is not None
    assert not program.schedule.has("B")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1p"])
def test_tensor_parallel_stages_in_any_order_of_ranks_and_streams(schedule: str) -> None:
    net = network(meshes(2, tp=2))
    program = pipeline(net, 3, schedule)
    for seed in range(20):
        check(net, program, schedule=seed)


def test_text_grows_by_a_line_per_call() -> None:
    lines = {}
    for count in (2, 8):
        program = pipeline(network(meshes(2), batch=16), count, "1f1b")
        text = str(program).splitlines()
        calls = [line for line in text if line.startswith("  call")]
        assert len(calls) == 6 * count  # F, B and a hand-over of two stages
        lines[count] = len(text) - len(calls)
    assert lines[2] == lines[8]


# -- stages of all kinds -------------------------------------------------------------------------

D = torch.float64


def built(define: Any, reference: Any, shapes: list[list[int]], wrt: list[int]) -> Net:
    """A net whose loss and weights a function of the definition returns."""
    with mf.FusionDefinition("net") as fd:
        loss, weights = define(fd)
        fd.add_output(loss)
        for dw in mf.grad(loss, weights):
            fd.add_output(dw)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=generator, dtype=D) for s in shapes]
    leaves = [x.clone().requires_grad_() for x in inputs]
    want = reference(*leaves)
    want.backward()
    grads = [leaves[n].grad for n in wrt]
    return Net(fd, inputs, [want.detach(), *(g for g in grads if g is not None)])


def mesh(*ranks: int, **axes: int) -> DeviceMesh:
    sizes = axes or {"tp": len(ranks)}
    return DeviceMesh(torch.tensor(ranks).view(*sizes.values()).tolist(), axes=tuple(sizes))


def tied() -> Net:
    a, b = mesh(0), mesh(1)

    def define(fd: Any) -> Any:
        x = fd.define_tensor([8, 4], D, a, name="x")
        t = fd.define_tensor([8, 4], D, b, name="t")
        w = fd.define_tensor([4, 4], D, a)
        h = fd.ops.set(fd.ops.linear(x, w).tanh()).on(b, {})
        return fd.ops.mse_loss(fd.ops.linear(h, fd.ops.set(w).on(b, {})), t), [w]

    def reference(x: Any, t: Any, w: Any) -> Any:
        return F.mse_loss(F.linear(F.linear(x, w).tanh(), w), t)

    return built(define, reference, [[8, 4], [8, 4], [4, 4]], [2])


def skip() -> Net:
    a, b, c = mesh(0), mesh(1), mesh(2)

    def define(fd: Any) -> Any:
        x = fd.define_tensor([8, 4], D, a, name="x")
        t = fd.define_tensor([8, 4], D, c, name="t")
        u, v, w = (fd.define_tensor([4, 4], D, m) for m in (a, b, c))
        first = fd.ops.linear(x, u).tanh()
        second = fd.ops.linear(fd.ops.set(first).on(b, {}), v).tanh()
        past = fd.ops.set(first).on(c, {}).sin()
        y = fd.ops.linear(fd.ops.set(second).on(c, {}) + past, w)
        return fd.ops.mse_loss(y, t), [u, v, w]

    def reference(x: Any, t: Any, u: Any, v: Any, w: Any) -> Any:
        first = F.linear(x, u).tanh()
        return F.mse_loss(F.linear(F.linear(first, v).tanh() + first.sin(), w), t)

    return built(define, reference, [[8, 4], [8, 4], *[[4, 4]] * 3], [2, 3, 4])


def other_sizes(a: DeviceMesh, b: DeviceMesh, rows: int = 8) -> Net:
    first, second = ({"dp": Shard(0)} if "dp" in m.axes else {} for m in (a, b))
    into, out = {"tp": Shard(0)}, {"tp": Shard(1)}

    def define(fd: Any) -> Any:
        x = fd.define_tensor([rows, 4], D, a, first, name="x")
        t = fd.define_tensor([rows, 4], D, b, second, name="t")
        u, v = (fd.define_tensor(s, D, a, p) for s, p in (([8, 4], into), ([4, 8], out)))
        w, z = (fd.define_tensor(s, D, b, p) for s, p in (([8, 4], into), ([4, 8], out)))
        h = fd.ops.linear(fd.ops.linear(x, u).tanh(), v)
        h = fd.ops.set(h).on(b, {**second, "tp": Shard(1)})
        y = fd.ops.linear(fd.ops.linear(h, w).tanh(), z)
        return fd.ops.mse_loss(y, t), [u, v, w, z]

    def reference(x: Any, t: Any, u: Any, v: Any, w: Any, z: Any) -> Any:
        h = F.linear(F.linear(x, u).tanh(), v)
        return F.mse_loss(F.linear(F.linear(h, w).tanh(), z), t)

    shapes = [[rows, 4], [rows, 4], *[[8, 4], [4, 8]] * 2]
    return built(define, reference, shapes, [2, 3, 4, 5])


def gathered(recomputes: bool) -> Net:
    a, b = mesh(0, 1, dp=2), mesh(2, 3, dp=2)
    split = {"dp": Shard(0)}
    places = (a, a, b, b)

    def define(fd: Any) -> Any:
        x = fd.define_tensor([8, 4], D, a, split, name="x")
        t = fd.define_tensor([8, 4], D, b, split, name="t")
        weights = [fd.define_tensor([4, 4], D, m, split) for m in places]
        h = x
        for n, (w, m) in enumerate(zip(weights, places, strict=True)):
            h = fd.ops.set(h).on(b, split) if n == 2 else h
            with mf.recompute() if recomputes else contextlib.nullcontext():
                h = fd.ops.linear(h, fd.ops.set(w).on(m, {})).tanh()
        return fd.ops.mse_loss(h, t), weights

    def reference(x: Any, t: Any, *weights: Any) -> Any:
        for w in weights:
            x = F.linear(x, w).tanh()
        return F.mse_loss(x, t)

    return built(define, reference, [[8, 4], [8, 4], *[[4, 4]] * 4], [2, 3, 4, 5])


def computed_again() -> Net:
    """Operations whose parts a backward computes again, on both sides of the border."""
    a, b = mesh(0, 1), mesh(2, 3)
    into = {"tp": Shard(0)}

    def define(fd: Any) -> Any:
        x = fd.define_tensor([8, 4], D, a, name="x")
        t = fd.define_tensor([8, 6], D, b, name="t")
        w, v = fd.define_tensor([6, 4], D, a, into), fd.define_tensor([6, 6], D, b, into)
        h = F.group_norm(F.mish(fd.ops.linear(x, w)), 2)
        y = fd.ops.linear(fd.ops.set(h).on(b, {}), v)
        return F.huber_loss(F.hardswish(y / y.std(1, keepdim=True)), t), [w, v]

    def reference(x: Any, t: Any, w: Any, v: Any) -> Any:
        y = F.linear(F.group_norm(F.mish(F.linear(x, w)), 2), v)
        y = y / y.std(1, keepdim=True)
        return F.huber_loss(y * F.relu6(y + 3) / 6, t)

    return built(define, reference, [[8, 4], [8, 6], [6, 4], [6, 6]], [2, 3])


KINDS = {
    "parts that are computed again": (computed_again, 4),
    "a weight of two stages": (tied, 4),
    "past a stage": (skip, 4),
    "two ranks, then four": (lambda: other_sizes(mesh(0, 1), mesh(2, 3, 4, 5)), 2),
    "four ranks, then two": (lambda: other_sizes(mesh(0, 1, 2, 3), mesh(4, 5)), 2),
    "uneven": (lambda: other_sizes(mesh(0, 1), mesh(2, 3, 4, 5), 7), 3),
    "empty microbatches": (lambda: other_sizes(mesh(0, 1), mesh(2, 3)), 6),
    "batch and features split": (
        lambda: other_sizes(mesh(0, 1, 2, 3, dp=2, tp=2), mesh(4, 5, 6, 7, dp=2, tp=2)),
        2,
    ),
    "gathered weights": (lambda: gathered(False), 2),
    "gathered weights, computed again": (lambda: gathered(True), 2),
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p"])
@pytest.mark.parametrize("kind", KINDS)
def test_stages(kind: str, schedule: str) -> None:
    make, count = KINDS[kind]
    net = make()
    check(net, pipeline(net, count, schedule))


def test_two_towers() -> None:
    a, b, c = mesh(0), mesh(1), mesh(2)

    def define(fd: Any) -> Any:
        x, z = (fd.define_tensor([8, 4], D, m, name=n) for m, n in ((a, "x"), (b, "t")))
        u, v = (fd.define_tensor([4, 4], D, m) for m in (a, b))
        first = fd.ops.set(fd.ops.linear(x, u)).on(c, {})
        return (first * fd.ops.set(fd.ops.linear(z, v)).on(c, {})).square().sum(), [u, v]

    def reference(x: Any, z: Any, u: Any, v: Any) -> Any:
        return (F.linear(x, u) * F.linear(z, v)).square().sum()

    net = built(define, reference, [[8, 4], [8, 4], [4, 4], [4, 4]], [2, 3])
    check(net, pipeline(net, 4, "gpipe"))
    with pytest.raises(mf.DefinitionError, match="no chain"):
        pipeline(net, 4, "1f1b")


def test_a_loss_that_counts_has_a_loop_before() -> None:
    a, b = mesh(0), mesh(1)
    with mf.FusionDefinition("net") as fd:
        x = fd.define_tensor([8, 4], D, a, name="x")
        t = fd.define_tensor([8], torch.int64, b, name="t")
        w = fd.define_tensor([5, 4], D, b, name="w")
        logits = fd.ops.linear(fd.ops.set(x.tanh()).on(b, {}), w)
        loss = fd.ops.cross_entropy(logits, t, ignore_index=2)
        (dw,) = mf.grad(loss, [w])
        fd.add_output(loss)
        fd.add_output(dw)
    x, t = torch.randn(8, 4, dtype=D), torch.tensor([0, 2, 1, 3, 2, 2, 4, 0])
    w = torch.randn(5, 4, dtype=D, requires_grad=True)
    want = F.cross_entropy(F.linear(x.tanh(), w), t, ignore_index=2)
    want.backward()
    assert w.grad is not None
    program = mf.pipeline(fd, microbatches=4, batch={"x": 0, "t": 0}, schedule="1f1b")
    check(Net(fd, [x, t, w.detach()], [want.detach(), w.grad]), program)
    assert next(i.op for i in program.host if i.op in ("for", "block")) == "for"


@pytest.mark.parametrize("count", [1, 3, 8])
def test_dropout_draws_what_it_draws_without_stages(count: int) -> None:
    a, b = mesh(0, 1, dp=2), mesh(2)
    with mf.FusionDefinition("net") as fd:
        x = fd.define_tensor([8, 4], D, a, name="x")
        seed = fd.define_scalar(None, dtype=torch.int64)
        w, v = fd.define_tensor([4, 4], D, a), fd.define_tensor([4, 4], D, b)
        h = fd.ops.dropout(fd.ops.linear(x, w), 0.5, seed=seed)
        loss = fd.ops.dropout(fd.ops.linear(fd.ops.set(h).on(b, {}), v), 0.3, seed=7).square().sum()
        for y in (loss, *mf.grad(loss, [w, v])):
            fd.add_output(y)
    given: Any = [torch.randn(8, 4, dtype=D), 5, *torch.randn(2, 4, 4, dtype=D)]
    wanted = mf.reference(fd, given)
    check(Net(fd, given, wanted), mf.pipeline(fd, microbatches=count, batch={"x": 0}))


# -- what is refused -----------------------------------------------------------------------------


def test_a_table_for_other_stages() -> None:
    net = network(meshes(2))
    with pytest.raises(mf.DefinitionError, match="no 1F0"):
        pipeline(net, 1, mf.Schedule.from_rows([["0F0", "0B0"], []]))
    with pytest.raises(mf.DefinitionError, match="no schedule is called"):
        pipeline(net, 1, "1F1B")


def test_weights_apart_need_gradients() -> None:
    with pytest.raises(mf.DefinitionError, match="without gradients"):
        pipeline(network(meshes(2), trains=False), 2, "zb1p")


def test_a_batch_that_is_split_otherwise_on_the_next_mesh() -> None:
    a, b = mesh(0, 1, dp=2), mesh(2)
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([8, 4], mesh=a, layout={"dp": Shard(0)}, name="x")
        fd.add_output(fd.ops.set(x.exp()).on(b, {}).exp())
    with pytest.raises(mf.LoweringError, match="cannot be computed in a pipeline") as error:
        mf.pipeline(fd, microbatches=2, batch={"x": 0})
    places = "(dp=S0) on mesh(dp=2) to (tp=R) on mesh(tp=1: 2)"
    assert f"it goes from {places}, which split the batch otherwise" in str(error.value)


#: What a stage computes of its rows, what of the batch it needs, and what to do instead.
OF_SUMS: dict[str, tuple[Any, str, str]] = {
    "rows less their mean": (
        lambda h: h - h.mean(0),
        "a sum over the whole batch",
        "compute it of each sample, as layer_norm does",
    ),
    "rows by their maximum": (
        lambda h: h / h.amax(0),
        "a max over the whole batch",
        "compute it of each sample, as layer_norm does",
    ),
    "a loss that is a norm": (
        lambda h: h.square().sum().sqrt(),
        "a sum over the whole batch",
        "add up in the loss what each sample gives, as a mean does",
    ),
}


@pytest.mark.parametrize("name", OF_SUMS)
def test_a_stage_that_needs_the_whole_batch(name: str) -> None:
    """The line is that of what needs it, not that of a hand-over."""
    compute, because, hint = OF_SUMS[name]
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([8, 4], mesh=mesh(0), name="x")
        w = fd.define_tensor([4, 4], mesh=mesh(1), name="w")
        h = fd.ops.linear(fd.ops.set(x.exp()).on(mesh(1), {}), w)
        y = compute(h)
        fd.add_output(y)
        if not y.shape:
            fd.add_output(mf.grad(y, [w])[0])
    with pytest.raises(mf.LoweringError, match="cannot be computed in a pipeline") as error:
        mf.pipeline(fd, microbatches=2, batch={"x": 0})
    assert f"each microbatch reads %{'t_' if 'norm' in name else ''}" in str(error.value)
    for said in (because, hint, "mf.compile(definition)"):
        assert said in str(error.value)
    assert "lambda h: h" in str(error.value)


def test_gradients_of_gradients_go_through_stages_the_other_way() -> None:
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([8, 4], mesh=mesh(0), name="x")
        w, v = (fd.define_tensor([4, 4], mesh=mesh(n), name=f"w{n}") for n in (0, 1))
        h = fd.ops.linear(fd.ops.set(fd.ops.linear(x, w)).on(mesh(1), {}), v).tanh()
        (dx,) = mf.grad(h.sum(), [x])
        fd.add_output(mf.grad(dx.square().sum(), [w])[0])
    with pytest.raises(mf.LoweringError, match="from later stages to earlier ones") as error:
        mf.pipeline(fd, microbatches=2, batch={"x": 0}, schedule="gpipe")
    assert "differentiate once" in str(error.value)


def test_a_batch_of_features() -> None:
    """The first stage sums over it, which the second one reads for each of its columns."""
    with mf.FusionDefinition("f") as fd:
        x, t = (fd.define_tensor([6, 4], mesh=mesh(n), name=name) for n, name in enumerate("xt"))
        w, v = (fd.define_tensor([4, 4], mesh=mesh(n), name=f"w{n}") for n in (0, 1))
        h = fd.ops.linear(fd.ops.set(fd.ops.linear(x, w)).on(mesh(1), {}), v)
        for dw in mf.grad(fd.ops.mse_loss(h, t), [w, v]):
            fd.add_output(dw)
    with pytest.raises(mf.LoweringError, match="a sum over the whole batch") as error:
        mf.pipeline(fd, microbatches=2, batch={"x": 1, "t": 1})
    assert "recompute" not in str(error.value)


# -- what the order of calls gives ---------------------------------------------------------------


def peaks(schedule: str, count: int) -> list[int]:
    """Bytes on each of four ranks, with microbatches of one size."""
    net = network(meshes(4), batch=4 * count)
    program = pipeline(net, count, schedule)
    return [memory_of(project(program.host, rank)).peak for rank in range(4)]


def test_memory_grows_with_live_microbatches() -> None:
    """A middle stage keeps what came, and both sides of its gelu: 4 rows of 8, 16 and 16."""
    kept = 4 * (WIDTH + 2 * HIDDEN) * 8
    four, eight = peaks("gpipe", 4), peaks("gpipe", 8)
    assert [b - a for a, b in zip(four[1:3], eight[1:3], strict=True)] == [4 * kept] * 2
    assert peaks("1f1b", 4)[1:3] == peaks("1f1b", 8)[1:3]
    assert peaks("1f1b", 8)[1] < eight[1] - 4 * kept


def test_the_next_microbatch_is_received_while_this_one_is_computed() -> None:
    """Before the wait for microbatch k the receiver has posted for k + 1."""
    program = pipeline(network(meshes(2), trains=False), 3)
    local = written_out(project(program.host, 1))
    at = {(i.op, *i.outputs, *i.reads[:1]): n for n, i in enumerate(local) if i.op == "wait"}
    posts = {i.outputs[0]: n for n, i in enumerate(local) if i.op == "post"}
    assert [posts[f"c0@{k + 1}"] < at["wait", f"c0@{k}"] for k in range(2)] == [True, True]


def test_a_sender_waits_when_it_has_computed_the_next_microbatch() -> None:
    program = pipeline(network(meshes(2), trains=False), 3)
    local = list(written_out(project(program.host, 0)))
    waits = {i.reads[0]: n for n, i in enumerate(local) if i.op == "wait"}
    made = {n: at for at, i in enumerate(local) for n in i.outputs}
    sent = next(i.reads[0] for i in local if i.op == "post").partition("@")[0]
    assert all(waits[f"c0@{k}"] > made[f"{sent}@{k + 1}"] for k in range(2))


def test_both_directions_have_communicators_of_their_own() -> None:
    program = pipeline(network(meshes(2, tp=2)), 2, "1f1b")
    handed = [c for c in program.communications if c.source.mesh != c.destination.mesh]
    forth, back = (c.group(0) for c in handed)
    assert forth == (0, 1, 2, 3)
    assert back == (2, 3, 0, 1)


def changed(lines: list[str], rng: random.Random) -> list[str]:
    """A program in which one call is left out, stands twice, or stands where another one stood."""
    at = [n for n, line in enumerate(lines) if line.startswith("  call")]
    i, j = rng.sample(at, 2)
    match rng.choice(["swap", "near", "drop", "twice"]):
        case "drop":
            return lines[:i] + lines[i + 1 :]
        case "twice":
            return [*lines[:j], lines[i], *lines[j:]]
        case "near":
            j = at[(at.index(i) + 1) % len(at)]
    other = {i: lines[j], j: lines[i]}
    return [other.get(n, line) for n, line in enumerate(lines)]


def test_other_orders_are_refused_with_the_call_or_give_the_same() -> None:
    net = network(meshes(2))
    lines, rng = str(pipeline(net, 3, "zb1p")).splitlines(), random.Random(0)
    accepted = 0
    for _ in range(40):
        program = hir.parse("\n".join(changed(lines, rng)))
        refusal = None
        try:
            verify(program)
        except mf.ProgramError as error:
            refusal = str(error)
        if refusal is not None:
            assert re.search(r"call [FIWT]\d+\(\d\)", refusal)
            continue
        accepted += 1
        given = dict(zip(program.inputs, net.inputs, strict=True))
        ranks = [
            {name: x.clone() for name, x in given.items() if program.has(name, rank)}
            for rank in range(2)
        ]
        found = mf.simulate(program, per_rank=ranks, options=POISON).per_rank
        for n, want in enumerate(net.wanted):
            (got,) = (outputs[n] for outputs in found if outputs[n] is not None)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert accepted
