"""Lowered programs in files, beside the compiled functions, where later starts read them.

A lowering depends on its fusion, options and table of costs, on mdfuse and torch, and on no rank.
The name of its file is made of all of these, so a rank that reads a file and one that lowers have
equal programs. A file is a checksum and a pickle, which may name data of mdfuse's and no function.
A damaged file counts as absent, and the log says so. Once there are too many, those go that were
read least recently.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import logging
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from threading import get_ident
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from mdfuse.compiled.lowering_names import name_of
from mdfuse.compiled.overlap import OverlapDecisions, table_of
from mdfuse.config import Options, options_from_environment
from mdfuse.errors import MdfuseError, reason
from mdfuse.files import check_private, private_folder, remove
from mdfuse.hir.once import note
from mdfuse.hir.program import HostProgram
from mdfuse.hir.verify.check import verify_once
from mdfuse.interpreter.garbage import no_collection
from mdfuse.ir.graph import Expr, Fusion
from mdfuse.pipelines.schedules import Schedule
from mdfuse.plan.artefacts import artefacts

_LOG = logging.getLogger("mdfuse.compile")

#: The fewest expressions of a fusion whose program is written: smaller ones are lowered as fast.
FEWEST = 512

#: The bytes of all files together, at most.
MOST_BYTES = 1 << 28

#: Packages and modules whose classes are data: a file may name these.
_ROOMS = ("mdfuse.ir.", "mdfuse.hir.", "mdfuse.layouts.", "mdfuse.extents.", "mdfuse.pipelines.")
_MODULES = frozenset(
    f"mdfuse.{x}"
    for x in ("communication", "compiled.overlap", "compiled.segments", "config", "errors", "mesh")
)


class ProgramParts(NamedTuple):
    """The parts of a program, which `mdfuse.compiled.program.Program` describes."""

    fusion: Fusion
    segments: tuple[Any, ...]
    host: HostProgram
    overlap: OverlapDecisions | None = None
    schedule: Schedule | None = None


@no_collection()
def from_files(
    fusion: Fusion,
    options: Options | None,
    how: tuple[Any, ...] | None,
    lower: Callable[[], ProgramParts],
) -> ProgramParts:
    """Return the parts of a program as `lower` does: read from a file, or written into one.

    A program that is written is verified first, unless the options leave that out; then no start
    that reads it verifies it again.

    Args:
        fusion: with numbers for its extents.
        options: as the program has them.
        how: what else `lower` goes by; None: code of the user's, and there are no files.
        lower: lowers the fusion.
    """
    folder = artefacts() if how is not None and len(fusion.exprs) >= FEWEST else None
    name = None if folder is None else _name(fusion, options, how)
    if folder is None or name is None:
        return lower()
    file = _File(folder.folder / f"{name}.program")
    lowered = file.read()
    if lowered is None:
        lowered = lower()
        file.write(lowered, options_from_environment(options).verify)
    return lowered


def _name(fusion: Fusion, options: Options | None, how: tuple[Any, ...] | None) -> str | None:
    chosen = options_from_environment(options)
    try:
        table = table_of(chosen) if chosen.overlap != "never" else None
    except MdfuseError:  # which the lowering raises, where it needs the table
        return None
    return name_of(fusion, chosen, options is None, table, how)


class _File:
    """The file of a program."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> ProgramParts | None:
        """Return the parts; None where the file is not there, or is of no use."""
        try:
            check_private(self._path.parent)
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            _unused(reason(error))
            return None
        try:
            content = memoryview(data)[32:]
            if data[:32] != self._checksum(content):
                raise ValueError("the checksum is another one")
            lowered, is_verified = _DataReader(io.BytesIO(content)).load()
            lowered = ProgramParts(*lowered)
            if not isinstance(lowered.host, HostProgram):
                raise TypeError("it is no program")
        except Exception as error:  # half a file may raise any error
            _LOG.warning(
                "%s is of no use, and its program is lowered: %s", self._path, reason(error)
            )
            return None
        if is_verified:
            note(verify_once, lowered.host, None)
        with suppress(OSError):
            os.utime(self._path)
        return lowered

    def write(self, lowered: ProgramParts, is_verified: bool) -> None:
        """Write the parts, once the program is verified; a wrong one fails where it runs."""
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}.{get_ident()}")
        try:
            if is_verified:
                verify_once(lowered.host)
            private_folder(self._path.parent)
            data = io.BytesIO()
            _DataWriter(data, protocol=5).dump((tuple(lowered), is_verified))
            content = data.getbuffer()
            part.write_bytes(self._checksum(content) + content)
            part.replace(self._path)
            _drop_oldest(self._path)
        except MdfuseError:
            return
        except Exception as error:  # the program is right without a file
            _unused(reason(error))
        finally:
            remove(part)

    def _checksum(self, content: memoryview) -> bytes:
        """Return a digest of what the file holds, and of its name: no other program is read."""
        digest = hashlib.sha256(self._path.name.encode())
        digest.update(content)
        return digest.digest()


@cache
def _unused(why: str) -> None:
    """Log once why there are no files."""
    _LOG.warning("lowered programs are not read from files, or not written: %s", why)


def _drop_oldest(latest: Path) -> None:
    """Remove the files that were read least recently, until all together are small enough.

    Among them are parts of files, of processes that were ended while they wrote.
    """
    files = list[tuple[float, int, Path]]()
    for path in latest.parent.glob("*.program*"):
        with suppress(FileNotFoundError):  # another process removes them, too
            about = path.stat()
            files.append((about.st_mtime, about.st_size, path))
    size = sum(n for _, n, _ in files)
    for _, n, path in sorted(files):
        if size <= MOST_BYTES or path == latest:
            break
        remove(path)
        size -= n


# -- data alone ------------------------------------------------------------------------------------


def _is_data(kind: type) -> bool:
    """Return whether objects of a class of mdfuse's are data."""
    module = kind.__module__
    return module in _MODULES or module.startswith(_ROOMS)


#: The fields of an expression; the answer of an earlier pass is no part of a program.
_EXPR = tuple(f.name for f in fields(Expr))


def _stated(expr: Expr, field: str) -> Any:
    return None if field == "answer" else getattr(expr, field)


class _DataWriter(pickle.Pickler):
    """Writes data of mdfuse's."""

    def reducer_override(self, x: Any) -> Any:
        kind = type(x)
        if kind is MappingProxyType:
            return dict, (dict(x),)
        if kind is Expr and x.answer is not None:
            return copyreg.__newobj__, (Expr,), [*map(partial(_stated, x), _EXPR)]  # type: ignore
        named = x if isinstance(x, type) else kind
        if named in _OTHERS or _is_data(named):
            return NotImplemented
        raise pickle.PicklingError(f"a program has a {kind.__qualname__}, which is no data")


class _DataReader(pickle.Unpickler):
    """Reads data of mdfuse's; no file makes it import, or call, anything else, or change a class.

    Attributes:
        kinds: the classes that the file names -> what each has.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.kinds: dict[type, dict[str, Any]] = {}

    def load(self) -> Any:
        """Return what the file holds.

        Raises:
            Exception: it holds something else than data, or half of it.
        """
        try:
            return super().load()
        finally:
            changed = [(kind, name) for kind in self.kinds for name in self._changed(kind)]
            for kind, name in changed:
                if name in self.kinds[kind]:
                    setattr(kind, name, self.kinds[kind][name])
                else:
                    delattr(kind, name)
            if changed:
                raise pickle.UnpicklingError(f"it changes {changed[0][0].__qualname__}")

    def _changed(self, kind: type) -> list[str]:
        """Return the names that a class has otherwise than before; pickles note slots there."""
        before = self.kinds[kind]
        after = {name: x for name, x in vars(kind).items() if name != "__slotnames__"}
        return [name for name, x in after.items() if name not in before or before[name] is not x]

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            x = getattr(torch, name, None)
            if isinstance(x, torch.dtype):
                return x
        if module == "builtins" and name in _BUILTINS:
            return _BUILTINS[name]
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and kind.__module__ == module and _is_data(kind):
            self.kinds.setdefault(kind, dict(vars(kind)))
            return kind
        raise pickle.UnpicklingError(f"{module}.{name} is no data")


_BUILTINS = {"range": range, "dict": dict}
_OTHERS = frozenset((torch.dtype, *_BUILTINS.values()))
