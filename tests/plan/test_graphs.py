"""Plans as graphs: what is captured, what is copied in and out, on a recorder that repeats calls.

A fake recorder stands for CUDA graphs: a replay makes the recorded calls again, on the addresses
that they had, and puts the results where the first ones lay. On GPUs the same is tested with CUDA's
own in `tests/multidevice/test_plans_ranks.py`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.fake_graphs import FakeRecorder, Repeat, capture_on_cpu
from torch import Tensor

import mdfuse as mf
from mdfuse.backends.base import Buffer, Posting, PostSite, Prepared
from mdfuse.backends.work import DONE
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.text.parser import parse
from mdfuse.plan.build import Plan, build
from mdfuse.plan.captures import ScratchPool, ScratchPools
from mdfuse.plan.graphs import GraphPlan, regions
from mdfuse.runtime.communicator import Communicator

CPU = torch.device("cpu")


def program(body: str) -> Any:
    return project(parse(f"host @small on mesh(x=1) {{ {body} }}"), 0)


def refuse(call: Any) -> Any:
    raise AssertionError("nothing is posted here")


def plan_of(body: str, arguments: list[Any], out: list[Any] | None = None) -> Plan:
    return build(program(body), refuse, CPU, True, arguments, out)


def graphs_of(
    body: str, arguments: list[Any], out: list[Any] | None = None, stay: tuple[int, ...] = ()
) -> tuple[GraphPlan, FakeRecorder]:
    """A captured plan; the arguments at positions `stay` lay at one address so far."""
    plan, recorder = plan_of(body, arguments, out), FakeRecorder()
    slots = [plan.inputs[n] for n in stay]
    found = plan.addresses(arguments, out)
    return GraphPlan(plan, lambda: plan, recorder, {s: found[s] for s in slots}), recorder


def draw(*shape: int) -> Tensor:
    return torch.randn(shape)


CHAIN = """
  input %x: f32[4,3] (x=R) input %w: f32[3,5] (x=R)
  %h: f32[4,5] (x=R) = matmul(%x, %w)
  %a: f32[4,5] (x=R) = mul(%h, 2.0)
  free %h
  %y: f32[4,5] (x=R) = add(%a, 1.0)
  free %a
  return %y"""


def test_replays_take_new_arguments_and_give_new_outputs() -> None:
    graphs, recorder = graphs_of(CHAIN, [draw(4, 3), draw(3, 5)])
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(4):
        x, w = draw(4, 3), draw(3, 5)
        (y,) = graphs.run([x, w])
        kept.append((y, x @ w * 2 + 1))
    assert all(torch.allclose(y, want) for y, want in kept)
    assert len({y.data_ptr() for y, _ in kept}) == 4
    assert [r.count for r in recorder.made] == [4]


def test_what_stays_is_read_in_place_until_it_moves() -> None:
    w = draw(3, 5)
    graphs, recorder = graphs_of(CHAIN, [draw(4, 3), w], stay=(1,))
    for _ in range(2):
        x = draw(4, 3)
        assert torch.allclose(graphs.run([x, w])[0], x @ w * 2 + 1)
        w.copy_(draw(3, 5))  # in place: the graph sees it
    assert len(recorder.made) == 1
    for _ in range(3):
        x, moved = draw(4, 3), draw(3, 5)
        assert torch.allclose(graphs.run([x, moved])[0], x @ moved * 2 + 1)
    assert [r.count for r in recorder.made] == [2, 3]
    assert recorder.made[0].is_reset


def test_arguments_that_are_too_large_to_copy() -> None:
    """Weights that move: the region runs eagerly from then on, and says so."""
    w = draw(3, 5)
    plan, recorder = plan_of(CHAIN, [draw(4, 3), w]), FakeRecorder()
    stays = {plan.inputs[1]: w.data_ptr()}
    graphs = GraphPlan(plan, lambda: plan, recorder, stays, limit=4 * 3 * 4)  # the bytes of x
    for weights in (w, w, draw(3, 5), draw(3, 5), w):
        x = draw(4, 3)
        assert torch.allclose(graphs.run([x, weights])[0], x @ weights * 2 + 1)
    assert [r.count for r in recorder.made] == [2] and recorder.made[0].is_reset
    assert "-- eager, because 0 MiB of its arguments lie elsewhere" in str(graphs)


NUMBERS = """
  input %x: f32[4] (x=R)
  input %s: f32 scalar
  %a: f32[4] (x=R) = mul(%x, 2.0)
  %t: f32 scalar = mul(%s, 3.0)
  %b: f32[4] (x=R) = mul(%a, %t)
  free %a
  %c: f32[4] (x=R) = exp(%b)
  free %b
  %y: f32[4] (x=R) = add(%c, %x)
  free %c
  return %y"""


def test_numbers_run_eagerly_between_captured_regions() -> None:
    graphs, recorder = graphs_of(NUMBERS, [draw(4), 1.0])
    reasons = [r.eager for r in graphs.regions]
    assert [r is None for r in reasons] == [True, False, True]
    assert reasons[1] == "it uses %s, a number of each run"
    for s in (0.5, -1.0, 0.25):
        x = draw(4)
        assert torch.allclose(graphs.run([x, s])[0], torch.exp(x * 2 * (s * 3)) + x)
    assert [r.count for r in recorder.made] == [3, 3]


TWO_NUMBERS = """
  input %x: f32[4] (x=R)
  input %w: f32[4] (x=R)
  input %s: f32 scalar
  %a: f32[4] (x=R) = mul(%x, %w)
  %b: f32[4] (x=R) = mul(%a, %s)
  %c: f32[4] (x=R) = exp(%b)
  free %b
  %d: f32[4] (x=R) = add(%c, %s)
  free %c
  %y: f32[4] (x=R) = add(%d, %a)
  free %a
  free %d
  return %y"""


class InScratch(FakeRecorder):
    """A replay overwrites what it may: results captured later in its pool.

    Its scratch was free when they were placed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pools = ScratchPools(object)
        self.pool_of: list[ScratchPool] = []

    def record(self, run: Callable[[], list[Any]], place: int) -> tuple[list[Any], Repeat]:
        self.pool_of.append(self.pools.at(place))
        self.pool_of[-1].living += 1
        first = len(self.made)

        def spoiling() -> list[Any]:
            for repeat, pool in zip(self.made[first + 1 :], self.pool_of[first + 1 :], strict=True):
                for result in repeat.results if pool is self.pool_of[first] else ():
                    result.fill_(torch.nan)
            return run()

        results, repeat = super().record(run, place)
        repeat.run = spoiling
        return results, repeat


def test_regions_captured_again_write_into_no_scratch_of_others() -> None:
    """The first region is captured anew behind the others; the last one reads its result."""
    w = draw(4)
    plan, recorder = plan_of(TWO_NUMBERS, [draw(4), w, 1.0]), InScratch()
    graphs = GraphPlan(plan, lambda: plan, recorder, {plan.inputs[1]: w.data_ptr()})
    assert [r.eager is None for r in graphs.regions] == [True, False, True, False, True]
    for n, s in enumerate((0.5, -1.0, 0.25, 2.0)):
        x, weights = draw(4), w if n < 2 else draw(4)
        want = torch.exp(x * weights * s) + s + x * weights
        assert torch.allclose(graphs.run([x, weights, s])[0], want)
    assert [r.count for r in recorder.made] == [2, 4, 4, 2]
    first, *others, last = recorder.pool_of
    assert all(pool is first for pool in others) and last is not first


def test_pools_are_shared_by_captures_in_order() -> None:
    """A later place shares a pool, the same place too, an earlier one begins another."""
    pools = ScratchPools(object)
    first = pools.at(0)
    first.living = 1
    assert [pools.at(n) is first for n in (0, 1, 3, 3)] == [True] * 4
    second = pools.at(2)
    assert second is not first
    second.living = 1
    assert pools.at(2) is pools.at(3) is second
    second.living = 0  # the allocator may give it up at any time
    assert pools.at(3) not in (first, second)


def test_what_is_sent_lies_in_the_arena_behind_an_eager_region() -> None:
    """Others copy it from there: a graph takes no copy of it."""
    memory, sent = torch.empty(1024, dtype=torch.uint8), list[int]()

    class Copies:
        def __call__(self, srcs: list[Tensor], dsts: list[Tensor]) -> Any:
            sent.append(srcs[0].data_ptr())
            dsts[0].copy_(srcs[0])
            return DONE

        def prepare(self, srcs: Any, dsts: Any, place: PostSite) -> None:
            return None

    body = """
      input %x: f32[4] (x=R)
      input %s: f32 scalar
      %a: f32[4] (x=R) = alloc(memory=symmetric)
      %a = mul(%x, %s)
      %g: f32[4] (x=R) = alloc
      %c = post allgather(%a) -> %g f32[4] (x=S0) => (x=R) axis=x dim=0
      wait %c
      free %a
      %y: f32[4] (x=R) = add(%g, 1.0)
      free %g
      return %y"""

    def built() -> Plan:
        arguments = [draw(4), 1.0]
        return build(
            program(body), lambda call: Copies(), CPU, True, arguments, memory=lambda size: memory
        )

    graphs = GraphPlan(built(), built, FakeRecorder(), {})
    assert [r.eager is None for r in graphs.regions][-2:] == [False, True]
    for s in (0.5, -1.0, 0.25):
        x = draw(4)
        assert torch.equal(graphs.run([x, s])[0], x * s + 1)
    assert len(sent) >= 3 and {*sent} == {memory.data_ptr()}


def test_buffers_of_the_caller() -> None:
    """Given outputs are filled and handed back; the graph writes where it was captured to."""
    graphs, _ = graphs_of(CHAIN, [draw(4, 3), draw(3, 5)], [draw(4, 5)])
    for _ in range(3):
        x, w, out = draw(4, 3), draw(3, 5), draw(4, 5)
        (y,) = graphs.run([x, w], [out])
        assert y is out
        assert torch.allclose(out, x @ w * 2 + 1)


def test_inputs_that_are_written() -> None:
    body = """
      input %x: f32[4] (x=R)
      alias %y = %x
      %y: f32[4] (x=R) = add(%x, 1.0)
      return %y"""
    graphs, _ = graphs_of(body, [draw(4)])
    for _ in range(3):
        x = draw(4)
        want = x + 1
        (y,) = graphs.run([x])
        assert y is x
        assert torch.equal(x, want)


def test_outputs_that_are_inputs_or_views_of_them() -> None:
    body = """
      input %x: f32[4,3] (x=R)
      %t: f32[3,4] (x=R) = permute(%x, dims=[1,0])
      %y: f32[4,3] (x=R) = add(%x, 1.0)
      return %t, %x, %y"""
    graphs, _ = graphs_of(body, [draw(4, 3)])
    for _ in range(2):
        x = draw(4, 3)
        t, same, y = graphs.run([x])
        assert same is x
        assert t.data_ptr() == x.data_ptr() and torch.equal(t, x.t())
        assert torch.equal(y, x + 1)


def test_an_error_names_the_instruction() -> None:
    plan = plan_of(CHAIN, [draw(4, 3), draw(3, 5)])

    graphs = GraphPlan(plan, lambda: plan, FakeRecorder(), {})
    with pytest.raises(RuntimeError) as caught:
        graphs._call(plan, 0, None, [draw(4, 4), draw(3, 5)])
    assert caught.value.__notes__ == ["in %h = matmul"]


def test_no_border_between_a_post_and_its_wait(null: Communicator) -> None:
    body = """
      input %x: f32[2] of [8] (x=S0)
      input %s: f32 scalar
      %g: f32[8] (x=R) = alloc
      %c = post allgather(%x) -> %g f32[8] (x=S0) => (x=R) axis=x dim=0
      %a: f32[2] of [8] (x=S0) = mul(%x, %s)
      wait %c
      %y: f32[8] (x=R) = add(%g, 1.0)
      return %y, %a"""
    local = project(parse(f"host @small on mesh(x=4) {{ {body} }}"), 0)
    null.prepare([(0, 1, 2, 3)])
    plan = build(local, null.poster, CPU, False, [draw(2), 1.0])
    found = [(r.eager is None, r.stop - r.start) for r in regions(plan)]
    assert [captured for captured, _ in found] == [False, True]


@pytest.fixture
def null(unjoined: None) -> Communicator:
    return mf.init(backend="null", rank=0, size=4)


# -- what breaks a capture -----------------------------------------------------------------------


class Garbage:
    """A cycle, which says when it goes."""

    def __init__(self, gone: Callable[[], None]) -> None:
        self.itself, self.gone = self, gone

    def __del__(self) -> None:
        self.gone()


class Capturing(FakeRecorder):
    """A recorder that makes much garbage while it captures."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[str] = []
        self.now = "before"
        self.error: Exception | None = None

    def leave(self) -> None:
        Garbage(lambda: self.collected.append(self.now))

    def record(self, run: Callable[[], list[Any]], place: int) -> tuple[list[Any], Repeat]:
        self.now = "during"
        self.leave()
        kept = [[n] for n in range(10_000)]  # enough for any generation
        assert len(kept) == 10_000
        try:
            if self.error is not None:
                raise self.error
            return super().record(run, place)
        finally:
            self.now = "behind"


@pytest.fixture
def collector() -> Iterator[None]:
    """Python's, eager."""
    was_enabled, limits = gc.isenabled(), gc.get_threshold()
    gc.collect()
    gc.set_threshold(100, 5, 5)
    yield
    gc.set_threshold(*limits)
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("is_enabled", [True, False])
@pytest.mark.parametrize("error", [None, RuntimeError("no")], ids=str)
def test_nothing_is_collected_in_a_capture(is_enabled: bool, error: Exception | None) -> None:
    plan, recorder = plan_of(CHAIN, [draw(4, 3), draw(3, 5)]), Capturing()
    graphs = GraphPlan(plan, lambda: plan, recorder, {})
    recorder.error = error
    gc.disable()
    recorder.leave()
    if is_enabled:
        gc.enable()
    with pytest.raises(RuntimeError, match="no") if error else nullcontext():
        graphs.run([draw(4, 3), draw(3, 5)])
    assert gc.isenabled() == is_enabled
    gc.collect()
    assert recorder.collected == ["before", "behind"]


def test_a_graph_is_not_given_up_while_another_thread_captures() -> None:
    """An eviction, or close(), in another thread waits for the capture."""
    old, made = graphs_of(CHAIN, [draw(4, 3), draw(3, 5)])
    old.run([draw(4, 3), draw(3, 5)])
    capturing, may_go = threading.Event(), threading.Event()

    class Slow(FakeRecorder):
        def record(self, run: Callable[[], list[Any]], place: int) -> tuple[list[Any], Repeat]:
            capturing.set()
            assert may_go.wait(20)
            assert not made.made[0].is_reset
            return super().record(run, place)

    plan = plan_of(CHAIN, [draw(4, 3), draw(3, 5)])
    new, x, w, got = GraphPlan(plan, lambda: plan, Slow(), {}), draw(4, 3), draw(3, 5), []
    first = threading.Thread(target=lambda: got.extend(new.run([x, w])))
    first.start()
    assert capturing.wait(20)
    other = threading.Thread(target=old.release)
    other.start()
    other.join(0.2)
    assert not made.made[0].is_reset
    may_go.set()
    first.join(20)
    other.join(20)
    assert made.made[0].is_reset and torch.allclose(got[0], x @ w * 2 + 1)


# -- the evaluator -------------------------------------------------------------------------------


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch, unjoined: None) -> list[FakeRecorder]:
    """An evaluator on CPU that captures, on fakes."""
    return capture_on_cpu(monkeypatch)


def test_the_second_run_captures_and_each_kind_by_itself(recorders: list[FakeRecorder]) -> None:
    one = mf.DeviceMesh([0])
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([4, 3], mesh=one, layout={})
        w = fd.define_tensor([3, 5], mesh=one, layout={})
        fd.add_output(fd.ops.tanh(x @ w) + 1.0)
    program, weights, kept = mf.compile(fd), draw(3, 5), []
    for n in range(7):
        for given in (draw(4, 3), draw(3, 4).t()):
            # kept, so that no two of them lie at one address
            kept.append((given, program.run(given, weights)[0], torch.tanh(given @ weights) + 1))
            assert len(recorders) == (0 if n == 0 else 1 if n == 1 and given.is_contiguous() else 2)
    assert all(torch.allclose(y, want) for _, y, want in kept)
    assert program.plans.info() == (12, 2, 0, 2, 32)
    # a graph for each of three addresses, then one whose result is copied
    assert [[r.count for r in recorder.made] for recorder in recorders] == [[1, 1, 1, 3]] * 2


@pytest.mark.parametrize("rows", [2, 2000])
def test_small_outputs_of_long_work_are_copied_out(
    rows: int, recorders: list[FakeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph serves all addresses; larger outputs get a graph for each of three."""
    monkeypatch.setattr("mdfuse.plan.graphs.LONG", 2)
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([rows, 3], mesh=mf.DeviceMesh([0]), layout={})
        for y in (fd.ops.tanh(x) + 1.0, fd.ops.sin(x) * 2.0):
            fd.add_output(y)
    program, x = mf.compile(fd), draw(rows, 3)
    outputs: list[tuple[list[Tensor], Tensor]] = []
    for _ in range(12):
        x.copy_(draw(rows, 3))
        outputs.append((program.run(x), x.clone()))  # all are held, so no two share an address
    for (y, z), given in outputs:
        torch.testing.assert_close(y, torch.tanh(given) + 1)
        torch.testing.assert_close(z, torch.sin(given) * 2)
    (recorder,) = recorders
    assert [r.count for r in recorder.made] == ([11] if rows == 2 else [1, 1, 1, 8])


def test_outputs_are_filled_where_they_lie(recorders: list[FakeRecorder]) -> None:
    """In a loop the allocator gives the same addresses: there is a graph for each, and no copy."""
    one = mf.DeviceMesh([0])
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([40, 30], mesh=one, layout={})
        y = fd.ops.tanh(x) + 1.0
        for output in (y, fd.ops.permute(y, [1, 0]), x, fd.ops.permute(x, [1, 0]), y.sum(0)):
            fd.add_output(output)
    program, x = mf.compile(fd), draw(40, 30)
    last: list[Tensor] = []
    for _ in range(12):
        x.copy_(draw(40, 30))
        want = torch.tanh(x) + 1
        before = [(kept, kept.clone()) for kept in (*last[:2], *last[4:])]
        got = program.run(x)
        for mine, theirs in zip(got, (want, want.T, x, x.T, want.sum(0)), strict=True):
            torch.testing.assert_close(mine, theirs)
        assert all(torch.equal(kept, old) for kept, old in before)
        assert got[2] is x and got[3].data_ptr() == x.data_ptr()
        assert got[1].stride() == (1, 30) or got[1].is_contiguous()
        last = got
    (recorder,) = recorders
    assert isinstance(program.plans.recent, GraphPlan)
    assert sum(r.count for r in recorder.made) == 11


@pytest.mark.parametrize("shape", ["expanded", "sliced", "overlapping"])
def test_what_is_copied_keeps_its_strides(shape: str, recorders: list[FakeRecorder]) -> None:
    """A plan is for its arguments' strides, so the graph's own buffers have them too."""
    one = mf.DeviceMesh([0])
    with mf.FusionDefinition("f") as fd:
        fd.add_output(fd.define_tensor([4, 6], mesh=one, layout={}) * 2.0)
    program = mf.compile(fd)
    for _ in range(5):
        x = {
            "expanded": draw(1, 6).expand(4, 6),
            "sliced": draw(9, 14)[1::2, ::2][:, :6],
            "overlapping": draw(20).as_strided((4, 6), (2, 1)),
        }[shape][:4]
        assert torch.equal(program.run(x)[0], x * 2)
    (recorder,) = recorders
    assert recorder.made


def test_always_is_refused_each_time(recorders: list[FakeRecorder]) -> None:
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([4], mesh=mf.DeviceMesh([0]), layout={})
        s = fd.define_scalar(None, dtype=torch.float32)
        fd.add_output(x * s + 1.0)
    program = mf.compile(fd, mf.Options(graph="always"))
    assert torch.equal(program.run(torch.ones(4), 2.0)[0], torch.full((4,), 3.0))
    for _ in range(2):
        with pytest.raises(mf.ProgramError, match="cannot be captured whole: it uses %s"):
            program.run(torch.ones(4), 2.0)


# -- the options ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("unjoined")
def test_always_needs_a_gpu() -> None:
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([4], dtype=torch.float32, mesh=mf.DeviceMesh([0]), layout={})
        fd.add_output(x + 1)
    with pytest.raises(mf.ProgramError, match='graph="always"') as caught:
        mf.compile(fd).run(torch.ones(4), options=mf.Options(graph="always"))
    assert "CUDA graphs are for GPUs" in str(caught.value)
    assert torch.equal(mf.compile(fd).run(torch.ones(4))[0], torch.full((4,), 2.0))


def test_explain_says_what_runs_eagerly() -> None:
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([4], dtype=torch.float32, mesh=mf.DeviceMesh([0]), layout={})
        s = fd.define_scalar(None, dtype=torch.float32)
        fd.add_output(x * s + 1)
    text = mf.compile(fd).explain()
    assert "graphs: " in text
    assert "uses %s, a number of each run" in text


def test_explain_says_that_all_is_captured() -> None:
    with mf.FusionDefinition("f") as fd:
        x = fd.define_tensor([4], dtype=torch.float32, mesh=mf.DeviceMesh([0]), layout={})
        fd.add_output(x * 2 + 1)
    assert "the whole program is captured in the second run" in mf.compile(fd).explain()
    never = mf.compile(fd, mf.Options(graph="never")).explain()
    assert 'graphs: none, because graph="never"' in never


# -- lifetimes -----------------------------------------------------------------------------------


class Lane:
    """Posts whose waits name neither handle nor buffers."""

    def __init__(self, at_once: bool) -> None:
        self.is_at_once = at_once

    def __call__(self, srcs: Any, dsts: Any) -> Any:
        raise AssertionError("all is prepared")

    def prepare(self, srcs: Any, dsts: Any, place: PostSite) -> Posting:
        assert place.at_once == self.is_at_once
        args = (Buffer("src", form="pointer"), Buffer("dst", form="pointer"))
        wait = () if self.is_at_once else (Prepared(list, ()),)
        return Posting(post=(Prepared(max, args, in_place=True), Prepared(list, ())), wait=wait)


@pytest.mark.parametrize("between", ["", "%b: f32[8] (x=R) = mul(%x, 3.0)"])
def test_what_is_under_way_keeps_its_memory(between: str) -> None:
    """Until the wait, no other buffer takes the place of what is sent or received.

    The reduction itself is done in place.
    """
    body = f"""
      input %x: f32[8] (x=R)
      %s: f32[8] (x=R) = mul(%x, 2.0)
      %d: f32[8] (x=R) = alloc
      %c = post allreduce[sum](%s) -> %d f32[8] (x=P(sum)) => (x=R) axis=x
      {between}
      wait %c
      %y: f32[8] (x=R) = add(%d, {"%b" if between else "%x"})
      return %y"""
    local = project(parse(f"host @small on mesh(x=4) {{ {body} }}"), 0)
    plan = build(local, lambda call: Lane(not between), CPU, False, [draw(8)])
    lies = {plan.names[n]: x.data_ptr() for n, x in plan.owned.buffers.items()}
    assert lies.keys() == ({"%s", "%d", "%b"} if between else {"%s", "%d"})
    assert lies["%s"] == lies["%d"] != lies.get("%b")
