"""Names of lowerings that are alike in all processes: of all that a lowering depends on.

A value is written out field by field, with its class, in the order of its parts; what it remembers
is left out. So equal texts mean equal values, and a hash of a text is a name for them. A text that
differs for equal values, as a set's may, costs a lowering and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch

from mdfuse.config import Options
from mdfuse.hir.passes import form_fusion_groups
from mdfuse.ir.graph import Fusion
from mdfuse.ir.ops import TABLE
from mdfuse.ir.registered import LabelRule
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh
from mdfuse.plan import inductor
from mdfuse.plan.unit_keys import own_code, settings

#: Types whose `repr` tells their values, and those of other types, apart.
_PLAIN = frozenset((str, int, bool, float, type(None)))

#: Fields of classes that are no dataclasses.
_FIELDS: dict[type, tuple[str, ...]] = {
    Layout: ("mesh", "placements", "splits", "stream", "reaches"),
    DeviceMesh: ("axes", "shape", "_ranks", "hosts", "lost"),
}


class NoNameError(Exception):
    """A part of a lowering that another process may know as something else."""


def name_of(fusion: Fusion, options: Options, *others: Any) -> str | None:
    """Return a name of all that the lowering of a fusion depends on.

    None: it depends on code of the user's.

    Args:
        fusion: with numbers for its extents.
        options: those that count, of the environment where none were given.
        others: what else the lowering is told, or reads.
    """
    rows = [TABLE.get(e.op) for e in fusion.exprs]
    if any(row is None or isinstance(row.rule, LabelRule) for row in rows):
        return None
    versions = own_code(), inductor.fingerprint(torch.device("cpu")), settings()
    try:
        text = _Text().of(
            (versions, form_fusion_groups.is_grouped(options), options, others, fusion)
        )
    except NoNameError:
        return None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class _Text:
    """Writes values; objects that stand in many places are written out once."""

    def __init__(self) -> None:
        #: address -> text, and the object, which keeps the address
        self._known: dict[int, tuple[str, Any]] = {}

    def of(self, x: Any) -> str:
        kind = type(x)
        if kind in _PLAIN:
            return repr(x)
        if kind is tuple or kind is list:
            if _PLAIN.issuperset(map(type, x)):
                return repr(x)
            return f"{kind.__name__}({','.join(map(self.of, x))})"
        known = self._known.get(id(x))
        if known is None:
            known = self._known[id(x)] = self._written(x, kind), x
        return known[0]

    def _written(self, x: Any, kind: type) -> str:
        if kind is dict or kind is MappingProxyType:
            return f"{{{','.join(f'{self.of(k)}:{self.of(v)}' for k, v in x.items())}}}"
        if kind is frozenset:
            return f"set({','.join(sorted(map(self.of, x)))})"
        if kind is torch.dtype or kind is range:
            return repr(x)
        read = _reader(kind)
        return f"{kind.__module__}.{kind.__qualname__}({','.join(map(self.of, read(x)))})"


@cache
def _reader(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads the fields that a value of a class was made with.

    Raises:
        NoNameError: nobody says what they are.
    """
    names = _FIELDS.get(kind)
    if names is None and kind.__module__.startswith("mdfuse."):
        if issubclass(kind, tuple):
            return tuple
        if is_dataclass(kind):
            names = tuple(f.name for f in fields(kind) if f.init)
    if names is None:
        raise NoNameError(kind.__qualname__)
    if len(names) > 1:
        return attrgetter(*names)
    return lambda x: tuple(getattr(x, name) for name in names)
