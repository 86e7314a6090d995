"""Texts of host programs that tests parse: `tests/programs/*/*.hir`, some of them templates."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "programs"


def program_text(name: str) -> str:
    return (FOLDER / f"{name}.hir").read_text(encoding="utf-8")


def program_texts(folder: str) -> dict[str, str]:
    """Name -> text of each program in a folder."""
    names = sorted(x.stem for x in (FOLDER / folder).glob("*.hir"))
    return {name: program_text(f"{folder}/{name}") for name in names}
