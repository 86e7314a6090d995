"""Definitions are found again: by what they record, wherever and however they are written."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Partial, Replicate, Shard, Stream

MESH = DeviceMesh.arange(tp=2)
OTHER = DeviceMesh([1, 0], axes=("tp",))


def info() -> tuple[int, int, int, int]:
    found = mf.FusionCache.get().info()
    return found.hits, found.misses, found.evictions, found.size


def defined(**changes: Any) -> mf.FusionDefinition:
    """A fusion of one of each kind of call, one argument of which may be another."""
    v = {
        "shape": [4, 6], "dtype": torch.float32, "mesh": MESH, "layout": {"tp": Shard(0)},
        "memory": None, "number": 2.0, "dims": [1], "keepdim": False, "law": {"tp": Replicate()},
        "stream": None, "order": None, "swap": False, "reuse": False, "second": False,
        "op": "exp", "constant": 3.0, "given": None, "p": 0.5, "seed": 1, **changes,
    }  # fmt: skip
    with mf.FusionDefinition(v.get("name", "fusion")) as fd:
        x = fd.define_tensor(
            v["shape"], v["dtype"], v["mesh"], v["layout"], stride_order=v["memory"]
        )
        z = fd.define_tensor([4, 6], mesh=v["mesh"])
        s = fd.define_scalar(v["constant"])
        n = fd.define_scalar(dtype=v["given"])
        a = (z - x if v["swap"] else x - z) * v["number"] * s * n
        b = fd.ops.BY_NAME[v["op"]](a)
        c = fd.ops.set(fd.ops.sum(b, v["dims"], v["keepdim"]))
        c = c.on(v["mesh"], v["law"], v["order"], v["stream"])
        d = fd.ops.dropout(x, v["p"], v["seed"])
        fd.add_output(c)
        fd.add_output(d * 1, reuse=z if v["reuse"] else None)
        if v["second"]:
            fd.add_output(b)
    return fd


CHANGES: list[dict[str, Any]] = [
    {"shape": [4, 1]},
    {"shape": [4, -1], "dims": [0]},
    {"dtype": torch.float64},
    {"mesh": OTHER},
    {"mesh": DeviceMesh([0, 1], axes=("dp",)), "layout": {}, "law": {}},
    {"layout": {"tp": Shard(1)}},
    {"layout": {}},
    {"memory": (0, 1)},
    {"number": 2},
    {"number": True},
    {"number": 0.0},
    {"number": -0.0},
    {"number": float("nan")},
    {"number": float("inf")},
    {"dims": [0]},
    {"dims": [0, 1]},
    {"keepdim": True},
    {"law": {"tp": Partial("sum")}},
    {"law": {"tp": Partial("max")}},
    {"law": {"tp": Shard(0)}},
    {"stream": Stream(0, 2)},
    {"stream": Stream(0, 4)},
    {"swap": True},
    {"reuse": True},
    {"second": True},
    {"op": "sin"},
    {"constant": 3},
    {"given": int},
    {"p": 0.25},
    {"seed": 2},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_records_something_else_is_another_definition(change: dict[str, Any]) -> None:
    first, other = defined(), defined(**change)
    assert info() == (0, 2, 0, 2)
    assert (str(first.fusion), first.fusion) != (str(other.fusion), other.fusion)
    again, other_again = defined(), defined(**change)
    assert info() == (2, 2, 0, 2)
    assert again.named is first.named and other_again.named is other.named


def test_the_order_of_axes_and_a_required_memory_order_are_part_of_the_key() -> None:
    mesh = DeviceMesh.arange(dp=2, tp=2)
    split = {"dp": Shard(0), "tp": Shard(0)}

    def define(axes: Any = None, law: Any = None, memory: Any = None, dtype: Any = None) -> Any:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([8, 3], mesh=mesh, layout=split, order=axes)
            y = fd.ops.set(x.to(dtype or torch.float64)).on(mesh, split, law)
            fd.add_output(y, stride_order=memory)
        return fd.named

    turned = {0: ("tp", "dp")}
    changes: list[dict[str, Any]] = [
        {}, {"axes": turned}, {"law": turned}, {"memory": (0, 1)}, {"memory": (1, 0)},
        {"dtype": torch.float16},
    ]  # fmt: skip
    found = [define(**c) for c in changes]
    assert len(set(map(id, found))) == len(changes) and info() == (0, 6, 0, 6)
    assert [define(**c) for c in changes] == found and info() == (6, 6, 0, 6)


def test_all_of_these_are_different_from_each_other() -> None:
    for change in CHANGES:
        defined(**change)
    assert info() == (0, len(CHANGES), 0, len(CHANGES))


def test_a_program_is_found_again() -> None:
    first = mf.compile(defined())
    segments = first.segments
    again = mf.compile(defined())
    assert again is first and again.segments is segments  # and the maps of their ids
    assert mf.compile(defined(number=3.0)) is not first


def test_options_and_predicates_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(a: object, b: object) -> bool:
        return False

    programs = [
        mf.compile(defined()),
        mf.compile(defined(), mf.Options(streams=2)),
        mf.compile(defined(), mf.Options(streams=3)),
        mf.compile(defined(), should_merge=never),
    ]
    assert len(set(map(id, programs))) == 4
    assert mf.compile(defined(), mf.Options(streams=3)) is programs[2]
    assert mf.compile(defined(), should_merge=never) is programs[3]
    monkeypatch.setenv("MDFUSE_STREAMS", "7")
    assert id(mf.compile(defined())) not in map(id, programs)
    monkeypatch.delenv("MDFUSE_STREAMS")
    assert mf.compile(defined()) is programs[0]


def test_names_and_lines_are_those_of_the_code_that_runs() -> None:
    with mf.FusionDefinition("one") as one:
        x = one.define_tensor([3], mesh=MESH)
        y = x + x
        one.add_output(y)
    with mf.FusionDefinition("two") as two:
        left = two.define_tensor([3], mesh=MESH)
        twice = left + left
        two.add_output(twice)
    assert info() == (1, 1, 0, 1)
    texts = [str(mf.compile(fd)) for fd in (one, two)]
    assert "@one" in texts[0] and "%y: f32[3]" in texts[0] and "twice" not in texts[0]
    assert "@two" in texts[1] and "%twice: f32[3]" in texts[1] and "%y" not in texts[1]
    lines = [fd.named.fusion.exprs[0].source for fd in (one, two)]
    assert lines[0] is not None and lines[1] is not None
    assert lines[1].line == lines[0].line + 4


def test_equal_code_in_several_files() -> None:
    text = "with mf.FusionDefinition() as fd:\n  fd.add_output(fd.define_tensor([2]) + 1)\n"
    found = []
    for file in ("first.py", "second.py", "first.py"):
        names: dict[str, Any] = {"mf": mf}
        exec(compile(text, file, "exec"), names)
        found.append(names["fd"].named)
    assert [s.fusion.exprs[0].source.file for s in found] == ["first.py", "second.py", "first.py"]
    assert found[0] is found[2]


def test_a_name_that_is_asked_for_early_is_the_same() -> None:
    """Handles know shapes; names are made when they are asked for, at any time."""
    defined()
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([4, 6], mesh=MESH, layout={"tp": Shard(0)})
        assert (x.name, x.layout) == ("x", Layout(MESH, {"tp": Shard(0)}))
        z = fd.define_tensor([4, 6], mesh=MESH)
        assert repr(z) == "%z: f32[4,6] (tp=R)!"
        a = x - z
        assert a.shape == (4, 6)
        fd.add_output(a)
    assert [e.output for e in fd.fusion.exprs] == ["a"]


def test_values_of_a_definition_that_was_found() -> None:
    def scaled(factor: float) -> mf.FusionDefinition:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([5, 3], mesh=MESH, layout={"tp": Shard(0)})
            fd.add_output(fd.ops.sum(x * factor, 0))
        return fd

    x = torch.randn(5, 3)
    for factor in (2.0, 3.0, 2.0, 3.0):
        (result,) = mf.simulate(mf.compile(scaled(factor)), [x]).outputs
        torch.testing.assert_close(result, (x * factor).sum(0))
    assert info() == (2, 2, 0, 2)


def test_a_definition_that_begins_as_another_one() -> None:
    def chain(ops: Sequence[str]) -> list[str]:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([3], mesh=MESH)
            for op in ops:
                x = fd.ops.BY_NAME[op](x)
            fd.add_output(x)
        return [e.op for e in fd.fusion.exprs]

    for ops in (["exp", "sin"], ["exp"], ["exp", "cos"], ["exp", "sin", "cos"], ["exp"]):
        assert chain(ops) == ops
    assert info() == (1, 4, 0, 4)
    assert mf.FusionCache.get().nodes() == 4 + 1 + 2 + 2  # an `add_output` at each end


def test_the_least_recently_used_is_dropped() -> None:
    cache = mf.FusionCache.get()
    limit = cache.limit
    try:
        cache.limit = 2
        first = mf.compile(defined())
        for number in (3.0, 4.0):
            mf.compile(defined())
            mf.compile(defined(number=number))
        assert info() == (2, 3, 1, 2)
        assert mf.compile(defined()) is first
        defined(number=3.0)
        assert info() == (3, 4, 2, 2)
        cache.limit = 1
        assert info() == (3, 4, 3, 1)
        nodes = cache.nodes()
        mf.FusionCache.reset()
        defined(number=3.0)
        assert cache.nodes() == nodes  # dropping took all that others do not need
    finally:
        cache.limit = limit


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, None])
def test_a_limit_that_is_none(limit: Any) -> None:
    with pytest.raises(mf.DefinitionError, match="FusionCache limit"):
        mf.FusionCache.get().limit = limit


def test_reset() -> None:
    first = mf.compile(defined())
    mf.FusionCache.reset()
    assert info() == (0, 0, 0, 0) and mf.FusionCache.get().nodes() == 0
    assert mf.compile(defined()) is not first
    assert info() == (0, 1, 0, 1)


def test_reset_while_a_definition_is_open() -> None:
    with mf.FusionDefinition() as fd:
        x = fd.define_tensor([3], mesh=MESH)
        mf.FusionCache.reset()
        fd.add_output(x + 1)
    mf.compile(fd)
    assert info() == (0, 1, 0, 1)


def test_a_definition_that_fails_leaves_nothing() -> None:
    cache = mf.FusionCache.get()

    def define() -> None:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([3], mesh=MESH)
            fd.ops.sum(x + 1, 5)

    with pytest.raises(mf.DefinitionError):
        define()
    assert info() == (0, 0, 0, 0) and cache.nodes() == 0


def test_a_call_that_is_refused_is_not_recorded() -> None:
    def tried() -> mf.FusionDefinition:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([3], mesh=MESH)
            with pytest.raises(mf.DefinitionError):
                x @ fd.define_tensor([4], mesh=MESH)
            fd.add_output(x + 1)
        return fd

    assert [e.op for e in tried().fusion.exprs] == ["add"]
    assert tried().named is tried().named
    assert info()[1] == 1


def test_an_operand_that_cannot_be_hashed() -> None:
    for wrong in ({}, set(), [1, {}], torch.ones(3)):
        with pytest.raises(mf.DefinitionError, match="is no operand"), mf.FusionDefinition() as fd:
            fd.define_tensor([3], mesh=MESH) + wrong


def test_lowering_that_fails_tells_the_line_of_the_definition_at_hand() -> None:
    messages = []
    for _ in range(2):
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([3], mesh=DeviceMesh([0, 1]), layout={"x": Partial("max")})
            fd.add_output(fd.ops.set(x).on(DeviceMesh([0, 1]), {"x": Partial("min")}))
        with pytest.raises(mf.MdfuseError) as caught:
            mf.compile(fd)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "fd.add_output(fd.ops.set(x)" in messages[0]


def test_symbols_are_called_as_in_the_code_at_hand() -> None:
    def first() -> mf.FusionDefinition:
        with mf.FusionDefinition() as fd:
            rows = fd.define_tensor([-1, 4], mesh=MESH, layout={"tp": Shard(0)})
            fd.add_output(fd.ops.sum(rows, 1))
        return fd

    def second() -> mf.FusionDefinition:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([-1, 4], mesh=MESH, layout={"tp": Shard(0)})
            fd.add_output(fd.ops.sum(x, 1))
        return fd

    programs = [mf.compile(f()) for f in (first, second, first, second)]
    assert programs[0] is programs[2] and programs[1] is programs[3]
    x = torch.randn(5, 4)
    for program, name in zip(programs, ("rows.0", "x.0"), strict=False):
        (result,) = mf.simulate(program, [x], extents={name: 5}).outputs
        torch.testing.assert_close(result, x.sum(1))


def test_decisions_about_extents_are_part_of_the_key() -> None:
    """Two definitions that record the same, one of which holds for some extents only."""

    def define(is_careful: bool) -> mf.FusionDefinition:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([-1], mesh=MESH)
            if is_careful:
                assert x.shape[0] % 3 == 0
            fd.add_output(x + 1)
        return fd

    for _ in range(2):
        free, careful = mf.compile(define(False)), mf.compile(define(True))
        mf.simulate(free, [torch.ones(4)])
        with pytest.raises(mf.DefinitionError, match="mod 3"):
            mf.simulate(careful, [torch.ones(4)])
    assert mf.compile(define(False)) is free and mf.compile(define(True)) is careful


def test_symbols_whose_examples_change_on_the_way() -> None:
    def define() -> tuple[mf.FusionDefinition, str]:
        with mf.FusionDefinition() as fd:
            x = fd.define_tensor([-1, 2], mesh=MESH)
            w = fd.define_tensor([3, 2], mesh=MESH)
            y = x + w
            shape = str(y.shape)
            z = y.reshape(x.shape[0] * 2)
            fd.add_output(z)
        return fd, shape

    (first, shape), (again, same) = define(), define()
    assert again.named is first.named and same == shape
    assert info() == (1, 1, 0, 1)
    x, w = torch.randn(3, 2), torch.randn(3, 2)
    (result,) = mf.simulate(mf.compile(again), [x, w]).outputs
    torch.testing.assert_close(result, (x + w).reshape(6))


def _in_threads(n: int, body: Callable[[int], None]) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(n)

    def run(i: int) -> None:
        start.wait()
        try:
            body(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def test_threads_share_what_they_define() -> None:
    """Eight threads, some defining the same and some other things, with evictions on the way."""
    cache, limit = mf.FusionCache.get(), mf.FusionCache.get().limit
    found: dict[int, set[int]] = {}
    x = torch.randn(4)

    def body(i: int) -> None:
        for k in range(30):
            number = float(k % 3 + (i % 2) * 100 + 1)
            with mf.FusionDefinition() as fd:
                t = fd.define_tensor([4], mesh=MESH, layout={"tp": Shard(0)})
                fd.add_output(t * number)
            program = mf.compile(fd)
            found.setdefault(int(number), set()).add(id(program))
            if k % 10 == 0:
                (result,) = mf.simulate(program, [x]).outputs
                assert torch.equal(result, x * number)

    _in_threads(8, body)
    assert info() == (8 * 30 - 6, 6, 0, 6)
    assert all(len(programs) == 1 for programs in found.values())
    try:
        cache.limit = 3
        _in_threads(8, body)
        assert len(cache) <= 3
    finally:
        cache.limit = limit


def test_a_training_loop_keeps_one_entry_and_flat_memory() -> None:
    def step(lr: float) -> mf.Program:
        with mf.FusionDefinition("step") as fd:
            x = fd.define_tensor([8, 16], mesh=MESH, layout={"tp": Shard(0)})
            w = fd.define_tensor([16, 4], mesh=MESH)
            y = x @ w
            a = fd.ops.relu(y)
            m = fd.ops.mean(a, 1, keepdim=True)
            c = a - m
            v = fd.ops.sum(c * c, 1, keepdim=True)
            o = c * fd.ops.rsqrt(v + 1e-5) * lr
            fd.add_output(fd.ops.set(fd.ops.sum(o, 0)).on(MESH))
        return mf.compile(fd)

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    program = step(0.1)
    for _ in range(10):
        step(0.1)
    before, nodes = objects(), mf.FusionCache.get().nodes()
    for _ in range(10_000):
        assert step(0.1) is program
    assert objects() - before < 100  # a hundredth of an object a step
    assert info() == (10_010, 1, 0, 1) and mf.FusionCache.get().nodes() == nodes


def test_a_loop_of_ever_new_definitions_stays_within_the_limit() -> None:
    cache = mf.FusionCache.get()
    for i in range(3 * cache.limit):
        defined(number=float(i + 10))
    assert len(cache) == cache.limit
    assert cache.nodes() < cache.limit * 20


def test_print() -> None:
    defined()
    defined()
    fd = defined(number=7.0, name="other")
    mf.compile(fd)
    lines = str(mf.FusionCache.get()).splitlines()
    assert lines[0] == "2 of 128 definitions: 1 hit, 2 misses, 0 evictions"
    assert lines[1].startswith("  @other: ") and "x f32[4,6]" in lines[1]
    assert lines[2].endswith("found 1 time, not lowered")


def test_names_are_the_same_however_often_a_line_has_run() -> None:
    """Python changes code that has run a few times: a builtin then calls from elsewhere in it."""

    def defined() -> str:
        with mf.FusionDefinition("often") as fd:
            x = fd.define_tensor([4])
            total = sum(y for y in (x, x.sin()))
            fd.add_output(total)
        return str(fd)

    first = defined()
    assert "%total" in first
    assert {defined() for _ in range(40)} == {first}
