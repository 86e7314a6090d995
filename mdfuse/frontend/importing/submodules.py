"""Calls of submodules in an exported graph, and patterns of submodules, which go word by word."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.fx import Node

from mdfuse.errors import LayoutError, listed
from mdfuse.frontend.importing.place import matching, nearest

#: The attribute under which the exported wrapper holds the module.
PREFIX = "module."

_NUMBERED = re.compile(r"@(\d+)$")


@dataclass(frozen=True, slots=True, order=True)
class SubmoduleCall:
    """A call of a submodule.

    Attributes:
        name: of the submodule, as the forward reached it: a submodule may have several names.
        number: how many calls by this name precede it.
    """

    name: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.name} (call {self.number})" if self.number else self.name


def calls_of(node: Node) -> tuple[SubmoduleCall, ...]:
    """Return the calls of submodules that enclose a node, outermost first.

    There are none for what the module itself computes, and for placeholders.
    """
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    return tuple(
        SubmoduleCall(
            path.removeprefix(PREFIX), int(again[1]) if (again := _NUMBERED.search(key)) else 0
        )
        for key, (path, _) in stack.items()
        if path.startswith(PREFIX)
    )


def blocks_by_call(nodes: Iterable[Node], names: Iterable[str]) -> dict[SubmoduleCall, list[Node]]:
    """Return the nodes of each call of some submodules, in order.

    A node in several such calls, as of a layer and of the attention in it, is in the outermost.

    Args:
        nodes: of a graph.
        names: of submodules, as `Submodules.chosen` has them.
    """
    wanted, blocks = {*names}, dict[SubmoduleCall, list[Node]]()
    for node in nodes:
        call = next((call for call in calls_of(node) if call.name in wanted), None)
        if call is not None:
            blocks.setdefault(call, []).append(node)
    return blocks


def word_by_word(name: str, pattern: str) -> bool:
    """Return whether each word of a name matches that of a pattern.

    >>> [word_by_word(name, "layers.*") for name in ("layers.0", "layers.0.mlp", "layers")]
    [True, False, False]
    """
    words, said = name.split("."), pattern.split(".")
    return len(words) == len(said) and all(map(fnmatchcase, words, said))


class Submodules:
    """The names of a module's submodules.

    Attributes:
        names: name -> all names of that submodule; several where it is shared.
    """

    def __init__(self, module: nn.Module) -> None:
        of: dict[int, list[str]] = {}
        every = [*module.named_modules(remove_duplicate=False)]
        for name, part in every:
            of.setdefault(id(part), []).append(name)
        self.names = {name: tuple(of[id(part)]) for name, part in every if part is not module}

    def chosen(self, what: str, said: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
        """Return the pattern that counts for each submodule that one matches, and its setting.

        The pattern without wildcards counts, then the one with the longest literal part.

        Args:
            what: the argument of the patterns, as errors name it.
            said: pattern -> setting.

        Raises:
            LayoutError: a pattern that matches nothing; two that are equally exact.
        """
        for pattern in said:
            if not any(word_by_word(name, pattern) for name in self.names):
                raise self._unmatched(what, pattern)
        matches = ((n, matching(said, all_, what, word_by_word)) for n, all_ in self.names.items())
        return {name: match for name, match in matches if match is not None}

    def _unmatched(self, what: str, pattern: str) -> LayoutError:
        return LayoutError(
            f"{what}[{pattern!r}] matches no submodule",
            because="a pattern goes word by word, * is one word, and submodules are "
            + (listed(_families(self.names)) or "none"),
            hint="near it are " + ", ".join(nearest(pattern, self.names))
            if self.names else "leave it out",
        )  # fmt: skip


def listing(chosen: Mapping[str, tuple[str, Any]]) -> dict[str, list[str]]:
    """Return pattern -> the names for which it counts, as `report()` lists them."""
    lines: dict[str, list[str]] = {}
    for name, (pattern, _) in chosen.items():
        lines.setdefault(pattern, []).append(name)
    return lines


def _families(names: Iterable[str]) -> list[str]:
    """Return names with * for numbers, each once: layers of one kind are one entry."""
    return [*dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names)]
