"""A step of training of an imported module: forward, loss, backward and update as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from mdfuse.errors import DefinitionError, counted, listed
from mdfuse.frontend import given
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.grad import grad
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.capture import Parameter
from mdfuse.frontend.importing.joined import JoinedTensors
from mdfuse.frontend.importing.place import matching, unmatched
from mdfuse.frontend.importing.record_graph import Inputs, Model, record
from mdfuse.frontend.importing.staged import all_finite_of, clip_factor_of, everywhere, near
from mdfuse.frontend.importing.state_layouts import state_layouts_of
from mdfuse.frontend.ops.pointwise import where
from mdfuse.frontend.optim import ParameterGroups, scaled
from mdfuse.frontend.plain import brief
from mdfuse.frontend.spec import TensorSpec
from mdfuse.interpreter.garbage import no_collection
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import as_mesh

#: The name of the input that counts steps.
COUNT = "count"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A step of an optimizer, as `mf.optim` has them: `(w, dw, *state, **numbers) -> (w, *state)`.

    Attributes:
        call: the function; numbers that are known are bound to it by `functools.partial`.
        state: names of the state tensors of each parameter.
        counts: whether it takes the number of the step.
        numbers: names of unbound numbers, which are inputs of each run.
        groups: pattern of parameters -> number -> its value, or the name of an input.
    """

    call: Callable[..., Any]
    state: tuple[str, ...]
    counts: bool
    numbers: tuple[str, ...]
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def step_of(self, name: str) -> Callable[..., Any]:
        """Return the function for the parameter of a name; it takes all inputs of numbers."""
        special = self._special(name)
        inputs = {x for values in self.groups.values() for x in values.values() if _is_name(x)}

        def call(*of_parameter: Handle, **numbers: Any) -> Any:
            usual = {n: x for n, x in numbers.items() if n not in inputs or n in self.shared}
            given = {n: numbers[x] if _is_name(x) else x for n, x in special.items()}
            return self.call(*of_parameter, **{**usual, **given})

        return call if self.groups else self.call

    def _special(self, name: str) -> dict[str, Any]:
        """Return a parameter's numbers, each of the most exact pattern that has it."""
        special = {}
        for number in dict.fromkeys(n for values in self.groups.values() for n in values):
            said = {p: values[number] for p, values in self.groups.items() if number in values}
            match = matching(said, [name], f"groups, {number}", may_agree=True)
            if match is not None:
                special[number] = match[1]
        return special

    @property
    def shared(self) -> tuple[str, ...]:
        """The unbound numbers of the function itself."""
        return Optimizer.of(self.call).numbers

    def check_groups(self, names: Sequence[str]) -> None:
        """Raise LayoutError for a group of no trained parameter."""
        for pattern in self.groups:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise unmatched("groups", pattern, names)

    @staticmethod
    def of(call: Any) -> Optimizer:
        """Read an optimizer's parameters.

        Raises:
            DefinitionError: call is no function of a parameter and its gradient.
        """
        if isinstance(call, ParameterGroups):
            alone = Optimizer.of(call.step)
            named = [x for g in call.numbers.values() for x in g.values() if _is_name(x)]
            numbers = tuple(dict.fromkeys([*alone.numbers, *named]))
            return replace(alone, numbers=numbers, groups=call.numbers)
        bound = call.keywords if isinstance(call, partial) else {}
        try:
            parameters = [*inspect.signature(call).parameters.values()]
        except (TypeError, ValueError):
            parameters = []
        places = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        if [p.name for p in places[:2]] != ["w", "dw"]:
            raise DefinitionError(
                f"optimizer={brief(call)}",
                because="an optimizer is a function (w, dw, *state, **numbers) -> (w, *state)",
                hint="mf.optim.adamw, or functools.partial(mf.optim.sgd, lr=0.1)",
            )
        momentum = bound.get("momentum", 0)
        state = [p for p in places[2:] if p.default is p.empty or momentum]
        return Optimizer(
            call=call,
            state=tuple(p.name for p in state if p.name != "step"),
            counts=any(p.name == "step" for p in state),
            numbers=tuple(
                p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty
            ),
        )


def _is_name(x: object) -> bool:
    return isinstance(x, str)


@dataclass(frozen=True, kw_only=True)
class StepDefinition:
    """A step of training.

    Attributes:
        definition: parameters, constants, arguments of the module, extra inputs, numbers of the
            optimizer, and its state; the outputs that are written into no input come first.
        trained: names of updated parameters, on which the loss depends.
        owners: name of a state -> the name of the parameter that it belongs to.
        masters: name of an f32 copy -> its parameter.
        counts: whether steps are counted.
        patterns: pattern of `state_layouts=` -> the parameters whose state it splits.
        skips: whether it changes nothing where gradients are not finite, and returns whether.
    """

    definition: FusionDefinition
    trained: tuple[str, ...]
    owners: Mapping[str, str]
    masters: Mapping[str, str]
    counts: bool
    patterns: Mapping[str, tuple[str, ...]]
    skips: bool = False


def define_step(
    model: Model,
    loss: Callable[..., Any] | None,
    extra: Mapping[str, TensorSpec] | None,
    optimizer: Optimizer,
    *,
    frozen: Sequence[str] | None,
    clip: float | None,
    master: bool,
    name: str,
    state_layouts: Mapping[str, Any] | None = None,
    skip_nonfinite: bool = False,
) -> StepDefinition:
    """Define a step: see `ImportedModel.training_step`."""
    call = f"training_step of {model.captured.name}"
    _check_given(call, loss, {"master": master, "skip_nonfinite": skip_nonfinite})
    extra = given.by_name(call, "extra", extra)
    trained = trained_nodes(model, frozen)
    places = state_layouts_of(model, given.by_name(call, "state_layouts", state_layouts), trained)
    with no_collection(), FusionDefinition(name) as fd:
        inputs = model.define_inputs(fd)
        others = {key: _extra(fd, model, key, spec) for key, spec in extra.items()}
        numbers = {n: fd.define_tensor([], mesh=model.mesh, name=n) for n in optimizer.numbers}
        count = _count(fd, model) if optimizer.counts else None
        handles = {h.name: (h, node) for node in trained for h in _parts(inputs, node)}
        read = places.copied(inputs)
        value, *extras = _loss(model, record(model, read), loss, others)
        reads = dict(zip(handles, (h for node in trained for h in _parts(read, node)), strict=True))
        existing = _existing(model, value, reads)
        gradients = {key: places.moved(handles[key][1], dw) for key, dw in existing.items()}
        slots = {
            key: _state(fd, places.layout(handles[key][1]), handles[key][0], optimizer, master)
            for key in gradients
        }
        optimizer.check_groups([*gradients])
        all_ = [handles[key][1] for key in gradients], [*gradients.values()]
        is_finite = all_finite_of(model, *all_) if skip_nonfinite else None
        factor, *norm = clip_factor_of(model, *all_, clip) if clip is not None else (None,)
        skipped = [~is_finite] if is_finite is not None else []
        for x in (everywhere(model, value), *extras, *norm, *skipped):
            fd.add_output(x)
        now = None if count is None else count + (1 if is_finite is None else is_finite)
        for key, dw in gradients.items():
            w, node = handles[key]
            steps = partial(near, model, node), partial(places.moved, node)
            if factor is not None:  # beside the update, with which it is one kernel
                dw = _clipped(dw, steps[0](factor), slots[key].master is not None)
            _update(fd, optimizer, w, dw, slots[key], now, numbers, is_finite, *steps)
        if count is not None and now is not None:
            fd.add_output(now, reuse=count)
    return StepDefinition(
        definition=fd,
        trained=tuple(gradients),
        owners={x.name: key for key, slot in slots.items() for x in slot.state},
        masters={slot.master.name: key for key, slot in slots.items() if slot.master is not None},
        counts=count is not None,
        patterns=places.patterns,
        skips=is_finite is not None,
    )


def _check_given(call: str, loss: object, flags: Mapping[str, object]) -> None:
    for name, value in flags.items():
        given.flag(call, name, value, DefinitionError)
    if loss is not None:
        given.function(call, "loss", loss, "of the module's tensors, in their order")


def _existing(model: Model, loss: Handle, of: Mapping[str, Handle]) -> dict[str, Handle]:
    """Return the gradients of parameters that the loss reads; others are skipped, as in torch.

    Raises:
        DefinitionError: the loss depends on no parameter.
    """
    gradients = dict(zip(of, grad(loss, [*of.values()]), strict=True))
    existing = {key: dw for key, dw in gradients.items() if not dw.fact.is_missing}
    if existing:
        return existing
    raise DefinitionError(
        f"training_step of {model.captured.name}: no parameter leads to the loss",
        because=f"there is no gradient of {listed([*of])}",
        hint="a loss of what the module returns, without detach; report() of the model warns of "
        "backwards that are not captured",
    )


def _count(fd: FusionDefinition, model: Model) -> Handle:
    """Define the step count, with 64 bits, because 1 - 0.999**n has few digits in 32."""
    return fd.define_tensor([], torch.float64, model.mesh, name=COUNT)


@dataclass(frozen=True, slots=True)
class _Slot:
    """The optimizer state of a parameter."""

    state: tuple[Handle, ...]
    master: Handle | None


def _parts(inputs: Inputs, node: Node) -> tuple[Handle, ...]:
    x = inputs.nodes[node]
    return x.parts if isinstance(x, JoinedTensors) else (x,)


def _state(
    fd: FusionDefinition, layout: Layout, w: Handle, optimizer: Optimizer, master: bool
) -> _Slot:
    """Define the optimizer state of a parameter."""
    is_narrow = master and w.dtype.itemsize < torch.float32.itemsize
    dtype = torch.float32 if is_narrow else w.dtype
    slots = [
        fd.define_tensor(w.shape, dtype, layout, name=f"{w.name}.{n}") for n in optimizer.state
    ]
    wide = fd.define_tensor(w.shape, dtype, layout, name=f"{w.name}.master") if is_narrow else None
    return _Slot(tuple(slots), wide)


def _clipped(dw: Handle, factor: Handle, is_wide: bool) -> Handle:
    """Return a gradient times a factor; for a master in f32, otherwise rounded to its dtype."""
    clipped = scaled(dw, factor)
    return clipped if is_wide or clipped is dw else clipped.to(dw.dtype)


def _update(
    fd: FusionDefinition,
    optimizer: Optimizer,
    w: Handle,
    dw: Handle,
    slot: _Slot,
    now: Handle | None,
    numbers: Mapping[str, Handle],
    is_finite: Handle | None,
    near: Callable[[Handle], Handle],
    moved: Callable[..., Handle],
) -> None:
    """Append the step of a parameter, written in place; it stays if gradients are not finite.

    `near(x)` brings a number to its stage, `moved(x)` puts it where its state is.
    """
    count = () if now is None else (near(now),)
    numbers = {name: near(x) for name, x in numbers.items()}
    is_finite = None if is_finite is None else near(is_finite)
    wide = moved(w) if slot.master is None else slot.master
    result = optimizer.step_of(w.name)(wide, dw, *slot.state, *count, **numbers)
    new, *state = result if isinstance(result, tuple) else (result,)
    if len(state) < len(slot.state):
        raise DefinitionError(
            f"the optimizer returns {counted(len(state) + 1, 'value')} for {w.name}",
            because=f"it keeps {', '.join(optimizer.state)} besides the parameter",
            hint="return (w, *state), in the order in which they are passed",
        )
    if is_finite is not None:
        pairs = zip((new, *state), (wide, *slot.state), strict=False)
        new, *state = (where(is_finite, x, old) for x, old in pairs)
    for x, old in zip(state, slot.state, strict=False):
        fd.add_output(x, reuse=old)
    if slot.master is not None:
        fd.add_output(moved(new.to(w.dtype), True), reuse=w)
        fd.add_output(new, reuse=slot.master)
    else:
        fd.add_output(moved(new, True), reuse=w)


def trained_nodes(model: Model, frozen: Sequence[str] | None) -> list[Node]:
    """Return the trained parameters, which require gradients and are not frozen.

    If frozen is None, only the adapters of a model with adapters are trained.

    Raises:
        DefinitionError: nothing is left to train.
        LayoutError: a pattern that matches no parameter.
    """
    patterns = given.names(f"training_step of {model.captured.name}", "frozen", frozen)
    of = model.captured.parameters
    alone = frozen is None and any(of[node].adapter is not None for node in model.parameters)
    names = [name for node in model.parameters for name in of[node].names]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise unmatched("frozen", pattern, names)
    trained = [
        node
        for node in model.parameters
        if of[node].tensor.requires_grad
        and not (alone and of[node].adapter is None)
        and not any(fnmatchcase(name, p) for name in of[node].names for p in patterns)
    ]
    if not trained:
        raise DefinitionError(
            f"training_step of {model.captured.name} with nothing to train",
            because="its parameters are frozen, or do not require gradients",
            hint="leave a pattern of frozen= out, or module.requires_grad_(True) before the import",
        )
    _check_apart([of[node] for node in trained])
    return trained


def _check_apart(parameters: Sequence[Parameter]) -> None:
    """Raise DefinitionError for parameters that share memory, because each is a separate input."""
    seen: dict[int, str] = {}
    for p in parameters:
        memory = 0 if p.tensor.is_meta else p.tensor.untyped_storage().data_ptr()
        if memory and memory in seen:
            raise DefinitionError(
                f"{seen[memory]} and {p.name} lie in one memory, and both are trained",
                because="they are two inputs of the program, which would become different",
                hint="one parameter, of which the module takes a part, or one of them frozen",
            )
        seen[memory] = p.name


def _extra(fd: FusionDefinition, model: Model, name: str, spec: TensorSpec) -> Handle:
    if not isinstance(spec, TensorSpec):
        raise DefinitionError(
            f"extra[{name!r}] is {type(spec).__name__}",
            because="an extra input is described by its shape, dtype and layout",
            hint="mf.TensorSpec((4, 128), torch.int64, mesh, {axis: placement})",
        )
    mesh = model.last_mesh if spec.mesh is None else as_mesh(spec.mesh)
    return fd.define_tensor(
        spec.shape, spec.dtype, mesh, spec.layout, spec.order, spec.stride_order, name=name
    )


def _loss(
    model: Model, results: Sequence[Any], loss: Callable[..., Any] | None, extra: Mapping[str, Any]
) -> Iterator[Handle]:
    """Return the loss, and further results of the function; by default the module's loss."""
    if loss is None:
        by_path = {o.path: results[o.place] for o in model.captured.outputs if o.place is not None}
        returned: Any = by_path.get("loss", results[0] if len(results) == 1 else None)
    else:
        returned = loss(*results, **extra)
    given = returned if isinstance(returned, tuple) else (returned,)
    value = given[0] if given else None
    is_loss = isinstance(value, Handle) and value.is_tensor and value.ndim == 0
    if not is_loss or not all(isinstance(x, Handle) for x in given):
        said = "the module returns no loss" if loss is None else f"loss returns {brief(value)}"
        raise DefinitionError(
            f"training_step of {model.captured.name}: {said}",
            because="a loss is a floating tensor without dims, alone or the first of a tuple",
            hint="loss=lambda logits, labels: mf.ops.cross_entropy(logits.flatten(0, 1), "
            "labels.flatten())",
        )
    yield from given
