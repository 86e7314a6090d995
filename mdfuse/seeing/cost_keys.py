"""Keys of tables of costs: the communications or the work of an entry, and their text in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self, TypeVar

from mdfuse.layouts.kinds import KINDS

V = TypeVar("V")

#: The kinds of links; any other word of a key names axes.
_KINDS = frozenset((*KINDS, "Barrier", "*"))


class LinkKey(NamedTuple):
    """The communications that a link is for.

    Attributes:
        kind: "SendRecv" for send and recv, too; "*" for all kinds.
        axes: as "tp" or "dp,tp"; "meshes" from one mesh to another; "" for all axes.
        ranks: the number of ranks that take part; 0 for any number.
        backend: that posts name; None for the usual one.

    >>> texts = ("*", "tp", "Allreduce tp", "symmetric: Allgather 2")
    >>> [LinkKey.of(x)[:3] for x in texts], [str(LinkKey.of(x)) for x in texts] == [*texts]
    ([('*', '', 0), ('*', 'tp', 0), ('Allreduce', 'tp', 0), ('Allgather', '', 2)], True)
    """

    kind: str = "*"
    axes: str = ""
    ranks: int = 0
    backend: str | None = None

    def __str__(self) -> str:
        kind = "" if self.axes and self.kind == "*" else self.kind
        name = " ".join(filter(None, (kind, self.axes, str(self.ranks or ""))))
        return f"{self.backend}: {name}" if self.backend is not None else name

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the key of a text."""
        backend, colon, name = text.rpartition(": ")
        kind, _, axes = name.partition(" ")
        if kind not in _KINDS:
            kind, axes = "*", name
        ranks = int(axes) if axes.isdecimal() else 0
        return cls(kind, "" if ranks else axes, ranks, backend if colon else None)


class WorkKey(NamedTuple):
    """The work that a curve or a grid is for.

    Attributes:
        name: of a function, or of a kind of work; "" in a table of one kind.
        dtype: as "f32".
        features: of a head of attention; 0 for other work.
        is_causal: whether attention has a causal mask.

    >>> texts = ("* f32", "one query f32", "query f32 64 causal", "bf16 causal")
    >>> [WorkKey.of(x)[:3] for x in texts], [str(WorkKey.of(x)) for x in texts] == [*texts]
    ([('*', 'f32', 0), ('one query', 'f32', 0), ('query', 'f32', 64), ('', 'bf16', 0)], True)
    """

    name: str
    dtype: str
    features: int = 0
    is_causal: bool = False

    def __str__(self) -> str:
        mask = "causal" if self.is_causal else ""
        return " ".join(filter(None, (self.name, self.dtype, str(self.features or ""), mask)))

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the key of a text."""
        unmasked = text.removesuffix(" causal")
        front, _, size = unmasked.rpartition(" ")
        features = int(size) if front and size.isdecimal() else 0
        name, _, dtype = (front if features else unmasked).rpartition(" ")
        return cls(name, dtype, features, unmasked != text)


def links_of(entries: Mapping[str, V]) -> dict[LinkKey, V]:
    """Return a table with its keys read."""
    return {LinkKey.of(text): x for text, x in entries.items()}


def works_of(entries: Mapping[str, V]) -> dict[WorkKey, V]:
    """Return a table with its keys read."""
    return {WorkKey.of(text): x for text, x in entries.items()}
