"""Rows that users add: labels as text, attributes as the call's own signature says.

    "... d!, d! -> ... d!"

Operands stand before the arrow, results behind it, one word for each dim. Dims of one label are
split together; `d!` must be whole on every rank; `...` are any leading dims, aligned from the right
as broadcasting does.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import counted
from mdfuse.ir.attributes import Attr, attr, is_word, word
from mdfuse.ir.dims import DimMap, Labels, Shape, Shapes
from mdfuse.ir.op_table import Op, checked
from mdfuse.ir.out_forms import ANYHOW

#: Labels of a row: text, or a function (operands' shapes, attributes) -> text.
LabelText = str | Callable[[Sequence[Shape | None], Mapping[str, Any]], str]
Words = tuple[str, ...]


class UntrueRule(ValueError):
    """Operands or results have other dims than the labels of a row say."""


@dataclass(frozen=True, eq=False)
class LabelRule:
    """The labels of a row, as a `mdfuse.ir.dims.Rule`.

    Attributes:
        said: the labels.
        reduces: label that results lack -> the reduce op that joins the results of a split.
        absent: attributes that are None or False where they are not given.
    """

    said: LabelText
    reduces: Mapping[str, str]
    absent: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, shapes: Shapes, result: Shape, attrs: Mapping[str, Any]) -> DimMap:
        operands, results, _ = self._read(shapes, attrs)
        whole = {x.rstrip("!") for words in (*operands, *results) for x in words if x[-1] == "!"}
        names = dict.fromkeys(x.rstrip("!") for words in (*results, *operands) for x in words)
        numbers = {x: n for n, x in enumerate(names)}

        def labels(words: Words, shape: Shape | None) -> Labels:
            plain = [x.rstrip("!") for x in words]
            labels = [None if x in whole else numbers[x] for x in plain]
            for d, x in enumerate(plain):  # a dim that is repeated must be whole
                if shape is not None and x.startswith("...") and shape[d] == 1:
                    labels[d] = labels[d] if self._extents(shapes, operands)[x] == 1 else None
            return tuple(labels)

        return DimMap(
            operands=tuple(labels(w, s) for w, s in zip(operands, shapes, strict=True)),
            results=tuple(labels(words, None) for words in results),
            reduces={numbers[x]: op for x, op in self.reduces.items() if x in numbers},
        )

    def shapes(self, shapes: Shapes, attrs: Mapping[str, Any]) -> Any:
        """Return the shapes of the results; LookupError where a label is of results alone."""
        operands, results, _ = self._read(shapes, attrs)
        extents = self._extents(shapes, operands)
        result_shapes = tuple(tuple(extents[x.rstrip("!")] for x in words) for words in results)
        return result_shapes if len(result_shapes) > 1 else result_shapes[0]

    def check(self, shapes: Shapes, given: Sequence[Shape], attrs: Mapping[str, Any]) -> None:
        """Raise UntrueRule where results do not have the dims and extents of their labels."""
        operands, results, text = self._read(shapes, attrs)
        extents = self._extents(shapes, operands)
        if len(results) != len(given):
            raise UntrueRule(
                f"{text!r} has {counted(len(results), 'result')}, and the call gave {len(given)}"
            )
        for words, shape in zip(results, given, strict=True):
            if len(words) != len(shape):
                raise UntrueRule(f"a result {list(shape)} has not the dims of {text!r}")
            for x, n in zip(words, shape, strict=True):
                if extents.setdefault(x.rstrip("!"), n) != n:
                    want = extents[x.rstrip("!")]
                    raise UntrueRule(
                        f"{x} of {text!r} is {want} in the operands, and {n} in a result"
                        f" {list(shape)}"
                    )

    def _read(
        self, shapes: Shapes, attrs: Mapping[str, Any]
    ) -> tuple[tuple[Words, ...], tuple[Words, ...], str]:
        """Return the words of operands and results, the leading dims written out; and the text."""
        text = (
            self.said if isinstance(self.said, str) else self.said(shapes, {**self.absent, **attrs})
        )
        before, behind = parsed(text, self.reduces)
        if len(shapes) > len(before):
            raise UntrueRule(
                f"{text!r} has {counted(len(before), 'operand')}, and {len(shapes)} were given"
            )
        before = before[: len(shapes)]
        leading = 0
        for words, shape in zip(before, shapes, strict=True):
            if shape is None:
                continue
            n_leading = len(shape) - len(words) + ("..." in words)
            if n_leading < 0 or (n_leading and "..." not in words):
                raise UntrueRule(f"an operand {list(shape)} has not the dims of {text!r}")
            leading = max(leading, n_leading if "..." in words else 0)

        def full(words: Words, n: int) -> Words:
            named = tuple(x for x in words if x != "...")
            return (*(f"...{k}" for k in range(n, 0, -1)), *named) if "..." in words else named

        operands = tuple(
            full(words, len(shape) - len(words) + 1) if shape is not None else ()
            for words, shape in zip(before, shapes, strict=True)
        )
        return operands, tuple(full(words, leading) for words in behind), text

    def _extents(self, shapes: Shapes, operands: Sequence[Words]) -> dict[str, int]:
        """Return the extent of each label; leading dims of extent 1 are repeated."""
        extents: dict[str, int] = {}
        for words, shape in zip(operands, shapes, strict=True):
            for x, n in zip(words, shape or (), strict=True):
                name = x.rstrip("!")
                if name not in extents or (name.startswith("...") and extents[name] == 1):
                    extents[name] = n
                elif extents[name] != n and not (name.startswith("...") and n == 1):
                    raise UntrueRule(f"{x} is {extents[name]} in one operand, and {n} in another")
        return extents


_WORD = re.compile(r"\.\.\.|[^\W\d]\w*!?")


def parsed(text: str, reduces: Mapping[str, str]) -> tuple[tuple[Words, ...], tuple[Words, ...]]:
    """Return the words of operands and of results.

    >>> parsed("... d!, d! -> ... d!", {})
    ((('...', 'd!'), ('d!',)), (('...', 'd!'),))

    Raises:
        ValueError: it is no rule.
    """
    ends = [[part.split() for part in end.split(",")] for end in text.split("->")]
    if len(ends) != 2 or any(not _WORD.fullmatch(x) for end in ends for w in end for x in w):
        raise ValueError(f"{text!r} is no rule: one label per dim, as in 'm k, k n -> m n'")
    before, behind = (tuple(map(tuple, end)) for end in ends)
    for words in (*before, *behind):
        plain = [x.rstrip("!") for x in words]
        if len({*plain}) < len(plain) or "..." in words[1:]:
            raise ValueError(f"{text!r}: a label stands once in an operand, and ... first")
    known = {x.rstrip("!") for words in before for x in words}
    whole = {x.rstrip("!") for words in (*before, *behind) for x in words if x[-1] == "!"}
    for words in behind:
        new = next((x for x in words if x.rstrip("!") not in known | whole), None)
        if new is not None:
            raise ValueError(f"{text!r}: {new} is in no operand: write {new}!, which is whole")
    everywhere = set.intersection(*({x.rstrip("!") for x in words} for words in behind))
    for x in sorted(known - whole - everywhere - reduces.keys()):
        raise ValueError(
            f"{text!r}: not every result has {x}: write {x}! for a dim that must be whole, or say "
            f"how ranks join their results: reduces={{{x!r}: 'sum'}}"
        )
    return before, behind


# -- attributes ------------------------------------------------------------------------------------

_KINDS = {bool: "bool", int: "int", float: "number", torch.dtype: "dtype"}


def operands_of(call: Callable[..., Any]) -> tuple[int, int]:
    """Return how many operands a call takes: its positional parameters; those of None may lack.

    Raises:
        TypeError: other parameters than operands, and attributes by name.
    """
    least = most = 0
    for p in inspect.signature(call).parameters.values():
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise TypeError(f"{p} of the call: each operand and each attribute has a name")
        if p.kind is p.KEYWORD_ONLY:
            continue
        if p.default not in (p.empty, None):
            raise TypeError(f"{p} is an operand, and operands have no numbers: write it behind *")
        most += 1
        least = most if p.default is p.empty else least
    if not most:
        raise TypeError("the call takes no operand")
    return least, most


def attributes_of(call: Callable[..., Any]) -> tuple[Attr, ...]:
    """Return the attributes of a call: its parameters behind `*`, by their annotations.

    Raises:
        TypeError: an annotation that is none of bool, int, float, str, `torch.dtype`, a Literal of
            words, and tuples of numbers.
    """
    hints = typing.get_type_hints(call)
    keywords = [p for p in inspect.signature(call).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return tuple(_attribute(p, hints.get(p.name, type(p.default))) for p in keywords)


def _attribute(p: inspect.Parameter, hint: Any) -> Attr:
    options = [x for x in typing.get_args(hint) if x is not type(None)]
    is_optional = typing.get_origin(hint) in (types.UnionType, typing.Union) and len(options) == 1
    kind = options[0] if is_optional else hint
    required = p.default is p.empty and not is_optional and kind is not bool
    if kind in _KINDS:
        return attr(p.name, _KINDS[kind], required)
    if kind is str:
        return Attr(p.name, "a word", is_word, required)
    words = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal and all(is_word(x, None) for x in words):
        return word(p.name, *words, required=required)
    if typing.get_origin(kind) is tuple and {*words} <= {int, float, ...}:
        return attr(p.name, "numbers", required)
    raise TypeError(
        f"{p} of the call: attributes are bool, int, float, str, torch.dtype, Literal[...] or "
        "tuple[int, ...]"
    )


# -- the row ---------------------------------------------------------------------------------------


def row_of_call(
    name: str,
    call: Callable[..., Any],
    said: LabelText,
    reduces: Mapping[str, str],
    meta: Callable[..., Any] | None,
    results: int,
) -> Op:
    """Return a row for the op table; see `mdfuse.register_op`.

    Raises:
        TypeError, ValueError: call or labels are not those of a row.
    """
    counts, attrs = operands_of(call), attributes_of(call)
    if isinstance(said, str):
        operands, results = map(len, parsed(said, reduces))
        if operands != counts[1]:
            raise ValueError(
                f"{said!r} has {counted(operands, 'operand')}, and the call takes {counts[1]}"
            )
    # expressions hold no attribute that is None or False
    absent = {a.name: False if a.is_flag else None for a in attrs if not a.required}
    rule = LabelRule(said, reduces, absent)
    return checked(
        name,
        _with(absent, call),
        rule,
        rule.shapes,
        ANYHOW,
        meta=_looking(_with(absent, meta or call), rule, results),
        attrs=attrs,
        operands=counts,
        is_single=False,
        is_library=True,
        results=results,
    )


def _with(absent: Mapping[str, Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call with all its attributes."""
    if not absent:
        return call

    def called(*operands: Any, **given: Any) -> Any:
        return call(*operands, **{**absent, **given})

    return called


def _looking(call: Callable[..., Any], rule: LabelRule, results: int) -> Callable[..., Any]:
    """Return a call on the meta device that raises UntrueRule where its labels are not true."""

    def on_meta(*operands: Any, **attrs: Any) -> Any:
        if not all(isinstance(x, Tensor | None) for x in operands):
            raise UntrueRule("its operands are tensors")
        computed = call(*operands, **attrs)
        tensors = computed if isinstance(computed, tuple) else (computed,)
        if isinstance(computed, tuple) != (results > 1) or not all(
            isinstance(x, Tensor) for x in tensors
        ):
            what = type(computed).__name__
            raise UntrueRule(
                f"of {counted(results, 'result')}, as its rule says, the call gave one {what}"
            )
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else None for x in operands]
        rule.check(shapes, [tuple(x.shape) for x in tensors], attrs)
        return computed

    return on_meta
