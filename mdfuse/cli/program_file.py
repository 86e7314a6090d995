"""What the command line is given: files that define `build`, and meshes as text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from mdfuse.errors import DefinitionError, MeshError
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.mesh import DeviceMesh

#: `build(mesh) -> (definition, global inputs)`.
Build = Callable[[DeviceMesh], tuple[FusionDefinition, Sequence[Any]]]


def parse_mesh(text: str) -> DeviceMesh:
    """A mesh over ranks 0, 1, 2, … from its axes and sizes.

    Raises:
        MeshError: the text is not a list of axis=size.

    >>> parse_mesh("dp=2,tp=4")
    mesh(dp=2, tp=4)
    """
    sizes: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        axis, _, size = part.partition("=")
        if not axis.isidentifier() or not size.isdecimal() or int(size) < 1 or axis in sizes:
            raise MeshError(
                f"{text!r} is no mesh",
                because="a mesh is a list of different axes with their sizes",
                hint="write axis=size, separated by commas: dp=2,tp=4",
            )
        sizes[axis] = int(size)
    return DeviceMesh.arange(**sizes)


def load_build(file: Path) -> Build:
    """Import a file as a script would be, its folder on the path, and give its `build`.

    Raises:
        DefinitionError: it defines none.
    """
    name = f"__mdfuse_{file.stem}__"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise DefinitionError(f"{file} is no Python file", hint="pass a file that ends in .py")
    module = module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.resolve().parent))
    spec.loader.exec_module(module)
    build = getattr(module, "build", None)
    if not callable(build):
        raise DefinitionError(
            f"{file} does not define build",
            because="the command line asks a file for its program on a mesh",
            hint="def build(mesh): ... return definition, [global_input, ...]",
        )
    found: Build = build
    return found


def call_build(build: Build, mesh: DeviceMesh) -> tuple[FusionDefinition, list[Any]]:
    """The definition and the global inputs on a mesh.

    Raises:
        DefinitionError: `build` returned something else.
    """
    result = build(mesh)
    if (
        isinstance(result, tuple)
        and len(result) == 2
        and isinstance(result[0], FusionDefinition)
        and isinstance(result[1], Sequence)
    ):
        return result[0], list(result[1])
    raise DefinitionError(
        f"build({mesh}) returned {type(result).__name__}",
        because="the command line needs the definition and the inputs to run it with",
        hint="return (definition, [global_input, ...])",
    )
