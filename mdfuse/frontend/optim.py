"""Optimizer steps as functions of values: parameter and state before -> after.

They are made of elementwise operations, so nothing is communicated if parameter, gradient and state
have one layout. Hyperparameters are numbers, or tensors without dims, which each run may choose; a
number that a run chooses as a scalar would keep the update out of CUDA graphs. Groups of parameters
with hyperparameters of their own are calls with other arguments. A gradient that does not exist, of
which `mf.grad` makes zeros, leaves parameter and state as they are.

A 16-bit parameter is updated in f32 and rounded once. To keep small steps, keep an f32 copy, the
*master*, and pass it to the step:

>>> import torch, mdfuse as mf
>>> with mf.FusionDefinition("step") as fd:
...     w = fd.define_tensor([4, 6], torch.bfloat16)
...     master, v = fd.define_tensor([4, 6]), fd.define_tensor([4, 6])
...     (dw,) = mf.grad((w * w).sum(), [w])
...     new, momentum = mf.optim.sgd(master, dw, v, lr=0.1, momentum=0.9)
...     fd.add_output(momentum, reuse=v)
...     fd.add_output(new.to(torch.bfloat16), reuse=w)
...     fd.add_output(new, reuse=master)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any

import torch

from mdfuse.errors import DefinitionError, counted, listed
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.ops.pointwise import ROWS, addcmul, clamp, lerp, where
from mdfuse.frontend.ops.recording import as_dtype, back, in_f32, record
from mdfuse.frontend.ops.reductions import sum as sum_of

#: A number, or a tensor without dims.
Number = float | Handle


def sgd(
    w: Handle,
    dw: Handle,
    v: Handle | None = None,
    *,
    lr: Number,
    momentum: Number = 0.0,
    weight_decay: Number = 0.0,
    nesterov: bool = False,
) -> tuple[Handle, Handle | None]:
    """Return parameter and velocity after a step of gradient descent, as `torch.optim.SGD`.

    Args:
        w: the parameter, floating.
        dw: its gradient.
        v: the velocity before the step, zeros at first; None: without momentum.
        lr: the learning rate.
        momentum: how much of the velocity stays.
        weight_decay: the part of the parameter that is added to the gradient.
        nesterov: look ahead along the velocity (Sutskever et al. 2013).

    Raises:
        DefinitionError: gradient or velocity of another shape; momentum without a velocity.
    """
    _check("sgd", w, dw, *(() if v is None else (v,)))
    if v is None and not (isinstance(momentum, float | int) and momentum == 0):
        raise DefinitionError(
            f"sgd of %{w.name} with momentum={momentum!r} and no velocity",
            hint="pass v, an input of the parameter's shape that is zeros at first",
        )
    if dw.fact.is_missing:
        return record("set", w), None if v is None else record("set", v)
    wide = in_f32(w)
    step = _decayed(_like(dw, wide), wide, weight_decay)
    if v is not None:
        velocity = _like(v, wide) * momentum + step
        step = step + velocity * momentum if nesterov else velocity
        v = back(velocity, v)
    return back(wide - step * lr, w), v


def adamw(
    w: Handle,
    dw: Handle,
    m: Handle,
    v: Handle,
    step: Handle,
    *,
    lr: Number,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: Number = 0.01,
) -> tuple[Handle, Handle, Handle]:
    """Return parameter and moments after a step of AdamW (arXiv:1711.05101), as `torch.optim`.

    Args:
        w: the parameter, floating.
        dw: its gradient.
        m: the mean of gradients before the step, zeros at first.
        v: the mean of their squares.
        step: the number of this step, from 1: a floating tensor without dims.
        lr: the learning rate.
        betas: how much of the moments stays.
        eps: added to the root of the second moment.
        weight_decay: the fraction of the parameter that is removed, times the learning rate.

    Raises:
        DefinitionError: gradient or moments of another shape; a step with dims, or no tensor.
    """
    _check("adamw", w, dw, m, v)
    is_step = isinstance(step, Handle) and step.is_tensor and step.ndim == 0
    if not (is_step and step.dtype.is_floating_point):
        raise DefinitionError(
            f"adamw of %{w.name} with step={step!r}",
            because="the moments are corrected for how many steps they are made of",
            hint="fd.define_tensor([]), an input that is 1.0 in the first step",
        )
    if dw.fact.is_missing:
        return record("set", w), record("set", m), record("set", v)
    wide = in_f32(w)
    g = _like(dw, wide)
    mean, square = _like(m, wide), _like(v, wide)
    mean = lerp(mean, g, _number(1.0 - betas[0], wide))
    square = addcmul(square * betas[1], g, g, value=1.0 - betas[1])
    rate, second, stays = _numbers_of(step, lr, betas, weight_decay, wide.dtype)
    root = ROWS["sqrt"](square) / second + eps
    return back(wide * stays - (mean / root) * rate, w), back(mean, m), back(square, v)


def _number(x: Number, like: Handle) -> Number:
    """Return a number, or a tensor without dims in the dtype of the parameter."""
    return as_dtype(x, like.dtype) if isinstance(x, Handle) and x.is_tensor else x


def _numbers_of(
    step: Handle,
    lr: Number,
    betas: tuple[Number, Number],
    weight_decay: Number,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    """Return step size, root and decay factor, shared by all parameters of a dtype.

    They are computed in f64, as torch computes numbers: 1 - 0.999 has few digits in f32.
    """
    given = step, lr, *betas, weight_decay
    numbers = ((type(x), x.id if isinstance(x, Handle) else x) for x in given)
    cached, key = step.definition.shared, ("adamw", dtype, *numbers)
    if key not in cached:
        count, rate, *means, decay = (
            as_dtype(x, torch.float64) if isinstance(x, Handle) and x.is_tensor else x
            for x in given
        )
        first, second = (1.0 - ROWS["pow"](beta, count) for beta in means)
        factors = rate / first, ROWS["sqrt"](second), 1.0 - rate * decay
        cached[key] = tuple(as_dtype(x, dtype) if isinstance(x, Handle) else x for x in factors)
    return cached[key]


def clip_by_global_norm(
    gradients: Sequence[Handle], max_norm: Number
) -> tuple[tuple[Handle, ...], Handle]:
    """Return gradients times min(1, max_norm / norm), and the norm of all of them together.

    Squares are summed in at least f32; each rank sums its shards of split gradients, and one small
    all-reduce per kind of split adds these. As `torch.nn.utils`.

    Args:
        gradients: floating tensors, at least one.
        max_norm: a number, or a tensor without dims.

    Raises:
        DefinitionError: no gradients, or one that is no floating tensor.
    """
    factor, norm = clip_factor(gradients, max_norm)
    return tuple(back(scaled(g, factor), g) for g in gradients), norm


def clip_factor(gradients: Sequence[Handle], max_norm: Number) -> tuple[Handle, Handle]:
    """Return min(1, max_norm / norm), and the norm; see `clip_by_global_norm`.

    Each square is added up beside its gradient: a part of what layers compute alike.
    """
    if not gradients or not all(
        isinstance(g, Handle) and g.dtype.is_floating_point for g in gradients
    ):
        raise DefinitionError(
            f"clip_by_global_norm of {counted(len(gradients), 'gradient')}",
            because="the norm is that of floating tensors, at least one",
            hint="pass what mf.grad returned",
        )
    there = [g for g in gradients if not g.fact.is_missing] or gradients
    squares = (sum_of(wide * wide) for wide in map(in_f32, there))
    norm = ROWS["sqrt"](reduce(add, squares))
    return clamp(max_norm / (norm + 1e-6), None, 1.0), norm


def scaled(g: Handle, factor: Handle) -> Handle:
    """Return a gradient times a factor, in at least f32; a missing one as it is."""
    return g if g.fact.is_missing else in_f32(g) * factor


@dataclass(frozen=True)
class ParameterGroups:
    """A step of an optimizer with other numbers for some parameters; `groups` makes it.

    Attributes:
        step: the function.
        numbers: pattern of names -> number of the step -> its value, or the name of an input.
    """

    step: Callable[..., Any]
    numbers: Mapping[str, Mapping[str, Any]]


def groups(
    step: Callable[..., Any], numbers: Mapping[str, Mapping[str, Number | str]]
) -> ParameterGroups:
    """Return a step for `training_step(optimizer=)` with other numbers for groups of parameters.

    Args:
        step: of this module, or the like; numbers that all groups share are bound by
            `functools.partial`.
        numbers: pattern of names of parameters -> number -> its value, or as text the name of an
            input, which each run chooses. Where several patterns match and have a number, the one
            without wildcards counts, then the one with the longest literal part.

    Raises:
        DefinitionError: step is no function; it has no such number.

    >>> from functools import partial
    >>> import mdfuse as mf
    >>> optimizer = mf.optim.groups(partial(mf.optim.adamw, weight_decay=0.1), {
    ...     "*.bias": {"weight_decay": 0.0}, "head.*": {"lr": "lr_head"}})
    >>> sorted(optimizer.numbers)
    ['*.bias', 'head.*']
    """
    if not callable(step) or not isinstance(numbers, Mapping):
        raise DefinitionError(
            f"groups({step!r}, {type(numbers).__name__})",
            because="a step of an optimizer has other numbers for parameters by pattern",
            hint='mf.optim.groups(partial(mf.optim.adamw, lr=1e-3), {"*.bias": {"lr": 1e-4}})',
        )
    known = [
        p.name for p in inspect.signature(step).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    for pattern, values in numbers.items():
        if wrong := [n for n in values if n not in known]:
            raise DefinitionError(
                f"groups[{pattern!r}] has {listed(wrong)}",
                because=f"the numbers of the step are {listed(known)}",
                hint="numbers by the names of the step's keyword arguments",
            )
    return ParameterGroups(step, {p: dict(values) for p, values in numbers.items()})


def averaged(step: Any, decay: float = 0.999) -> Any:
    """Return a step that also keeps the exponential moving average of each parameter, its EMA.

    The state `average` is the parameter after the first step, then decay * average + (1 - decay) *
    parameter, as `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn`. It has the
    dtype of the parameter, or of its master: 16 bits lose what a large decay adds.

    Args:
        step: of this module, or the like; or what `groups` returns.
        decay: how much of the average stays, from 0 to 1.

    Raises:
        DefinitionError: another decay; step is no function.

    >>> from functools import partial
    >>> import inspect, mdfuse as mf
    >>> optimizer = mf.optim.averaged(partial(mf.optim.sgd, lr=0.1), decay=0.99)
    >>> [*inspect.signature(optimizer).parameters][:4]
    ['w', 'dw', 'average', 'step']
    """
    if not isinstance(decay, float | int) or not 0 <= decay <= 1:
        raise DefinitionError(f"averaged with decay={decay!r}", hint="a number from 0 to 1")
    if isinstance(step, ParameterGroups):
        return replace(step, step=averaged(step.step, decay))
    if not callable(step):
        raise DefinitionError(f"averaged({step!r})", hint="mf.optim.averaged(mf.optim.adamw)")
    signature = inspect.signature(step)
    bound = step.keywords if isinstance(step, partial) else {}
    places = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = [p.replace(default=p.empty) for p in places
            if p.default is p.empty or bound.get("momentum", 0)]  # fmt: skip
    counts = any(p.name == "step" for p in needed)
    state = [p for p in needed if p.name != "step"]

    def call(w: Handle, dw: Handle, *given: Handle, **numbers: Any) -> tuple[Handle, ...]:
        *old, average, now = given
        result = step(w, dw, *old, *([now] if counts else []), **numbers)
        new, *after = result if isinstance(result, tuple) else (result,)
        wide = _like(new, in_f32(average))
        mean = lerp(in_f32(average), wide, 1.0 - decay)
        mean = where(ROWS["le"](now, 1.0), wide, mean)
        return (new, *after[: len(old)], back(mean, average))

    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    added = [inspect.Parameter(n, place) for n in ("average", "step")]
    others = [p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    call.__signature__ = signature.replace(parameters=[*state, *added, *others])  # type: ignore[attr-defined]
    return call


def all_finite(gradients: Sequence[Handle]) -> Handle:
    """Return whether each element of all gradients is finite: a bool without dims.

    Ranks sum their parts of zero times each element, which no finite gradient makes overflow.
    """
    there = [g for g in gradients if not g.fact.is_missing] or gradients
    zeros = [sum_of(in_f32(g) * 0.0) for g in there]
    return ROWS["isfinite"](reduce(lambda a, b: a + b, zeros))


def _check(name: str, w: Handle, *others: Handle) -> None:
    for x in (w, *others):
        if not isinstance(x, Handle) or not x.is_tensor or not x.dtype.is_floating_point:
            raise DefinitionError(
                f"{name} with {x!r}",
                because="parameters, gradients and their means are floating tensors",
                hint="what define_tensor or mf.grad returned",
            )
        if x.shape != w.shape:
            raise DefinitionError(
                f"{name} of %{w.name}: {w.value.type_text()} with %{x.name}: {x.value.type_text()}",
                because="each element of the parameter has its own",
                hint="tensors of the parameter's shape",
            )


def _like(x: Handle, wide: Handle) -> Handle:
    return x if x.dtype == wide.dtype else x.to(wide.dtype)


def _decayed(g: Handle, w: Handle, weight_decay: Any) -> Handle:
    is_none = isinstance(weight_decay, float | int) and weight_decay == 0
    return g if is_none else g + w * weight_decay
