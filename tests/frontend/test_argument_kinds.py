"""What arguments of operations may be: numbers of numpy are numbers, other kinds are refused."""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.oracle import is_close

import mdfuse as mf
from mdfuse import DeviceMesh, FusionDefinition, Layout, MdfuseError, Shard
from mdfuse.frontend import ops as frontend
from mdfuse.frontend.argument_kinds import REFUSED as NOTHING
from mdfuse.frontend.argument_kinds import ArgumentKind, kinds_of, taken, taking_kinds
from mdfuse.frontend.handle import Handle

STRANGE: tuple[Any, ...] = (
    10**20, -(10**20), 10**5000, "x", b"x", {}, {1}, object(), print, [[1]], [0.5], [None], 1j,
    slice(None), torch.ones(2), torch.ones(2).to_sparse(), np.ones((2, 2)), DeviceMesh([0]),
    Shard(0), float("nan"), (10**20,),
)  # fmt: skip


def is_refused(act: Callable[[], Any]) -> bool:
    try:
        act()
    except MdfuseError:
        return True
    return False


@pytest.mark.parametrize("name", sorted(frontend.BY_NAME))
def test_strange_arguments_are_refused_by_our_own_errors(name: str) -> None:
    """Each in the place of each parameter; what is taken nevertheless is no error of Python."""
    function = frontend.BY_NAME[name]
    known = inspect.signature(function).parameters
    refused = 0
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, 3], name="x")
        usual = {p.name: x for p in known.values() if p.default is p.empty and p.kind != 2}
        for key in known:
            for strange in STRANGE:
                if known[key].kind is inspect.Parameter.VAR_POSITIONAL:
                    refused += not usual and is_refused(partial(function, x, strange))
                    continue
                refused += is_refused(partial(function, **{**usual, key: strange}))
    assert refused > len(STRANGE) // 2


def test_every_parameter_has_a_kind() -> None:
    for name, function in frontend.BY_NAME.items():
        assert [*kinds_of(function)] == [*inspect.signature(function).parameters], name


def drawn_calls(
    good: dict[str, list[Any]], pool: tuple[Any, ...]
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments in their places and by name, some of them wrong, given twice or missing."""
    draw = random.Random(1)
    names = list(good)
    for _ in range(60):
        n = draw.randrange(len(names) + 2)
        named = [*names[n:], "unknown"] if draw.random() < 0.9 else names[:n]
        args = [draw.choice(good[names[min(i, len(names) - 1)]]) for i in range(n)]
        kwargs = {key: draw.choice(good.get(key, pool)) for key in named if draw.random() < 0.6}
        if draw.random() < 0.9:
            kwargs.pop("unknown", None)
        if args and draw.random() < 0.3:
            args[draw.randrange(n)] = draw.choice(pool)
        yield args, kwargs
        yield from spoiled(args, kwargs)


#: What no operation takes, of types that many take.
SPOILED: dict[type, Any] = {int: 2**63, list: [10**20], tuple: (None, 10**20)}


def spoiled(args: list[Any], kwargs: dict[str, Any]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """A call with another value of the same type in one place."""
    for n, x in enumerate(args):
        if type(x) in SPOILED:
            yield [*args[:n], SPOILED[type(x)], *args[n + 1 :]], kwargs
    for key, x in kwargs.items():
        if type(x) in SPOILED:
            yield args, {**kwargs, key: SPOILED[type(x)]}


def are_same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        return all(map(are_same, a, b))
    return a is b or (type(a) is type(b) and not isinstance(a, Handle) and bool(a == b))


@pytest.mark.parametrize("name", sorted(frontend.BY_NAME))
def test_what_was_passed_before_changes_nothing(name: str) -> None:
    """Each of several calls in a row is taken as if it were the first."""
    signature = inspect.signature(frontend.BY_NAME[name])

    @functools.wraps(inspect.unwrap(frontend.BY_NAME[name]))
    def given(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return signature.bind(*args, **kwargs).arguments

    operation = taking_kinds(given)
    kinds = kinds_of(frontend.BY_NAME[name])
    outcomes = Counter[bool]()
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, 3], name="x")
        pool = (x, 1, -1, None, True, 0.5, [0, 1], (1,), [x, x], torch.float32, "none", 2**63,
                [10**20], (0, True), [x, 1], [], np.int64(1), np.array([1, 0]), torch.Size([1, 2]),
                [True, False], "x", {}, object())  # fmt: skip
        good = {key: [y for y in pool if is_taken(kind, y)] for key, kind in kinds.items()}
        for args, kwargs in drawn_calls(good, pool):
            got, expected = (
                outcome(partial(act, *args, **kwargs))
                for act in (operation, partial(first_taken, given.__name__, signature, kinds))
            )
            assert are_same(got, expected), (args, kwargs)
            outcomes[isinstance(expected, str)] += 1
    assert len(outcomes) == 2, outcomes


def is_taken(kind: ArgumentKind, x: Any) -> bool:
    """Whether a kind takes an argument."""
    try:
        return kind.take(x) is not NOTHING
    except MdfuseError:
        return False


def first_taken(
    name: str,
    signature: inspect.Signature,
    kinds: dict[str, ArgumentKind],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The arguments, each looked at by itself."""
    return taken(name, signature, kinds, args, kwargs).arguments


def outcome(act: Callable[[], Any]) -> Any:
    """What is returned, in the order of names, or the first line of the error."""
    try:
        found = act()
    except MdfuseError as error:
        return str(error).splitlines()[0]
    return tuple(sorted(found.items(), key=lambda item: str(item[0])))


@pytest.mark.parametrize("wrong", [2**63, -(2**63) - 1])
def test_integers_and_lists_are_looked_at_each_time(wrong: int) -> None:
    with FusionDefinition() as fd:
        x, n = fd.define_tensor([2, 3]), fd.define_tensor([2], torch.int64)
        for dim in (1, wrong):
            acts = (
                lambda: x.sum(dim), lambda: x.sum(dim=dim), lambda: x.sum([0, dim]),  # noqa: B023
                lambda: x.permute(0, dim), lambda: x.permute(dims=(0, dim)),  # noqa: B023
                lambda: fd.ops.cat([x, x], dim), lambda: n * dim, lambda: fd.ops.mul(n, dim),  # noqa: B023
            )  # fmt: skip
            for act in acts:
                assert is_refused(act) is (dim == wrong)
        for tensors in ([x, x], [x, 1], [x, None], [x, [x]]):
            wrongly = partial(fd.ops.cat, tensors)
            assert is_refused(wrongly) is (tensors[1] is not x)


def test_numbers_of_numpy_are_numbers() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    with FusionDefinition() as fd:
        h = fd.define_tensor(np.array([2, 3, 4]), name="x")
        results = (
            h.sum(np.int64(1)),
            h.reshape(np.int32(6), np.int64(-1)),
            h[np.int64(1)],
            h * np.float32(0.5),
            h + np.int64(2),
            h.permute(np.array([2, 0, 1])),
            h.amax((np.int8(0), 2), keepdim=np.bool_(True)),
            h.size(np.int64(-1)) * h,
            h[:, np.int64(1) :],
            h.narrow(np.int64(2), np.int64(1), np.int64(2)),
        )
        for result in results:
            fd.add_output(result)
    expected = (
        x.sum(1), x.reshape(6, -1), x[1], x * 0.5, x + 2, x.permute(2, 0, 1),
        x.amax((0, 2), keepdim=True), 4 * x, x[:, 1:], x.narrow(2, 1, 2),
    )  # fmt: skip
    for got, want in zip(mf.reference(fd, [x]), expected, strict=True):
        assert is_close(got, want)


@pytest.mark.parametrize("number", [np.int64(0), np.float64(0.0), np.float32(-0.0), np.uint8(0)])
def test_a_number_of_numpy_is_not_the_value_of_that_id(number: Any) -> None:
    """x has the id 0: what was recorded for `x + x` is not found for `x + 0`."""

    def define(add: Callable[[Any], Any]) -> torch.Tensor:
        with FusionDefinition("found") as fd:
            fd.add_output(add(fd.define_tensor([3])))
        return mf.reference(fd, [torch.ones(3)])[0]

    mf.FusionCache.reset()
    assert torch.equal(define(lambda x: x + x), torch.full((3,), 2.0))
    assert torch.equal(define(lambda x: x + number), torch.ones(3))


def test_false_is_a_limit() -> None:
    with FusionDefinition() as fd:
        x = fd.define_tensor([3])
        fd.add_output(x.clamp(min=False))
    got = mf.reference(fd, [torch.tensor([-1.0, 0.5, 2.0])])[0]
    assert torch.equal(got, torch.tensor([0.0, 0.5, 2.0]))


@pytest.mark.parametrize("limits", [(math.nan, None), (None, math.nan), (-1.0, math.nan)])
def test_a_limit_that_is_nan_leaves_nothing(limits: tuple[Any, Any]) -> None:
    """As torch says of `clamp`; torch 2.11 does not do it where there is one limit."""
    with FusionDefinition() as fd:
        x = fd.define_tensor([3])
        fd.add_output(x.clamp(*limits))
        fd.add_output(x.clamp_max(math.nan))
        fd.add_output(fd.ops.hardtanh(x, -1.0, math.nan))
    for got in mf.reference(fd, [torch.tensor([-1.0, 0.5, 2.0])]):
        assert got.isnan().all()


def module() -> Any:
    return mf.fusion(torch.nn.Linear(2, 2))


#: What is refused, and words that the message has.
REFUSED: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "name of a definition": (lambda fd, x: FusionDefinition(3), ("FusionDefinition(3)",)),  # type: ignore[arg-type]
    "a name of lines": (lambda fd, x: FusionDefinition("a\nb"), ("one line",)),
    "name of an input": (lambda fd, x: fd.define_tensor([2], name=5), ("name=5",)),
    "a dotted name": (lambda fd, x: fd.define_tensor([2], name="a..b"), ("name='a..b'",)),
    "huge shape": (lambda fd, x: fd.define_tensor([2**40, 2**40]), ("2**59",)),
    "extent": (lambda fd, x: fd.define_tensor([2**70]), ("shape",)),
    "text for a shape": (lambda fd, x: fd.define_tensor("ab"), ("shape 'ab'",)),
    "scalar": (lambda fd, x: fd.define_scalar(2**70), ("71 bits",)),
    "scalar of a list": (lambda fd, x: fd.define_scalar([1]), ("[1]",)),
    "scalar dtype": (lambda fd, x: fd.define_scalar(1, dtype=[int]), ("dtype=",)),
    "operand": (lambda fd, x: x + 2**70, ("71 bits",)),
    "operand of text": (lambda fd, x: x + "a", ("str is no operand",)),
    "first operand": (lambda fd, x: fd.ops.sum(3), ("sum: 3",)),
    "index": (lambda fd, x: x[10**5000], ("bits",)),
    "bound": (lambda fd, x: x[: 2**70], ("slice(",)),
    "chunk of no dims": (lambda fd, x: x.sum().chunk(2), ("it has no dims",)),
    "unbind of no dims": (lambda fd, x: x.sum().unbind(), ("it has no dims",)),
    "unbind of many": (lambda fd, x: fd.define_tensor([10**9]).unbind(), ("1000000000 parts",)),
    "rms_norm of integers": (lambda fd, x: fd.ops.rms_norm(x.int()), ("i32[2,3]", "cast")),
    "bias of two dims": (lambda fd, x: fd.ops.linear(x, x, fd.ops.zeros(2, 2)), ("bias",)),
    "a fraction of integers": (
        lambda fd, x: x[:, :2].int().addmm(x.int(), x.int().T, alpha=0.5), ("alpha=0.5",)),
    "a mesh of text": (lambda fd, x: (x * 1).on("abc"), ("abc",)),
    "a layout of lists": (lambda fd, x: (x * 1).on([0], {"x": [0]}), ("not a placement",)),
    "a layout of numbers": (lambda fd, x: (x * 1).on([0], {0: Shard(0)}), ("not a placement",)),
    "an order of text": (lambda fd, x: (x * 1).on([0], {}, order="ab"), ("order='ab'",)),
    "a stream of numbers": (lambda fd, x: (x * 1).on([0], {}, stream=3), ("stream=3",)),
    "a Layout and more": (
        lambda fd, x: (x * 1).on(Layout(DeviceMesh([0])), stream=3), ("stream=3",)),
    "a module": (lambda fd, x: module(), ("Linear", "parameters", "F.linear")),
    "no function": (lambda fd, x: mf.fusion(3), ("fusion(int)",)),  # type: ignore[arg-type]
    "missing argument": (lambda fd, x: x.split(), ("split", "split_size")),
    "unknown argument": (lambda fd, x: x.sum(axes=1), ("sum", "axes")),
    "argument twice": (lambda fd, x: x.sum(0, dim=1), ("sum", "dim")),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    wrong, says = REFUSED[name]
    with FusionDefinition() as fd:
        x = fd.define_tensor([2, 3], name="x")
        with pytest.raises(MdfuseError) as caught:
            wrong(fd, x)
    for words in says:
        assert words in str(caught.value), caught.value


def test_a_module_without_parameters_is_a_function() -> None:
    traced = mf.fusion(torch.nn.ReLU())
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(mf.reference(traced.define(mf.TensorSpec((2,))), [x])[0], x.relu())


@pytest.mark.parametrize("other", [0, 1])
def test_a_handle_of_another_definition(other: int) -> None:
    with FusionDefinition("first") as first:
        x = first.define_tensor([3], name="x")
    with FusionDefinition("second") as fd:
        y = fd.define_tensor([3])
        pair = (x, y) if other else (y, x)
        for wrong in (
            lambda: fd.ops.cat(pair), lambda: fd.ops.where(y > 0, *pair), lambda: pair[0] @ pair[1],
            lambda: fd.add_output(x), lambda: fd.ops.full((2,), x), lambda: y.max(x),
        ):  # fmt: skip
            with pytest.raises(MdfuseError):
                wrong()
