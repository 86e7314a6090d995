"""The tables of docs/operations.md, made of what the operations say of themselves.

`python tests/operations_page.py` writes them.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import torch

from mdfuse.frontend import ops
from mdfuse.frontend.ops import pointwise
from mdfuse.frontend.torch_functions import equals

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
_HEAD = "| operation | other names | torch | |\n|---|---|---|---|\n"
_SPACES = (("torch", torch), ("F", torch.nn.functional), ("x", torch.Tensor))

#: What a reader may look for; the page says of these that they are not there, while they are not.
_WANTED = ("cumsum", "sort", "topk", "gather", "scatter", "einsum", "flip", "roll")


def _call(name: str) -> str:
    """An operation with its arguments: `dims` is another name of `dim`, `more` goes on."""
    known = [*inspect.signature(ops.BY_NAME[name]).parameters]
    left_out = {"more", *(("dims",) if "dim" in known else ())}
    return f"`{name}({', '.join(p for p in known if p not in left_out)})`"


def _of_torch(name: str) -> str:
    """What is the same in torch: a function, or a method."""
    for short, space in _SPACES:
        function = getattr(space, name, None)
        if function is not None and equals().get(function) == name:
            return f"`{short}.{name}`"
    return ""


def _aliases(name: str) -> str:
    return ", ".join(f"`{alias}`" for alias, of in ops.ALIASES.items() if of == name)


def _row(name: str) -> str:
    words = (inspect.getdoc(ops.BY_NAME[name]) or "").split("\n\n")[0].replace("\n", " ")
    assert "|" not in words, f"the first line of {name} is a cell of a table"
    return f"| {_call(name)} | {_aliases(name)} | {_of_torch(name)} | {words.removesuffix('.')} |\n"


def _plain() -> list[str]:
    """Operations that only record a row: in the page their names are all there is to say."""
    rows, spelled = pointwise.ROWS, ops.defined_in(pointwise)
    return sorted(name for name, f in rows.items() if spelled.get(name, f) is f)


def table(families: tuple[ModuleType, ...]) -> str:
    """One line for each operation of some families, but for plain ones."""
    found = [name for family in families for name in ops.defined_in(family)]
    return _HEAD + "".join(_row(name) for name in found if name not in _plain())


def plain_names(operands: int) -> str:
    """Operations that have nothing but operands, with their other names."""
    found = []
    for name in _plain():
        if len(inspect.signature(pointwise.ROWS[name]).parameters) == operands:
            also = _aliases(name)
            found.append(f"`{name}`" + (f" ({also})" if also else ""))
    return ", ".join(found)


def page(text: str) -> str:
    """The page with its tables anew; each stands in the section that is named so."""
    families = {
        "Elementwise": (ops.pointwise,),
        "Reductions": (ops.reductions, ops.extremes),
        "Tensors of numbers": (ops.creations,),
        "Shapes and the order of dims": (ops.views,),
        "Parts": (ops.parts,),
        "Products": (ops.products,),
        "Neural networks": (ops.neural,),
        "Random numbers": (ops.draws,),
    }
    assert {f for found in families.values() for f in found} == {*ops.FAMILIES}
    for title, found in families.items():
        before, heading, section = text.partition(f"\n## {title}\n")
        start = section.index("| operation |")
        _, gap, rest = section[start:].partition("\n\n")
        text = before + heading + section[:start] + table(found).rstrip("\n") + (gap or "\n") + rest
    for start, operands in (("Of one operand: ", 1), ("Of two: ", 2)):
        before, heading, rest = text.partition(start)
        text = before + heading + plain_names(operands) + ".\n" + rest.partition("\n")[2]
    before, heading, rest = text.partition("There is no `")
    absent = "`, `".join(name for name in _WANTED if name not in ops.BY_NAME)
    return before + heading + absent + rest[rest.index("`, convolution") :]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
