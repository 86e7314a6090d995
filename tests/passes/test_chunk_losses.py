"""Logits, losses and gradients of a head go through one loop, in chunks of rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.oracle import check_everywhere
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.hir.instructions import POSTS
from mdfuse.passes import compute_again

ONE, LINE = DeviceMesh.arange(one=1), DeviceMesh.arange(d=4)
GRID = DeviceMesh.arange(d=2, tp=2)
D0, TP0 = {"d": Shard(0)}, {"tp": Shard(0)}
#: mesh, layout of rows, layout of the weight, layout in which the head reads it
STYLES: dict[str, tuple[DeviceMesh, Any, Any, Any]] = {
    "one": (ONE, {}, {}, {}),
    "data": (LINE, D0, {}, {}),
    "gathered": (LINE, D0, D0, {}),
    "classes": (DeviceMesh.arange(tp=4), {}, TP0, TP0),
    "both": (GRID, D0, {**D0, **TP0}, TP0),
    "features": (DeviceMesh.arange(tp=2), {}, {"tp": Shard(1)}, {"tp": Shard(1)}),
}
WIDTH = 6

Loss = Callable[..., Any]


def _masked(lib: Any, logits: Any, target: Any) -> Any:
    losses = lib.cross_entropy(logits, target, reduction="none")
    return (losses * (target < 4)).sum() / 5


def _capped(lib: Any, logits: Any, target: Any) -> Any:
    return lib.cross_entropy(lib.tanh(logits / 2.5) * 2.5, target)


def _z(lib: Any, logits: Any, target: Any) -> Any:
    return lib.cross_entropy(logits, target) + 1e-2 * lib.logsumexp(logits, 1).square().mean()


def _nll(lib: Any, logits: Any, target: Any) -> Any:
    return lib.nll_loss(lib.log_softmax(logits, -1), target)


class _Torch:
    cross_entropy, nll_loss, log_softmax = F.cross_entropy, F.nll_loss, F.log_softmax
    tanh, logsumexp = torch.tanh, torch.logsumexp


LOSSES: dict[str, Loss] = {
    "mean": lambda lib, x, y: lib.cross_entropy(x, y),
    "sum": lambda lib, x, y: lib.cross_entropy(x, y, reduction="sum"),
    "ignored": lambda lib, x, y: lib.cross_entropy(x, y, ignore_index=3),
    "smoothed": lambda lib, x, y: lib.cross_entropy(x, y, label_smoothing=0.3),
    "masked": _masked,
    "capped": _capped,
    "z": _z,
    "nll": _nll,
}


def define(
    style: str,
    loss: Loss,
    shape: tuple[int, ...],
    classes: int,
    dtype: torch.dtype = torch.float64,
    *,
    bias: bool = False,
    frozen: bool = False,
) -> mf.FusionDefinition:
    mesh, rows, weight, read = STYLES[style]
    with mf.FusionDefinition("head") as fd:
        x = fd.define_tensor([*shape, WIDTH], dtype, mesh, rows)
        w = fd.define_tensor([classes, WIDTH], dtype, mesh, weight)
        y = fd.define_tensor([*shape], torch.int64, mesh, rows)
        more = [fd.define_tensor([classes], dtype, mesh, {}, name="b")] if bias else []
        with mf.recompute():
            whole = w if weight == read else fd.ops.set(w).on(mesh, read)
        logits = mf.ops.linear(x * 2.0, whole, *more).reshape(-1, classes)
        value = loss(
            mf.ops, logits.to(torch.float32) if dtype.itemsize < 4 else logits, y.flatten()
        )
        fd.add_output(value)
        for g in mf.grad(value, [x, *more] if frozen else [x, w, *more]):
            fd.add_output(g)
    return fd


def numbers(shape: tuple[int, ...], classes: int, bias: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(sum(shape) + classes)
    x, w = (torch.randn(*s, WIDTH, generator=g, dtype=torch.float64) for s in (shape, (classes,)))
    y = torch.randint(classes, shape, generator=g)
    return [x, w, y, *([torch.randn(classes, generator=g, dtype=torch.float64)] if bias else [])]


def by_torch(loss: Loss, given: list[Tensor], frozen: bool = False) -> list[Tensor]:
    x, w, y, *more = (t.clone().requires_grad_(t.is_floating_point()) for t in given)
    logits = F.linear(x * 2.0, w, *more).reshape(-1, w.shape[0])
    value = loss(_Torch, logits, y.flatten())
    return [value.detach(), *torch.autograd.grad(value, [x, *more] if frozen else [x, w, *more])]


def loops(program: mf.Program) -> list[Any]:
    return [i for i in program.host.walk() if i.op == "for" and "i" in i.outputs]


def kinds(program: mf.Program) -> Counter[str]:
    return Counter(str(i.comm.kind) for i in program.host.walk() if i.comm is not None)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("style", STYLES)
def test_values(style: str, name: str) -> None:
    """Even chunks, and uneven ones; a rank may have none of the last."""
    loss = LOSSES[name]
    for shape, classes, most in (((2, 4), 12, 90), ((5, 3), 11, 40)):
        given = numbers(shape, classes)
        fd = define(style, loss, shape, classes)
        program = mf.compile(fd, mf.Options(logits_bytes=most, poison=True, overlap="never"))
        assert loops(program), program.explain()
        check_everywhere(program, given, by_torch(loss, given))


def test_split_classes_take_a_kernel_between_posts() -> None:
    """Few bytes are posted, so on one stream: masks and sums are where the logits are read."""
    loss, classes = LOSSES["ignored"], 1 << 14
    options = mf.Options(logits_bytes=1 << 16, compile="always", overlap="never")
    program = mf.compile(define("classes", loss, (8,), classes, torch.bfloat16), options)
    (loop,), views = loops(program), ("free", "chunk")
    wide = {x for x, t in program.host.types.items() if t.shape == (8, classes)}
    readers = [i for i in loop.body if not wide.isdisjoint(i.reads) and i.op not in views]
    assert [i.op for i in readers] == ["launch", "launch"], f"{program}"
    assert all(i.op != "set_stream" for i in program.host.walk()), f"{program}"
    given = numbers((8,), classes)
    wide_sums = mf.compile(define("classes", loss, (8,), classes), options)
    check_everywhere(wide_sums, given, by_torch(loss, given))
    small = mf.compile(define("classes", LOSSES["mean"], (8,), 12), mf.Options(logits_bytes=40))
    assert any(i.op == "set_stream" for i in small.host.walk()), f"{small}"


@pytest.mark.parametrize("style", STYLES)
def test_nothing_of_the_size_of_logits_is_whole(style: str) -> None:
    rows, classes = (16, 4), 64
    fd = define(style, LOSSES["mean"], rows, classes, torch.float32)
    at_once = mf.compile(fd, mf.Options(logits_bytes=0, overlap="never"))
    whole = max(t.nbytes() for t in at_once.host.types.values())
    program = mf.compile(fd, mf.Options(logits_bytes=whole // 8, overlap="never"))
    made = (n for i in loops(program) for j in i.walk() for n in j.outputs)
    chunks = [program.host.types[n] for n in made if n.endswith(".i") and len(n) > 2]
    of_rows = [t for t in chunks if t.layout and t.layout.stream and t.layout.stream.op is None]
    assert max(t.nbytes() for t in of_rows) <= whole // 8
    assert kinds(program)["Allgather"] <= kinds(at_once)["Allgather"]
    assert kinds(program)["ReduceScatter"] == kinds(at_once)["ReduceScatter"]
    given = [
        torch.zeros(v.shape, dtype=v.dtype) for v in map(fd.fusion.values.get, fd.fusion.inputs)
    ]
    before, after = (mf.simulate(p, given).peak_bytes[0] for p in (at_once, program))
    assert after < before - whole


def test_a_weight_is_gathered_once_and_reduced_once() -> None:
    fd = define("gathered", LOSSES["mean"], (8, 4), 12)
    program = mf.compile(fd, mf.Options(logits_bytes=100))
    assert kinds(program) == {"Allgather": 1, "ReduceScatter": 1, "Allreduce": 2}
    posted = [j for i in loops(program) for j in i.walk() if j.op in POSTS]
    assert not posted


def test_split_classes_join_numbers_of_rows_and_no_more() -> None:
    program = mf.compile(
        define("classes", LOSSES["mean"], (8, 4), 12), mf.Options(logits_bytes=100, overlap="never")
    )
    inside = [j for i in loops(program) for j in i.walk() if j.comm is not None]
    assert {j.comm.kind for j in inside if j.comm} == {"Allreduce"}
    at_once = mf.compile(
        define("classes", LOSSES["mean"], (8, 4), 12), mf.Options(logits_bytes=0, overlap="never")
    )
    assert program.bytes_received(0) == at_once.bytes_received(0)


@pytest.mark.parametrize("features", [1, 64])
@pytest.mark.parametrize("style", ["one", "gathered", "classes"])
def test_16_bits_are_no_worse_than_at_once(
    style: str, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few features the loop adds the weight's gradient up; with many it follows the loop."""
    monkeypatch.setitem(globals(), "WIDTH", features)
    given = numbers((8, 8), 40)
    narrow = [t.bfloat16() if t.is_floating_point() else t for t in given]
    exact = by_torch(LOSSES["mean"], [t.double() if t.is_floating_point() else t for t in narrow])
    torch_own = [t.bfloat16() if t.is_floating_point() else t for t in narrow]
    x, w, y = (t.clone().requires_grad_(t.is_floating_point()) for t in torch_own)
    value = F.cross_entropy(F.linear(x * 2.0, w).reshape(-1, 40).float(), y.flatten())
    of_torch = [value.detach(), *torch.autograd.grad(value, [x, w])]
    fd = define(style, LOSSES["mean"], (8, 8), 40, torch.bfloat16)
    program = mf.compile(fd, mf.Options(logits_bytes=1200))
    added = [j for i in loops(program) for j in i.walk() if j.op == "accumulate"]
    is_added = any(len(program.host.types[j.outputs[0]].shape) == 2 for j in added)
    assert is_added == (features == 1)
    results = mf.simulate(program, narrow).outputs
    for ours, theirs, right in zip(results, of_torch, exact, strict=True):
        error, usual = ((t.double() - right).norm() / right.norm() for t in (ours, theirs))
        assert error <= 2 * usual + 1e-6, (error, usual)  # ranks, or a CPU, add terms in 16 bits


def test_bias_and_frozen_weight() -> None:
    for style in ("one", "gathered", "data"):
        for frozen in (False, True):
            fd = define(style, LOSSES["mean"], (8, 2), 12, bias=True, frozen=frozen)
            given = numbers((8, 2), 12, bias=True)
            program = mf.compile(fd, mf.Options(logits_bytes=100))
            assert loops(program)
            check_everywhere(program, given, by_torch(LOSSES["mean"], given, frozen))


def test_forward_alone() -> None:
    with mf.FusionDefinition("evaluated") as fd:
        x, w = fd.define_tensor([9, 4]), fd.define_tensor([7, 4])
        y = fd.define_tensor([9], torch.int64)
        fd.add_output(mf.ops.cross_entropy(mf.ops.linear(x, w), y, reduction="none"))
    program = mf.compile(fd, mf.Options(logits_bytes=60))
    given = [torch.randn(9, 4), torch.randn(7, 4), torch.randint(7, (9,))]
    expected = F.cross_entropy(given[0] @ given[1].T, given[2], reduction="none")
    assert loops(program)
    check_everywhere(program, given, [expected])


def refused(loss: Loss, **how: Any) -> str:
    with mf.FusionDefinition("refused") as fd:
        x, w = fd.define_tensor([8, 4], name="x"), fd.define_tensor([6, 4], name="w")
        y = fd.define_tensor([8], torch.int64, name="y")
        logits = mf.ops.linear(x, w)
        value = loss(mf.ops, logits, y)
        fd.add_output(value)
        if how.get("shown"):
            fd.add_output(logits)
        for g in mf.grad(value, [x, w]):
            fd.add_output(g)
    program = mf.compile(fd, mf.Options(logits_bytes=50))
    given = [torch.randn(8, 4).double(), torch.randn(6, 4).double(), torch.randint(6, (8,))]
    single = [t.float() if t.is_floating_point() else t for t in given]
    a, b, c = (t.clone().requires_grad_(t.is_floating_point()) for t in given)
    right = loss(_Torch, a @ b.T, c)
    expected = [right.detach(), *([(a @ b.T).detach()] if how.get("shown") else []),
                *torch.autograd.grad(right, [a, b])]  # fmt: skip
    for ours, theirs in zip(mf.simulate(program, single).outputs, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    assert not loops(program)
    return program.explain()


def test_heads_that_stay_whole_say_why() -> None:
    squared = refused(lambda lib, x, y: lib.cross_entropy(x, y).square())
    assert "a gradient of logits needs %" in squared and "of which all rows are part" in squared
    shown = refused(LOSSES["mean"], shown=True)
    assert "at once, because %logits is returned" in shown


def test_a_head_in_chunks_is_told() -> None:
    program = mf.compile(define("one", LOSSES["mean"], (8, 2), 12), mf.Options(logits_bytes=300))
    assert "f64[16,12]" in program.explain()
    assert "with losses and gradients in 3 chunks of rows" in program.explain()


def test_small_logits_and_one_row_stay() -> None:
    fd = define("one", LOSSES["mean"], (8, 2), 12)
    assert not loops(mf.compile(fd)) and not loops(mf.compile(fd, mf.Options(logits_bytes=0)))
    one = mf.compile(define("one", LOSSES["mean"], (1, 1), 12), mf.Options(logits_bytes=1))
    assert not loops(one) and "one row is not divided" in one.explain()


def test_two_losses_of_a_head_share_the_loop() -> None:
    def loss(lib: Any, x: Any, y: Any) -> Any:
        return lib.cross_entropy(x, y) + 0.5 * lib.cross_entropy(x, (y + 1) % x.shape[1])

    given = numbers((4, 4), 12)
    program = mf.compile(define("gathered", loss, (4, 4), 12), mf.Options(logits_bytes=50))
    assert len(loops(program)) == 1
    check_everywhere(program, given, by_torch(loss, given))


def test_microbatches_are_the_only_loop() -> None:
    fd = define("data", LOSSES["sum"], (8, 1), 12)
    options = mf.Options(logits_bytes=50)
    program = mf.pipeline(fd, microbatches=2, batch={"x": 0, "y": 0}, options=options)
    given = numbers((8, 1), 12)
    check_everywhere(program, given, by_torch(LOSSES["sum"], given))


@pytest.mark.parametrize("seed", range(12))
def test_drawn(seed: int) -> None:
    draw = random.Random(seed)
    style, name = draw.choice([*STYLES]), draw.choice([*LOSSES])
    shape = (draw.randint(1, 9), draw.randint(1, 5))
    classes, bias, frozen = draw.randint(2, 17), draw.random() < 0.3, draw.random() < 0.3
    fd = define(style, LOSSES[name], shape, classes, bias=bias, frozen=frozen)
    given = numbers(shape, classes, bias)
    options = mf.Options(
        logits_bytes=draw.choice([1, 40, 150, 600]), poison=True, streams=draw.choice([1, 4]),
        prefetch_bytes=draw.choice([0, 1 << 20]), bucket_bytes=draw.choice([0, 1 << 20]),
    )  # fmt: skip
    check_everywhere(mf.compile(fd, options), given, by_torch(LOSSES[name], given, frozen))


@pytest.mark.parametrize("seed", range(10))
def test_positions_in_zigzag_order(seed: int) -> None:
    """A rank has two runs of rows, which chunks cut as they lie; labels are those of the next."""
    draw = random.Random(seed)
    ranks, rows = draw.choice([2, 3, 4]), draw.choice([1, 2, 5, 16, 23, 40])
    classes, most = draw.randint(2, 17), draw.choice([40, 150, 600])
    mesh, placed = DeviceMesh.arange(cp=ranks), {"cp": Shard(1, zigzag=True)}
    of_weight = draw.choice([{}, {"cp": Shard(0)}])
    with mf.FusionDefinition("zigzag") as fd:
        x = fd.define_tensor([1, rows, WIDTH], torch.float64, mesh, placed)
        w = fd.define_tensor([classes, WIDTH], torch.float64, mesh, of_weight)
        y = fd.define_tensor([1, rows], torch.int64, mesh, placed)
        next_ = mf.ops.pad(y, (0, 1), value=-100)[:, 1:]
        logits = mf.ops.linear(x * 2.0, fd.ops.set(w).on(mesh, {}))
        value = mf.ops.cross_entropy(
            logits.reshape(-1, classes), next_.reshape(-1), reduction="sum"
        )
        for z in (value, *mf.grad(value, [x, w])):
            fd.add_output(z)
    given = numbers((1, rows), classes)
    program = mf.compile(fd, mf.Options(logits_bytes=most, poison=True, overlap="never"))
    leaves = [t.clone().requires_grad_() for t in given[:2]]
    wide = F.linear(leaves[0] * 2.0, leaves[1]).reshape(-1, classes)
    loss = F.cross_entropy(wide, F.pad(given[2], (0, 1), value=-100)[:, 1:].reshape(-1),
                           reduction="sum")  # fmt: skip
    want = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    check_everywhere(program, given, want)
    here = -(-rows // ranks)
    if here > 1 and 4 * here * classes > most:
        assert loops(program), program.explain()
        shapes = [t.local_shape(0) for n, t in program.host.types.items() if t.layout]
        whole = here * classes
        assert not [
            s for s in shapes if len(s) > 1 and s[-1] == classes and whole <= torch.Size(s).numel()
        ]


def test_logits_of_16_bits_are_what_is_kept_between_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit of a loop casts them again, so that those in f32 are in no memory."""
    classes, rows = 1 << 14, 4
    given = [t.bfloat16() if t.is_floating_point() else t for t in numbers((8,), classes)]

    def compiled(how: Any, plans: int = 1) -> mf.Program:
        options = mf.Options(logits_bytes=rows * classes, compile=how, overlap="never", plans=plans)
        return mf.compile(define("classes", LOSSES["mean"], (8,), classes, torch.bfloat16), options)

    program, by_calls = compiled("always"), compiled("never")
    (loop,) = loops(program)
    units = [i for i in loop.body if i.op == "launch"]
    between = {program.host.types[str(x)] for i in units for x in (*i.inputs, *i.outputs)}
    assert not [t for t in between if t.shape == (8, classes) and t.dtype is torch.float32]
    run, other = (mf.simulate(p, given) for p in (program, by_calls))
    assert all(map(torch.equal, run.outputs, other.outputs))
    monkeypatch.setattr(compute_again, "run", lambda fusion: fusion)
    (before, *_) = mf.simulate(compiled("always", plans=2), given).peak_bytes  # lowered anew
    assert run.peak_bytes[0] <= before - 2 * rows * classes // 4
