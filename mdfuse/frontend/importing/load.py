"""Read a rank's boxes of a checkpoint: safetensors files, torch's own, or tensors by name."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mdfuse.errors import ProgramError, shown
from mdfuse.frontend.importing import chunks
from mdfuse.frontend.importing.place import nearest
from mdfuse.interpreter.json_text import from_json
from mdfuse.ir.graph import Fusion
from mdfuse.layouts.boxes import Box, Boxes, box_shape, boxes_of, index_of, intersect, relative

_INDEX = "model.safetensors.index.json"


class Checkpoint(Protocol):
    """Where tensors are read from."""

    @property
    def names(self) -> Sequence[str]:
        """The names of its tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""

    def part(self, name: str, box: Box) -> Tensor:
        """A box of a tensor."""


class InMemory:
    """Tensors by name, as `state_dict()` gives them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.names = [*tensors]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self.tensors[name].shape)

    def part(self, name: str, box: Box) -> Tensor:
        """A copy of a box of a tensor."""
        return part_of(self.tensors[name], box)


def with_starts(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> Checkpoint:
    """Return a checkpoint that also has these tensors, where it lacks them."""
    lacking = {name: x for name, x in tensors.items() if name not in checkpoint.names}
    return _Completed(checkpoint, InMemory(lacking)) if lacking else checkpoint


class _Completed:
    """A checkpoint, and tensors that it lacks."""

    def __init__(self, first: Checkpoint, rest: InMemory) -> None:
        self._first, self._rest = first, rest
        self.names = [*first.names, *rest.names]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._of(name).shape(name)

    def part(self, name: str, box: Box) -> Tensor:
        """A box of a tensor."""
        return self._of(name).part(name, box)

    def _of(self, name: str) -> Checkpoint:
        return self._rest if name in self._rest.tensors else self._first


class InFiles:
    """Tensors in files of safetensors; each is opened for a tensor at a time.

    So what was read is given back to the system: an open file counts as memory of the process, as
    far as it was read.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files
        self.names = [*files]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        with _opened(self.files[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def part(self, name: str, box: Box) -> Tensor:
        """A box of a tensor, and nothing else of it."""
        with _opened(self.files[name]) as file:
            if not box:
                found: Tensor = file.get_tensor(name)
                return found
            part: Tensor = file.get_slice(name)[tuple(slice(*interval) for interval in box)]
            return part.clone(memory_format=torch.contiguous_format)


class Distributed:
    """A folder that `torch.distributed.checkpoint` wrote, whatever the layout it was saved in.

    Of the chunks in its files the boxes that are asked for are read; compressed ones whole.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._folder = folder
        try:
            found = FileSystemReader(folder).read_metadata()
        except _UNREADABLE as error:
            raise _no_folder(folder, error) from error
        kept = found.state_dict_metadata.items()
        self._kept = {n: x for n, x in kept if isinstance(x, TensorStorageMetadata)}
        #: (name, where a chunk begins) -> its place in a file
        self._places = {(k.fqn, k.offset): x for k, x in (found.storage_data or {}).items()}
        self.names = [*self._kept]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._kept[name].size)

    def part(self, name: str, box: Box) -> Tensor:
        """A box of a tensor."""
        kept = self._kept[name]
        part = torch.empty(box_shape(box), dtype=kept.properties.dtype)
        for chunk in kept.chunks:
            sizes = zip(chunk.offsets, chunk.sizes, strict=True)
            there = tuple((first, first + n) for first, n in sizes)
            both = intersect(box, there)
            if both is None:
                continue
            place = self._places[name, chunk.offsets]
            if getattr(place, "transform_descriptors", None):
                return part_of(self._whole(name), box)
            try:
                file, into = self._folder / place.relative_path, part[index_of(relative(both, box))]
                chunks.read_box(file, place.offset, place.length, relative(both, there), into)
            except _UNREADABLE as error:
                raise _no_folder(self._folder, error) from error
        return part

    def _whole(self, name: str) -> Tensor:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        whole = torch.empty(self.shape(name), dtype=self._kept[name].properties.dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this process reads for itself
            load({name: whole}, storage_reader=FileSystemReader(self._folder), no_dist=True)
        return whole


#: What files that are missing, cut off or something else make of reading them.
_UNREADABLE = (
    OSError, EOFError, pickle.UnpicklingError, AttributeError, RuntimeError, ValueError,
    zipfile.BadZipFile,
)  # fmt: skip


def _no_folder(folder: Path, error: Exception) -> ProgramError:
    return ProgramError(
        f"{folder} cannot be read",
        because=f"{type(error).__name__}: {error}".splitlines()[0],
        hint="a folder that torch.distributed.checkpoint.save wrote",
    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise ProgramError(
            f"{path} cannot be read: safetensors is not installed",
            hint='pip install "mdfuse[demo]", or pass tensors by name: model.load(state_dict)',
        ) from error
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ProgramError(
            f"{path} cannot be read",
            because=str(error).splitlines()[0],
            hint="a file of safetensors; every rank reads the same files",
        ) from error


def opened(source: Any) -> Checkpoint:
    """Return what a checkpoint is read from.

    Args:
        source: a file of safetensors, an index of several, a folder with either, a folder of
            `torch.distributed.checkpoint`, or tensors by name.

    Raises:
        ProgramError: there is no such file, or it is none.
    """
    if isinstance(source, Mapping):
        return InMemory(source)
    path = Path(source)
    if path.is_dir() and (path / ".metadata").exists():
        return Distributed(path)
    if path.is_dir():
        index = path / _INDEX
        files = sorted(path.glob("*.safetensors"))
        if not index.exists() and not files:
            raise ProgramError(
                f"{path} has no file of safetensors",
                because="a folder has model.safetensors, or several files and their index",
                hint="pass the file itself",
            )
        return _of_index(index) if index.exists() else _of_files(files)
    return _of_index(path) if path.suffix == ".json" else _of_files([path])


def _of_files(files: Sequence[Path]) -> InFiles:
    found: dict[str, Path] = {}
    for path in files:
        with _opened(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    return InFiles(found)


def _of_index(index: Path) -> InFiles:
    try:
        files = dict(from_json(index.read_text(encoding="utf-8"))["weight_map"])
        for name, file in files.items():
            if not isinstance(file, str):
                raise TypeError(f"{name} is in {shown(file)}")
            f"{name}{file}".encode()  # what JSON may write, and no name can be
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProgramError(
            f"{index} cannot be read",
            because=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            hint='an index says which file has a tensor: {"weight_map": {name: file}}',
        ) from error
    missing = sorted({f for f in files.values() if not (index.parent / f).exists()})
    if missing:
        raise ProgramError(
            f"{index} names {missing[0]}, which is not there",
            because=f"{len(missing)} of {len({*files.values()})} files of the checkpoint are gone",
            hint="every rank reads the checkpoint: put all files where each rank finds them",
        )
    return InFiles({name: index.parent / file for name, file in files.items()})


def check_names(
    checkpoint: Checkpoint, wanted: Sequence[Sequence[str]], known: Sequence[str] = ()
) -> list[str]:
    """Return the names of a checkpoint that nothing reads.

    Args:
        checkpoint: what is read.
        wanted: all names of each tensor that is read.
        known: other names that the module has.

    Raises:
        ProgramError: tensors that are wanted and not there: all of them at once.
    """
    there = {*checkpoint.names}
    missing = [names[0] for names in wanted if not there & {*names}]
    unexpected = [n for n in checkpoint.names if n not in {x for names in wanted for x in names}]
    if missing:
        near = nearest(missing[0], unexpected or checkpoint.names)
        raise ProgramError(
            f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors: "
            + ", ".join(missing[:5]) + (", …" if len(missing) > 5 else ""),
            because=f"near {missing[0]} it has {', '.join(near) or 'nothing'}",
            hint="rename=lambda name: ..., where the checkpoint has other names",
        )  # fmt: skip
    return [n for n in unexpected if n not in known]


def check_shape(checkpoint: Checkpoint, name: str, shape: Sequence[int]) -> None:
    """Raise ProgramError where a tensor has another shape than the module says."""
    there = checkpoint.shape(name)
    if there != tuple(shape):
        raise ProgramError(
            f"{name} has the shape {list(there)} in the checkpoint, {list(shape)} in the module",
            because="a parameter is read as it is",
            hint="the module and the checkpoint are of one configuration",
        )


def read(checkpoint: Checkpoint, name: str, dtype: torch.dtype, box: Box) -> Tensor:
    """Read a box of a tensor, in the dtype of the program.

    Raises:
        ProgramError: it has integers where the program has floats, or the other way round.
    """
    part = checkpoint.part(name, box)
    if part.dtype != dtype and not (part.is_floating_point() and dtype.is_floating_point):
        raise ProgramError(
            f"{name} is {part.dtype} in the checkpoint, and {dtype} in the module",
            because="floats are cast to floats alone",
            hint="cast it before",
        )
    return part.to(dtype)


def read_state(folder: Path, fusion: Fusion, state: Mapping[str, Tensor | None], rank: int) -> None:
    """Read a rank's boxes of inputs of a fusion into tensors that it has.

    Raises:
        ProgramError: the checkpoint has others, or they have other shapes.
    """
    checkpoint = opened(folder)
    others = check_names(checkpoint, [(name,) for name in state])
    if others:
        raise ProgramError(
            f"{folder} is of another state: it has {others[0]}",
            because=f"@{fusion.name} keeps nothing of {len(others)} of its tensors",
            hint="load what a step with the same parameters and optimizer saved",
        )
    for name in state:
        check_shape(checkpoint, name, fusion.values[name].shape)
    for name, x in state.items():
        if x is not None:
            shape = fusion.values[name].shape
            boxes = tuple(boxes_of(fusion.layout(name).rows(shape, rank)))
            x.copy_(joined(boxes, partial(read, checkpoint, name, x.dtype)))


def joined(boxes: Boxes, read: Callable[[Box], Tensor]) -> Tensor:
    """Return a rank's part of a tensor: one box as it is read, several in their places."""
    (box, _), *more = boxes
    if not more:
        return read(box)
    pieces = [read(box) for box, _ in boxes]
    ends = zip(*([stop for _, stop in place] for _, place in boxes), strict=True)
    part = pieces[0].new_empty([max(of) for of in ends])
    for piece, (_, place) in zip(pieces, boxes, strict=True):
        part[index_of(place)] = piece
    return part


def part_of(x: Tensor, box: Box) -> Tensor:
    """A copy of a box of a tensor, dense."""
    part = x.detach()[tuple(slice(*interval) for interval in box)]
    return part.clone(memory_format=torch.contiguous_format)
