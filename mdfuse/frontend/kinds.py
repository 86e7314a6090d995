"""Checks of operations' arguments: each is converted by its kind, or refused.

An operation is called through `taking_kinds`. Each argument is converted by its kind (numbers of
numpy become Python's), or refused. If all arguments have usual types, only integers (for 64 bits)
and the items of lists are checked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mdfuse.errors import DefinitionError
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.kind_table import KINDS as KINDS
from mdfuse.frontend.kind_table import REFUSED, TENSORS, VALUE, all_of
from mdfuse.frontend.kind_table import Kind as Kind
from mdfuse.frontend.kind_table import kind_of as kind_of
from mdfuse.frontend.plain import END, LEAST, brief

F = TypeVar("F", bound=Callable[..., Any])

#: The most arguments of a call whose types are remembered; longer calls are always looked at.
_MOST = 8
_UNKNOWN: dict[Any, Any] = {}


def taking_kinds(function: F, elementwise: bool = False) -> F:
    """Return the function with its arguments checked and converted.

    Args:
        function: an operation.
        elementwise: its operands may be numbers.
    """
    name, signature = function.__name__, inspect.signature(function)
    kinds = {
        key: VALUE if elementwise and key in ("x", "other") else kind_of(name, key)
        for key in signature.parameters
    }
    known: dict[Any, Any] = {}

    def looking(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        bound = taken(name, signature, kinds, args, kwargs)
        learn(known, signature, kinds, args, kwargs)
        return function(*bound.args, **bound.kwargs)

    @functools.wraps(function)
    def operation(*args: Any, **kwargs: Any) -> Any:
        at, lists = known, None
        try:
            for x in args:
                kind = type(x)
                at = at[kind]
                if kind is int and not LEAST <= x < END:
                    at = _UNKNOWN
            if kwargs:
                for key in kwargs:
                    x = kwargs[key]
                    kind = type(x)
                    at = at[key][kind]
                    if kind is int and not LEAST <= x < END:
                        at = _UNKNOWN
            lists = at[None]
        except KeyError:
            pass
        if lists is None:
            return looking(args, kwargs)
        for n, take in lists:
            x = kwargs[n] if type(n) is str else args[n]
            if take(x) is not x:
                return looking(args, kwargs)
        return function(*args, **kwargs) if kwargs else function(*args)

    return operation  # type: ignore[return-value]


def learn(
    known: dict[Any, Any],
    signature: inspect.Signature,
    kinds: Mapping[str, Kind],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Remember the types of a call whose arguments are accepted unchanged.

    Args:
        known: a tree: from each argument to the next by its type; where it is named, by its name
            and then its type. After the last, under None, the positions of lists, each with its
            kind's `take`.
        signature, kinds: of the operation.
        args, kwargs: of the call.
    """
    if len(args) > _MOST:
        return
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    by_argument: dict[Any, Kind] = {}
    for name, at in signature.bind(*range(len(args)), **{k: k for k in kwargs}).arguments.items():
        by_argument |= dict.fromkeys(at if isinstance(at, tuple) else (at,), kinds[name])
    lists = [n for n, x in given.items() if type(x) in (list, tuple)]
    if not all(n in lists or type(x) in by_argument[n].usual for n, x in given.items()):
        return
    for n, x in given.items():
        step = known.setdefault(n, {}) if isinstance(n, str) else known
        known = step.setdefault(type(x), {})
    known[None] = tuple((n, by_argument[n].take) for n in lists)


def taken(
    name: str,
    signature: inspect.Signature,
    kinds: Mapping[str, Kind],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> inspect.BoundArguments:
    """Return a call's arguments, each as its kind takes it.

    Raises:
        DefinitionError: other arguments than the operation has, or of other kinds.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise DefinitionError(
            f"{name}: {error}",
            because=f"it is {name}({', '.join(signature.parameters)})",
            hint="docs/operations.md lists operations and their arguments",
        ) from None
    for key, x in bound.arguments.items():
        is_more = signature.parameters[key].kind is inspect.Parameter.VAR_POSITIONAL
        kind = kinds[key]
        accepted = all_of(kind.take, x) if is_more else kind.take(x)
        if accepted is REFUSED:
            raise refused(name, key, x, kind)
        bound.arguments[key] = accepted
    return bound


def refused(name: str, key: str, x: Any, kind: Kind) -> DefinitionError:
    """Return the error for an argument of another kind."""
    if "value" in kind.words and not isinstance(x, Handle):
        return no_value(name, x)
    if isinstance(x, Handle) and kind is TENSORS:
        return DefinitionError(
            f"{name}: {key} is %{x.name}, one value",
            because=f"{key} is {kind.words}",
            hint="[x], or x.unbind(0) for the places of its first dim",
        )
    if isinstance(x, Handle):
        return DefinitionError(
            f"{name}: {key} is %{x.name}, a value of the fusion",
            because=f"{key} is fixed when the fusion is defined",
            hint=f"pass {kind.words}",
        )
    return DefinitionError(
        f"{name}: {key} = {brief(x)}",
        because=f"{key} is {kind.words}" + (" of 64 bits" if type(x) is int else ""),
        hint="docs/operations.md lists operations and their arguments",
    )


def no_value(name: str, x: Any, where: Sequence[str] = ()) -> DefinitionError:
    """Return the error for an argument that is not an operand."""
    if isinstance(x, int):
        return DefinitionError(
            f"{name}: {brief(x)} is no operand",
            where=where,
            because="operands are values of the definition, and numbers of at most 64 bits where "
            "a number may stand",
            hint="fd.define_scalar, or fd.ops.full for a tensor",
        )
    return DefinitionError(
        f"{name}: {type(x).__name__} is no operand",
        where=where,
        because="operands are values of the definition and numbers",
        hint="make it an input with fd.define_tensor",
    )
