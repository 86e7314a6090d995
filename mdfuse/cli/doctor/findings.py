"""Findings of `mdfuse doctor`, and their table."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from mdfuse.cli.rich_tables import facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fact about the machine, with a remedy if it needs one.

    Attributes:
        name: the thing that was examined; empty where the finding above is continued.
        what: the fact.
        remedy: what to do about it; None where nothing is to be done.
        is_problem: programs cannot run without the remedy; decides the exit status.
    """

    name: str
    what: str
    remedy: str | None = None
    is_problem: bool = False

    @property
    def text(self) -> str:
        """The fact and the remedy in one line."""
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


def table(findings: list[Finding]) -> Table:
    """Return a table of findings in two columns, where those with a remedy stand out."""
    return facts((finding.name, Text(finding.text, _style(finding))) for finding in findings)


def problems(findings: list[Finding]) -> list[str]:
    """Return the findings that keep programs from running, one line each."""
    return [f"{f.name}: {f.text}" for f in findings if f.is_problem]


def _style(finding: Finding) -> str:
    if finding.is_problem:
        return "bold red"
    return "yellow" if finding.remedy else ""
