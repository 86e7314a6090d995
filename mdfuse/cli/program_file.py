"""Read arguments of the command line: files that define `build`, and meshes as text."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from mdfuse.bootstrap import MOST_RANKS
from mdfuse.cli.user_code import user_code
from mdfuse.errors import DefinitionError, MeshError, counted
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.mesh import DeviceMesh

#: `build(mesh) -> (definition, global inputs)`.
Build = Callable[[DeviceMesh], tuple[FusionDefinition, Sequence[Any]]]


def parse_mesh(text: str) -> DeviceMesh:
    """Return a mesh over ranks 0, 1, 2, … from a text of its axes and sizes.

    Raises:
        MeshError: the text is not a list of axis=size, or has too many ranks.

    >>> parse_mesh("dp=2,tp=4")
    mesh(dp=2, tp=4)
    """
    sizes: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        axis, _, size = part.partition("=")
        if not axis.isidentifier() or not _is_size(size) or axis in sizes:
            raise MeshError(
                f"{text!r} is no mesh",
                because="a mesh is a list of different axes with their sizes",
                hint="write axis=size, separated by commas: dp=2,tp=4",
            )
        sizes[axis] = int(size)
    if math.prod(sizes.values()) > MOST_RANKS:
        raise MeshError(
            f"{text!r} has {counted(math.prod(sizes.values()), 'rank')}",
            because=f"a mesh of the command line has at most {MOST_RANKS}",
            hint="choose smaller sizes",
        )
    return DeviceMesh.arange(**sizes)


def parse_batch(text: str) -> dict[str, int]:
    """Return input -> its dim that is the batch's, from a text.

    Raises:
        DefinitionError: the text is not a list of name=dim.

    >>> parse_batch("x=0,t=0")
    {'x': 0, 't': 0}
    """
    pairs = [part.partition("=") for part in text.replace(" ", "").split(",")]
    if not all(name and dim.isascii() and dim.isdecimal() for name, _, dim in pairs):
        raise DefinitionError(
            f"{text!r} names no batch",
            because="it says which dim of which inputs is the batch's",
            hint="write name=dim, separated by commas: x=0,t=0",
        )
    return {name: int(dim) for name, _, dim in pairs}


def _is_size(text: str) -> bool:
    """Return whether a text is a number from 1, in ASCII digits and not too long for `int`."""
    return text.isascii() and text.isdecimal() and len(text) < 20 and int(text) > 0


def load_build(file: Path) -> Build:
    """Import a file, with its folder on the path as for a script, and return its `build`.

    Raises:
        DefinitionError: the file is no Python file, defines no `build`, or raises something.
    """
    name = f"__mdfuse_{file.stem}__"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise DefinitionError(
            f"{file} is no Python file",
            because="its name tells what it is",
            hint="pass a file that ends in .py",
        )
    module = module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.resolve().parent))
    with user_code(file.name, "what runs when it is imported"):
        spec.loader.exec_module(module)
        build = getattr(module, "build", None)
    if not callable(build):
        raise DefinitionError(
            f"{file} does not define build",
            because="the command line asks a file for its program on a mesh",
            hint="def build(mesh): ... return definition, [global_input, ...]",
        )
    typed: Build = build
    return typed


def call_build(build: Build, mesh: DeviceMesh) -> tuple[FusionDefinition, list[Any]]:
    """Call `build` on a mesh, and return the definition and the global inputs.

    Torch's random numbers begin at one seed, so that all ranks draw the same global inputs.

    Raises:
        DefinitionError: `build` returned something else, or raised something.
    """
    import torch  # late: the command line says what is wrong with its arguments before

    torch.manual_seed(0)
    with user_code(_file_of(build), f"build({mesh})"):
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


def _file_of(build: Build) -> str:
    code = getattr(build, "__code__", None)
    return Path(code.co_filename).name if code is not None else "the file that defines build"
