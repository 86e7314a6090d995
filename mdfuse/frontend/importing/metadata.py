"""What a checkpoint of `torch.distributed.checkpoint` has: `.metadata`, a pickle, read as data.

A pickle may call whatever it names. Here names have meanings of their own: of the few that torch
writes, values and records without behaviour, and any other is an error. So no file that is read
runs code, and none changes a class of torch's.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar
from uuid import uuid4

import torch

from mdfuse.errors import ProgramError
from mdfuse.torch_private import checkpoint_metadata

#: The file of a folder that has one.
NAME = ".metadata"

Extents = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a file in the folder.

    Attributes:
        file: its name in the folder.
        start, length: the bytes.
        transforms: how they were changed, as compressed, by torch's names; none: as they are.
    """

    file: str
    start: int
    length: int
    transforms: tuple[str, ...] = ()

    @staticmethod
    def of(file: Any, start: Any, length: Any, transforms: Any = None) -> Place:
        """Return a place as some file says it.

        Raises:
            ValueError: it is none, or not in the folder.
        """
        path = PurePosixPath(file) if isinstance(file, str) else PurePosixPath("/")
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"it names the file {file!r}, which is not in the folder")
        start, length = _extents((start, length))
        found = tuple(transforms or ())
        if not all(isinstance(x, str) for x in found):
            raise ValueError(f"it names the transforms {transforms!r}")
        return Place(str(file), start, length, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor: its extents, and where it lies."""

    sizes: Extents
    place: Place


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint: its dtype and shape, and its boxes by their first elements."""

    dtype: torch.dtype
    shape: Extents
    chunks: Mapping[Extents, Chunk]


@dataclass(frozen=True, slots=True)
class Contents:
    """The tensors of a checkpoint by name, and a text that tells it from others."""

    tensors: Mapping[str, Stored] = field(default_factory=dict)
    id: str = ""


def read(folder: Path) -> Contents:
    """Return what a folder has.

    Raises:
        ProgramError: it cannot be read, or is something else.
    """
    try:
        check_file(folder / NAME)
        found = _Reader(io.BytesIO((folder / NAME).read_bytes())).load()
        return _contents(found)
    except Exception as error:  # half a pickle raises whatever its last words lead to
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise unreadable(folder, why) from error


def check_file(path: Path) -> None:
    """Raise OSError for what is there and no file: a pipe that nobody writes into never ends."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError("it is no file")


def unreadable(folder: Path, why: str) -> ProgramError:
    """Return the error for a folder that is no checkpoint, or a damaged one."""
    return ProgramError(
        f"{folder} cannot be read",
        because=why,
        hint="a folder that torch.distributed.checkpoint.save wrote",
    )


def as_torch(stored: Mapping[str, Stored]) -> Any:
    """Return tensors as torch's own metadata, which it pickles."""
    rows = {
        name: (x.dtype, x.shape, [(first, chunk.sizes) for first, chunk in x.chunks.items()])
        for name, x in stored.items()
    }
    places = {
        (name, first): (chunk.place.file, chunk.place.start, chunk.place.length)
        for name, x in stored.items()
        for first, chunk in x.chunks.items()
    }
    return checkpoint_metadata(rows, places, uuid4().hex)


# -- reading -------------------------------------------------------------------------------------

_TORCH = "torch.distributed.checkpoint"
#: Classes of torch's whose objects are records of fields here.
_RECORDS = {
    (f"{_TORCH}.metadata", name)
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
    )
} | {(f"{_TORCH}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")}  # fmt: skip
#: Other names, each with what a call of it makes here: a value, or nothing that is read.
_VALUES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    ("builtins", "set"): frozenset,
}
_NOT_READ = {
    (f"{_TORCH}.metadata", "_MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"), ("pathlib._local", "WindowsPath"),
}  # fmt: skip


class _Record:
    """An object of torch's as its fields, in the order in which they are pickled."""

    kind: ClassVar[str]
    fields: Any

    def __setstate__(self, fields: Any) -> None:
        self.fields = fields

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


class _Reader(pickle.Unpickler):
    """Reads a pickle of known names; the objects that stand for them are made for it alone."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._known: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name."""
        key = (module, name)
        if key not in self._known:
            self._known[key] = self._found(*key)
        return self._known[key]

    def _found(self, module: str, name: str) -> Any:
        key = (module, name)
        if key in _RECORDS:
            return type(name, (_Record,), {"kind": name})
        if key in _NOT_READ:
            return lambda *_: None
        if key in _VALUES:
            return _VALUES[key]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype | torch.layout):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint has")


def _contents(found: Any) -> Contents:
    """Return what a record of torch's says, checked."""
    said, places = found["state_dict_metadata"], dict[tuple[str, Extents], Place]()
    for index, info in (found["storage_data"] or {}).items():
        first = index.fields.get("offset")
        if first is None:  # it is no tensor
            continue
        key = _text(index["fqn"]), _extents(first)
        if key in places:
            raise ValueError(f"it says twice where {key[0]} is from {list(key[1])} on")
        transforms = info.fields.get("transform_descriptors")
        places[key] = Place.of(info["relative_path"], info["offset"], info["length"], transforms)
    tensors = {
        _text(name): _stored(name, x, places)
        for name, x in said.items()
        if x.kind == "TensorStorageMetadata"
    }
    about = found.fields.get("storage_meta")
    return Contents(tensors, str(about.fields.get("save_id", "")) if about is not None else "")


def _stored(name: str, x: Any, places: Mapping[tuple[str, Extents], Place]) -> Stored:
    dtype, shape = x["properties"].fields[0], _extents(x["size"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has the dtype {dtype!r}")
    chunks: dict[Extents, Chunk] = {}
    for chunk in x["chunks"]:
        first, sizes = _extents(chunk["offsets"]), _extents(chunk["sizes"])
        is_inside = len(first) == len(sizes) == len(shape) and all(
            a + n <= m for a, n, m in zip(first, sizes, shape, strict=True)
        )
        if not is_inside or first in chunks:
            raise ValueError(f"{name} has a box {list(sizes)} from {list(first)} on")
        chunks[first] = Chunk(sizes=sizes, place=places[name, first])
    return Stored(dtype, shape, chunks)


def _text(x: Any) -> str:
    if not isinstance(x, str):
        raise ValueError(f"a tensor has the name {x!r}")
    return x


def _extents(x: Any) -> Extents:
    found = tuple(x)
    if not all(type(n) is int and n >= 0 for n in found):
        raise ValueError(f"it says {found!r} where numbers of elements or bytes belong")
    return found
