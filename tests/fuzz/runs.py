"""Runs of small programs on what nobody would pass: refused, or equal to plain torch.

A program is drawn together with the same computation in plain torch. Values are small integers, so
that results are equal to the last bit. Its arguments are plain, or odd; it is simulated, or run by
one rank, several times, so that plans of earlier arguments meet later ones. Whatever is accepted
gives what torch gives on the same arguments, and plain arguments are always accepted.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import mdfuse as mf
from mdfuse import DeviceMesh, FusionCache, MdfuseError, Options, Partial, Replicate, Shard

DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.complex64)
NAMES = (
    "x", "y", "fi", "\ufb01", "\xb5", "\u03bc", "\U0001d432", "class", "None", "run", "v0", "v1",
    "b0", "c0", "caller", "x.1", "x_1", "_", "__debug__", "torch", "mm", "\xaa", "a", "K", "\u212a",
)  # fmt: skip
BAD_NAMES = ("1", "e\u0301", "", " ", "x y", "%x", "x\n", "\ud800", "x" * 300, 3, b"x", ("x",))


class Own(Tensor):
    """A subclass."""


@dataclass
class Drawn:
    """A program, and what plain torch makes of its inputs.

    Attributes:
        program: the program.
        inputs: shape, dtype and layout of each; no shape: a number.
        reference: the outputs for given inputs.
        reuse: the output that goes into the first input, if one does.
        is_symbolic: the extent of the first dim of the first input is chosen by each run.
    """

    program: mf.Program
    inputs: list[tuple[tuple[int, ...] | None, torch.dtype, dict[str, Any]]]
    reference: Callable[[list[Any]], list[Tensor]]
    reuse: int | None
    is_symbolic: bool


@dataclass
class _Values:
    """Values of a definition, each with the function of the inputs that it is."""

    handles: list[Any] = field(default_factory=list)
    of: list[Callable[[list[Any]], Any]] = field(default_factory=list)


def fuzz(drawn: random.Random) -> None:
    """One program, a few calls of it."""
    FusionCache.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        is_run = drawn.random() < 0.6
        ranks = 1 if is_run else drawn.randint(1, 4)
        made = _program(drawn, ranks)
        for _ in range(drawn.randint(2, 4)):
            if is_run:
                _run(drawn, made)
            else:
                _simulate(drawn, made, ranks)


# -- programs --------------------------------------------------------------------------------------


def _program(drawn: random.Random, ranks: int) -> Drawn:
    mesh, values, inputs = DeviceMesh.arange(t=ranks), _Values(), []
    is_symbolic = drawn.random() < 0.1
    with mf.FusionDefinition(drawn.choice(["p", "p", *NAMES])) as fd:
        for at in range(drawn.randint(1, 3)):
            shape = tuple(drawn.choice([0, 1, 2, 3, 4]) for _ in range(drawn.randint(0, 3)))
            if inputs and drawn.random() < 0.6 and inputs[0][0] is not None:
                shape, dtype = inputs[0][:2]
            else:
                dtype = drawn.choice(DTYPES)
            layout = {} if shape and is_symbolic else _layout(drawn, len(shape), dtype)
            names = BAD_NAMES if drawn.random() < 0.04 else NAMES
            name = {} if drawn.random() < 0.5 else {"name": drawn.choice(names)}
            extents = (-1, *shape[1:]) if is_symbolic and not at and shape else shape
            if at and drawn.random() < 0.15:
                inputs.append((None, torch.int64, {}))
                values.handles.append(fd.define_scalar(dtype=torch.int64, **name))
            else:
                inputs.append((shape, dtype, layout))
                values.handles.append(fd.define_tensor(extents, dtype, mesh, layout, **name))
            values.of.append(lambda xs, at=at: xs[at])
        for _ in range(drawn.randint(0, 4)):
            _operation(drawn, fd, mesh, values)
        outputs = _outputs(drawn, values, len(inputs))
        reuse = None
        for n, at in enumerate(outputs):
            into = {}
            if n == 0 and at >= len(inputs) and not is_symbolic and drawn.random() < 0.4:
                into, reuse = {"reuse": values.handles[0]}, 0
            fd.add_output(values.handles[at], **into)
    options = Options(poison=drawn.random() < 0.3, check_indices=drawn.random() < 0.1)
    program = mf.compile(fd, options)
    functions = [values.of[at] for at in outputs]
    has_symbol = program.symbolic is not None
    return Drawn(program, inputs, lambda xs: [f(xs) for f in functions], reuse, has_symbol)


def _layout(drawn: random.Random, ndim: int, dtype: torch.dtype) -> dict[str, Any]:
    kinds: list[Any] = [Replicate(), *map(Shard, range(ndim))]
    if dtype != torch.bool:
        kinds.append(Partial())
    return {"t": drawn.choice(kinds)}


def _operation(drawn: random.Random, fd: Any, mesh: DeviceMesh, values: _Values) -> None:
    """One more value; what the definition refuses, it refuses for all."""
    at = drawn.randrange(len(values.handles))
    x, of = values.handles[at], values.of[at]
    ndim = len(getattr(x, "shape", ()))
    kind = drawn.randrange(7)
    if kind == 0:
        made, function = fd.ops.set(x).on(mesh, _layout(drawn, ndim, torch.bool)), of
    elif kind == 1:
        dims = drawn.sample(range(ndim), ndim)
        made, function = (
            fd.ops.permute(x, dims),
            lambda xs: of(xs).permute(dims) if dims else of(xs),
        )
    elif kind == 2:
        made, function = x * 2, lambda xs: of(xs) * 2
    elif kind == 3:
        other = drawn.randrange(len(values.handles))
        also = values.of[other]
        made, function = x * values.handles[other], lambda xs: of(xs) * also(xs)
    elif kind == 4:
        other = drawn.randrange(len(values.handles))
        also = values.of[other]
        made, function = x + values.handles[other], lambda xs: of(xs) + also(xs)
    elif kind == 5 and ndim:
        d = drawn.randrange(ndim)
        made, function = x.sum(d), lambda xs: of(xs).sum(d)
    else:
        made, function = x == x, lambda xs: of(xs) == of(xs)
    values.handles.append(made)
    values.of.append(function)


def _outputs(drawn: random.Random, values: _Values, inputs: int) -> list[int]:
    count = len(values.handles)
    later = list(range(inputs, count)) or list(range(count))
    return drawn.sample(later, min(len(later), drawn.randint(1, 2)))


# -- arguments -------------------------------------------------------------------------------------


def _plain(drawn: random.Random, shape: tuple[int, ...] | None, dtype: torch.dtype) -> Any:
    if shape is None:
        return drawn.randint(-3, 3)
    count = torch.Size(shape).numel()
    numbers = [drawn.randint(-3, 3) for _ in range(count)]
    x = torch.tensor(numbers, dtype=torch.int64).reshape(shape).to(dtype)
    if dtype.is_complex:
        x = x + 1j * torch.tensor(numbers[::-1]).reshape(shape)
    return x


def _strided(drawn: random.Random, x: Tensor) -> Tensor:
    """The same elements, lying in another way."""
    kind = drawn.randrange(3)
    if kind == 0:
        dims = drawn.sample(range(x.ndim), x.ndim)
        return x.permute(dims).contiguous().permute([dims.index(d) for d in range(x.ndim)])
    memory = x.new_zeros([2 * n + 1 for n in x.shape])
    view = memory[tuple(slice(1, None, 2) for _ in x.shape)]
    view.copy_(x)
    return view


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def _overlapping(x: Tensor) -> Tensor:
    return x.new_ones(64).as_strided(x.shape, [1] * x.ndim)


#: Tensors that torch reads as it reads others.
USUAL: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x[tuple(slice(0, 1) for _ in x.shape)].expand(x.shape) if x.numel() else x,
    _overlapping,
    lambda x: torch._neg_view(x) if x.dtype != torch.bool else x,
    lambda x: x.conj(),
    lambda x: torch._neg_view(x.conj()) if x.dtype != torch.bool else x,
    lambda x: torch.complex(x, x).conj().imag if x.is_floating_point() else x,
    lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    _inference,
)

#: What must be refused, always or where gradients are recorded.
ODD: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.clone().requires_grad_() if x.is_floating_point() or x.is_complex() else None,
    lambda x: torch.nn.Parameter(x.clone(), x.is_floating_point() or x.is_complex()),
    lambda x: x.as_subclass(Own),
    lambda x: x.to_sparse(),
    lambda x: torch.nested.nested_tensor([x]),
    lambda x: torch.nested.nested_tensor([x.flatten()], layout=torch.jagged),
    lambda x: torch.quantize_per_tensor(x.float(), 1.0, 0, torch.qint8),
    lambda x: x.to("meta"),
    lambda x: FakeTensorMode().from_tensor(x),
    lambda x: x.numpy(),
    lambda x: x.tolist(),
    lambda x: None,
    lambda x: 3,
    lambda x: "x",
    lambda x: x.double() if x.dtype != torch.float64 else x.int(),
    lambda x: x.unsqueeze(0),
    lambda x: x.flatten()[:1],
    lambda x: x.new_zeros([n + 1 for n in x.shape] or [1]),
    lambda x: torch.complex(x.float(), x.float()) if not x.is_complex() else x.real,
    lambda x: x.new_empty((1 << 40, *x.shape[1:])[: x.ndim], device="meta"),
    lambda x: torch.nn.UninitializedParameter(),
    lambda x: object(),
)

NUMBERS = (
    3,
    -2,
    0,
    True,
    2.0,
    2.5,
    1e300,
    1 << 63,
    -(1 << 64),
    1 << 31,
    10**400,
    1j,
    "3",
    None,
)


def _argument(drawn: random.Random, x: Any) -> Any:
    """Odd or not; what cannot be made so stays plain."""
    if type(x) is not Tensor or x.is_nested or x.is_quantized or x.layout is not torch.strided:
        return drawn.choice([*NUMBERS, torch.tensor(2), torch.tensor([2]), torch.tensor(2.5)])
    kind = drawn.random()
    if kind < 0.3:
        return _strided(drawn, x)
    try:
        return drawn.choice(USUAL if kind < 0.65 else ODD)(x)
    except (RuntimeError, TypeError, NotImplementedError, ValueError):
        return x


def _mode(drawn: random.Random) -> AbstractContextManager[Any]:
    return drawn.choice([nullcontext, nullcontext, torch.no_grad, torch.inference_mode])()


def _read(made: Drawn, given: list[Any]) -> list[Any]:
    """What a run reads, where it takes these arguments."""
    kept = [_kept(x) for x in given]
    for n, (shape, _, _) in enumerate(made.inputs[: len(kept)]):
        if shape is None and isinstance(kept[n], int | float | Tensor):
            with suppress(ValueError, OverflowError, RuntimeError):
                kept[n] = int(kept[n])
    return kept


def _kept(x: Any) -> Any:
    """What torch reads in a plain tensor; anything else as it is."""
    if not isinstance(x, Tensor) or type(x) not in (Tensor, torch.nn.Parameter) or x.is_nested:
        return x
    with torch.no_grad():
        return x.clone().resolve_conj().resolve_neg() if x.layout is torch.strided else x


# -- calls -----------------------------------------------------------------------------------------


def _arguments(drawn: random.Random, made: Drawn) -> tuple[list[Any], bool]:
    """Arguments, and whether all are plain."""
    given = [_plain(drawn, shape, dtype) for shape, dtype, _ in made.inputs]
    if drawn.random() < 0.4:
        return given, True
    odd = drawn.randrange(len(given))
    given[odd] = _argument(drawn, given[odd])
    if drawn.random() < 0.1:
        given = drawn.choice([given[:-1], [*given, given[0]], given * 2])
    return given, False


def _extents(drawn: random.Random, made: Drawn) -> Any:
    if not made.is_symbolic:
        return None if drawn.random() < 0.9 else drawn.choice([{}, {"x.0": 3}, 3])
    name = made.program.symbolic.symbols[0]
    right = made.inputs[0][0][0]
    odd = [right + 1, -1, 1 << 63, 1 << 62, 10**400, 2.0, "3", None, True]
    return drawn.choice([None, None, {name: right}, {name: drawn.choice(odd)}, {"q": 3}, [right]])


def _outs(drawn: random.Random, want: list[Any]) -> Any:
    """Nothing, buffers, or what cannot be one."""
    if drawn.random() < 0.6 or not want:
        return None
    buffers: list[Any] = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in want]
    if drawn.random() < 0.5:
        return buffers if drawn.random() < 0.5 else tuple(buffers)
    at = drawn.randrange(len(buffers))
    buffers[at] = _argument(drawn, buffers[at])
    return drawn.choice([buffers, buffers, 3, "out", [], buffers[:1] * 3, buffers[at], {0: 1}])


def _run(drawn: random.Random, made: Drawn) -> None:
    """One rank runs it twice on the same arguments; then plain ones must be accepted."""
    given, is_plain = _arguments(drawn, made)
    extents = _extents(drawn, made)
    out = _outs(drawn, _reference(made, given)) if made.reuse is None else None
    with _mode(drawn):
        for _ in range(2):
            before = _read(made, given)
            try:
                results = made.program.run(*given, out=out, extents=extents)
            except MdfuseError as error:
                if is_plain and out is None and extents is None and _reference(made, given):
                    raise AssertionError(f"plain arguments are refused: {error}") from error
                break
            _compare(made, before, results)
            if out is not None:
                assert all(x is y for x, y in zip(out, results, strict=True))
            _check_inputs(made, before, given, results)
    plain = [_plain(drawn, shape, dtype) for shape, dtype, _ in made.inputs]
    before = _read(made, plain)
    try:
        results = made.program.run(*plain)
    except MdfuseError as error:
        if not _reference(made, plain):
            return
        raise AssertionError(f"plain arguments are refused: {error}") from error
    _compare(made, before, results)


def _check_inputs(made: Drawn, before: list[Any], given: list[Any], results: list[Any]) -> None:
    """Inputs are left as they are, but for one that an output reuses, which is that output."""
    for n, (old, x) in enumerate(zip(before, given, strict=True)):
        if n == made.reuse:
            assert results[0].data_ptr() == x.data_ptr() or not x.numel()
        elif isinstance(x, Tensor) and isinstance(old, Tensor):
            _equal(_kept(x), old)


def _simulate(drawn: random.Random, made: Drawn, ranks: int) -> None:
    given, is_plain = _arguments(drawn, made)
    extents, schedule = _extents(drawn, made), drawn.choice([None, None, 0, 1])
    before = _read(made, given)
    per_rank = _parts(drawn, made, before, ranks) if drawn.random() < 0.3 else None
    options = Options(poison=drawn.random() < 0.3, check_indices=drawn.random() < 0.1)
    with _mode(drawn):
        try:
            found = mf.simulate(
                made.program,
                given if per_rank is None else None,
                extents=extents,
                per_rank=per_rank,
                options=options,
                schedule=schedule,
            )
        except MdfuseError as error:
            if is_plain and extents is None and per_rank is None and _reference(made, given):
                raise AssertionError(f"plain arguments are refused: {error}") from error
            return
    if per_rank is None:
        _compare(made, before, found.outputs)
        for old, x in zip(before, given, strict=True):
            if isinstance(x, Tensor) and isinstance(old, Tensor):
                _equal(_kept(x), old)


def _parts(drawn: random.Random, made: Drawn, given: list[Any], ranks: int) -> Any:
    """What each rank passes, one of them something odd."""
    names = made.program.host.inputs
    rows: list[Any] = [{} for _ in range(ranks)]
    for (shape, _, layout), name, x in zip(made.inputs, names, given, strict=False):
        for rank, row in enumerate(rows):
            is_right = type(x) is Tensor and x.layout is torch.strided
            is_right = is_right and not x.is_nested and not x.is_quantized
            whole = shape is None or not is_right or x.ndim != len(shape)
            mesh = DeviceMesh.arange(t=ranks)
            row[name] = x if whole else mf.shard_tensor(x, mesh, layout, rank=rank)
    odd = rows[drawn.randrange(ranks)]
    for name in odd:
        odd[name] = _argument(drawn, odd[name])
    odd.update(drawn.choice([{}, {}, {"q": 3}, {3: 3}]))
    return drawn.choice([rows, rows, rows[:-1], 3, [3], None, [None] * ranks])


def _reference(made: Drawn, given: list[Any]) -> list[Any]:
    """Plain torch on these arguments; nothing where it cannot, or the extents may mean nothing."""
    if made.is_symbolic:
        return []
    try:
        found = made.reference(_read(made, given))
        return [x for x in found if type(x) is Tensor and x.layout is torch.strided]
    except Exception:
        return []


def _compare(made: Drawn, before: list[Any], results: list[Any]) -> None:
    with torch.no_grad():
        wanted = made.reference(before)
    for got, want in _pairs(results, wanted):
        _equal(got, want)


def _pairs(results: list[Any], wanted: list[Any]) -> Iterator[tuple[Any, Any]]:
    assert len(results) == len(wanted)
    yield from zip(results, wanted, strict=True)


def _equal(got: Any, want: Any) -> None:
    assert isinstance(got, Tensor), type(got)
    assert (got.shape, got.dtype) == (want.shape, want.dtype), (got, want)
    assert torch.equal(got, want), f"{got}\n{want}"
