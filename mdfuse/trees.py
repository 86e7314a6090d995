"""Trees of tensors: tuples, lists, dicts, dataclasses, and other types that torch registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.torch_private import pytree


@dataclass(frozen=True, slots=True)
class _Record:
    """A dataclass that torch does not know as a tree, taken apart: its type and fields."""

    kind: type
    names: tuple[str, ...]
    values: tuple[Any, ...]


pytree.register_pytree_node(
    _Record,
    lambda x: ([*x.values], (x.kind, x.names)),
    lambda values, said: said[0](**dict(zip(said[1], values, strict=True))),
    serialized_type_name=f"{__name__}._Record",
    flatten_with_keys_fn=lambda x: (
        [(pytree.GetAttrKey(n), v) for n, v in zip(x.names, x.values, strict=True)],
        (x.kind, x.names),
    ),
)


def flattened(tree: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    """Return (path, leaf) of a tree, besides its structure, for `unflattened`."""
    leaves, structure = pytree.tree_flatten_with_path(tree)
    if any(_is_record(x) for _, x in leaves):
        return pytree.tree_flatten_with_path(_with_records(tree))
    return leaves, structure


def unflattened(leaves: Sequence[Any], structure: Any) -> Any:
    """Return the tree of a structure with these leaves."""
    return pytree.tree_unflatten(list(leaves), structure)


def children(tree: Any) -> list[tuple[str, Any]]:
    """Return (key, entry) of the outermost level of a tree; none for a leaf.

    >>> children({"a": [1, 2], "b": 3}), children(3)
    ([('a', [1, 2]), ('b', 3)], [])
    """
    if _is_record(tree):
        return [(f.name, getattr(tree, f.name)) for f in fields(tree) if f.init]
    entries, _ = pytree.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    return [(key_text(path), x) for path, x in entries if path]


def key_text(path: Sequence[Any]) -> str:
    """Return the keys of a path, joined by dots: of dicts their keys, of lists their places."""
    kinds = {pytree.SequenceKey: "idx", pytree.MappingKey: "key", pytree.GetAttrKey: "name"}
    return ".".join(str(getattr(key, kinds[type(key)])) for key in path)


def tensor_inside(leaf: Any) -> str | None:
    """Return the attribute that holds a tensor of an object that is no tree; None for no such.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> tensor_inside(SimpleNamespace(scale=2, tables=[torch.ones(3)])), tensor_inside("scale")
    ('tables', None)
    """
    if isinstance(leaf, torch.Tensor):  # an input; what hangs on it, as `main_grad`, is not read
        return None
    return next((n for n, x in getattr(leaf, "__dict__", {}).items() if _has_tensor(x)), None)


def tensor_in_constant(name: str, x: Any, attribute: str) -> DefinitionError:
    """Return the error of an argument for whose tensor a program would have a constant."""
    return DefinitionError(
        f"{type(x).__name__} for {name}",
        because=f"its {attribute} holds a tensor, whose numbers would be constants of the program",
        hint="pass tensors, or a tuple, dict or dataclass of them; or name the class to "
        "torch.utils._pytree.register_pytree_node",
    )


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(tree))


def _is_record(x: Any) -> bool:
    """Return whether x is a dataclass; those of mdfuse, as specs of tensors, are leaves."""
    if not is_dataclass(x) or isinstance(x, type):
        return False
    kind: Any = type(x)
    return kind.__dataclass_params__.init and not kind.__module__.startswith(f"{__package__}.")


def _with_records(tree: Any) -> Any:
    """Replace each dataclass that torch does not know as a tree by a record."""
    return pytree.tree_map(_record, tree)


def _record(x: Any) -> Any:
    if not _is_record(x):
        return x
    names = tuple(f.name for f in fields(x) if f.init)
    return _Record(type(x), names, tuple(_with_records(getattr(x, n)) for n in names))
