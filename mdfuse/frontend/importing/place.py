"""Layouts of parameters, inputs and outputs, by patterns of names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mdfuse.errors import LayoutError, MdfuseError
from mdfuse.frontend.ops.views import set as set_
from mdfuse.layouts.layout import Layout, Placement
from mdfuse.mesh import DeviceMesh
from mdfuse.names import as_name

#: Prefixes of what calls of submodules return and take; such names are matched word by word.
PASSED = ("activation", "argument")

_WILD = re.compile(r"\*|\?|\[[^\]]*\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A layout, and the pattern that gave it.

    Attributes:
        said: the placements of axes, where others are as it is inferred; None: all count.
        name: of the tensor that it was given to.
    """

    pattern: str
    layout: Layout
    said: tuple[tuple[str, Placement], ...] | None = None
    name: str = ""

    @property
    def value_name(self) -> str:
        """The name of a placed value in programs: of the submodule that passes it."""
        return as_name(self.name.partition(":")[2].replace(".", "_"), "t").replace(".", "_")

    def brought(self, x: Any) -> Any:
        """Return a value of a definition in this layout."""
        return set_(x).on(self.layout) if self.said is None else set_(x).on(x, dict(self.said))


class Patterns:
    """Patterns of names, each with placements.

    Args:
        layouts: pattern -> axis -> placement, or a `Layout`.
        mesh: of all layouts.
        gather: the axes along which parameters are gathered before they are read. They split the
            parts of other axes, so that a gather gives back these parts; a `Layout` is taken as is.
    """

    def __init__(
        self, layouts: Mapping[str, Any], mesh: DeviceMesh, gather: Sequence[str] = ()
    ) -> None:
        self.mesh = Layout(mesh).mesh  # Layout refuses an invalid mesh
        self.gather = tuple(gather)
        for axis in gather:
            self.mesh.axis_index(axis)  # which refuses an axis that the mesh lacks
        self._layouts: dict[str, Layout] = {}
        self._stated = {p for p, said in layouts.items() if isinstance(said, Layout)}
        for pattern, placements in layouts.items():
            self._layouts[pattern] = self._layout(pattern, placements)
        self._axes = {p: tuple(said or ()) for p, said in layouts.items() if p not in self._stated}
        self.matched: dict[str, list[str]] = {pattern: [] for pattern in layouts}

    def __getitem__(self, pattern: str) -> Layout:
        """The layout that a pattern says."""
        return self._layouts[pattern]

    def _layout(self, pattern: str, said: Any) -> Layout:
        try:
            return said if isinstance(said, Layout) else Layout(self.mesh, said)
        except MdfuseError as error:
            raise _of_pattern(pattern, error) from error

    def of_submodules(self) -> Iterator[tuple[str, str, str]]:
        """Yield each pattern of what submodules return or take: whole, its prefix, and its path."""
        for pattern in self._layouts:
            kind, *parts = pattern.split(":")
            if kind in PASSED and parts:
                yield pattern, kind, parts[0]

    def find(self, names: Sequence[str], ndim: int, shown: str | None = None) -> Placed | None:
        """Return the layout for these names of one tensor; None if no pattern matches.

        Args:
            names: all of them.
            ndim: of the tensor.
            shown: the name in `matched`; by default the first one.

        Raises:
            LayoutError: equally exact patterns; contradicting patterns for names of one tensor; a
                layout that does not fit; a Partial.
        """
        chosen = self._chosen(names)
        if not chosen:
            return None
        pattern, first = chosen[0], shown or names[0]
        layout = self._layouts[pattern]
        partial = layout.partial_axes
        if partial:
            raise LayoutError(
                f"layouts[{pattern!r}]: {first} is Partial along {partial[0]}",
                because="what is passed to a program, or returned by it, is whole or split",
                hint="Shard(dim), or leave the axis out",
            )
        try:
            layout = layout.normalized(ndim, singles=True)
        except MdfuseError as error:
            raise _of_pattern(pattern, error, first) from error
        if ":" not in first and pattern not in self._stated:
            layout = self._gathered_inside(layout)
        for pattern in chosen:
            self.matched[pattern].append(first)
        is_partly = first.startswith(PASSED) and ":" in first and pattern in self._axes
        said = tuple((a, layout.placement(a)) for a in self._axes[pattern]) if is_partly else None
        return Placed(pattern=pattern, layout=layout, said=said, name=first)

    def _gathered_inside(self, layout: Layout) -> Layout:
        """Return a layout of a parameter in which gathered axes split the parts of others."""
        order = {
            dim: tuple(sorted(axes, key=lambda axis: axis in self.gather))
            for dim, axes in layout.splits
        }
        return Layout(layout.mesh, layout.by_axis(), order, layout.stream)

    def _chosen(self, names: Sequence[str]) -> list[str]:
        """Return the patterns that apply, which agree; those for one name precede those for all."""
        best = (matching(self._layouts, [name], "layouts") for name in names)
        patterns = dict.fromkeys(match[0] for match in best if match is not None)
        special = [p for p in patterns if not all(_matches(name, p) for name in names)]
        asked = special or [*patterns]
        for other in asked[1:]:
            if self._layouts[other] != self._layouts[asked[0]]:
                raise LayoutError(
                    f"{' and '.join(names)} are one, and layouts say two things of it: "
                    f"{self._layouts[asked[0]]} ({asked[0]!r}), "
                    f"{self._layouts[other]} ({other!r})",
                    because="what has several names, as a tied parameter, is one input",
                    hint="give both patterns the same placements, or leave one out",
                )
        return asked

    def check_used(self, names: Sequence[str]) -> None:
        """Raise LayoutError for a pattern that matches nothing, with the nearest names."""
        of_submodules = {pattern for pattern, _, _ in self.of_submodules()}
        for pattern in self._layouts:
            if pattern not in of_submodules and not self.is_used(pattern, names):
                raise unmatched("layouts", pattern, names)

    def is_used(self, pattern: str, names: Sequence[str]) -> bool:
        """Return whether a pattern matches one of the names."""
        return any(_matches(name, pattern) for name in names)


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name; names with a prefix are of no parameter."""
    kinds = [x.split(":")[0] if ":" in x else "" for x in (name, pattern)]
    if kinds[0] in PASSED:
        parts = name.split(":"), pattern.split(":")
        return len(parts[0]) == len(parts[1]) and all(map(word_by_word, *parts))
    return kinds[0] == kinds[1] and fnmatchcase(name, pattern)


def word_by_word(name: str, pattern: str) -> bool:
    """Return whether each word of a name matches that of a pattern.

    >>> [word_by_word(name, "layers.*") for name in ("layers.0", "layers.0.mlp", "layers")]
    [True, False, False]
    """
    words, said = name.split("."), pattern.split(".")
    return len(words) == len(said) and all(map(fnmatchcase, words, said))


def matching(
    said: Mapping[str, Any],
    names: Sequence[str],
    what: str,
    matches: Callable[[str, str], bool] = _matches,
    *,
    may_agree: bool = False,
) -> tuple[str, Any] | None:
    """Return the most exact pattern that matches one of the names, and its setting.

    Args:
        said: pattern -> setting.
        names: of one thing.
        what: the argument of the patterns, as errors name it.
        matches: whether a name matches a pattern.

    Raises:
        LayoutError: two patterns that are equally exact; with `may_agree` only where they differ.
    """
    hits = (p for p in said if any(matches(n, p) for n in names))
    best = sorted(hits, key=_exactness, reverse=True)
    for other in best[1:]:
        is_other = not may_agree or said[other] != said[best[0]]
        if is_other and _exactness(best[0]) == _exactness(other):
            raise _equally(what, [best[0], other], names[0])
    return (best[0], said[best[0]]) if best else None


def _equally(what: str, patterns: Sequence[str], name: str) -> LayoutError:
    return LayoutError(
        f"{what}: {patterns[0]!r} and {patterns[1]!r} both match {name}",
        because="of several patterns the one without wildcards, then the one with the longest "
        "literal part counts, and these are equal",
        hint=f"say {name!r} itself, or make one of them longer",
    )


def unmatched(what: str, pattern: str, names: Iterable[str]) -> LayoutError:
    """Return the error for a pattern that matches nothing, with the nearest names."""
    return LayoutError(
        f"{what}[{pattern!r}] matches nothing",
        because="every pattern says something of a name",
        hint="near it are " + ", ".join(nearest(pattern, names)),
    )


def nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that are most like a pattern, three at most."""
    all_ = list(dict.fromkeys(names))
    wild = _WILD.sub("", pattern)
    key = {name: difflib.SequenceMatcher(None, wild, name).ratio() for name in all_}
    ends = {name: difflib.SequenceMatcher(None, wild[::-1], name[-len(wild) :][::-1]).ratio()
            for name in all_}  # fmt: skip
    return sorted(all_, key=lambda n: (-max(key[n], ends[n]), all_.index(n)))[:3]


def _exactness(pattern: str) -> tuple[bool, int]:
    return not _WILD.search(pattern), len(_WILD.sub("", pattern))


def _of_pattern(pattern: str, error: MdfuseError, name: str = "") -> LayoutError:
    of = f" for {name}" if name else ""
    return LayoutError(
        f"layouts[{pattern!r}]{of}: {error.what}", because=error.because, hint=error.hint
    )
