"""Layouts on the command line: other ones for some inputs of a definition, `w*=(tp=S0)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from mdfuse.errors import DefinitionError, MdfuseError, listed
from mdfuse.frontend.cache import NamedDefinition
from mdfuse.hir.text.values import placement_of
from mdfuse.ir.graph import Fusion
from mdfuse.layouts.layout import Layout, Placement

#: A placement as programs print it.
_PLACEMENT = re.compile(r"R|S-?\d+(/(\d+|\[\d+(,\d+)*\]))?|P\(\w+\)")

#: Name of inputs, in which * stands for anything -> axis -> placement.
Layouts = Mapping[str, Mapping[str, Placement]]


def parse_layouts(text: str) -> Layouts:
    """Return the layouts of some inputs from a text.

    Raises:
        DefinitionError: the text is no layout of inputs.

    >>> parse_layouts("w*=(dp=R, tp=S0); x=(dp=S0)")["w*"]
    {'dp': Replicate(), 'tp': Shard(dim=0)}
    """
    layouts: dict[str, dict[str, Placement]] = {}
    for part in text.split(";"):
        name, sign, inner = (s.strip() for s in part.partition("="))
        placed = [] if inner == "()" else _split(inner.removeprefix("(").removesuffix(")"))
        pairs = {axis: where for axis, _, where in (p.partition("=") for p in placed)}
        is_right = all(_PLACEMENT.fullmatch(where) for where in pairs.values())
        if not name or not sign or not is_right or name in layouts or len(pairs) < len(placed):
            raise DefinitionError(
                f"{text!r} is no layout of inputs",
                because="it is a name, in which * stands for anything, and where each axis puts it",
                hint="write name=(axis=placement, ...), placements as programs print them (S0, "
                "S0/3, R, P(sum)), several inputs with semicolons: 'w*=(tp=S0); x=(dp=S0)'",
            )
        layouts[name] = {axis: placement_of(where) for axis, where in pairs.items()}
    return layouts


def _split(text: str) -> list[str]:
    """Return the parts between commas that no brackets hold, without blanks."""
    return re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text.replace(" ", ""))


def placed(named: NamedDefinition, layouts: Layouts) -> NamedDefinition:
    """Return a definition whose inputs of some names have other layouts, on their meshes.

    Raises:
        DefinitionError: no input has such a name, or it cannot have the layout.
    """
    fusion, changed = named.fusion, dict[str, Layout]()
    known = [x for x in fusion.inputs if fusion.values[x].layout is not None]
    for pattern, placements in layouts.items():
        inputs = [x for x in known if fnmatchcase(x, pattern)]
        if not inputs:
            raise DefinitionError(
                f"layout of {pattern}",
                because=f"@{fusion.name} has no tensor of that name among its inputs",
                hint=f"one of {listed(known)}",
            )
        changed |= {x: _placed(fusion, x, placements) for x in inputs}
    return replace(named, fusion=fusion.with_layouts(changed))


def _placed(fusion: Fusion, name: str, placements: Mapping[str, Placement]) -> Layout:
    value = fusion.values[name]
    try:
        return Layout(fusion.layout(name).mesh, placements).normalized(len(value.shape))
    except MdfuseError as error:
        raise DefinitionError(
            f"layout of {name}: {error.what}", because=error.because, hint=error.hint
        ) from error
