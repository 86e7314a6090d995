"""Gradients of definitions: programs, what is kept, computed again, refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.drawn import numbers
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Replicate, Shard, Stream
from mdfuse.frontend import gradients, vjps
from mdfuse.frontend.handle import Handle

TP, DP = DeviceMesh.arange(tp=4), DeviceMesh.arange(dp=4)
GRID = DeviceMesh.arange(dp=2, tp=2)


def kinds(program: mf.Program) -> list[str]:
    return sorted(c.kind for c in program.communications)


def expected(f: Callable[..., Any], *xs: Tensor) -> list[Tensor]:
    """What torch's autograd gives for the sum of what a function returns."""
    leaves = [x.clone().requires_grad_() for x in xs]
    found = torch.autograd.grad(f(*leaves).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True)]


def given(
    fd: mf.FusionDefinition, mesh: DeviceMesh, *inputs: tuple[list[int], dict[str, Any]]
) -> list[Handle]:
    return [fd.define_tensor(shape, torch.float64, mesh, where) for shape, where in inputs]


# -- what a program reads like -------------------------------------------------------------------


def test_lines_say_what_they_come_from() -> None:
    with mf.FusionDefinition("lines") as fd:
        x, w = given(fd, TP, ([8, 4], {}), ([4, 8], {"tp": Shard(1)}))
        with mf.recompute():
            h = (x @ w).tanh()
        dx, dw = mf.grad((h * h).sum(), [x, w])
        fd.add_output(dx)
        fd.add_output(dw)
    comments = re.findall(r"# (test_gradients\.py:\d+)( \(.*\))?$", str(fd.fusion), re.MULTILINE)
    notes = [note for _, note in comments]
    assert {*notes} == {"", " (backward)", " (recomputed)"}
    again = [e for e in fd.fusion.exprs if e.source and e.source.note == "recomputed"]
    assert [e.op for e in again] == ["matmul", "tanh"]
    assert [*fd.fusion.outputs] == ["dx", "dw"]


def test_names_of_gradients() -> None:
    with mf.FusionDefinition("names") as fd:
        x, w = given(fd, TP, ([4], {}), ([4], {}))
        found = mf.grad((x * w).sum(), [x, w])
        assert [g.name for g in found] == ["in.grad", "in_1.grad"]
        da, db = mf.grad((x * w).sum(), [x, w])
        (dc,) = mf.grad((x * w).sum(), x)
        assert (da.name, db.name, dc.name) == ("da", "db", "dc")


def test_a_definition_that_is_made_again_pays_one_edge() -> None:
    def define() -> mf.FusionDefinition:
        with mf.FusionDefinition("again") as fd:
            x, w = given(fd, TP, ([8, 4], {}), ([4, 8], {"tp": Shard(1)}))
            with mf.recompute():
                h = (x @ w).tanh()
            (dw,) = mf.grad((h * h).sum(), [w])
            (ddw,) = mf.grad((dw * dw).sum(), [w])
            fd.add_output(ddw)
        return fd

    mf.FusionCache.reset()
    program = mf.compile(define())
    # two inputs, two ends of a block, matmul, tanh, mul, sum; mul, sum; two grads; the output
    assert mf.FusionCache.get().nodes() == 13
    assert mf.compile(define()) is program
    assert mf.FusionCache.get().info().hits == 1


def test_in_traced_functions() -> None:
    @mf.fusion
    def step(x: Any, w: Any) -> Any:
        loss = torch.tanh(x @ w).sum()
        return mf.grad(loss, [x, w])

    fd = step.define(
        mf.TensorSpec([8, 4], torch.float64, TP),
        mf.TensorSpec([4, 8], torch.float64, TP, {"tp": Shard(1)}),
    )
    xs = numbers(8, 4), numbers(4, 8, seed=1)
    check_everywhere(mf.compile(fd), xs, expected(lambda x, w: torch.tanh(x @ w), *xs))


# -- cases that are easy to get wrong ------------------------------------------------------------


def check(
    f: Callable[..., Any],
    mesh: DeviceMesh,
    *inputs: tuple[list[int], dict[str, Any]],
    posts: list[str] | None = None,
    reference: Callable[..., Any] | None = None,
) -> mf.Program:
    with mf.FusionDefinition("case") as fd:
        handles = given(fd, mesh, *inputs)
        for g in mf.grad(f(*handles).sum(), handles):
            fd.add_output(g)
    program = mf.compile(fd)
    xs = [numbers(*shape, seed=i) for i, (shape, _) in enumerate(inputs)]
    check_everywhere(program, xs, expected(reference or f, *xs))
    if posts is not None:
        assert kinds(program) == posts, program
    return program


def test_the_value_is_an_input() -> None:
    with mf.FusionDefinition("itself") as fd:
        x, seed = given(fd, TP, ([4], {"tp": Shard(0)}), ([4], {}))
        (dx,) = mf.grad(x, [x], seed=seed)
        fd.add_output(dx)
    check_everywhere(mf.compile(fd), [numbers(4), numbers(4, seed=1)], [numbers(4, seed=1)])


def test_one_gradient_twice_and_shared() -> None:
    """What comes back to both operands of an addition is one value, but two outputs."""
    with mf.FusionDefinition("twice") as fd:
        x, w, seed = given(fd, TP, ([4], {}), ([4], {"tp": Shard(0)}), ([4], {}))
        dx, dw, same = mf.grad(x + w, [x, w, x], seed=seed)
        assert dx.id == same.id
        fd.add_output(dx)
        fd.add_output(dw)
    xs = [numbers(4, seed=i) for i in range(3)]
    check_everywhere(mf.compile(fd), xs, [xs[2], xs[2]])


def test_ties_across_ranks() -> None:
    """The share of each of equal elements needs all of them."""
    x = torch.tensor([3.0, 1.0, 3.0, 3.0, 0.0], dtype=torch.float64)
    with mf.FusionDefinition("ties") as fd:
        (h,) = given(fd, DP, ([5], {"dp": Shard(0)}))
        (dh,) = mf.grad(h.amax(), [h])
        fd.add_output(dh)
    check_everywhere(mf.compile(fd), [x], [(x == 3.0).double() / 3])


def test_of_an_intermediate_with_a_law() -> None:
    with mf.FusionDefinition("law") as fd:
        x, w = given(fd, TP, ([8, 4], {}), ([4, 8], {"tp": Shard(1)}))
        h = (x @ w).on(TP, {"tp": Shard(0)})
        dh, dx = mf.grad((h * h * h).sum(), [h, x])
        fd.add_output(dh)
        fd.add_output(dx)
    program = mf.compile(fd)
    assert program.fusion.layout("dh").by_axis() == {"tp": Shard(0)}
    xs = [numbers(8, 4), numbers(4, 8, seed=1)]
    wanted = expected(lambda x, w: (x @ w) ** 3, *xs)[0]
    check_everywhere(program, xs, [3 * (xs[0] @ xs[1]) ** 2, wanted])


def test_a_replicated_value_beside_a_split_one() -> None:
    """What each rank adds to its own heads comes back as a sum over ranks: one all-reduce."""
    check(
        lambda heads, shared: (heads + shared).tanh(), TP,
        ([6, 8], {"tp": Shard(1)}), ([6, 1], {}), posts=["Allreduce"],
    )  # fmt: skip


def test_an_input_that_is_written_after_the_backward_reads_it() -> None:
    with mf.FusionDefinition("reuse") as fd:
        w, x = given(fd, TP, ([4, 4], {"tp": Shard(1)}), ([3, 4], {}))
        (dx,) = mf.grad((x @ w).tanh().sum(), [x])
        fd.add_output(w + 1, reuse=w)
        fd.add_output(dx)
    xs = [numbers(4, 4), numbers(3, 4, seed=1)]
    wanted = expected(lambda w, x: (x @ w).tanh(), *xs)[1]
    check_everywhere(mf.compile(fd), [xs[0].clone(), xs[1]], [xs[0] + 1, wanted])


def test_required_orders_and_streams_are_not_asked_of_cotangents() -> None:
    def f(x: Any, w: Any) -> Any:
        h = x @ w
        if isinstance(h, Handle):
            h = mf.ops.stride_order(h, (0, 1))
            h = mf.ops.tanh(h).on(Layout(TP, {"tp": Shard(1)}, stream=Stream(0, 2)))
            return h * 2
        return torch.tanh(h) * 2

    inputs = ([8, 4], {}), ([4, 8], {"tp": Shard(1)})
    check(f, TP, *inputs)
    with mf.FusionDefinition("asked") as fd:
        handles = given(fd, TP, *inputs)
        fd.add_output(mf.grad(f(*handles).sum(), handles)[0])
    backward = [e.output for e in fd.fusion.exprs if e.source and e.source.note]
    values = [fd.fusion.values[n] for n in backward]
    assert backward
    assert not any(v.stream is not None or v.is_order_required for v in values)


def test_symbolic_extents() -> None:
    """A gradient asks no more of extents than its value."""

    def define(has_gradient: bool) -> mf.FusionDefinition:
        with mf.FusionDefinition("symbolic") as fd:
            x = fd.define_tensor([-1, 6], torch.float64, DP, {"dp": Shard(0)})
            w = fd.define_tensor([6, 3], torch.float64, DP)
            b = fd.define_tensor([3], torch.float64, DP)
            y = torch.softmax(x @ w + b, 1).mean()
            fd.add_output(y)
            if has_gradient:
                for g in mf.grad(y, [x, w, b]):
                    fd.add_output(g)
        return fd

    program = mf.compile(define(True))
    assert {*map(str, program.lowerings[0].guards)} == {
        *map(str, mf.compile(define(False)).lowerings[0].guards)
    }
    for n in (8, 5, 1):
        xs = [numbers(n, 6), numbers(6, 3, seed=1), numbers(3, seed=2)]
        wanted = expected(lambda x, w, b: torch.softmax(x @ w + b, 1).mean(), *xs)
        found = mf.simulate(program, xs).outputs
        for ours, theirs in zip(found[1:], wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


Parts = dict[str, tuple[Callable[[Any], Any], list[str]]]

#: what is made of [5,4] -> what puts the cotangents of its slices together
PARTS: Parts = {
    "side by side": (lambda x: (x[:2] ** 3).sum() + (x[2:].sin() * x.mean()).sum(), ["cat"]),
    "backwards": (lambda x: (x[:, 3:] * x[:, 1:2] ** 2 * x[:, :1] * x[:, 2:3] ** 3).sum(), ["cat"]),
    "both dims": (lambda x: sum((y**3).sum() for d in (0, 1) for y in x.unbind(d)), ["cat"] * 2),
    "twice": (lambda x: sum((y**3).sum() * y.sum() for y in (*x.chunk(2), *x.chunk(2))),
              ["cat"] * 2),
    "a gap": (lambda x: (x[:2] ** 3).sum() + (x[3:] ** 2).sum(), ["slice_grad"] * 2),
    "overlapping": (lambda x: (x[:3] ** 3).sum() + (x[2:] ** 2).sum(), ["slice_grad"] * 2),
    "steps": (lambda x: (x[::2] ** 3).sum() + (x[1::2] ** 2).sum(), ["slice_grad"] * 2),
    "of two dims": (lambda x: (x[:2, :2] ** 3).sum() + (x[2:] ** 2).sum(), ["slice_grad"] * 2),
    "none of it": (lambda x: x[:0].sum() + (x[:2] ** 2).sum() + (x[2:] ** 3).sum(),
                   ["slice_grad", "cat"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_slices_come_back_side_by_side(name: str) -> None:
    """Where they make up a dim; gradients of the gradient are right, too."""
    f, joins = PARTS[name]
    x = numbers(5, 4)
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    definitions = []
    for is_second in (False, True):
        with mf.FusionDefinition("parts") as fd:
            (h,) = given(fd, TP, ([5, 4], {"tp": Shard(0)}))
            (dx,) = mf.grad(f(h), [h])
            fd.add_output(dx)
            if is_second:
                fd.add_output(mf.grad(dx.square().sum(), [h])[0])
        definitions.append(fd)
    once, twice = definitions
    found = [e.op for e in once.fusion.exprs if e.op in ("cat", "slice_grad")]
    assert sorted(found) == sorted(joins)
    check_everywhere(mf.compile(twice), [x], [first.detach(), second])


def test_slices_of_symbolic_extents() -> None:
    """One definition for rows that are even and odd, few and many."""

    def f(x: Any) -> Any:
        return (x[1:].tanh().sum(0) + x[::2].exp().sum(0) + x[: x.shape[0] // 2].sin().sum(0))[::3]

    with mf.FusionDefinition("slices") as fd:
        x = fd.define_tensor([-1, 7], torch.float64, TP, {"tp": Shard(1)})
        (dx,) = mf.grad(f(x).sum(), [x])
        fd.add_output(dx)
    program = mf.compile(fd)
    for n in (8, 7, 2, 3):
        given_ = numbers(n, 7)
        (found,) = mf.simulate(program, [given_]).outputs
        torch.testing.assert_close(found, expected(f, given_)[0])


def test_a_mean_over_a_split_dim_in_sixteen_bits() -> None:
    with mf.FusionDefinition("mean") as fd:
        x = fd.define_tensor([300], torch.bfloat16, DP, {"dp": Shard(0)})
        (dx,) = mf.grad(x.mean(), [x])
        fd.add_output(dx)
    x = numbers(300).to(torch.bfloat16)
    (found,) = mf.simulate(mf.compile(fd), [x]).outputs
    assert torch.equal(found, torch.full((300,), 1 / 300).to(torch.bfloat16))


def test_attention_gives_its_sums_where_a_gradient_goes_through_it() -> None:
    def attended(x: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    with mf.FusionDefinition() as fd:
        x, frozen = (fd.define_tensor([2, 3, 4], torch.float64) for _ in range(2))
        y, beside, after = attended(x), attended(frozen), attended(x.detach())
        (dx,) = mf.grad((y + beside).square().sum(), [x])
        for out in (dx, beside, after):
            fd.add_output(out)
    ops = [e.op for e in mf.compile(fd).fusion.exprs if "attention" in e.op]
    assert ops == ["attention", *["scaled_dot_product_attention"] * 2, "attention_grad"]
    given = [numbers(2, 3, 4), numbers(2, 3, 4, seed=1)]
    leaf = given[0].clone().requires_grad_()
    (attended(leaf) + attended(given[1])).square().sum().backward()
    found = mf.reference(fd, given)
    for ours, theirs in zip(found, (leaf.grad, *map(attended, given[::-1])), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_what_leads_nowhere_is_zeros_without_communication() -> None:
    with mf.FusionDefinition("nothing") as fd:
        x, w, i = given(fd, TP, ([4], {}), ([8, 2], {"tp": Shard(0)}), ([4], {}))
        late = x * 3
        gradients_ = mf.grad((x * fd.ops.detach(i)).sum(), [w, i, late, x])
        for g in gradients_:
            fd.add_output(g)
    program = mf.compile(fd)
    assert kinds(program) == []
    assert program.fusion.layout("in_1.grad").by_axis() == {"tp": Shard(0)}
    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in ((8, 2), (4,), (4,))]
    xs = [numbers(4), numbers(8, 2), numbers(4, seed=2)]
    check_everywhere(program, xs, [*zeros, xs[2]])


@pytest.mark.parametrize("drop", ["an addition", "a sum over a repeated dim"])
def test_mutants_give_other_values(drop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests of values would not notice, they would not test."""
    if drop == "an addition":
        monkeypatch.setattr(gradients._Backward, "_total", lambda self, name: self.parts[name][0])
    else:
        monkeypatch.setitem(vjps.RULES, "mul", lambda e, ct: (ct * e[1], ct * 0))
    mf.FusionCache.reset()
    with pytest.raises(AssertionError):
        check(lambda x, w: x * w + x.tanh() * w, TP, ([6, 4], {}), ([4], {}))
    mf.FusionCache.reset()


# -- recompute -----------------------------------------------------------------------------------


def test_what_is_defined_inside_is_not_kept() -> None:
    def define(is_recomputed: bool) -> mf.Program:
        with mf.FusionDefinition("chain") as fd:
            x, *weights = given(fd, TP, ([64, 8], {}), *(([8, 8], {}) for _ in range(4)))
            h = x
            for w in weights:
                if is_recomputed:
                    with mf.recompute():
                        h = ((h @ w).tanh().exp() + 1).log()
                else:
                    h = ((h @ w).tanh().exp() + 1).log()
            for g in mf.grad(h.sum(), weights):
                fd.add_output(g)
        return mf.compile(fd, mf.Options(compile="never"))  # whose values are all named

    xs = [numbers(64, 8), *(numbers(8, 8, seed=i) for i in range(1, 5))]

    def f(x: Any, *weights: Any) -> Any:
        for w in weights:
            x = ((x @ w).tanh().exp() + 1).log()
        return x

    peaks = []
    for is_recomputed in (False, True):
        program = define(is_recomputed)
        check_everywhere(program, xs, expected(f, *xs)[1:])
        peaks.append(most_alive(program))
    assert peaks[1] < peaks[0]


def most_alive(program: mf.Program) -> int:
    """How many bytes of computed values are alive at once, views counted too."""
    alive: dict[str, int] = {}
    most = 0
    for i in program.host.instructions:
        if i.op == "free":
            for name in i.reads:
                alive.pop(name, None)
        for name in i.outputs:
            kind = program.host.types[name]
            alive[name] = math.prod(kind.local_shape(0)) * kind.dtype.itemsize
        most = max(most, sum(alive.values()))
    return most


def test_dropout_inside_draws_the_same() -> None:
    with mf.FusionDefinition("dropout") as fd:
        x = fd.define_tensor([40, 4], mesh=DP, layout={"dp": Shard(0)})
        with mf.recompute():
            h = fd.ops.dropout(x, 0.5, seed=3) * x
        (dx,) = mf.grad((h * h).sum(), [x])
        fd.add_output(h)
        fd.add_output(dx)
    x = numbers(40, 4).float()
    h, dx = mf.simulate(mf.compile(fd), [x]).outputs
    torch.testing.assert_close(dx, torch.where(h == 0, 0.0, 16 * x**3))


def test_a_send_inside_is_sent_again() -> None:
    first, second = DeviceMesh([0], ["tp"]), DeviceMesh([1], ["tp"])
    with mf.FusionDefinition("send") as fd:
        x = fd.define_tensor([4], torch.float64, first)
        with mf.recompute():
            y = fd.ops.set(x).on(second, {})
        loss = (y * y).sum()
        (dx,) = mf.grad(loss, [x])
        fd.add_output(loss)
        fd.add_output(dx)
    program = mf.compile(fd)
    assert len(program.communications) == 3, program
    check_everywhere(program, [numbers(4)], [(numbers(4) ** 2).sum(), 2 * numbers(4)])
    assert "(recomputed)" in str(program)
    assert re.findall(r"the meshes differ.*", program.explain()) == [
        "the meshes differ", "the meshes differ (recomputed)", "the meshes differ (backward)",
    ]  # fmt: skip


def test_an_inner_block_is_a_part_of_the_outer_one() -> None:
    with mf.FusionDefinition("nested") as fd:
        (x,) = given(fd, TP, ([4], {}))
        with mf.recompute():
            h = x.exp()
            with mf.recompute():
                h = h.tanh()
            h = h.exp()
        (dx,) = mf.grad(h.sum(), [x])
        fd.add_output(dx)
    notes = [e.op for e in fd.fusion.exprs if e.source and e.source.note == "recomputed"]
    assert notes == ["exp", "tanh", "exp"]
    check_everywhere(
        mf.compile(fd), [numbers(4)], expected(lambda x: x.exp().tanh().exp(), numbers(4))
    )


# -- laws by reference ---------------------------------------------------------------------------


def test_a_value_lies_as_another() -> None:
    with mf.FusionDefinition("like") as fd:
        x, w = given(
            fd, GRID, ([8, 4], {"dp": Shard(0), "tp": Shard(1)}), ([4, 4], {"tp": Shard(0)})
        )
        y = x @ w  # Partial along tp
        z = fd.ops.set(x * 2).on(y)
        given_ = fd.define_tensor([8, 4], torch.float64, name="given").on(z)
        fd.add_output(z)
        fd.add_output(given_ + 1)
    program = mf.compile(fd)
    for name in (z.name, "given"):
        assert program.fusion.layout(name).by_axis() == {"dp": Shard(0), "tp": Replicate()}
    assert f"%{z.name}: f64[8,4] as %y! = set" in str(fd.fusion)


def test_the_stream_is_not_taken() -> None:
    with mf.FusionDefinition("stream") as fd:
        (x,) = given(fd, TP, ([8, 4], {"tp": Shard(1)}))
        y = (x * 2).on(Layout(TP, {"tp": Shard(1)}, stream=Stream(0, 2)))
        z = fd.ops.set(x).on(y)
        fd.add_output(z + y)
    values = mf.compile(fd).fusion.values
    assert values["y"].stream is not None
    assert values["z"].stream is None
    assert values["z"].layout == values["y"].layout


WRONG_LAWS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "another number of dims": (
        lambda fd, x, v, s: (x * 2).on(v), "lies as %v: f32[4]", "a layout says of each dim"),
    "a scalar": (lambda fd, x, v, s: (v * 2).on(s), "which is a scalar", "a layout says of each"),
    "of a scalar": (lambda fd, x, v, s: (s * 2).on(v), "is placed, but it is a scalar", "every"),
    "itself": (lambda fd, x, v, s: v2.on(v2) if (v2 := v * 2) is not None else 0,
               "lies as itself", "would wait for itself"),
    "a second law": (
        lambda fd, x, v, s: (v * 2).on(v).on(TP, {}), "but its law says as %v", "one layout"),
    "after its use": (
        lambda fd, x, v, s: [v2 := v * 2, v2 + 1, v2.on(v)], "placed after its first use",
        "before the value is used"),
    "a referee that is placed later": (
        lambda fd, x, v, s: [v2 := v * 2, (v * 3).on(v2), v2.on(TP, {})],
        "placed after its first use", "before the value is used"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_LAWS)
def test_wrong_laws(name: str) -> None:
    call, what, because = WRONG_LAWS[name]
    with mf.FusionDefinition("wrong") as fd:
        x, v = fd.define_tensor([4, 4], name="x"), fd.define_tensor([4], name="v")
        with pytest.raises(mf.LayoutError) as error:
            call(fd, x, v, fd.define_scalar(name="s"))
    assert what in error.value.what
    assert because in (error.value.because or "")


def test_a_law_and_a_layout_at_once() -> None:
    with mf.FusionDefinition("both") as fd:
        x = fd.define_tensor([4])
        with pytest.raises(mf.LayoutError, match="has an order or a stream of its own"):
            (x * 2).on(x, {"tp": Shard(0)}, {0: ("tp",)})


def test_a_law_of_another_definition() -> None:
    with mf.FusionDefinition("other") as other:
        far = other.define_tensor([4])
    with mf.FusionDefinition("this") as fd:
        x = fd.define_tensor([4])
        with pytest.raises(mf.DefinitionError, match="belongs to @other"):
            (x * 2).on(far)


# -- what is refused -----------------------------------------------------------------------------


WRONG: dict[str, tuple[Callable[..., Any], str, str]] = {
    "no seed": (lambda fd, x, y, i, s: mf.grad(y, [x]), "grad of %y: f32[4,4], without a seed",
                "seed="),
    "a seed of another shape": (
        lambda fd, x, y, i, s: mf.grad(y, [x], seed=y.sum(0)), "with the seed", "f32[4,4]"),
    "a seed of another dtype": (
        lambda fd, x, y, i, s: mf.grad(y, [x], seed=y.double()), "with the seed", "f32[4,4]"),
    "a number": (lambda fd, x, y, i, s: mf.grad(y.sum(), [2.0]), "grad with 2.0", "define_tensor"),
    "of a number": (lambda fd, x, y, i, s: mf.grad(1.0, [x]), "grad with 1.0", "define_tensor"),
    "a tensor": (
        lambda fd, x, y, i, s: mf.grad(y.sum(), [torch.ones(4)]), "grad with", "define_tensor"),
    "a scalar": (lambda fd, x, y, i, s: mf.grad(y.sum(), [s]), "with %s: a scalar", "cast it"),
    "integers": (lambda fd, x, y, i, s: mf.grad(y.sum(), [i]), "with %i: i64[4]", "cast it"),
    "of integers": (lambda fd, x, y, i, s: mf.grad(i.sum(), [x]), ": i64[]", "cast it"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str) -> None:
    call, what, hint = WRONG[name]
    with mf.FusionDefinition("wrong") as fd:
        x = fd.define_tensor([4, 4])
        i = fd.define_tensor([4], torch.int64)
        s = fd.define_scalar()
        y = x * 2
        before = str(fd.value_of(y.id)), len(fd._recorded().names)
        fd.value_of(x.id)
        with pytest.raises(mf.DefinitionError) as error:
            call(fd, x, y, i, s)
        after = str(fd.value_of(y.id)), len(fd._recorded().names)
        assert before[0] == after[0]
    assert what in error.value.what
    assert hint in (error.value.hint or "")
    assert any("test_gradients.py" in line for line in error.value.where)


def test_another_definition() -> None:
    with mf.FusionDefinition("other") as other:
        far = other.define_tensor([4])
    with mf.FusionDefinition("this") as fd:
        x = fd.define_tensor([4])
        with pytest.raises(mf.DefinitionError, match="belongs to @other"):
            mf.grad(x.sum(), [far])
    with pytest.raises(mf.DefinitionError, match="is not being defined"):
        mf.grad(x, [x])


def test_an_op_without_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vjps.RULES, "erf")
    mf.FusionCache.reset()
    with mf.FusionDefinition("erf") as fd:
        x = fd.define_tensor([4], name="x")
        y = x.erf()
        with pytest.raises(
            mf.DefinitionError, match=re.escape("%y = erf(...) has no gradient")
        ) as error:
            mf.grad(y.sum(), [x])
        assert any("y = x.erf()" in line for line in error.value.where)
        fd.add_output(*mf.grad((x * 2 + fd.ops.detach(y)).sum(), [x]))
    mf.FusionCache.reset()


def test_a_call_that_fails_midway_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(e: Any, ct: Any) -> Any:
        (ct * 2).tanh()
        raise mf.DefinitionError("refused")

    mf.FusionCache.reset()
    texts = []
    for is_tried in (True, False):
        with mf.FusionDefinition("midway") as fd:
            x = fd.define_tensor([4], name="x")
            y = x.erf().exp()
            if is_tried:
                with monkeypatch.context() as patched:
                    patched.setitem(vjps.RULES, "erf", refuse)
                    with pytest.raises(mf.DefinitionError, match="refused"):
                        mf.grad(y.sum(), [x])
            (z,) = mf.grad((x.erf() * y).sum(), [x])
            fd.add_output(z)
        texts.append(re.sub(" +# .*", "", str(fd.fusion)))
        mf.FusionCache.reset()
    assert "mul" in texts[0]
    assert texts[0].replace("_", "").count("erf") == texts[1].replace("_", "").count("erf")
    assert len(texts[0].splitlines()) == len(texts[1].splitlines()) + 1  # the sum that was asked


def test_what_is_defined_inside_and_not_computed() -> None:
    """Inputs and numbers are there already; laws, outputs and seeds may stand inside as well."""
    x, w, v, by = numbers(8, 4), numbers(4, 4, seed=1), numbers(4, 4, seed=2), numbers(8, 4, seed=3)
    with mf.FusionDefinition("inside") as fd:
        (first,) = given(fd, TP, ([8, 4], {"tp": Shard(0)}))
        with mf.recompute():
            (second,) = given(fd, TP, ([4, 4], {"tp": Shard(0)}))
            scale = fd.define_scalar(dtype=float)
            h = fd.ops.set((first @ second).tanh() * scale).on(TP, {"tp": Shard(1)})
            with mf.recompute():
                third = fd.define_tensor([4, 4], torch.float64).on(TP, {})
                seed = fd.define_tensor([8, 4], torch.float64).on(first)
                y = fd.ops.set((h @ third).tanh()).on(seed)
            fd.add_output(y)
        for g in mf.grad(y, [first, second, third], seed=seed):
            fd.add_output(g)

    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return ((x @ w).tanh() * 0.5 @ v).tanh()

    wanted = [f(x, w, v), *expected(lambda *xs: f(*xs) * by, x, w, v)]
    program = mf.compile(fd)
    assert "(recomputed)" in str(program)
    check_everywhere(program, [x, w, 0.5, v, by], wanted)


def test_of_what_is_defined_inside_gradients_are_differentiated_again() -> None:
    with mf.FusionDefinition("twice") as fd:
        (x,) = given(fd, TP, ([8, 4], {"tp": Shard(0)}))
        with mf.recompute():
            (w,) = given(fd, TP, ([4, 4], {}))
            y = (x @ w).tanh()
        (g,) = mf.grad((y * y).sum(), [w])
        fd.add_output(mf.grad((g * g).sum(), [w])[0])
    a, b = numbers(8, 4), numbers(4, 4, seed=1).requires_grad_()
    (first,) = torch.autograd.grad((a @ b).tanh().square().sum(), [b], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), [b])
    check_everywhere(mf.compile(fd), [a, b.detach()], [second])


def test_recompute_that_is_left_open() -> None:
    def define() -> None:
        with mf.FusionDefinition("open") as fd:
            x = fd.define_tensor([4])
            mf.recompute().__enter__()
            fd.add_output(x * 2)

    with pytest.raises(mf.DefinitionError, match=re.escape("@open ends inside of recompute()")):
        define()


def test_grad_inside_of_recompute() -> None:
    with mf.FusionDefinition("inside") as fd:
        x = fd.define_tensor([4])
        with mf.recompute():
            y = x.exp()
            with pytest.raises(mf.DefinitionError, match=re.escape("inside of recompute()")):
                mf.grad(y.sum(), [x])


def test_recompute_outside_of_a_definition() -> None:
    with pytest.raises(mf.DefinitionError, match="needs a definition"), mf.recompute():
        pass


def test_std_mean_of_equal_numbers_is_flat_as_std_is() -> None:
    x = torch.full((4,), 2.0, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(sum(torch.std_mean(leaf)), leaf)
    with mf.FusionDefinition("flat") as fd:
        h = fd.define_tensor([4], torch.float64)
        deviation, centre = fd.ops.std_mean(h)
        for g in mf.grad(deviation + centre, [h]):
            fd.add_output(g)
    (found,) = mf.reference(fd, [x])
    torch.testing.assert_close(found, want)


def recomputed_ops(fd: mf.FusionDefinition) -> list[str]:
    exprs = (e for e in mf.compile(fd).fusion.exprs if e.source is not None)
    return [e.op for e in exprs if e.source is not None and e.source.note == "recomputed"]


def test_what_another_block_reads_is_kept() -> None:
    """Blocks of layers: nothing of a layer is computed twice for the next one."""
    numbers = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with mf.FusionDefinition() as fd:
        x, w = (fd.define_tensor([4, 4], torch.float64) for _ in range(2))
        h = x
        for _ in range(3):
            with mf.recompute():
                h = (h @ w).tanh() @ w
        (dw,) = mf.grad((h * 2).sum(), [w])
        fd.add_output(dw)
    assert recomputed_ops(fd) == ["matmul", "tanh"] * 3
    leaf = numbers.clone().requires_grad_()
    y = numbers
    for _ in range(3):
        y = (y @ leaf).tanh() @ leaf
    (expected,) = torch.autograd.grad((y * 2).sum(), [leaf])
    check_everywhere(mf.compile(fd), [numbers, numbers], [expected])


def test_inputs_that_a_block_defines() -> None:
    """Tensors and numbers; an input is there, and so is not computed again."""
    numbers = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mesh = DeviceMesh.arange(fsdp=2)
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4, 4], torch.float64, mesh, {"fsdp": Shard(0)})
        with mf.recompute():
            w = fd.define_tensor([4, 4], torch.float64, mesh, {"fsdp": Shard(0)}, name="w")
            s = fd.define_scalar(dtype=float, name="s")
            h = ((x @ fd.ops.set(w).on(mesh, {})) * s).tanh()
        gradients = mf.grad(h.sin().sum(), [x, w])
        for dx in gradients:
            fd.add_output(dx)
    assert recomputed_ops(fd) == ["set", "matmul", "mul", "tanh"]
    leaves = [numbers.clone().requires_grad_() for _ in range(2)]
    y = ((leaves[0] @ leaves[1]) * 1.5).tanh().sin().sum()
    check_everywhere(mf.compile(fd), [numbers, numbers, 1.5], torch.autograd.grad(y, leaves))
