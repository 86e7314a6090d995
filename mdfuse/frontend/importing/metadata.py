"""Contents of a `torch.distributed.checkpoint`: its pickle `.metadata`, read as data.

A pickle may call any function that it names. Here the few names that torch writes stand for values
and records without behaviour, and any other name is an error. So reading a file runs no code and
changes no class of torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from reprlib import repr as short
from typing import Any
from uuid import uuid4

import torch

from mdfuse.errors import ProgramError, shown
from mdfuse.frontend.importing import pickled
from mdfuse.torch_private import checkpoint_metadata

#: The name of the metadata file in a folder.
NAME = ".metadata"

Extents = tuple[int, ...]

#: Characters of a path, and dims of a tensor, or transforms, that a file may name.
_LONGEST, _MOST = 4096, 64


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Bytes of a file in the folder.

    Attributes:
        file: its name in the folder.
        start, length: the bytes.
        transforms: torch's names of transforms of the bytes, as compression; none: plain bytes.
    """

    file: str
    start: int
    length: int
    transforms: tuple[str, ...] = ()

    @staticmethod
    def of(file: Any, start: Any, length: Any, transforms: Any = None) -> StoredBytes:
        """Return a place from values that a file holds.

        Raises:
            ValueError: it is not a place, or not in the folder.
        """
        is_path = isinstance(file, str) and len(file) <= _LONGEST
        path = PurePosixPath(file if is_path else "/")
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"it names the file {short(file)}, which is not in the folder")
        start, length = _extents((start, length))
        names = () if transforms is None else transforms
        if not _is_short(names) or not all(isinstance(x, str) for x in names):
            raise ValueError(f"it names the transforms {short(transforms)}")
        return StoredBytes(str(file), start, length, tuple(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a tensor: its extents, and its place."""

    sizes: Extents
    place: StoredBytes


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
    """Return the contents of a folder.

    Raises:
        ProgramError: the folder cannot be read, or holds no such checkpoint.
    """
    try:
        check_file(folder / NAME)
        return _contents(pickled.read((folder / NAME).read_bytes(), _name))
    except Exception as error:  # a truncated pickle may raise any error
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise unreadable(folder, why) from error


def check_file(path: Path) -> None:
    """Raise OSError for a path other than a file, because reading a pipe may never end."""
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
#: Other names -> the function that stands for a call: it returns a value, or an unread object.
_VALUES: dict[tuple[str, str], pickled.Made] = {
    ("torch", "Size"): lambda args: _only(args, tuple),
    ("collections", "OrderedDict"): lambda args: {},
    ("builtins", "set"): lambda args: _only(args, list),
}
_NOT_READ = {
    (f"{_TORCH}.metadata", "_MEM_FORMAT_ENCODING"), ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"), ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"), ("pathlib._local", "WindowsPath"),
}  # fmt: skip


def _name(module: str, name: str) -> Any:
    """Return the stand-in for a name in `.metadata`."""
    key = (module, name)
    if key in _RECORDS:
        return pickled.PickledName(lambda args: pickled.Record(name))
    if key in _NOT_READ:
        return pickled.PickledName(lambda args: None)
    if key in _VALUES:
        return pickled.PickledName(_VALUES[key])
    dtype = getattr(torch, name, None) if module == "torch" else None
    if isinstance(dtype, torch.dtype | torch.layout):
        return dtype
    raise ValueError(f"it names {shown(module)}.{shown(name)}, which no checkpoint has")


def _only(args: tuple[Any, ...], kind: type) -> Any:
    (x,) = args
    if type(x) is not kind:
        raise ValueError(f"it has a {type(x).__name__} where a {kind.__name__} belongs")
    return x


def _contents(record: Any) -> Contents:
    """Return the contents of torch's metadata record, checked."""
    said, places = record["state_dict_metadata"], dict[tuple[str, Extents], StoredBytes]()
    for index, info in (record["storage_data"] or {}).items():
        first = index.fields.get("offset")
        if first is None:  # an entry other than a tensor
            continue
        key = _text(index["fqn"]), _extents(first)
        if key in places:
            raise ValueError(f"it says twice where {key[0]} is from {list(key[1])} on")
        transforms = info.fields.get("transform_descriptors")
        places[key] = StoredBytes.of(
            info["relative_path"], info["offset"], info["length"], transforms
        )
    tensors = {
        _text(name): _stored(name, x, places)
        for name, x in said.items()
        if x.kind == "TensorStorageMetadata"
    }
    about = record.fields.get("storage_meta")
    id_ = "" if about is None else about.fields.get("save_id")
    return Contents(tensors, id_ if isinstance(id_, str) else "")


def _stored(name: str, x: Any, places: Mapping[tuple[str, Extents], StoredBytes]) -> Stored:
    dtype, shape = x["properties"].fields[0], _extents(x["size"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has the dtype {short(dtype)}")
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
        raise ValueError(f"a tensor has the name {short(x)}")
    return x


def _is_short(x: object) -> bool:
    """Return whether something is a list that need not be looked through again and again."""
    return isinstance(x, list | tuple) and len(x) <= _MOST


def _extents(x: Any) -> Extents:
    if not _is_short(x) or not all(type(n) is int and n >= 0 for n in x):
        raise ValueError(f"it says {short(x)} where numbers of elements or bytes belong")
    return tuple(x)
