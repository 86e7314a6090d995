"""The host program of a report: its lines, with links between posts and waits."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mdfuse.hir.program import HostProgram

#: More lines are left out.
MOST = 4000

_POST = re.compile(r"^\s*%(\S+) = (?:post|send|recv)\b")
_WAIT = re.compile(r"^\s*wait %([^\s\[]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingRow:
    """A line of a program.

    Attributes:
        text: without the user's line.
        source: the user's line.
        kind: "post", "wait" or "".
        anchor: the name of this place; "" where nothing leads to it.
        target: the anchor of the wait for a post, or of the post that is awaited.
    """

    text: str
    source: str
    kind: str = ""
    anchor: str = ""
    target: str = ""


def rows(program: HostProgram) -> list[ListingRow]:
    """Return the lines of a program; a post and the first wait for it lead to each other."""
    lines: list[ListingRow] = []
    posts: dict[str, int] = {}
    waits: dict[int, int] = {}
    texts = [_parted(line) for line in str(program).splitlines()]
    for n, (text, _) in enumerate(texts):
        if post := _POST.match(text):
            posts[post[1]] = n
        elif (wait := _WAIT.match(text)) and wait[1] in posts:
            waits.setdefault(posts[wait[1]], n)
    back = {wait: post for post, wait in waits.items()}
    for n, (text, source) in enumerate(texts):
        if n in waits or n in back:
            other = waits.get(n, back.get(n))
            kind = "post" if n in waits else "wait"
            row = ListingRow(
                text=text, source=source, kind=kind, anchor=f"l{n}", target=f"l{other}"
            )
        else:
            kind = "post" if _POST.match(text) else "wait" if _WAIT.match(text) else ""
            row = ListingRow(text=text, source=source, kind=kind)
        lines.append(row)
    return lines


def _parted(line: str) -> tuple[str, str]:
    text, _, source = line.partition(" # ")
    return text.rstrip(), source.strip()
