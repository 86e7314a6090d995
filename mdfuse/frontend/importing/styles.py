"""Layouts of what submodules take and return, as styles of `parallelize_module` say them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from mdfuse.errors import LayoutError
from mdfuse.frontend.importing.activations import argument_names
from mdfuse.frontend.importing.place import word_by_word
from mdfuse.frontend.plain import brief
from mdfuse.layouts.layout import Placement, Replicate, Shard

#: Styles that say nothing of parameters.
PREPARING = (
    "SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput",
    "sequence_parallel",
)  # fmt: skip

#: Styles of matrices -> the layout of the product that they have by themselves.
_USUAL = {"ColwiseParallel": Shard(-1), "RowwiseParallel": Replicate()}


def passed_by(module: nn.Module, path: str, style: Any) -> Iterator[tuple[str, Placement]]:
    """Yield (pattern, placement) of what submodules of a path take and return.

    Args:
        module: that the plan is for.
        path: of submodules, word by word.
        style: an object of torch, or the name of a style of transformers.

    Raises:
        LayoutError: a placement of which mdfuse has none.
    """
    kind = style if isinstance(style, str) else type(style).__name__
    if kind in ("SequenceParallel", "sequence_parallel"):
        split = getattr(style, "sequence_sharding", None)
        placement = Shard(1) if split is None else _placement(path, split)
        yield f"argument:{path}", placement
        yield f"activation:{path}", placement
    elif kind in _USUAL and not isinstance(style, str):
        said = _placement(path, style.output_layouts)
        if said != _USUAL[kind]:
            yield f"activation:{path}", said
    elif kind == "PrepareModuleInput":
        yield from _taken(module, path, style)
    elif kind == "PrepareModuleOutput":
        yield from _returned(path, style)
    elif kind == "PrepareModuleInputOutput":
        yield from _taken(module, path, style.prepare_module_input)
        yield from _returned(path, style.prepare_module_output)


def _taken(module: nn.Module, path: str, style: Any) -> Iterator[tuple[str, Placement]]:
    """Yield the placements of arguments; positional ones have names in the submodule's forward."""
    wanted = _several(style.desired_input_layouts)
    parts = (part for name, part in module.named_modules() if word_by_word(name, path))
    names = argument_names(next(parts, module), len(wanted))
    pairs = [*zip(names, wanted, strict=True), *(style.desired_input_kwarg_layouts or {}).items()]
    for name, said in pairs:
        if said is not None:
            yield f"argument:{path}:{name}", _placement(path, said)


def _returned(path: str, style: Any) -> Iterator[tuple[str, Placement]]:
    for place, said in enumerate(_several(style.desired_output_layouts)):
        if said is not None:
            yield f"activation:{path}:{place}", _placement(path, said)


def _several(said: Any) -> tuple[Any, ...]:
    return () if said is None else tuple(said) if isinstance(said, tuple | list) else (said,)


def _placement(path: str, said: Any) -> Placement:
    """Return a placement of torch as mdfuse's own."""
    (one,) = said if isinstance(said, tuple | list) and len(said) == 1 else (said,)
    if isinstance(one, Shard | Replicate):
        return one
    if type(one).__name__ == "Shard":
        return Shard(one.dim)
    if type(one).__name__ == "Replicate":
        return Replicate()
    raise LayoutError(
        f"the plan's path {path!r} says {brief(said)}",
        because="what submodules take and return is whole or split, along one axis of a mesh",
        hint="Shard(dim), Replicate(), or a style without this layout",
    )
