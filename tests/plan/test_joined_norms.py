"""Sums over ranks that are posted together with the norms behind them, on the simulator.

A stand-in gives the simulator's posters what those of GPUs have. Values are compared with float64
or, to the bit, with the same program by separate steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Options, Partial, Shard, hir
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.row_norms import RowNorm
from mdfuse.hir.verify.check import verify
from mdfuse.plan.build import build
from mdfuse.simulation import network
from mdfuse.simulation.network import SimPoster, SimWork

MESH = DeviceMesh.arange(tp=2)
OPTIONS = Options(backend="gloo, tp=symmetric", compile="always")
EPS = 1e-5

Build = Callable[[FusionDefinition, Any, Any, Any], tuple[Any, ...]]


class JoinedWork:
    """A kernel under way: its results are there once the sum is, and somebody waits."""

    def __init__(self, work: SimWork, finish: Callable[[], None]) -> None:
        self.work, self.finish = work, finish

    @property
    def is_done(self) -> bool:
        return self.work.is_done

    def wait(self) -> None:
        self.work.wait()
        self.finish()


def join(poster: Any, norm: RowNorm, log: list[RowNorm]) -> Callable[..., JoinedWork]:
    """The function that posts as the kernel does, whose results are NaN until the wait."""

    def post(x: Tensor, r: Tensor | None, w: Tensor | None, t: Any, y: Tensor) -> JoinedWork:
        log.append(norm)
        given = [r is not None, w is not None, t is not None]
        assert given == [norm.has_residual, norm.weight_dtype is not None, norm.has_total]
        assert all(z is None or z.is_contiguous() for z in (x, r, w, t, y))
        places = [z.untyped_storage().data_ptr() for z in (x, r, w) if z is not None]
        summed = torch.empty_like(x)
        for z in (t, y):
            if z is not None:
                assert z.untyped_storage().data_ptr() not in places
                z.fill_(torch.nan)

        def finish() -> None:
            total = summed if r is None else r + summed
            if t is not None:
                t.copy_(total)
            if norm.is_rounded:
                wide = total.float()
                wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
                y.copy_(wide.to(norm.dtype) * w)
            else:
                y.copy_(F.rms_norm(total, [norm.width], w, norm.eps))

        return JoinedWork(poster([x], [summed]), finish)

    return post


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[RowNorm]:
    """The norms that were posted with their sums, one for each rank and post."""
    log: list[RowNorm] = []

    class Poster(SimPoster):
        def joined(self, norm: RowNorm, rows: int) -> Any:
            return join(self, norm, log) if norm.fits(rows, len(self.call.team)) else None

    monkeypatch.setattr(network, "SimPoster", Poster)
    return log


def define(
    build: Build,
    shape: tuple[int, ...] = (6, 10),
    dtype: torch.dtype = torch.bfloat16,
    options: Options = OPTIONS,
    layout: dict[str, Any] | None = None,
) -> mf.Program:
    """A program of a sum, a residual and a weight: x of [2, *shape] is split."""
    with FusionDefinition("norms") as fd:
        x = fd.define_tensor([2, *shape], dtype, MESH, {"tp": Shard(0)}, name="x")
        r = fd.define_tensor([*shape], dtype, MESH, layout or {}, name="r")
        w = fd.define_tensor([shape[-1]], dtype, MESH, name="w")
        part = (x * 0.5).sum(0).on(MESH, {"tp": Partial("sum")})
        for y in build(fd, fd.ops.set(part).on(MESH, {}), r, w):
            fd.add_output(y)
    program = mf.compile(fd, options)
    verify(program.host)
    assert hir.parse(str(program.host)) == program.host
    return program


def inputs(shape: tuple[int, ...] = (6, 10), dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    every = ((2, *shape), shape, shape[-1:])
    return [torch.randn(n, generator=draw).to(dtype) for n in every]


def spelled(y: Any, w: Any) -> Any:
    """The norm as models of transformers compute it."""
    wide = y.to(torch.float32)
    wide = wide * (wide.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    return w * wide.to(y.value.dtype)


def add_norm(fd: Any, s: Any, r: Any, w: Any) -> tuple[Any, ...]:
    total = r + s
    return total, fd.ops.rms_norm(total, (s.shape[-1],), w, EPS)


def add_norm_alone(fd: Any, s: Any, r: Any, w: Any) -> tuple[Any, ...]:
    return (add_norm(fd, s, r, w)[1] * 2.0,)


def norm_alone(fd: Any, s: Any, r: Any, w: Any) -> tuple[Any, ...]:
    y = fd.ops.rms_norm(s, (s.shape[-1],), w, EPS)
    return (y * r, y + r)


def sum_and_norm(fd: Any, s: Any, r: Any, w: Any) -> tuple[Any, ...]:
    return (fd.ops.rms_norm(s, (s.shape[-1],), w, EPS) + 1.0, s * 3.0)


def spelled_norm(fd: Any, s: Any, r: Any, w: Any) -> tuple[Any, ...]:
    return (spelled(r + s, w).exp(),)


def without_weight(fd: Any, s: Any, r: Any, w: Any) -> tuple[Any, ...]:
    total = s + r
    return total * w, fd.ops.rms_norm(total, (s.shape[-1],), eps=EPS)


def two_of_them(fd: Any, s: Any, r: Any, w: Any) -> tuple[Any, ...]:
    """A layer with two sums, the second one of what the first one's norm makes."""
    total, y = add_norm(fd, s, r, w)
    z = fd.define_tensor([2, *s.shape], s.value.dtype, MESH, {"tp": Shard(0)}, name="z")
    again = fd.ops.set((z * y).sum(0).on(MESH, {"tp": Partial("sum")})).on(MESH, {})
    return add_norm(fd, again, total, w)


JOINED: dict[str, tuple[Build, tuple[bool, bool]]] = {
    "residual and total": (add_norm, (True, True)),
    "residual": (add_norm_alone, (True, False)),
    "norm": (norm_alone, (False, True)),
    "sum read by others": (sum_and_norm, (False, True)),
    "spelled": (spelled_norm, (True, False)),
    "no weight": (without_weight, (True, True)),
}


@pytest.mark.parametrize("schedule", [None, 1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", JOINED)
def test_a_norm_is_posted_with_its_sum(
    name: str, dtype: torch.dtype, schedule: int | None, joined: list[RowNorm]
) -> None:
    build, form = JOINED[name]
    program, apart = (define(build, dtype=dtype, options=x) for x in (OPTIONS, APART))
    assert str(program.host).count("then=row_norm") == 1 and "then=" not in str(apart.host)
    given = inputs(dtype=dtype)
    options = Options(poison=True)
    got = mf.simulate(program, given, options=options, schedule=schedule)
    if schedule is None:
        assert [(n.has_residual, n.has_total) for n in joined] == [form] * 2
        assert {n.width for n in joined} == {10} and {n.eps for n in joined} == {EPS}
    want = mf.simulate(apart, given, options=options)
    for a, b in zip(got.outputs, want.outputs, strict=True):
        assert torch.equal(a, b)


APART = Options(backend=OPTIONS.backend, compile="always", sums="apart")


def long_rows(fd: Any, s: Any, r: Any, w: Any) -> tuple[Any, ...]:
    return (s.exp() * r, w)


def twice_added(fd: Any, s: Any, r: Any, w: Any) -> tuple[Any, ...]:
    """The sum is read by more than the addition, so it is not in the norm's kernel alone."""
    total = r + s
    return fd.ops.rms_norm(total, (s.shape[-1],), w, EPS), s + 1.0


def over_two_dims(fd: Any, s: Any, r: Any, w: Any) -> tuple[Any, ...]:
    return (fd.ops.rms_norm(s, (*s.shape,), eps=EPS) + r,)


def inner_read(fd: Any, s: Any, r: Any, w: Any) -> tuple[Any, ...]:
    """The mean of the squares is a result, too."""
    wide = s.to(torch.float32)
    mean = wide.pow(2).mean(-1, keepdim=True)
    return w * (wide * (mean + EPS).rsqrt()).to(s.value.dtype), mean


APART_ANYWAY: dict[str, tuple[Build, tuple[int, ...], Options]] = {
    "no norm": (long_rows, (6, 10), OPTIONS),
    "sum read besides the residual": (twice_added, (6, 10), OPTIONS),
    "two dims": (over_two_dims, (6, 10), OPTIONS),
    "mean of squares read": (inner_read, (6, 10), OPTIONS),
    "too many rows": (add_norm, (241, 10), OPTIONS),
    "too wide": (add_norm, (1, 16_385), OPTIONS),
    "not compiled": (add_norm, (6, 10), Options(backend=OPTIONS.backend, compile="never")),
    "another backend": (add_norm, (6, 10), Options(backend="gloo", compile="always")),
}


@pytest.mark.parametrize("name", APART_ANYWAY)
def test_what_is_computed_apart(name: str, joined: list[RowNorm]) -> None:
    build, shape, options = APART_ANYWAY[name]
    program = define(build, shape, options=options)
    assert "then=" not in str(program.host)
    given = inputs(shape)
    got = mf.simulate(program, given).outputs
    if build is add_norm and name != "too wide":
        check(got, given)
    assert not joined


def check(got: list[Tensor], given: list[Tensor]) -> None:
    """The total and the norm beside float64."""
    x, r, w = (z.double() for z in given)
    total = r + (x * 0.5).sum(0)
    right = F.rms_norm(total, total.shape[-1:], w, EPS)
    for a, b in zip(got, (total, right), strict=True):
        assert (a.double() - b).norm() < 2e-2 * b.norm()


@pytest.mark.parametrize("shape", [(1, 10), (3, 7), (2, 3, 16), (5, 6144)])
def test_shapes(shape: tuple[int, ...], joined: list[RowNorm]) -> None:
    """One row, more dims than two, widths that are no power of 2."""
    given = inputs(shape)
    check(mf.simulate(define(add_norm, shape), given).outputs, given)
    assert len(joined) == 2 and joined[0].width == shape[-1]


def test_two_sums_follow_each_other(joined: list[RowNorm]) -> None:
    given = [*inputs(), torch.randn(2, 6, 10).to(torch.bfloat16)]
    program, apart = (define(two_of_them, options=x) for x in (OPTIONS, APART))
    assert str(program.host).count("then=row_norm") == 2
    for schedule in (None, 1, 2, 3):
        got = mf.simulate(program, given, options=Options(poison=True), schedule=schedule)
        want = mf.simulate(apart, given)
        assert all(map(torch.equal, got.outputs, want.outputs))
    assert len(joined) == 16


def test_buffers_of_callers(joined: list[RowNorm]) -> None:
    """Operands that are not dense are copied; results lie where the caller says."""
    program, given = define(add_norm), inputs()
    names = program.host.outputs
    per_rank, out = [], []
    for rank in range(2):
        r = given[1].T.contiguous().T if rank else given[1]
        total, y = torch.full((2, 6, 10), torch.nan, dtype=torch.bfloat16)
        out.append((total, y))
        mine = {"x": given[0][rank : rank + 1], "r": r, "w": given[2]}
        per_rank.append({**mine, names[0]: total, names[1]: y})
    mf.simulate(program, per_rank=per_rank)
    assert len(joined) == 2
    for total, y in out:
        check([total, y], given)


def test_a_backend_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps are then those of any program."""

    class Poster(SimPoster):
        def joined(self, norm: RowNorm, rows: int) -> None:
            asked.append(rows)

    asked, shape = list[int](), (7, 12)  # a program of its own: plans are kept by their text
    monkeypatch.setattr(network, "SimPoster", Poster)
    check(mf.simulate(define(add_norm, shape), inputs(shape)).outputs, inputs(shape))
    assert asked == [7, 7]


@dataclass
class Alike:
    """A poster of a rank whose peer has the same terms, so that a sum is twice its operand."""

    log: list[RowNorm]

    def __call__(self, srcs: list[Tensor], dsts: list[Tensor]) -> Any:
        return SimpleNamespace(is_done=True, wait=lambda: dsts[0].copy_(2 * srcs[0]))

    def prepare(self, *_: Any) -> None:
        """Return None: nothing is prepared."""

    def joined(self, norm: RowNorm, rows: int) -> Any:
        return join(self, norm, self.log)


@pytest.mark.parametrize("is_dense", [True, False])
def test_a_plan_keeps_buffers_until_the_wait(is_dense: bool) -> None:
    """Plans have memory of their own, in which a buffer has the place of another one later."""
    program, log = define(two_of_them, (5, 24)), list[RowNorm]()
    host = project(program.host, 0)
    plan = build(host, lambda call: Alike(log), torch.device("cpu"), poison=False)
    assert "joined" in str(plan) and plan.owned.nbytes
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        x, r, w, z = (
            torch.randn(n, generator=draw).to(torch.bfloat16)
            for n in ((1, 5, 24), (5, 24), (24,), (1, 5, 24))
        )
        given = [x, r if is_dense else r.T.contiguous().T, w, z]
        got = plan.run(given)
        total = x.double()[0] + r.double()
        y = F.rms_norm(total, (24,), w.double(), EPS)
        total = total + 2 * z.double()[0] * y
        for a, b in zip(got, (total, F.rms_norm(total, (24,), w.double(), EPS)), strict=True):
            assert (a.double() - b).norm() < 2e-2 * b.norm()
    assert len(log) == 6 and all(n.has_residual and n.has_total for n in log[1::2])


def test_a_word_that_is_wrong_does_no_harm(joined: list[RowNorm]) -> None:
    """By hand: `then=` in front of other work, and at another post, says nothing."""
    text = """
host @hand on mesh(tp=2) {
  input %x: f32[2,4] (tp=P(sum))
  input %y: f32[2,4] (tp=P(sum))
  %s: f32[2,4] (tp=R) = alloc
  %c = post allreduce[sum](%x) -> %s f32[2,4] (tp=P(sum)) => (tp=R) axis=tp then=row_norm
  wait %c
  launch unit(%s) -> %b {
    %a: f32[2,4] (tp=R) = mul(%s, 2.0)
    %b: f32[2,4] (tp=R) = exp(%a)
  }
  %m: f32[1,4] of [2,4] (tp=S0) = alloc
  %d = post reduce_scatter[sum](%y) -> %m f32[2,4] (tp=P(sum)) => (tp=S0) axis=tp dim=0 THEN
  wait %d
  launch norm(%m) -> %n {
    %n: f32[1,4] of [2,4] (tp=S0) = rms_norm(%m, None, normalized_shape=[4], eps=1e-06)
  }
  return %b, %n
}
"""
    host = hir.parse(text.replace("THEN", "then=row_norm"))
    verify(host)
    x, y = torch.rand(2, 2, 4), torch.rand(2, 2, 4)
    per_rank = [{"x": x[n], "y": y[n]} for n in range(2)]
    got = mf.simulate(host, per_rank=per_rank).outputs
    torch.testing.assert_close(got[0], (2 * x.sum(0)).exp())
    torch.testing.assert_close(got[1], F.rms_norm(y.sum(0), [4], eps=1e-6))
    assert not joined


HAND = """
host @hand on m0=mesh(tp=2), m1=mesh(q=1: 2) {
  input %x: f32[4,8] m0(tp=P(sum))
  input %r: f32[4,8] m0(tp=R)
  input %w: f32[8] m0(tp=R)
  input %o: f32[1] m1(q=R)
  BEFORE
  %s: f32[4,8] m0(tp=R) = alloc
  %c = post allreduce[sum](%x) -> %s f32[4,8] m0(tp=P(sum)) => m0(tp=R) axis=tp then=row_norm
  BETWEEN
  wait %c
  launch unit(%s, %r, %w) -> %t, %y {
    %t: f32[4,8] m0(tp=R) = add(%s, %r)
    %y: f32[4,8] m0(tp=R) = rms_norm(%t, %w, normalized_shape=[8], eps=1e-05)
  }
  BEHIND
  %u: f32[4,8] m0(tp=R) = mul(%y, 2.0)
  return %t, %u
}
"""

SPELLED = """
    %square: f32[4,8] m0(tp=R) = pow(%t, 2)
    %mean: f32[4,1] m0(tp=R) = mean(%square, dims=[-1], keepdim=True)
    %moved: f32[4,1] m0(tp=R) = add(%mean, 1e-05)
    %root: f32[4,1] m0(tp=R) = rsqrt(%moved)
    %t = mul(%t, %root)
    %y: f32[4,8] m0(tp=R) = mul(%t, %w)"""

ONE_NORM = "\n    %y: f32[4,8] m0(tp=R) = rms_norm(%t, %w, normalized_shape=[8], eps=1e-05)"

#: What changes in the text, and whether the sum is posted with the norm.
BY_HAND: dict[str, tuple[tuple[tuple[str, str], ...], bool]] = {
    "as it is": ((), True),
    "a view in between": ((("BETWEEN", "%v: f32[4,8] m0(tp=R) = narrow(%r)"),), True),
    "a name that stands for two values": (((ONE_NORM, SPELLED),), False),
    "a name that is made again": (
        (
            ("BEFORE", "%y: f32[4,8] m0(tp=R) = mul(%r, 5.0)"),
            ("BETWEEN", "free %y"),
            ("    %y: f32[4,8] m0(tp=R) =", "    %y ="),
            ("BEHIND", "free %s"),
            ("return %t, %u", "free %y\n  return %t, %u"),
        ),
        False,
    ),
    "a buffer in another order": (
        (
            ("BETWEEN", "%t: f32[4,8] m0(tp=R) = alloc order=[1,0]"),
            ("    %t: f32[4,8] m0(tp=R) =", "    %t ="),
        ),
        False,
    ),
    "sent before": (
        (
            (
                "BEFORE",
                "%y: f32[4,8] m0(tp=R) = mul(%r, 2.0)\n  %z: f32[4,8] m1(q=R) = alloc\n"
                "  %b = post broadcast(%y) -> %z f32[4,8] m0(tp=R) => m1(q=R)\n  wait %b",
            ),
            ("    %y: f32[4,8] m0(tp=R) =", "    %y ="),
        ),
        True,
    ),
    "read by one rank": (
        (
            (
                "BEHIND",
                "%z: f32[4,8] m1(q=R) = alloc\n"
                "  %b = post broadcast(%s) -> %z f32[4,8] m0(tp=R) => m1(q=R)\n  wait %b",
            ),
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str, joined: list[RowNorm]) -> None:
    """Values are those of the units, and both ranks make the same calls: see `joined`."""
    changes, is_joined = BY_HAND[name]
    text = HAND
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    for place in ("BEFORE", "BETWEEN", "BEHIND"):
        text = text.replace(f"  {place}\n", "")
    host = hir.parse(text)
    verify(host)
    assert hir.parse(str(host)) == host
    x, r, w = (torch.randn(n) for n in ((2, 4, 8), (4, 8), (8,)))
    total = x.sum(0) + r
    y = F.rms_norm(total, (8,), w, EPS)
    total = y / w if "two values" in name else total
    for schedule in (None, 1, 2):
        per_rank = [{"x": x[n], "r": r, "w": w} for n in range(2)]
        got = mf.simulate(
            host,
            per_rank=[*per_rank, {"o": torch.ones(1)}],
            options=Options(poison=True),
            schedule=schedule,
        )
        for each in got.per_rank[:2]:
            torch.testing.assert_close(each[0], total)
            torch.testing.assert_close(each[1], 2 * y)
            assert each[0].stride() == ((1, 4) if "order" in name else (8, 1))
    assert [n.has_residual for n in joined] == [True] * 6 * is_joined  # of ranks and schedules


def test_members_post_alike_where_one_of_them_reads_the_sum(joined: list[RowNorm]) -> None:
    """One rank alone sends the sum to another mesh; what is posted does not depend on that."""
    other = DeviceMesh([2], axes=("q",))

    def build(fd: Any, s: Any, r: Any, w: Any) -> tuple[Any, ...]:
        y = spelled(s, w)
        return fd.ops.set(s).on(other, {}) * 2.0, y + r

    program, given = define(build), inputs()
    assert "then=row_norm" in str(program.host)
    ranks = [project(program.host, n) for n in range(2)]
    assert ["broadcast" in str(x) for x in ranks] == [True, False]
    got = mf.simulate(program, given).outputs
    assert len(joined) == 2 and joined[0] == joined[1]
    x, r, w = (z.double() for z in given)
    total = (x * 0.5).sum(0)
    right = (2 * total, F.rms_norm(total, (10,), w, EPS) + r)
    for a, b in zip(got, right, strict=True):
        assert (a.double() - b).norm() < 2e-2 * b.norm()


def test_a_weight_that_is_the_sum(joined: list[RowNorm]) -> None:
    """It is there behind the sum alone, so that it cannot be in the norm's kernel."""

    def build(fd: Any, s: Any, r: Any, w: Any) -> tuple[Any, ...]:
        return (fd.ops.rms_norm(s, (s.shape[-1],), s, EPS) * 2.0, spelled(s, s) + r)

    program, given = define(build, (10,), torch.float32), inputs((10,), torch.float32)
    got = mf.simulate(program, given, options=Options(poison=True)).outputs
    total = (given[0].double() * 0.5).sum(0)
    y = F.rms_norm(total, (10,), total, EPS)
    torch.testing.assert_close(got[0].double(), 2 * y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1].double(), y + given[1].double(), rtol=1e-5, atol=1e-5)
    assert {n.weight_dtype for n in joined} <= {None}


def test_explained() -> None:
    text = define(two_of_them).explain()
    assert "sums: 2 of 2 sums over ranks with the norms behind them in one kernel" in text
