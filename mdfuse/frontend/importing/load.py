"""Read a rank's boxes of a checkpoint: safetensors files, torch's own, or tensors by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Protocol

import torch
from torch import Tensor

from mdfuse.errors import ProgramError, reason
from mdfuse.files import as_path
from mdfuse.frontend.given import by_name, function, why_no_numbers
from mdfuse.frontend.importing import chunks, metadata
from mdfuse.frontend.importing.place import nearest
from mdfuse.frontend.plain import brief
from mdfuse.interpreter.json_text import from_json
from mdfuse.ir.graph import Fusion, dtype_name
from mdfuse.layouts.boxes import (
    Box,
    Boxes,
    box_shape,
    box_size,
    boxes_of,
    index_of,
    intersect,
    relative,
)

_INDEX = "model.safetensors.index.json"


class Checkpoint(Protocol):
    """A source of tensors; `lends`: a part may share its memory."""

    lends: bool

    @property
    def names(self) -> Sequence[str]:
        """Return the names of its tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""

    def part(self, name: str, box: Box) -> Tensor:
        """A box of a tensor."""


class InMemory:
    """Tensors by name, as `state_dict()` gives them."""

    lends = True

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.names = [*tensors]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._of(name).shape)

    def part(self, name: str, box: Box) -> Tensor:
        """Return a view of a box of a tensor."""
        return view_of(self._of(name), box)

    def _of(self, name: str) -> Tensor:
        """Return a tensor to read; other entries of a state may be anything."""
        x = self.tensors[name]
        if (why := why_no_numbers(x)) is not None:
            raise ProgramError(
                f"{name} cannot be read", because=why, hint="dense tensors by name: state_dict()"
            )
        return x


def with_starts(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> Checkpoint:
    """Return a checkpoint that also has these tensors, where it lacks them."""
    lacking = {name: x for name, x in tensors.items() if name not in checkpoint.names}
    return _Completed(checkpoint, InMemory(lacking)) if lacking else checkpoint


class _Completed:
    """A checkpoint, and tensors that it lacks."""

    lends = True

    def __init__(self, first: Checkpoint, others: InMemory) -> None:
        self._first, self._rest = first, others
        self.names = [*first.names, *others.names]

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

    Closing the file returns its pages to the system: pages read from an open file count as memory
    of the process.
    """

    lends = False

    def __init__(self, files: Mapping[str, Path]) -> None:
        self.files = files
        self.names = [*files]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        with _opened(self.files[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def part(self, name: str, box: Box) -> Tensor:
        """Read only a box of a tensor."""
        with _opened(self.files[name]) as file:
            if not box:
                tensor: Tensor = file.get_tensor(name)
                return tensor
            part: Tensor = file.get_slice(name)[tuple(slice(*interval) for interval in box)]
            return part.clone(memory_format=torch.contiguous_format)


class Distributed:
    """A folder that `torch.distributed.checkpoint` wrote, whatever the layout it was saved in.

    Only the wanted boxes of chunks are read; compressed chunks are read whole.

    Raises:
        ProgramError: the folder cannot be read, or holds no such checkpoint.
    """

    lends = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        contents = metadata.read(folder)
        self._tensors, self.id = contents.tensors, contents.id
        self.names = [*self._tensors]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return self._tensors[name].dtype

    def part(self, name: str, box: Box) -> Tensor:
        """A box of a tensor."""
        stored = self._tensors[name]
        part, count = torch.empty(box_shape(box), dtype=stored.dtype), 0
        filled: list[Box] = []
        for first, chunk in stored.chunks.items():
            there = tuple((a, a + n) for a, n in zip(first, chunk.sizes, strict=True))
            both = intersect(box, there)
            if both is None:
                continue
            filled.append(both)
            count += box_size(both)
            file, into = self._folder / chunk.place.file, part[index_of(relative(both, box))]
            try:
                chunks.read_box(file, chunk.place, chunk.sizes, relative(both, there), into)
            except Exception as error:
                raise metadata.unreadable(self._folder, f"{file.name}: {reason(error)}") from error
        if _overlap(filled):
            raise metadata.unreadable(self._folder, f"two chunks have the same elements of {name}")
        if count != part.numel():
            why = f"its chunks have {count} of {part.numel()} elements of a box of {name}"
            raise metadata.unreadable(self._folder, why)
        return part


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return whether two boxes of a tensor meet, compared along the dim that splits them most."""
    if len(boxes) < 2:
        return False
    d = max(range(len(boxes[0])), key=lambda d: len({box[d] for box in boxes}))
    near: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[d]):
        near = [other for other in near if other[d][1] > box[d][0]]
        if any(intersect(box, other) is not None for other in near):
            return True
        near.append(box)
    return False


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
        metadata.check_file(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise _no_file(path, error) from error


def _no_file(path: Path, error: Exception) -> ProgramError:
    """Return the error for a file that is not of safetensors, or cannot be read."""
    is_torch = path.suffix in (".bin", ".pt", ".pth")
    return ProgramError(
        f"{path} cannot be read",
        because=(str(error).splitlines() or [type(error).__name__])[0],
        hint="load(torch.load(path, weights_only=True, mmap=True)) reads what torch.save wrote"
        if is_torch
        else "a file of safetensors; every rank reads the same files",
    )


def opened(source: Any) -> Checkpoint:
    """Return the reader of a checkpoint.

    Args:
        source: a file of safetensors, an index of several, a folder with either, a folder of
            `torch.distributed.checkpoint`, or tensors by name.

    Raises:
        ProgramError: the file does not exist or is invalid; a source of another kind.
    """
    if isinstance(source, Mapping):
        return InMemory(by_name("load", "source", source, ProgramError))
    if not isinstance(source, str | os.PathLike):
        raise ProgramError(
            f"load of {brief(source)}",
            because="a checkpoint is a file, a folder, or tensors by name",
            hint='load("model.safetensors"), or load(module.state_dict())',
        )
    path = as_path(source)
    if not os.path.isdir(path):
        return _of_index(path) if path.suffix == ".json" else _of_files([path])
    try:
        files = sorted(path.glob("*.safetensors"))
    except OSError as error:
        raise _no_file(path, error) from error
    if os.path.exists(path / _INDEX):
        return _of_index(path / _INDEX)
    if files:
        return _of_files(files)
    if is_portable(path):
        return Distributed(path)
    raise ProgramError(
        f"{path} has no file of safetensors",
        because="a folder has model.safetensors, or several files and their index",
        hint="pass the file itself",
    )


def names_of(call: str, rename: Any) -> Callable[[str], str]:
    """Return the function from a parameter's name to that in the checkpoint.

    Raises:
        MdfuseError: it is not callable; or, when it is called, it returns no name.
    """
    if rename is None:
        return str
    function(call, "rename", rename, 'rename=lambda name: f"model.{name}"')

    def called(name: str) -> str:
        new = rename(name)
        if not isinstance(new, str):
            raise ProgramError(
                f"{call}: rename({name!r}) returns {brief(new)}",
                because="a parameter has a name in the checkpoint, which is text",
                hint="return the name as it is where it is the same",
            )
        return new

    return called


def is_portable(folder: Path) -> bool:
    """Return whether a folder says that it is one of `torch.distributed.checkpoint`."""
    return os.path.exists(folder / metadata.NAME)


def _of_files(files: Sequence[Path]) -> InFiles:
    paths: dict[str, Path] = {}
    for path in files:
        with _opened(path) as file:
            names = [*file.keys()]
        for name in names:
            if name in paths:
                raise ProgramError(
                    f"{path} has {name}, and so has {paths[name].name}",
                    because="no index says which of the two counts",
                    hint="pass one of the files, or an index that names the file of each tensor",
                )
            paths[name] = path
    return InFiles(paths)


def _of_index(index: Path) -> InFiles:
    try:
        metadata.check_file(index)
        said = from_json(index.read_text(encoding="utf-8"), pairs=_once)
        files = {name: _inside(file) for name, file in said["weight_map"].items()}
        for name, file in files.items():
            f"{name}{file}".encode()  # JSON may hold it, but no name can
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ProgramError(
            f"{index} cannot be read",
            because=reason(error),
            hint='an index says which file has a tensor: {"weight_map": {name: file}}',
        ) from error
    missing = sorted({f for f in files.values() if not os.path.exists(index.parent / f)})
    if missing:
        raise ProgramError(
            f"{index} names {missing[0]}, which is not there",
            because=f"{len(missing)} of {len({*files.values()})} files of the checkpoint are gone",
            hint="every rank reads the checkpoint: put all files where each rank finds them",
        )
    return InFiles({name: index.parent / file for name, file in files.items()})


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; ValueError if a name occurs twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it says two things of {twice}")
    return mapping


def _inside(file: Any) -> str:
    """Return the path of a file beside an index; ValueError if it leaves the folder.

    A file may be a link, as in the cache of the Hub.
    """
    path = PurePath(file)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"it names {file!r}, which is not in its folder")
    return str(file)


def check_names(
    checkpoint: Checkpoint, wanted: Sequence[Sequence[str]], known: Sequence[str] = ()
) -> list[str]:
    """Return the names of a checkpoint that nothing reads.

    Args:
        checkpoint: the source.
        wanted: all names of each tensor that is read.
        known: other names that the module has.

    Raises:
        ProgramError: missing tensors, all of them in one error.
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
    """Raise ProgramError if a tensor has another shape than in the module."""
    there = checkpoint.shape(name)
    if there != tuple(shape):
        raise ProgramError(
            f"{name} has the shape {list(there)} in the checkpoint, {list(shape)} in the module",
            because="a parameter is read as it is",
            hint="the module and the checkpoint are of one configuration",
        )


def is_cast(there: torch.dtype | None, wanted: torch.dtype | None) -> bool:
    """Return whether numbers of a dtype are read as those of another one: floats as floats."""
    if there is None or wanted is None:
        return False
    return there == wanted or (there.is_floating_point and wanted.is_floating_point)


def read(
    checkpoint: Checkpoint, name: str, dtype: torch.dtype, box: Box, device: Any = None
) -> Tensor:
    """Read a box of a tensor, in the dtype of the program.

    A tensor in memory is cast on the device: on the host this takes longer than the transfer.

    Raises:
        ProgramError: it has integers where the program has floats, or the other way round.
    """
    part = checkpoint.part(name, box)
    if not is_cast(part.dtype, dtype):
        raise ProgramError(
            f"{name} is {part.dtype} in the checkpoint, and {dtype} in the module",
            because="floats are cast to floats alone",
            hint="cast it before",
        )
    moved = part.to(device)
    return moved.to(dtype, copy=checkpoint.lends and moved is part).contiguous()


def state_of(folder: Path, fusion: Fusion, names: Sequence[str], cast: bool) -> Distributed:
    """Return a checkpoint of inputs of a fusion.

    Args:
        folder: where it is.
        fusion: whose inputs it has.
        names: of the inputs to read.
        cast: whether floats may have another floating dtype.

    Raises:
        ProgramError: it cannot be read, or has other names, shapes or dtypes.
    """
    checkpoint = Distributed(folder)
    others = check_names(checkpoint, [(name,) for name in names])
    if others:
        raise ProgramError(
            f"{folder} is of another state: it has {others[0]}",
            because=f"@{fusion.name} keeps nothing of {len(others)} of its tensors",
            hint="load what a step with the same parameters and optimizer saved",
        )
    for name in names:
        check_shape(checkpoint, name, fusion.values[name].shape)
        there, wanted = checkpoint.dtype(name), fusion.values[name].dtype
        if there != wanted and not (cast and is_cast(there, wanted)):
            raise ProgramError(
                f"{folder} is of another state: %{name} is {dtype_name(there)} there, "
                f"{dtype_name(wanted)} here",
                because="a state that is rounded does not go on as it was",
                hint="load(folder, cast=True) casts floats"
                if is_cast(there, wanted)
                else "load what a step with the same parameters and optimizer saved",
            )
    return checkpoint


def copy_state(
    checkpoint: Distributed, fusion: Fusion, state: Mapping[str, Tensor | None], rank: int
) -> None:
    """Read a rank's boxes from a checked checkpoint; ProgramError if it is damaged."""
    for name, x in state.items():
        if x is not None:
            shape = fusion.values[name].shape
            boxes = tuple(boxes_of(fusion.layout(name).rows(shape, rank)))
            x.copy_(joined(boxes, partial(read, checkpoint, name, x.dtype)))


def joined(boxes: Boxes, read: Callable[[Box], Tensor]) -> Tensor:
    """Return a rank's part of a tensor: a single box as read, several in their places."""
    (box, _), *others = boxes
    if not others:
        return read(box)
    pieces = [read(box) for box, _ in boxes]
    ends = zip(*([stop for _, stop in place] for _, place in boxes), strict=True)
    part = pieces[0].new_empty([max(of) for of in ends])
    for piece, (_, place) in zip(pieces, boxes, strict=True):
        part[index_of(place)] = piece
    return part


def part_of(x: Tensor, box: Box) -> Tensor:
    """Return a dense copy of a box of a tensor."""
    return view_of(x, box).clone(memory_format=torch.contiguous_format)


def view_of(x: Tensor, box: Box) -> Tensor:
    """Return a box of a tensor, which shares its memory."""
    return x.detach()[tuple(slice(*interval) for interval in box)]
