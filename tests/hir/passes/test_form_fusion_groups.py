"""Local work in host units: what joins which unit, and that values stay what they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.pipelines import batch_of, check_orders, meshes, network
from helpers.reuse_cases import CASES, Build, Expect, define, inputs

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Options, Shard, hir
from mdfuse.hir.program import HostProgram
from mdfuse.hir.verify.check import verify

ALWAYS = Options(compile="always")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def grouped(fd: FusionDefinition) -> mf.Program:
    program = mf.compile(fd, options=ALWAYS)
    verify(program.host)
    assert hir.parse(str(program.host)) == program.host
    return program


def shape_of(host: HostProgram) -> list[str]:
    """Units as `name(ops in order)`, other instructions by what they run; frees left out."""
    return [
        f"{i.fn}({' '.join(j.fn for j in i.body)})" if i.op == "launch" else i.fn or i.op
        for i in host
        if i.op not in ("free", "return")
    ]


def test_work_and_the_products_around_it_are_one_unit() -> None:
    mesh = DeviceMesh.arange(t=1)
    with FusionDefinition("swiglu") as fd:
        x, g, u = (fd.define_tensor([4, 4], torch.float32, mesh, {}) for _ in range(3))
        fd.add_output(fd.ops.silu(x @ g) * (x @ u))
    program = grouped(fd)
    assert shape_of(program.host) == ["fused0(matmul silu matmul mul)"]
    given = torch.randn(3, 4, 4)
    (got,) = mf.simulate(program, list(given)).outputs
    a, b, c = given.double()
    torch.testing.assert_close(got.double(), F.silu(a @ b) * (a @ c), **CLOSE)


def test_products_alone_are_no_unit() -> None:
    mesh = DeviceMesh.arange(t=1)
    with FusionDefinition("products") as fd:
        x, y = (fd.define_tensor([4, 4], torch.float32, mesh, {}) for _ in range(2))
        fd.add_output(x @ fd.ops.permute(y, [1, 0]) @ y)
    assert shape_of(grouped(fd).host) == ["permute", "matmul", "matmul"]


def test_work_goes_before_communication() -> None:
    mesh = DeviceMesh.arange(t=2)
    with FusionDefinition("early") as fd:
        x = fd.define_tensor([4, 4], torch.float32, mesh, {"t": Shard(0)})
        y = fd.define_tensor([4, 4], torch.float32, mesh, {})
        whole = fd.ops.set(x.exp() + 1.0).on(mesh, {})
        fd.add_output(whole * y.sin().cos())
    program = grouped(fd)
    made = shape_of(program.host)
    post = next(n for n, name in enumerate(made) if name in ("post", "allgather"))
    units = [n for n, name in enumerate(made) if name.startswith("fused")]
    assert units[0] < post < units[-1]
    given = torch.rand(2, 4, 4)
    (got,) = mf.simulate(program, list(given)).outputs
    a, b = given.double()
    torch.testing.assert_close(got.double(), (a.exp() + 1) * b.sin().cos(), **CLOSE)


def behind_a_sum(ahead: str) -> mf.Program:
    """`a` and `b` of this rank, and a sum over ranks of `x`, which both programs add up."""
    mesh = DeviceMesh.arange(t=2)
    with FusionDefinition("behind") as fd:
        a, b = (fd.define_tensor([4, 4], torch.float32, mesh, {}) for _ in range(2))
        x = fd.define_tensor([4, 4], torch.float32, mesh, {"t": Shard(0)})
        total = fd.ops.set(fd.ops.sum(x, dims=[0])).on(mesh, {})
        early = {
            "narrow": lambda: fd.ops.cast(a * 2.0, torch.float64),
            "wide": lambda: a * 2.0 + b,
            "product": lambda: fd.ops.cast(a @ b, torch.float64),
            "returned": lambda: fd.ops.cast(a * 2.0, torch.float64),
        }[ahead]()
        if ahead == "returned":
            fd.add_output(early)
        fd.add_output((total + 1.0) * early)
    return grouped(fd)


@pytest.mark.parametrize(
    ("ahead", "form"),
    [
        ("narrow", "sum alloc post wait fused0(mul cast add mul)"),
        ("wide", "sum alloc post fused0(mul add) wait fused1(add mul)"),
        ("product", "sum alloc post matmul wait fused0(cast add mul)"),
        ("returned", "sum alloc post fused0(mul cast) wait fused1(add mul)"),
    ],
)
def test_what_is_read_behind_a_wait_is_computed_there(ahead: str, form: str) -> None:
    """Where that reads no more: what is wide is narrow then, and is never written."""
    program = behind_a_sum(ahead)
    assert sorted(" ".join(shape_of(program.host)).split()) == sorted(form.split()), str(program)
    a, b, x = torch.randn(3, 4, 4).unbind()
    got = mf.simulate(program, [a, b, x]).outputs[-1]
    early = a @ b if ahead == "product" else a * 2 + (b if ahead == "wide" else 0)
    torch.testing.assert_close(got.double(), ((x.sum(0) + 1) * early).double(), **CLOSE)
    at = {op: n for n, op in enumerate(shape_of(program.host))}
    first = next(n for op, n in at.items() if "mul" in op or op == "matmul")
    assert (first > at["wait"]) == (ahead == "narrow")


def test_a_product_that_is_summed_over_ranks_has_a_buffer() -> None:
    """So the sum may have its place; not what is computed by a compiled kernel."""
    mesh = DeviceMesh.arange(t=2)
    with FusionDefinition("sums") as fd:
        x = fd.define_tensor([4, 4], torch.float32, mesh, {"t": Shard(1)})
        w = fd.define_tensor([4, 4], torch.float32, mesh, {"t": Shard(0)})
        y = x * 2.0
        fd.add_output(fd.ops.set(y @ w).on(mesh, {}) + 1.0)
        fd.add_output(fd.ops.set(fd.ops.sum(y * y, dims=[1])).on(mesh, {}))
    program = grouped(fd)
    code = [*program.host]
    launch = next(n for n, i in enumerate(code) if i.op == "launch")
    summed = [i.inputs[0] for i in code if i.comm is not None]
    made = {x for i in code[:launch] if i.op == "alloc" for x in i.outputs}
    assert [x in made for x in summed] == [True, False], str(program)
    a, b = torch.randn(2, 4, 4)
    first, second = mf.simulate(program, [a, b]).outputs
    torch.testing.assert_close(first, 2 * a @ b + 1, **CLOSE)
    torch.testing.assert_close(second, (4 * a * a).sum(1), **CLOSE)


def test_layers_are_equal_units() -> None:
    """Cut where the fewest values are read later: here a layer hands on one."""
    mesh = DeviceMesh.arange(t=1)
    with FusionDefinition("layers") as fd:
        x = fd.define_tensor([4, 4], torch.float32, mesh, {})
        y = x.sin() * 0.5 + 1.0
        for _ in range(50):
            w = fd.define_tensor([4, 4], torch.float32, mesh, {})
            y = (y + (y @ w).tanh()).exp().sin() * 0.5 - 1.0
        fd.add_output(y.cos() + 1.0)
    program = grouped(fd)
    units = [i for i in program.host if i.op == "launch"]
    assert len({len(i.body) for i in units[1:-1]}) == 1 and len(units) > 8
    assert all(len(i.outputs) == 1 for i in units)
    assert all(len(i.inputs) == len(units[1].inputs) for i in units[1:-1])
    given = torch.randn(51, 4, 4)
    (got,) = mf.simulate(program, list(given)).outputs
    y = given[0].double().sin() * 0.5 + 1
    for w in given[1:].double():
        y = (y + (y @ w).tanh()).exp().sin() * 0.5 - 1
    torch.testing.assert_close(got.double(), y.cos() + 1, **CLOSE)


def test_what_is_computed_again_is_in_a_later_unit() -> None:
    """In one unit a compiler would see that it is the same, and keep it."""
    with FusionDefinition("again") as fd:
        x = fd.define_tensor([8, 4], torch.float32, DeviceMesh.arange(t=1), {})
        w = fd.define_tensor([4, 4], torch.float32, DeviceMesh.arange(t=1), {})
        with mf.recompute():
            y = ((x @ w).tanh().exp() + 1.0).log()
        (dw,) = mf.grad((y * y).sum(), [w])
        fd.add_output(dw)
    program = grouped(fd)
    units = [i for i in program.host if i.op == "launch"]
    notes = [{j.source.note for j in i.body if j.source is not None} for i in units]
    assert any("recomputed" in n for n in notes)
    assert not any({"", "recomputed"} <= n for n in notes)
    a, b = torch.randn(8, 4), torch.randn(4, 4)
    (got,) = mf.simulate(program, [a, b]).outputs
    leaf = b.double().requires_grad_()
    want = ((a.double() @ leaf).tanh().exp() + 1).log().square().sum()
    torch.testing.assert_close(got.double(), *torch.autograd.grad(want, leaf), **CLOSE)


def test_meshes_do_not_mix() -> None:
    one, two = DeviceMesh([0]), DeviceMesh([1])
    with FusionDefinition("apart") as fd:
        x = fd.define_tensor([4], torch.float32, one, {})
        y = fd.define_tensor([4], torch.float32, two, {})
        fd.add_output(x.exp() * 2.0)
        fd.add_output(y.exp() * 2.0)
    host = grouped(fd).host
    assert shape_of(host) == ["fused0(exp mul)", "fused1(exp mul)"]


def test_a_single_op_and_views_stay_as_they_are() -> None:
    mesh = DeviceMesh.arange(t=1)
    with FusionDefinition("little") as fd:
        x = fd.define_tensor([4, 2], torch.float32, mesh, {})
        fd.add_output(fd.ops.permute(x, [1, 0])[1:] + 1.0)
    assert shape_of(grouped(fd).host) == ["permute", "slice", "add"]


def test_what_is_read_behind_a_write_is_the_old_value() -> None:
    mesh = DeviceMesh.arange(t=1)
    with FusionDefinition("order") as fd:
        w = fd.define_tensor([4, 4], torch.float32, mesh, {})
        x = fd.define_tensor([4, 4], torch.float32, mesh, {})
        step = (w @ x) * 0.5 + 1.0
        fd.add_output(w - step, reuse=w)
        fd.add_output((w @ x).exp() + w)
    program = grouped(fd)
    a, b = torch.randn(2, 4, 4)
    first, second = mf.simulate(program, [a.clone(), b.clone()]).outputs
    torch.testing.assert_close(first, a - ((a @ b) * 0.5 + 1))
    torch.testing.assert_close(second, (a @ b).exp() + a)


def test_updates_are_in_units() -> None:
    """Forward and backward read the weights in products, so they are a unit before."""
    mesh = DeviceMesh.arange(t=1)
    with FusionDefinition("step") as fd:
        x = fd.define_tensor([5, 4], torch.float64, mesh, {})
        weights = [fd.define_tensor([4, 4], torch.float64, mesh, {}) for _ in range(2)]
        speeds = [fd.define_tensor([4, 4], torch.float64, mesh, {}) for _ in range(2)]
        y = (x @ weights[0]).tanh() @ weights[1]
        for w, dw, v in zip(weights, mf.grad((y * y).sum(), weights), speeds, strict=True):
            new, speed = mf.optim.sgd(w, dw, v, lr=0.1, momentum=0.9, weight_decay=0.01)
            fd.add_output(new, reuse=w)
            fd.add_output(speed, reuse=v)
    program = grouped(fd)
    _, second = (i for i in program.host if i.op == "launch")
    assert "matmul" not in {j.fn for j in second.body}
    assert {*second.outputs} == {i for i in second.inputs if "grad" not in i}
    assert not [i for i in program.host if i.fn and i.op != "launch"]

    given = [torch.randn(5, 4), *torch.randn(4, 4, 4)]
    given = [each.double() for each in given]
    leaves = [w.clone().requires_grad_() for w in given[1:3]]
    optimizer = torch.optim.SGD(leaves, lr=0.1, momentum=0.9, weight_decay=0.01)
    for leaf, v in zip(leaves, given[3:], strict=True):
        optimizer.state[leaf]["momentum_buffer"] = v.clone()
    ((given[0] @ leaves[0]).tanh() @ leaves[1]).square().sum().backward()
    optimizer.step()
    got = mf.simulate(program, [each.clone() for each in given]).outputs
    want = [(leaf.detach(), optimizer.state[leaf]["momentum_buffer"]) for leaf in leaves]
    for mine, theirs in zip(got, [x for pair in want for x in pair], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["transposed", "transposed of a sum", "behind", "a row", "one"])
def test_what_is_read_elsewhere_is_not_in_the_unit_of_an_update(kind: str) -> None:
    """Kernels that a compiler makes of one unit may read an element after it was written."""
    mesh = DeviceMesh.arange(t=1)
    with FusionDefinition("mixed") as fd:
        w = fd.define_tensor([4, 4], torch.float64, mesh, {})
        x = fd.define_tensor([4, 4], torch.float64, mesh, {})
        other, update = w, x
        if kind == "transposed":
            other = fd.ops.permute(w, [1, 0]) * 2.0
        elif kind == "transposed of a sum":
            other = fd.ops.permute(w + x, [1, 0]) * 2.0
        elif kind == "a row":
            other = w[1] * 2.0 + x
        elif kind == "one":
            update = x * fd.ops.sum(w)
        fd.add_output(other + 1.0)
        new = (w - 0.5 * update) * 1.5
        fd.add_output(new, reuse=w)
        if kind == "behind":
            fd.add_output(fd.ops.permute(new, [1, 0]) * 3.0 + w)
    program = grouped(fd)
    for unit in (i for i in program.host if i.op == "launch"):
        over = {program.host.root(name) for name in unit.outputs} & {"w"}
        ops = {j.fn for j in unit.body}
        assert not (over and ops & {"permute", "slice", "sum", "select"}), program
    a, b = torch.randn(2, 4, 4, dtype=torch.float64)
    results = mf.simulate(program, [a.clone(), b.clone()]).outputs
    beside = {
        "transposed": a.T * 2,
        "transposed of a sum": (a + b).T * 2,
        "a row": a[1] * 2 + b,
    }
    update = b * a.sum() if kind == "one" else b
    new = (a - 0.5 * update) * 1.5
    want = [beside.get(kind, a) + 1, new, *([new.T * 3 + a] if kind == "behind" else [])]
    for mine, theirs in zip(results, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_sums_over_chunks_are_added_up_in_the_units_of_their_parts() -> None:
    net = network(meshes(2))
    batch = batch_of(net)
    program = mf.pipeline(
        net.definition, microbatches=3, batch=batch, schedule="1f1b", options=ALWAYS
    )
    verify(program.host)
    assert hir.parse(str(program.host)) == program.host
    for name in ("B0", "B1"):
        body = program.host.blocks[name].body
        (unit,) = [i for i in body if i.op == "launch"]
        added = [i for i in unit.body if i.op == "accumulate"]
        assert len(added) == 2 and {x for i in added for x in i.outputs} <= {*unit.outputs}
        assert {x for i in added for x in i.reads}.isdisjoint(unit.outputs)
        assert not any(i.op == "accumulate" for i in body)
    check_orders(program, net, seeds=3)


def test_products_alone_and_their_sums_are_no_unit() -> None:
    mesh = DeviceMesh.arange(t=1)
    with FusionDefinition("products") as fd:
        x, y = (fd.define_tensor([4, 4], torch.float64, mesh, {}, name=n) for n in "xy")
        fd.add_output(fd.ops.permute(x, [1, 0]) @ y)
    program = mf.pipeline(fd, microbatches=2, batch={"x": 0, "y": 0}, options=ALWAYS)
    (loop,) = [i for i in program.host if i.op == "for"]
    assert [i.op for i in loop.body if i.op != "free"][-2:] == ["matmul", "accumulate"]
    x, y = torch.randn(2, 4, 4, dtype=torch.float64)
    (got,) = mf.simulate(program, [x, y]).outputs
    torch.testing.assert_close(got, x.T @ y)


def test_what_nobody_reads_is_no_unit() -> None:
    """A split of nothing leaves nothing to read; rank 1 has no part of anything."""
    mesh = DeviceMesh([0, 2], axes=("a",))
    with FusionDefinition("nothing") as fd:
        x = fd.define_tensor([0], torch.float32, mesh, {})
        y = fd.ops.set(-x).on(mesh, {"a": Shard(0)})
        fd.add_output((-y).on(mesh, {}))
    (got,) = mf.simulate(grouped(fd), [torch.zeros(0)]).outputs
    assert got.shape == (0,)


def test_never_groups_nothing() -> None:
    with FusionDefinition("never") as fd:
        x = fd.define_tensor([4], torch.float32, DeviceMesh.arange(t=1), {})
        fd.add_output(x.exp().sin() + 1.0)
    host = mf.compile(fd, options=Options(compile="never")).host
    assert shape_of(host) == ["exp", "sin", "add"]


@pytest.mark.parametrize(("build", "expect"), CASES, ids=[build.__name__ for build, _ in CASES])
def test_outputs_in_their_inputs(build: Build, expect: Expect) -> None:
    """What a unit writes into an input does not show in what it took from it before."""
    program = mf.compile(define(build), options=ALWAYS)
    assert hir.parse(str(program.host)) == program.host
    result = mf.simulate(program, [x.clone() for x in inputs()])
    for got, want in zip(result.outputs, expect(*inputs()), strict=True):
        assert torch.equal(got, want), program


def test_rows_of_a_table_are_added_up_by_torch() -> None:
    """In one order, on GPUs too: a compiler adds them by atomic operations."""
    mesh = DeviceMesh.arange(t=2)
    with FusionDefinition("lookup") as fd:
        rows = fd.define_tensor([6], torch.int64, mesh, {"t": Shard(0)})
        table = fd.define_tensor([5, 4], torch.float32, mesh, {})
        loss = (F.embedding(rows, table).sin() * 2.0).sum()
        fd.add_output(*mf.grad(loss, [table]))
    program = grouped(fd)
    made = shape_of(program.host)
    assert "embedding_grad" in made
    assert any(name.startswith("fused") for name in made)
    given = torch.tensor([0, 3, 3, 4, 0, 3]), torch.rand(5, 4)
    (got,) = mf.simulate(program, [*given]).outputs
    leaf = given[1].double().requires_grad_()
    (F.embedding(given[0], leaf).sin() * 2.0).sum().backward()
    torch.testing.assert_close(got.double(), leaf.grad, **CLOSE)


def test_gradients_of_parameters_go_with_what_they_are_computed_from() -> None:
    """Work for a table, which is in no unit, brings earlier work along: nothing it reads stays."""
    mesh = DeviceMesh.arange(t=1)
    with FusionDefinition("layers") as fd:
        rows = fd.define_tensor([64], torch.int64, mesh, {})
        table = fd.define_tensor([5, 32], torch.float32, mesh, {})
        weights = [fd.define_tensor([32, 32], torch.float32, mesh, {}) for _ in range(8)]
        x = F.embedding(rows, table)
        for w in weights:
            x = (x @ w).sin() + x
        for dw in mf.grad(x.sum(), [table, *weights]):
            fd.add_output(dw)
    program = grouped(fd)
    order = shape_of(program.host)
    assert order[-1] == "embedding_grad"
    given = [torch.randint(5, (64,)), torch.rand(5, 32), *torch.rand(8, 32, 32) / 8]
    leaves = [given[0], *(x.double().requires_grad_() for x in given[1:])]
    y = F.embedding(leaves[0], leaves[1])
    for w in leaves[2:]:
        y = (y @ w).sin() + y
    y.sum().backward()
    for got, leaf in zip(mf.simulate(program, given).outputs, leaves[1:], strict=True):
        torch.testing.assert_close(got.double(), leaf.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("cache", [{}, {"t": Shard(0)}], ids=str)
def test_rows_of_a_cache_are_written_in_the_unit_that_computes_them(
    cache: dict[str, Shard], is_read: bool
) -> None:
    """Who reads the cache before or behind is in another unit."""
    mesh = DeviceMesh.arange(t=2)
    with FusionDefinition("cache") as fd:
        x = fd.define_tensor([3, 4], torch.float32, mesh, {}, name="x")
        at = fd.define_tensor([3], torch.int64, mesh, {}, name="at")
        c = fd.define_tensor([7, 4], torch.float32, mesh, cache, name="c")
        before = (c * 3).cos() if is_read else 0
        rows = x.sin() * 2
        written = c.index_copy(0, at, rows)
        fd.add_output(written, reuse=c)
        fd.add_output((written + 1).exp() + before)
        fd.add_output(rows.cos())
    program = grouped(fd)
    behind = "fused1(add exp add cos)"
    if is_read:
        units = ["fused0(mul cos sin mul)", "index_copy", behind]
    else:
        units = ["fused0(sin mul index_copy)", behind]
    assert shape_of(program.host) == units, f"{program}"
    numbers, old = torch.randn(3, 4), torch.randn(7, 4)
    places = torch.tensor([6, 0, 6])
    new, y, z = mf.simulate(program, [numbers, places, old.clone()]).outputs
    wanted = old.clone()
    for n, place in enumerate(places.tolist()):
        wanted[place] = numbers[n].sin() * 2
    torch.testing.assert_close(new, wanted)
    torch.testing.assert_close(y, (wanted + 1).exp() + ((old * 3).cos() if is_read else 0))
    torch.testing.assert_close(z, (numbers.sin() * 2).cos())
