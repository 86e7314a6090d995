"""Two programs beside each other: communications, memory, and differences of their texts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.traffic import Group, Traffic, by_kind
from mdfuse.seeing.costs import Costs
from mdfuse.seeing.memory_use import memory_of
from mdfuse.seeing.rank_classes import rank_classes
from mdfuse.seeing.timeline import timeline

#: Lines around those that differ.
_CONTEXT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The costs of a program, on one rank of each class of ranks that run alike.

    Attributes:
        label: its name in the comparison.
        host: the program, for all ranks.
        ranks: the ranks that are looked at.
        traffic: by kind and axis, an entry for each of these ranks.
        peaks: the most bytes that each of them holds at once.
        seconds: the predicted time of a run; None without a table of costs.
    """

    label: str
    host: HostProgram
    ranks: tuple[int, ...]
    traffic: dict[Group, Traffic]
    peaks: tuple[int, ...]
    seconds: float | None = None

    @property
    def total(self) -> Traffic:
        """The traffic of all kinds together."""
        total = Traffic(len(self.ranks))
        for traffic in self.traffic.values():
            total.add(traffic)
        return total


def account(label: str, host: HostProgram, costs: Costs | None = None) -> Account:
    """Return the costs of a program.

    Args:
        label: its name in the comparison.
        host: for all ranks, with numbers for extents.
        costs: predicts its time; None: no time is predicted.
    """
    ranks = rank_classes(host).firsts
    return Account(
        label=label,
        host=host,
        ranks=ranks,
        traffic=by_kind(host, ranks),
        peaks=tuple(memory_of(project(host, r)).peak for r in ranks),
        seconds=timeline(host, costs).seconds if costs is not None else None,
    )


def groups_of(accounts: Sequence[Account]) -> list[Group]:
    """Return the kinds and axes of several programs, in the order of appearance."""
    return [*dict.fromkeys(group for a in accounts for group in a.traffic)]


def differing_text(a: Account, b: Account, is_full: bool = False) -> list[str]:
    """Return a unified diff of the texts of two programs, without lines of code.

    Args:
        a: the first program.
        b: the second one.
        is_full: with the types of all values; else only inputs have layouts, without extents, so
            that another split alone makes no difference.
    """
    before, after = _text(a.host, is_full), _text(b.host, is_full)
    lines = difflib.unified_diff(before, after, a.label, b.label, n=_CONTEXT, lineterm="")
    return list(lines)


#: Left out of the short form: types of values, extents of inputs, layouts of communications.
_TYPE = r"\w+\[[^\]]*\](?: of \[[^\]]*\])?"
_LAYOUT = r"(?:m\d+)?\((?:[^()]|\([^()]*\))*\)"
_SHORT = (
    (rf"^(\s*input %\S+): {_TYPE} ", r"\1: "),
    (rf"^(\s*%\S+): {_TYPE} {_LAYOUT}(?: pad=\w+\([^)]*\))? =", r"\1 ="),
    (rf" {_TYPE} {_LAYOUT} => {_LAYOUT}", ""),
)


def _text(host: HostProgram, is_full: bool) -> list[str]:
    lines = [re.sub(r" +# .*$", "", line) for line in str(host).splitlines()]
    for pattern, short in () if is_full else _SHORT:
        lines = [re.sub(pattern, short, line) for line in lines]
    return lines
