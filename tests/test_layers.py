"""The tree is what `docs/architecture.md` says: imports never climb; nothing is too large."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mdfuse"
TESTS = ROOT / "tests"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: Folders of tests that belong to no package of mdfuse.
APART = {"fuzz", "helpers", "image", "multidevice", "multirank", "namespaces"}

#: Lines of a function, its docstring and signature included, and of a module.
FUNCTION, MODULE = 60, 500

#: Lines of `docs/architecture.md`.
PAGE = 200

#: Modules that need each other: an object prints or draws itself, a program runs its parts.
CIRCLES = {
    frozenset({"hir.program", "hir.text.printer"}),
    frozenset({"layouts.layout", "layouts.picture", "layouts.picture_svg"}),
    frozenset({"pipelines.schedule_picture", "pipelines.timing"}),
    frozenset(
        {
            "compiled.leaf_program",
            "compiled.program",
            "compiled.segments",
            "compiled.sizes",
            "compiled.specialisations",
        }
    ),
}

#: Modules beside the packages, `__init__` and `__main__` left out.
TOP = 13


def layers() -> list[str]:
    """The rooms of the table of layers, from the lowest to the highest."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = re.search(r"## Layers\n.*?\n\| layer .*?\n\|[-|]+\n(.*?)\n\n", text, re.DOTALL)
    assert table is not None
    return [
        room for row in table[1].splitlines() for room in re.findall("`(.*?)`", row.split("|")[2])
    ]


def room(path: Path) -> str:
    """The package or module at the top that a file belongs to."""
    first, *rest = path.relative_to(PACKAGE).parts
    return f"{first}/" if rest else first


def room_of(name: str) -> str:
    """The room of a dotted name below mdfuse; what only `__init__` knows is its own."""
    first = [*name.split("."), ""][1]
    if first and (PACKAGE / first).is_dir():
        return f"{first}/"
    return f"{first}.py" if (PACKAGE / f"{first}.py").exists() else "__init__.py"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, room) of each import from mdfuse: at the top, in functions, for types alone."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from ((node.lineno, room_of(n)) for n in names if n.split(".")[0] == "mdfuse")


def dotted(path: Path) -> str:
    """The name of a module below mdfuse; a package has the name of its folder."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def needed(path: Path, known: set[str]) -> Iterator[str]:
    """The modules that one imports when it runs, in functions, too; not those for types alone."""
    tree = tree_of(path)
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node not in for_types:
            for alias in node.names:
                name = f"{node.module}.{alias.name}".removeprefix("mdfuse.")
                yield name if name in known else node.module.removeprefix("mdfuse.")


def test_modules_of_a_room_form_no_circles() -> None:
    """Each module can be read before those that import it, but for a few that are named."""
    known = {dotted(path) for path in MODULES}
    graph = networkx.DiGraph()
    for path in MODULES:
        graph.add_edges_from((dotted(path), name) for name in needed(path, known) if name in known)
    circles = {frozenset(c) for c in networkx.strongly_connected_components(graph) if len(c) > 1}
    assert circles == CIRCLES


def test_the_page_of_the_layers_is_short() -> None:
    """It explains; exceptions are for the docstrings of modules."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert text.count("\n") <= PAGE


def test_every_room_has_its_layer() -> None:
    listed = layers()
    assert len(listed) == len({*listed})
    assert {*listed} == {room(path) for path in MODULES}
    assert len([r for r in listed if not r.endswith("/") and not r.startswith("__")]) <= TOP


def test_no_import_climbs() -> None:
    height = {name: n for n, name in enumerate(layers())}
    climbs = [
        f"{path.relative_to(ROOT)}:{line} imports from {up}, which is a higher layer"
        for path in MODULES
        for line, up in imports(path)
        if height[up] > height[room(path)]
    ]
    assert not climbs


def test_nothing_is_too_long() -> None:
    long = []
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                long += [f"{path}: {node.name} has {lines} lines"] * (lines > FUNCTION)
        lines = path.read_text(encoding="utf-8").count("\n")
        long += [f"{path} has {lines} lines"] * (lines > MODULE)
    assert not long


def test_tests_mirror_the_package() -> None:
    """`tests/hir/emit/test_loops_values.py` is about `mdfuse/hir/emit/loops.py`, or a package."""
    strange = []
    for path in TESTS.rglob("test_*.py"):
        folder, *rest = path.relative_to(TESTS).parts
        if not rest or folder in APART:
            continue
        here = PACKAGE / path.parent.relative_to(TESTS)
        names = {p.stem if p.suffix == ".py" else p.name for p in here.glob("[a-z]*")}
        words = path.stem.removeprefix("test_").split("_")
        if not {"_".join(words[:n]) for n in range(1, len(words) + 1)} & names:
            strange.append(str(path.relative_to(ROOT)))
    assert strange == []
