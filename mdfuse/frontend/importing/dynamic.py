"""Dynamic extents of a module's arguments: `dynamic_shapes`, as torch's export takes it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mdfuse.errors import DefinitionError, counted, listed
from mdfuse.frontend.plain import brief
from mdfuse.frontend.spec import TensorSpec
from mdfuse.trees import children

_TENSORS = (Tensor, TensorSpec)


def dims_of_tensors(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    said: Any,
    names: Sequence[str],
) -> list[dict[int, Any] | None] | None:
    """Return the dynamic dims of each tensor among the arguments.

    Args:
        module: that is called with the arguments.
        args, kwargs: of its forward.
        said: the settings of arguments, in their structure: a mapping by names, or a sequence in
            their order; a mapping may also have full names of tensors. The setting of a tensor is a
            dict by dims, a sequence of all dims, or None. Unnamed dims are fixed. An object that
            makes such a mapping, as `torch.export.ShapesCollection`, is taken too.
        names: of the tensors, as "batch.mask", in the order of the arguments.

    Raises:
        DefinitionError: it does not fit the arguments.
    """
    if said is None or (isinstance(said, Mapping | Sequence) and not len(said)):
        return None
    by_name, by_tensor = _by_name(module, args, kwargs, said, names)
    dims = _NamedDims(_named(said))
    chosen: list[dict[int, Any] | None] = []
    for name, x, of in _arguments(module, args, kwargs, by_name):
        chosen += dims.of(name, x, of)
    given = dict(zip(names, _tensors((*args, *kwargs.values())), strict=True))
    at = {name: n for n, name in enumerate(names)}
    for name, of in by_tensor.items():
        (chosen[at[name]],) = dims.of(name, given[name], of)
    return chosen


def _by_name(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    said: Any,
    names: Sequence[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings by argument name, and those by full tensor name."""
    if not isinstance(said, Mapping | list | tuple) and hasattr(said, "dynamic_shapes"):
        said = said.dynamic_shapes(module, tuple(args), dict(kwargs))
    try:
        passed = [*inspect.signature(module.forward).bind(*args, **kwargs).arguments]
    except TypeError as error:
        raise DefinitionError(
            f"{type(module).__name__} does not take {counted(len(args), 'argument')}"
            + (f" and {listed(kwargs)}" if kwargs else ""),
            because=f"its forward says: {error}",
            hint="args and kwargs are those of the forward",
        ) from error
    if isinstance(said, list | tuple):
        _check_count("dynamic_shapes", said, passed, "argument")
        return dict(zip(passed, said, strict=True)), {}
    if not isinstance(said, Mapping):
        raise _wrong("dynamic_shapes", said, "a mapping by names of arguments, or a tuple of all")
    known = {*inspect.signature(module.forward).parameters, *passed, *kwargs}
    for name in said:
        if name not in known and name not in names:
            raise DefinitionError(
                f"dynamic_shapes[{brief(name)}] is no tensor among the arguments",
                because=f"these are {listed(names)}",
                hint='for example {"ids": {0: "batch"}}',
            )
    by_tensor = {name: of for name, of in said.items() if name in names and name not in known}
    return {name: of for name, of in said.items() if name not in by_tensor}, by_tensor


def _arguments(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], said: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and setting of each argument in the order of the call."""
    kinds = {p.name: p.kind for p in inspect.signature(module.forward).parameters.values()}
    plain = [n for n, kind in kinds.items() if kind.name.startswith("POSITIONAL_")]
    variadic = next((n for n, kind in kinds.items() if kind.name == "VAR_POSITIONAL"), "args")
    others = next((n for n, kind in kinds.items() if kind.name == "VAR_KEYWORD"), "kwargs")
    yield from zip(plain, args, (said.get(n) for n in plain), strict=False)
    yield from _inner(variadic, args[len(plain) :], said.get(variadic))
    named = {n: x for n, x in kwargs.items() if n in kinds or n in said}
    yield from ((n, x, said.get(n)) for n, x in named.items())
    yield from _inner(others, {n: x for n, x in kwargs.items() if n not in named}, said.get(others))


def _inner(name: str, x: Any, said: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and setting of each item of a container."""
    inside = children(x)
    if isinstance(said, list | tuple):
        _check_count(name, said, inside, "item")
        said = dict(zip((key for key, _ in inside), said, strict=True))
    if said is not None and not isinstance(said, Mapping):
        raise _wrong(name, said, f"{type(x).__name__} takes a mapping or a sequence of its items")
    by_key = {str(key): of for key, of in (said or {}).items()}
    unknown = [key for key in by_key if key not in dict(inside)]
    if unknown:
        raise DefinitionError(
            f"dynamic_shapes: {name} has no {brief(unknown[0])}",
            because=f"its items are {listed(key for key, _ in inside) or 'none'}",
            hint="say something of these, or leave it out",
        )
    yield from ((f"{name}.{key}", child, by_key.get(key)) for key, child in inside)


def _tensors(x: Any) -> Iterator[Any]:
    """Yield the tensors in a tree."""
    if isinstance(x, _TENSORS):
        yield x
        return
    for _, child in children(x):
        yield from _tensors(child)


def _named(said: Any) -> dict[str, Any]:
    """Return the torch dims among the settings by name; equal names are one dim."""
    if isinstance(said, torch.export.Dim):
        return {said.__name__: said}
    if isinstance(said, Mapping | list | tuple):
        inner = said.values() if isinstance(said, Mapping) else said
        return {name: dim for of in inner for name, dim in _named(of).items()}
    return {}


@dataclass(frozen=True, slots=True)
class _NamedDims:
    """Torch dims by name; a name alone adds a new one."""

    known: dict[str, Any]

    def of(self, name: str, x: Any, said: Any) -> list[dict[int, Any] | None]:
        """Return the settings of each tensor in an argument, by dim."""
        if isinstance(x, _TENSORS):
            return [self._of_tensor(name, len(x.shape), said)]
        if children(x) or (isinstance(said, Mapping | list | tuple) and not said):
            return [dims for inner in _inner(name, x, said) for dims in self.of(*inner)]
        if said is not None:
            raise DefinitionError(
                f"dynamic_shapes: {brief(said)} of {name}, which is {brief(x)}",
                because="it is a constant of the program: extents are those of tensors",
                hint="None, or nothing at all",
            )
        return []

    def _of_tensor(self, name: str, ndim: int, said: Any) -> dict[int, Any] | None:
        if said is None:
            return None
        if isinstance(said, list | tuple):
            _check_count(name, said, range(ndim), "dim")
            said = dict(enumerate(said))
        if not isinstance(said, Mapping):
            raise _wrong(name, said, "a tensor takes a mapping by dims, or a tuple of all of them")
        for dim in said:
            if type(dim) is not int or not -ndim <= dim < ndim:
                raise DefinitionError(
                    f"dynamic_shapes: dim {brief(dim)} of {name}",
                    because=f"it has {counted(ndim, 'dim')}",
                    hint="a negative dim counts from the last one",
                )
        chosen = {dim % ndim: self._dim(name, x) for dim, x in said.items() if x is not None}
        return chosen or None

    def _dim(self, name: str, said: Any) -> Any:
        if isinstance(said, str) and said.isidentifier():
            return self.known.setdefault(said, torch.export.Dim(said))
        is_hint = isinstance(said, type(torch.export.Dim.AUTO))
        if not isinstance(said, torch.export.Dim) and not is_hint and type(said) is not int:
            raise _wrong(name, said, "an extent has a name, or a torch.export.Dim; or it is fixed")
        return said


def _check_count(name: str, said: Sequence[Any], there: Sequence[Any], noun: str) -> None:
    if len(said) != len(there):
        raise DefinitionError(
            f"dynamic_shapes: {len(said)} for {counted(len(there), noun)} of {name}",
            because="a sequence says something of each, None where it is fixed",
            hint="a mapping names those alone of which there is something to say",
        )


def _wrong(name: str, said: Any, rule: str) -> DefinitionError:
    return DefinitionError(
        f"dynamic_shapes: {brief(said)} for {name}",
        because=rule,
        hint='for example {"ids": {0: "batch"}}, or {"ids": ("batch", None)}',
    )
