"""Memory orders: requirements are kept exactly, hints cost nothing.

Values are compared with plain torch, strides with those of a dense tensor of the permuted shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations, product
from typing import Any

import pytest
import torch
from helpers.oracle import check_everywhere, dense_strides, given_to_each, has_strides
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard, Stream
from mdfuse.compiled.program import Program
from mdfuse.errors import DefinitionError, ProgramError
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.passes.segmentation import merge_local, merge_nothing

MESH = DeviceMesh.arange(tp=4)
ORDERS = list(permutations(range(3)))
SPELLINGS = ("output", "op")

Fd = Any


def outermost_first(stride_order: Sequence[int]) -> tuple[int, ...]:
    """The dims of a stride order from outermost to innermost."""
    return tuple(sorted(range(len(stride_order)), key=lambda d: -stride_order[d]))


def lying(shape: Sequence[int], stride_order: Sequence[int]) -> Tensor:
    """A tensor with these strides; integers, so that sums are exact."""
    dims = outermost_first(stride_order)
    base = torch.randint(-9, 10, [shape[d] for d in dims], generator=torch.Generator())
    return base.double().permute([dims.index(d) for d in range(len(dims))])


def outputs_lie(
    program: Program, inputs: Sequence[Tensor], expected: Sequence[Tensor], *orders: Any
) -> None:
    """Check the values on every rank, and the strides of the outputs that have an order here."""
    result = check_everywhere(program, inputs, expected, exact=True)
    for outputs in result.per_rank:
        for x, order in zip(outputs, orders, strict=True):
            if x is not None and order is not None:
                strides = dense_strides(x.shape, outermost_first(order))
                assert has_strides(x, strides), f"{x.shape} {x.stride()}, not {strides}\n{program}"


def require(
    fd: Fd, t: Any, order: Sequence[int], spelling: str, layout: Layout | None = None
) -> None:
    """Both ways to require a memory order of an output."""
    if spelling == "op":
        y = fd.ops.stride_order(t, order)
        fd.add_output(y if layout is None else y.on(layout))
    else:
        fd.add_output(t if layout is None else t.on(layout), stride_order=order)


_COPIES = ("set", "stride_order", "permute", "narrow", "reshape", "expand")


def is_copy(i: Instruction) -> bool:
    """A view that must lie in some order, or a set into a buffer, is a copy."""
    return (i.fn or i.op) in _COPIES and i.order is not None


def copies(program: HostProgram) -> int:
    """How many instructions of the printed program copy."""
    return sum(is_copy(i) for i in program.walk())


def copies_after(program: HostProgram) -> int:
    """How many of them there are after the last wait."""
    code = list(program.instructions)
    (*_, last) = (at for at, i in enumerate(code) if i.op == "wait")
    return sum(is_copy(i) for i in code[last:])


# -- requirements --------------------------------------------------------------------------------

LAYOUTS = [Layout(MESH, {"tp": p}) for p in (Replicate(), Shard(0), Shard(1), Shard(2))]


@pytest.mark.parametrize("shape", [(8, 4, 12), (5, 6, 3)], ids=["even", "uneven"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_order_of_three_dims(
    spelling: str, order: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    x = lying(shape, (2, 1, 0))
    pairs = (
        product(LAYOUTS, repeat=2)
        if spelling == "output"
        else zip(LAYOUTS, LAYOUTS[::-1], strict=True)
    )
    for source, goal in pairs:
        with mf.FusionDefinition() as fd:
            a = fd.define_tensor(shape, torch.float64, source)
            require(fd, a + 1, order, spelling)  # computed
            require(fd, fd.ops.set(a), order, spelling, goal)  # resharded
            require(fd, a.permute(2, 0, 1), order, spelling)  # a view
        outputs_lie(mf.compile(fd), [x], [x + 1, x, x.permute(2, 0, 1)], order, order, order)


def test_a_requirement_in_the_middle_is_kept() -> None:
    """It reaches what is computed from the value, as on one device."""
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor([4, 6], torch.float64, MESH, {"tp": Shard(0)})
        t = fd.ops.stride_order(a * 2, (0, 1))
        fd.add_output(t + 1)
        fd.add_output(fd.ops.set(t).on(MESH, {}))
    program = mf.compile(fd)
    x = lying((4, 6), (1, 0))
    outputs_lie(program, [x], [x * 2 + 1, x * 2], (0, 1), None)
    assert str(program.fusion).count("order=[1,0]!") == 1


@pytest.mark.parametrize("merge", [None, merge_local, merge_nothing])
def test_a_requirement_is_kept_in_every_segmentation(merge: Any) -> None:
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor([4, 6, 2], torch.float64, MESH, {"tp": Shard(0)})
        b = fd.ops.where(a > 0, a, -a)
        t = fd.ops.stride_order(fd.ops.where(b > 3, b, a), (0, 2, 1))
        u = fd.ops.where(t > 1, t, t * 2)
        fd.add_output(t)
        fd.add_output(u, stride_order=(1, 0, 2))
        fd.add_output(fd.ops.set(u).on(MESH, {"tp": Shard(1)}), stride_order=(1, 2, 0))
    program = mf.compile(fd, should_merge=merge)
    x = lying((4, 6, 2), (2, 1, 0))
    t = torch.where(x.abs() > 3, x.abs(), x)
    u = torch.where(t > 1, t, t * 2)
    outputs_lie(program, [x], [t, u, u], (0, 2, 1), (1, 0, 2), (1, 2, 0))
    for part in program.segments:  # the producer's and each consumer's view are one
        for name, value in part.fusion.values.items():
            assert value == program.fusion.values[name]


def test_one_value_in_two_orders() -> None:
    """A second `stride_order` is a new value."""
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor([4, 6], torch.float64, MESH)
        t = fd.ops.stride_order(a + 1, (0, 1))
        u = fd.ops.stride_order(t, (1, 0))
        fd.add_output(t)
        fd.add_output(u)
        fd.add_output(fd.ops.stride_order(fd.ops.stride_order(a + 2, (0, 1)), (1, 0)))
    x = lying((4, 6), (1, 0))
    program = mf.compile(fd)
    outputs_lie(program, [x], [x + 1, x + 1, x + 2], (0, 1), (1, 0), (1, 0))
    assert copies(program.host) == 1  # t -> u; of the last two orders only the second is written


def test_a_name_is_no_communication() -> None:
    """A value may be called what the buffers of communications are called."""
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor([4, 6], torch.float64, MESH, name="a.recv")
        fd.add_output(a.permute(1, 0), stride_order=(0, 1))
    given = lying((4, 6), (0, 1))
    outputs_lie(mf.compile(fd), [given], [given.T], (0, 1))


def test_expanded_dims_are_written_out() -> None:
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor([4, 1], torch.float64, MESH, {"tp": Shard(0)})
        t = a.expand(4, 3)
        fd.add_output(t, stride_order=(0, 1))
        u = fd.ops.set(t * 1).on(MESH, {})
        fd.add_output(fd.ops.set(a.expand(4, 5)).on(MESH, {}), stride_order=(0, 1))
        fd.add_output(u, stride_order=(0, 1))
    x = lying((4, 1), (1, 0))
    expected = [x.expand(4, 3), x.expand(4, 5), x.expand(4, 3)]
    outputs_lie(mf.compile(fd), [x], expected, (0, 1), (0, 1), (0, 1))


def test_the_requirement_can_be_read() -> None:
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor([4, 6, 2], stride_order=(0, 1, 2))
        t = fd.ops.stride_order(a, (0, 2, 1))
        assert a.stride_order_requirement is None  # declared, not required
        assert t.stride_order_requirement == (0, 2, 1)
        assert (t + 1).stride_order_requirement is None
        assert fd.define_scalar(2.0).stride_order_requirement is None
        fd.add_output(t, stride_order=(0, 2, 1))  # required already: no other value
    assert fd.fusion.outputs == (t.name,)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_one_device_keeps_requirements(order: tuple[int, ...]) -> None:
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor([4, 3, 5], torch.float64, MESH)
        fd.add_output(a * 2, stride_order=order)
    x = lying((4, 3, 5), (2, 1, 0))
    for fusion in (fd, mf.compile(fd).fusion):  # as defined, and with the requirement on the op
        (y,) = mf.reference(fusion, [x])
        assert torch.equal(y, x * 2)
        assert y.stride() == dense_strides(y.shape, outermost_first(order))


def test_extents_of_each_run() -> None:
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor([-1, -1, 3], torch.float64, MESH, {"tp": Shard(0)}, name="a")
        fd.add_output(a + 1, stride_order=(0, 2, 1))
        fd.add_output(fd.ops.set(a).on(MESH, {}), stride_order=(0, 1, 2))
    program = mf.compile(fd)
    for shape in ((8, 5, 3), (6, 2, 3), (9, 7, 3)):
        x = lying(shape, (2, 1, 0))
        result = mf.simulate(program, [x], options=mf.Options(poison=True))
        for order, y, want in zip(((0, 2, 1), (0, 1, 2)), result.outputs, (x + 1, x), strict=True):
            assert torch.equal(y, want)
            for outputs in result.per_rank:
                part = outputs[order != (0, 2, 1)]
                assert has_strides(part, dense_strides(part.shape, outermost_first(order)))


@pytest.mark.parametrize("goal", [{"tp": Shard(0)}, {"tp": Shard(1)}, {}], ids=str)
def test_streamed_outputs(goal: dict[str, Any]) -> None:
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor([8, 6], torch.float64, MESH, {"tp": Shard(1)})
        t = (a * 2).on(MESH, {"tp": Shard(1)}, stream=Stream(0, 4))
        fd.add_output(t, stride_order=(0, 1))
        u = fd.ops.set(a + 1).on(MESH, goal, stream=Stream(0, 4))
        fd.add_output(u, stride_order=(0, 1))
    x = lying((8, 6), (1, 0))
    program = mf.compile(fd)
    outputs_lie(program, [x], [x * 2, x + 1], (0, 1), (0, 1))
    loops = [i for i in program.host.instructions if i.op == "for"]
    assert not any(i.order for loop in loops[:1] for i in loop.walk())  # written where it belongs


# -- what a requirement costs ----------------------------------------------------------------------

SUM = {"tp": Partial("sum")}
#: name -> (layout before, layout after, orders in which it arrives)
COMMUNICATIONS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "Allgather of dim 0": ({"tp": Shard(0)}, {}, (0, 1, 2)),
    "Allgather of dim 1": ({"tp": Shard(1)}, {}, (1, 0, 2)),
    "Allgather of dim 2": ({"tp": Shard(2)}, {}, (2, 0, 1)),
    "ReduceScatter of dim 0": (SUM, {"tp": Shard(0)}, (0, 1, 2)),
    "ReduceScatter of dim 1": (SUM, {"tp": Shard(1)}, (1, 0, 2)),
    "ReduceScatter of dim 2": (SUM, {"tp": Shard(2)}, (2, 0, 1)),
    "Allreduce": (SUM, {}, (0, 1, 2)),
    "AllToAll of dim 0": ({"tp": Shard(0)}, {"tp": Shard(1)}, (0, 1, 2)),
    "AllToAll of dim 1": ({"tp": Shard(1)}, {"tp": Shard(0)}, (1, 0, 2)),
    "AllToAll of dim 2": ({"tp": Shard(2)}, {"tp": Shard(1)}, (2, 0, 1)),
}


def reshard(source: Layout, goal: Layout, order: Any, shape: Sequence[int]) -> Program:
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor(shape, torch.float64, source)
        fd.add_output(fd.ops.set(a).on(goal), stride_order=order)
    return mf.compile(fd)


@pytest.mark.parametrize("shape", [(8, 4, 12), (5, 6, 7)], ids=["even", "uneven"])
@pytest.mark.parametrize("name", COMMUNICATIONS)
def test_a_requirement_costs_one_copy_or_none(name: str, shape: tuple[int, ...]) -> None:
    before, after, arrives = COMMUNICATIONS[name]
    source, goal = Layout(MESH, before), Layout(MESH, after)
    plain = reshard(source, goal, None, shape)
    (communication,) = plain.communications
    assert communication.kind == name.split()[0]
    assert copies_after(plain.host) == 0
    x = lying(shape, (2, 1, 0))
    for order in ORDERS:
        program = reshard(source, goal, order, shape)
        extra = int(outermost_first(order) != arrives)
        assert copies(program.host) == copies(plain.host) + extra, program
        assert copies_after(program.host) == extra
        assert len(program.host.instructions) - len(plain.host.instructions) in (0, extra * 2)
        outputs_lie(program, [x], [x], order)


# -- hints -----------------------------------------------------------------------------------------


def orders_of(program: Program) -> dict[str, str]:
    return {n: v.order_from for n, v in program.fusion.values.items() if v.order_from != "op"}


@pytest.mark.parametrize("declared", list(permutations(range(4))), ids=str)
def test_a_sum_follows_its_input(declared: tuple[int, ...]) -> None:
    x = lying((4, 2, 3, 5), declared)
    for dim, keepdim in product(range(4), (False, True)):
        with mf.FusionDefinition() as fd:
            a = fd.define_tensor(
                x.shape, torch.float64, MESH, {"tp": Shard(0)}, stride_order=declared
            )
            fd.add_output(fd.ops.sum(a, dims=[dim], keepdim=keepdim))
        program = mf.compile(fd)
        kept = declared if keepdim else [p for d, p in enumerate(declared) if d != dim]
        order = tuple(sorted(kept).index(p) for p in kept)
        if dim == 0:  # reduced over ranks: what arrives lies as it was posted
            check_everywhere(program, [x], [x.sum(dim, keepdim)], exact=True)
            assert orders_of(program) == {}
        else:
            outputs_lie(program, [x], [x.sum(dim, keepdim)], order)
            assert copies(program.host) == 0


def test_ties_that_disagree_give_no_hint() -> None:
    """Two inputs in two orders give the order of the first, as torch does on one device."""
    a, b = lying((4, 3, 2), (2, 1, 0)), lying((4, 3, 2), (0, 1, 2))
    for first, second in ((a, b), (b, a)):
        with mf.FusionDefinition() as fd:
            orders = [(2, 1, 0) if t is a else (0, 1, 2) for t in (first, second)]
            x, y = (fd.define_tensor(a.shape, torch.float64, MESH, stride_order=o) for o in orders)
            fd.add_output(x + y)
            fd.add_output(fd.ops.sum(x + y, dims=[1]))
        program = mf.compile(fd)
        assert orders_of(program) == {}
        outputs_lie(program, [first, second], [a + b, (a + b).sum(1)], orders[0], (1, 0))


def test_the_input_with_most_dims_counts() -> None:
    """A dim of one element is a broadcast; the bias has an order of its own that has no say."""
    x, bias = lying((4, 3, 2), (0, 1, 2)), lying((4, 1, 2), (2, 1, 0))
    with mf.FusionDefinition() as fd:
        b = fd.define_tensor(bias.shape, torch.float64, MESH, name="bias")
        a = fd.define_tensor(x.shape, torch.float64, MESH, stride_order=(0, 1, 2))
        fd.add_output(b + a)
        fd.add_output(fd.ops.sum(b + a, dims=[0]))
    outputs_lie(mf.compile(fd), [bias, x], [bias + x, (bias + x).sum(0)], (0, 1, 2), (0, 1))


def test_a_linear_is_not_pushed_into_a_bad_order() -> None:
    x, w = lying((4, 3, 8), (2, 1, 0)), lying((5, 8), (1, 0))
    with mf.FusionDefinition() as fd:
        a, b = (fd.define_tensor(t.shape, torch.float64, MESH) for t in (x, w))
        y = fd.ops.linear(a, b)
        fd.add_output(y)
        fd.add_output(fd.ops.relu(y))
        fd.add_output(y + 1)
    program = mf.compile(fd)
    want = x @ w.T
    plain = (2, 1, 0)
    outputs_lie(program, [x, w], [want, want.relu(), want + 1], plain, plain, plain)
    assert orders_of(program) == {} and copies(program.host) == 0


@pytest.mark.parametrize("place", [(3, 2, 1, 0), (3, 1, 2, 0), (2, 3, 1, 0)], ids=str)
@pytest.mark.parametrize("layout", [{}, {"tp": Shard(1)}], ids=str)
def test_attention_follows_its_query(layout: dict[str, Any], place: tuple[int, ...]) -> None:
    q = lying((2, 4, 6, 8), place) / 9
    k, v = lying((2, 4, 5, 8), (3, 2, 1, 0)) / 9, lying((2, 4, 5, 8), (3, 2, 1, 0)) / 9
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor(q.shape, torch.float64, MESH, layout, stride_order=place)
        b, c = (fd.define_tensor(t.shape, torch.float64, MESH, layout) for t in (k, v))
        fd.add_output(fd.ops.scaled_dot_product_attention(a, b, c))
    program = mf.compile(fd)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    result = check_everywhere(program, [q, k, v], [want])
    for (y,) in result.per_rank:
        assert y is not None and has_strides(y, dense_strides(y.shape, outermost_first(place)))
    assert copies(program.host) == 0


ATTENDED = {
    "heads of two sizes": ((2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 3), None),
    "a mask": ((2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 8), (6, 5)),
    "no heads": ((4, 6, 8), (4, 5, 8), (4, 5, 8), None),
}


@pytest.mark.parametrize("case", ATTENDED)
def test_attention_that_is_not_fused_has_no_hint(case: str) -> None:
    *shapes, mask = ATTENDED[case]
    order = (3, 1, 2, 0) if len(shapes[0]) == 4 else (1, 2, 0)
    with mf.FusionDefinition() as fd:
        q = fd.define_tensor(shapes[0], mesh=MESH, stride_order=order)
        k, v = (fd.define_tensor(s, mesh=MESH) for s in shapes[1:])
        m = None if mask is None else fd.define_tensor(mask, mesh=MESH)
        fd.add_output(fd.ops.scaled_dot_product_attention(q, k, v, m))
    assert orders_of(mf.compile(fd)) == {}


def test_aliases_have_no_hint() -> None:
    x = lying((4, 3, 2), (0, 1, 2))
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor(x.shape, torch.float64, MESH, stride_order=(0, 1, 2))
        b = fd.define_tensor([4, 2], torch.float64, MESH, name="b")
        fd.add_output(a)
        fd.add_output(a.permute(1, 0, 2))
        fd.add_output(fd.ops.sum(a, dims=[1]), reuse=b)
    program = mf.compile(fd)
    assert orders_of(program) == {}
    expected = [x, x.permute(1, 0, 2), x.sum(1)]
    outputs_lie(program, [x, lying((4, 2), (1, 0))], expected, (0, 1, 2), None, (1, 0))


#: What reads an output whose op could follow a channels-last input; each would have to copy.
READERS: dict[str, Callable[[Fd, Any], Any]] = {
    "posted": lambda fd, t: fd.ops.set(t).on(MESH, {}),
    "reshaped": lambda fd, t: t.reshape(-1),
    "linear": lambda fd, t: fd.ops.linear(
        t, fd.define_tensor([2, 3], torch.float64, MESH, name="w")
    ),
    "posted later": lambda fd, t: fd.ops.set(t + 1).on(MESH, {}),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_hint_is_dropped_where_a_reader_would_copy(reader: str) -> None:
    def program(declared: Any) -> Program:
        with mf.FusionDefinition() as fd:
            layout = {"tp": Shard(0)}
            a = fd.define_tensor([4, 5, 3], torch.float64, MESH, layout, stride_order=declared)
            t = fd.ops.sum(a, dims=[1])
            fd.add_output(t)
            fd.add_output(READERS[reader](fd, t))
        return mf.compile(fd)

    hinted, plain = program((0, 1, 2)), program(None)
    assert orders_of(hinted) == {}
    assert copies(hinted.host) == copies(plain.host)


def test_readers_see_the_hinted_order() -> None:
    """What is computed from an output with a hint lies as its op then writes it."""
    x = lying((4, 5, 3), (0, 1, 2))
    with mf.FusionDefinition() as fd:
        a = fd.define_tensor(x.shape, torch.float64, MESH, stride_order=(0, 1, 2))
        t = fd.ops.sum(a, dims=[1])
        fd.add_output(t)
        fd.add_output(fd.ops.relu(t))
        fd.add_output(fd.ops.stride_order(fd.ops.exp(t - t), (1, 0)))
    program = mf.compile(fd)
    expected = [x.sum(1), x.sum(1).relu(), torch.ones(4, 3, dtype=torch.float64)]
    outputs_lie(program, [x], expected, (0, 1), (0, 1), (1, 0))
    assert copies(program.host) == 0


OPS: dict[str, Callable[[Fd, Any], Any]] = {
    "sum": lambda fd, a: fd.ops.sum(a, dims=[1]),
    "max": lambda fd, a: fd.ops.max(a, dims=[1]),
    "mean": lambda fd, a: fd.ops.mean(a, dims=[1]),
    "softmax": lambda fd, a: fd.ops.softmax(a, dim=1),
    "layer_norm": lambda fd, a: fd.ops.layer_norm(a, [3]),
    "permute": lambda fd, a: fd.ops.sum(a.permute(2, 0, 1), dims=[0]),
    "reshape": lambda fd, a: fd.ops.sum(a.reshape(2, 2, 5, 3), dims=[2]),
    "unsqueeze": lambda fd, a: fd.ops.max(fd.ops.unsqueeze(a, 1), dims=[0]),
    "cat": lambda fd, a: fd.ops.cat([a, a + 1], dim=1),
}


@pytest.mark.parametrize("goal", [None, {}, {"tp": Shard(0)}, {"tp": Shard(1)}], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_a_hint_costs_no_copy(op: str, goal: dict[str, Any] | None) -> None:
    def program(declared: Any) -> Program:
        with mf.FusionDefinition() as fd:
            layout = {"tp": Shard(0)}
            a = fd.define_tensor([4, 5, 3], torch.float64, MESH, layout, stride_order=declared)
            t = OPS[op](fd, a)
            fd.add_output(t if goal is None else t.on(MESH, goal))
        return mf.compile(fd)

    plain = copies(program(None).host)
    for declared in ORDERS:
        assert copies(program(declared).host) <= plain


@pytest.mark.parametrize("stream", [Stream(0, 2), Stream(1, 3)], ids=str)
def test_a_streamed_output_takes_a_hint(stream: Stream) -> None:
    def program(declared: Any) -> Program:
        with mf.FusionDefinition() as fd:
            layout = {"tp": Shard(0)}
            a = fd.define_tensor([8, 5, 6], torch.float64, MESH, layout, stride_order=declared)
            fd.add_output(fd.ops.sum(a, dims=[1]).on(MESH, layout, stream=stream))
            fd.add_output(fd.ops.set(a).on(MESH, {}, stream=Stream(0, 2)))
        return mf.compile(fd)

    def sets(program: Program) -> int:
        return sum(i.op == "set" for i in program.host.walk())

    hinted = program((0, 1, 2))
    assert copies(hinted.host) == copies(program(None).host)
    assert sets(hinted) == sets(program(None))
    x = lying((8, 5, 6), (0, 1, 2))
    outputs_lie(hinted, [x], [x.sum(1), x], (0, 1), None)


# -- buffers of the caller -------------------------------------------------------------------------


def test_a_buffer_in_another_order_is_refused() -> None:
    program = reshard(Layout(MESH, {"tp": Shard(0)}), Layout(MESH, {}), (0, 1, 2), (4, 2, 3))
    x = lying((4, 2, 3), (2, 1, 0))
    rows = given_to_each(program, [x])
    for row in rows:
        row[program.fusion.outputs[0]] = torch.empty(x.shape, dtype=x.dtype)
    with pytest.raises(ProgramError, match=r"strides \(6, 3, 1\) on rank 0, expected \(1, 4, 8\)"):
        mf.simulate(program.host, per_rank=rows)


# -- errors ----------------------------------------------------------------------------------------


def refused(act: Callable[[Fd, Any], object], *texts: str) -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 3])
        with pytest.raises(DefinitionError) as caught:
            act(fd, x)
        message = str(caught.value)
        assert all(text in message for text in (*texts, "test_choose_orders.py:")), message
        fd.add_output(x + 1)


BAD = [(0, 0), (0,), (0, 1, 2), (1, 2), (-1, 0), 1]


@pytest.mark.parametrize("order", BAD, ids=str)
def test_no_permutation(order: Any) -> None:
    texts = "stride_order=", "permutation of 0..1", "0 the fastest"
    refused(lambda fd, x: fd.add_output(x, stride_order=order), *texts, "%x: f32[8,3]")
    refused(lambda fd, x: fd.ops.stride_order(x, order), *texts, "%x: f32[8,3]")
    refused(lambda fd, x: fd.define_tensor([8, 3], stride_order=order), *texts, "2 dims")
    refused(lambda fd, x: fd.add_output(fd.ops.stride_order(x, (0, 1)), stride_order=order), *texts)


@pytest.mark.parametrize("order", [(0.0, 1.0), ("a", 0)], ids=str)
def test_places_that_are_no_integers(order: Any) -> None:
    texts = "stride_order: order = ", "a list of integers"
    refused(lambda fd, x: fd.add_output(x, stride_order=order), *texts)
    refused(lambda fd, x: fd.ops.stride_order(x, order), *texts)
    texts = "stride_order=", "permutation of 0..1", "0 the fastest"
    refused(lambda fd, x: fd.define_tensor([8, 3], stride_order=order), *texts, "2 dims")


def test_tensors_without_dims() -> None:
    refused(lambda fd, x: fd.add_output(fd.ops.sum(x), stride_order=(0,)), "there are no dims")
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 3], mesh=MESH)
        fd.add_output(fd.ops.sum(x), stride_order=())
    assert mf.simulate(mf.compile(fd), [torch.ones(8, 3)]).outputs[0] == 24


def test_a_scalar_has_no_order() -> None:
    refused(lambda fd, x: fd.ops.stride_order(fd.define_scalar(2.0), ()), "%s", "is a scalar")


def test_two_orders_of_one_output() -> None:
    refused(
        lambda fd, x: fd.add_output(fd.ops.stride_order(x, (0, 1)), stride_order=(1, 0)),
        "stride_order=(1, 0)",
        "stride_order=(0, 1) is required",
        "one memory order",
        "fd.ops.stride_order(",
    )


def test_reuse_of_a_buffer_in_another_order() -> None:
    refused(
        lambda fd, x: fd.add_output(x + 1, stride_order=(0, 1), reuse=x),
        "not the one of %x",
        "takes the place",
    )
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([8, 3], torch.float64, MESH, stride_order=(0, 1))
        fd.add_output(x + 1, stride_order=(0, 1), reuse=x)
    given = lying((8, 3), (0, 1))
    outputs_lie(mf.compile(fd), [given.clone()], [given + 1], (0, 1))
