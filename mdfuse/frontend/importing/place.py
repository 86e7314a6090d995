"""Layouts of parameters, inputs and outputs, by patterns of names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mdfuse.errors import LayoutError, MdfuseError
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh

_WILD = re.compile(r"\*|\?|\[[^\]]*\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A layout, and the pattern that gave it."""

    pattern: str
    layout: Layout


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
        self.matched: dict[str, list[str]] = {pattern: [] for pattern in layouts}

    def __getitem__(self, pattern: str) -> Layout:
        """The layout that a pattern says."""
        return self._layouts[pattern]

    def _layout(self, pattern: str, said: Any) -> Layout:
        try:
            return said if isinstance(said, Layout) else Layout(self.mesh, said)
        except MdfuseError as error:
            raise _of_pattern(pattern, error) from error

    def find(self, names: Sequence[str], ndim: int) -> Placed | None:
        """Return the layout for these names of one tensor; None if no pattern matches.

        Raises:
            LayoutError: equally exact patterns; contradicting patterns for names of one tensor; a
                layout that does not fit; a Partial.
        """
        chosen = self._chosen(names)
        if not chosen:
            return None
        pattern, first = chosen[0], names[0]
        layout = self._layouts[pattern]
        partial = layout.partial_axes
        if partial:
            raise LayoutError(
                f"layouts[{pattern!r}]: {first} is Partial along {partial[0]}",
                because="what is passed to a program, or returned by it, is whole or split",
                hint="Shard(dim), or leave the axis out",
            )
        try:
            layout = layout.normalized(ndim)
        except MdfuseError as error:
            raise _of_pattern(pattern, error, first) from error
        if ":" not in first and pattern not in self._stated:
            layout = self._gathered_inside(layout)
        for pattern in chosen:
            self.matched[pattern].append(first)
        return Placed(pattern=pattern, layout=layout)

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
        for pattern in self._layouts:
            if not any(_matches(name, pattern) for name in names):
                raise unmatched("layouts", pattern, names)


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name; names of inputs and outputs have a prefix."""
    kinds = [x.split(":")[0] if ":" in x else "" for x in (name, pattern)]
    return kinds[0] == kinds[1] and fnmatchcase(name, pattern)


def matching(
    said: Mapping[str, Any],
    names: Sequence[str],
    what: str,
    matches: Callable[[str, str], bool] = _matches,
) -> tuple[str, Any] | None:
    """Return the most exact pattern that matches one of the names, and its setting.

    Args:
        said: pattern -> setting.
        names: of one thing.
        what: the argument of the patterns, as errors name it.
        matches: whether a name matches a pattern.

    Raises:
        LayoutError: two patterns that are equally exact.
    """
    hits = (p for p in said if any(matches(n, p) for n in names))
    best = sorted(hits, key=_exactness, reverse=True)
    if len(best) > 1 and _exactness(best[0]) == _exactness(best[1]):
        raise _equally(what, best, names[0])
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
