"""Names and sentences that a newcomer trips over: counted, with limits that only fall."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted((ROOT / "mdfuse").rglob("*.py"))
#: Modules besides those of the package whose sentences are read.
SCRIPTS = sorted(p for folder in ("benchmarks", "examples") for p in (ROOT / folder).glob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SHELL = [ROOT / ".ci" / "run", *sorted(p for p in (ROOT / "launch").iterdir() if p.is_file())]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

#: Words that say nothing of a value whose only name they are.
EMPTY = {"found", "made", "told", "kept", "own", "more", "rest", "here"}

#: What is counted -> the most there may be; lower it with each repair.
LIMITS = {
    "empty names": 0,
    "empty parameters": 4,
    "empty functions": 0,
    "classes of one name": 0,
    "modules of one name": 1,
    "docstrings that ask": 0,
}

#: A sentence that opens so puts its subject last.
OPENS = re.compile(r"(?:^|[.!?]\s+|\n\n\s*|[-*] )(Of) (?!course\b)")


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """A tree and the statements in it, at any depth; not their expressions, most of its nodes."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield from statements(node)


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def comments(text: str) -> str:
    """The comments of a module, a blank line between those apart."""
    lines = [re.search(r"(?:^|\s)#:? (.*)$", line) for line in text.splitlines()]
    return "\n".join(x[1] if x else "\n" for x in lines)


@cache
def counted() -> Counter[str]:
    asking = re.compile(r"(What|Where|How|Whether|Which|Who)\b")
    counts, classes, modules = Counter[str](), Counter[str](), {*MODULES}
    for path in (*MODULES, *SCRIPTS):
        texts = docstrings(tree_of(path))
        counts["docstrings that ask"] += sum(bool(asking.match(x)) for x in texts)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Name):  # by `=`, `for`, `with` and `:=`
                counts["empty names"] += isinstance(node.ctx, ast.Store) and node.id in EMPTY
            elif isinstance(node, ast.arg):
                counts["empty parameters"] += node.arg in EMPTY
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                counts["empty functions"] += node.name.strip("_") in EMPTY
            elif isinstance(node, ast.ClassDef) and path in modules:
                classes[node.name] += 1
    counts["classes of one name"] = sum(n > 1 for n in classes.values())
    stems = Counter(path.stem for path in MODULES)
    counts["modules of one name"] = sum(n > 1 for x, n in stems.items() if not x.startswith("__"))
    return counts


@pytest.mark.parametrize("kind", LIMITS)
def test_there_are_no_more_than_before(kind: str) -> None:
    assert counted()[kind] <= LIMITS[kind]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_sentences_of_pages_begin_with_their_subject(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [m[0] for m in OPENS.finditer(text)] == []


def test_sentences_of_modules_begin_with_their_subject() -> None:
    wrong = []
    for path in (*MODULES, *SCRIPTS, *TESTS):
        text = path.read_text(encoding="utf-8")
        parts = [*docstrings(tree_of(path)), comments(text)]
        wrong += [(path.name, m[0]) for part in parts for m in OPENS.finditer(part)]
    wrong += [
        (path.name, m[0])
        for path in SHELL
        for m in OPENS.finditer(comments(path.read_text(encoding="utf-8")))
    ]
    assert wrong == []
