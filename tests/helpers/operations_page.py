"""The lists of docs/operations.md, made of what the operations say of themselves.

`python tests/helpers/operations_page.py` writes them.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from types import ModuleType

from mdfuse.frontend import ops
from mdfuse.frontend.ops import pointwise

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
#: How wide a line of the page is, at most.
_WIDTH = 120


def _call(name: str) -> str:
    """An operation with its arguments: `dims` is another name of `dim`, `more` goes on."""
    known = [*inspect.signature(ops.BY_NAME[name]).parameters]
    left_out = {"further", *(("dims",) if "dim" in known else ())}
    return f"`{name}({', '.join(p for p in known if p not in left_out)})`"


def _aliases(name: str) -> str:
    return ", ".join(f"`{alias}`" for alias, of in ops.ALIASES.items() if of == name)


def _wrapped(text: str, start: str = "") -> str:
    return textwrap.fill(
        text, _WIDTH, subsequent_indent=start, break_long_words=False, break_on_hyphens=False
    )


def _line(name: str) -> str:
    words = (inspect.getdoc(ops.BY_NAME[name]) or "").split("\n\n")[0].replace("\n", " ")
    also = f" ({_aliases(name)})" if _aliases(name) else ""
    return _wrapped(f"- {_call(name)}{also}: {words}", "  ") + "\n"


def _plain() -> list[str]:
    """Operations that only record a row: in the page their names are all there is to say."""
    rows = pointwise.ROWS
    spelled = {name: f for family in ops.FAMILIES for name, f in ops.defined_in(family).items()}
    return sorted(name for name, f in rows.items() if spelled.get(name, f) is f)


def lines(families: tuple[ModuleType, ...]) -> str:
    """One line for each operation of some families, but for plain ones."""
    found = [name for family in families for name in ops.defined_in(family)]
    return "".join(_line(name) for name in found if name not in _plain())


def plain_names(operands: int) -> str:
    """Operations that have nothing but operands, with their other names."""
    found = []
    for name in _plain():
        if len(inspect.signature(pointwise.ROWS[name]).parameters) == operands:
            also = _aliases(name)
            found.append(f"`{name}`" + (f" ({also})" if also else ""))
    return ", ".join(found)


def page(text: str) -> str:
    """The page with its lists anew; each stands in the section that is named so."""
    families = {
        "Elementwise": (ops.pointwise, ops.special),
        "Reductions": (ops.reductions, ops.extremes, ops.scans),
        "Tensors of numbers": (ops.creations,),
        "Shapes and the order of dims": (ops.views, ops.moves),
        "Parts": (ops.parts, ops.joining),
        "Triangles, diagonals, classes": (ops.masks,),
        "By tensors of indices": (ops.lookups, ops.updates),
        "Products": (ops.products, ops.expert_rows, ops.einsums, ops.matrices, ops.distances),
        "Neural networks": (ops.neural, ops.norms, ops.cells),
        "Losses": (ops.losses,),
        "Convolutions and images": (ops.convolutions, ops.resampling),
        "Random numbers": (ops.draws,),
    }
    assert {f for found in families.values() for f in found} == {*ops.FAMILIES}
    for title, found in families.items():
        before, heading, section = text.partition(f"\n## {title}\n")
        start = f"\n{section}".index("\n- `")
        _, gap, rest = section[start:].partition("\n\n")
        text = before + heading + section[:start] + lines(found).rstrip("\n") + (gap or "\n") + rest
    for start, operands in (("With one operand: ", 1), ("With two: ", 2)):
        before, heading, rest = text.partition(start)
        rest = rest.partition(".\n")[2]
        text = before + _wrapped(f"{start}{plain_names(operands)}.") + "\n" + rest
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
