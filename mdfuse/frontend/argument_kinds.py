"""Kinds of arguments: an operation's annotations say which arguments it takes.

An operation is called through `taking_kinds`. Each argument is converted by its kind (numbers of
numpy become Python's), or refused. If all arguments have usual types, only integers (for 64 bits)
and the items of lists are checked.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.plain import END, LEAST, brief, is_in_range, plain_number

F = TypeVar("F", bound=Callable[..., Any])

#: The marker that a kind returns for an argument that it refuses.
REFUSED: Any = object()
_NUMBERS = frozenset((int,))

#: The most arguments of a call whose types are remembered; longer calls are always looked at.
_MOST = 8
_UNKNOWN: dict[Any, Any] = {}


@dataclass(frozen=True, slots=True)
class ArgumentKind:
    """A kind of arguments.

    Attributes:
        words: its description in messages.
        take: converts an argument of any type, or returns `REFUSED`.
        usual: types that are accepted at once; integers only within 64 bits.
    """

    words: str
    take: Callable[[Any], Any]
    usual: frozenset[type]


# -- numbers -------------------------------------------------------------------------------------


def _integer(x: Any) -> Any:
    x = plain_number(x)
    is_integer = isinstance(x, int | Extent) and not isinstance(x, bool)
    return x if is_integer and is_in_range(x) else REFUSED


def _number(x: Any) -> Any:
    x = plain_number(x)
    return x if isinstance(x, bool | int | float | Extent) and is_in_range(x) else REFUSED


def _setting(x: Any) -> Any:
    """Take a number as an attribute: bools become ints, since False means no attribute."""
    x = _number(x)
    return int(x) if isinstance(x, bool) else x


def _flag(x: Any) -> Any:
    x = plain_number(x)
    return x if isinstance(x, bool) else REFUSED


def _several(one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that takes a single item, or a list or tuple of items, by `one`."""

    def take(x: Any) -> Any:
        if type(x) in (list, tuple) and _NUMBERS.issuperset(map(type, x)):
            is_usual = not x or (min(x) >= LEAST and max(x) < END)
            return x if is_usual and one is _integer else all_of(one, x)
        if not isinstance(x, Sequence | torch.Tensor | Handle) and hasattr(x, "tolist"):
            x = x.tolist()  # an array of numpy
        return all_of(one, x) if _is_several(x) else one(x)

    return take


def _listed(one: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that takes a list or tuple of items by `one`."""
    several = _several(one)
    return lambda x: several(x) if _is_several(x) else REFUSED


def _is_several(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str | bytes)


def all_of(one: Callable[[Any], Any], items: Iterable[Any]) -> Any:
    """Take each item by `one`; a list or tuple whose items all stay is returned itself."""
    taken = tuple(map(one, items))
    if type(items) in (list, tuple) and all(map(operator.is_, taken, items)):
        return items
    return REFUSED if any(x is REFUSED for x in taken) else taken


# -- values --------------------------------------------------------------------------------------


def _handle(x: Any) -> Any:
    return x if isinstance(x, Handle) else REFUSED


def _tensors(x: Any) -> Any:
    if isinstance(x, str | bytes | Mapping | Handle):
        return REFUSED
    try:
        return all_of(_handle, x)
    except TypeError:  # it cannot be iterated
        return REFUSED


def _or(*takes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def take(x: Any) -> Any:
        attempts = (t(x) for t in takes)
        return next((y for y in attempts if y is not REFUSED), REFUSED)

    return take


def _is(kind: type) -> Callable[[Any], Any]:
    return lambda x: x if isinstance(x, kind) else REFUSED


# -- annotations ---------------------------------------------------------------------------------

_N = type(None)
_none, _integers = _is(_N), _several(_integer)

#: `dim=()` is all dims for some functions of torch, and none for others.
_NO_DIMS = "None (dims=() stands for no dims)"

#: annotation -> the words for its kinds of arguments, its `take`, and usual types; see
#: `ArgumentKind`. The aliases among them are in `mdfuse.frontend.ops.recording`.
_ANNOTATED: dict[str, tuple[tuple[str, ...], Callable[[Any], Any], tuple[type, ...]]] = {
    "Handle": (("a value of the fusion",), _handle, (Handle,)),
    "Operand": (
        ("a value of the fusion", "a number"), _or(_handle, _number), (Handle, int, float, bool)
    ),
    "Sequence[Handle]": (("a list of values of the fusion",), _tensors, ()),
    "int": (("an integer",), _integer, (int,)),
    "float": (("a number",), _setting, (int, float)),
    "bool": (("True or False",), _flag, (bool,)),
    "str": (("a string",), _is(str), (str,)),
    "torch.dtype": (("a torch dtype",), _is(torch.dtype), (torch.dtype,)),
    "None": (("None",), _none, (_N,)),
    "Integers": (("an integer", "a list of integers"), _integers, (int,)),
    "Numbers": (("a number", "a list of numbers"), _several(_number), (int, float)),
    "Sequence[int]": (("a list of integers",), _listed(_integer), ()),
    "Flags": (("a list of bools", "of integers"), _listed(_or(_flag, _integer)), ()),
    "Sizes": (
        ("an integer", "a list of integers", "None"), _several(_or(_none, _integer)), (int, _N)
    ),
    "Dims": (
        ("an integer", "a list of some integers", _NO_DIMS),
        lambda x: REFUSED if isinstance(x, list | tuple) and not x else _or(_none, _integers)(x),
        (int, _N),
    ),
    # Any type: the code that uses the argument checks it.
    "Any": (("anything",), lambda x: x, (Handle, int, float, bool, list, tuple, dict, _N)),
}  # fmt: skip


@functools.cache
def kind_of(annotation: str) -> ArgumentKind:
    """Return the kind of the arguments that an annotation allows: `Handle | None`, say."""
    words, takes, usual = zip(*(_ANNOTATED[part] for part in annotation.split(" | ")), strict=True)
    *first, last = (w for alternatives in words for w in alternatives)
    text = f"{', '.join(first)}, or {last}" if first else last
    return ArgumentKind(text, _or(*takes) if takes[1:] else takes[0], frozenset().union(*usual))


def kinds_of(function: Callable[..., Any]) -> dict[str, ArgumentKind]:
    """Return the kind of each argument of an operation."""
    annotated = function.__annotations__.items()
    return {name: kind_of(annotation) for name, annotation in annotated if name != "return"}


# -- calls ---------------------------------------------------------------------------------------


def taking_kinds(function: F) -> F:
    """Return an operation with its arguments checked and converted."""
    name, signature, kinds = function.__name__, inspect.signature(function), kinds_of(function)
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
    kinds: Mapping[str, ArgumentKind],
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
    by_argument: dict[Any, ArgumentKind] = {}
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
    kinds: Mapping[str, ArgumentKind],
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


def refused(name: str, key: str, x: Any, kind: ArgumentKind) -> DefinitionError:
    """Return the error for an argument of another kind."""
    if "value" in kind.words and not isinstance(x, Handle):
        return no_value(name, x)
    if isinstance(x, Handle) and "list of values" in kind.words:
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
