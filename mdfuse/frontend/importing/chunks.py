"""Read only boxes of tensors that `torch.save` wrote into a part of a file.

Such a part is a zip archive that holds a tensor's storage. `torch.load` to the meta device gives
shape and strides, `zipfile` the offset.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from mdfuse.frontend.importing.metadata import StoredBytes, check_file
from mdfuse.layouts.boxes import Box, box_shape, index_of
from mdfuse.torch_private import untransformed

#: Rows up to this many bytes are read whole, because systems read pages.
_SHORT = 512
#: The number of bytes of such rows per read.
_SLAB = 1 << 20
#: The size of a local file header in an archive, and the offset of its lengths.
_HEADER, _LENGTHS = 30, 26


class PartOfFile(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        self._at = (0, self._at, self._length)[whence] + offset
        return self._at

    def readinto(self, buffer: object) -> int:
        """Fill a buffer with the bytes that are left."""
        into = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        into = into[: max(min(len(into), self._length - self._at), 0)]
        self._file.seek(self._start + self._at)
        count = _fill(self._file, into)
        self._at += count
        return count


def _fill(file: BinaryIO, into: memoryview) -> int:
    """Fill a buffer, or read to the end of the file."""
    count = 0
    while count < len(into):
        length = file.readinto(into[count:])  # type: ignore[attr-defined]
        if not length:
            break
        count += length
    return count


def opened(path: Path) -> BinaryIO:
    """Open a file that is read as it is asked for, without a buffer."""
    check_file(path)
    return path.open("rb", buffering=0)


def read_box(path: Path, place: StoredBytes, sizes: Sequence[int], box: Box, into: Tensor) -> None:
    """Read a box of the tensor in a part of a file.

    Args:
        path: the file.
        place: the part; a compressed one is read whole.
        sizes: the shape of the tensor.
        box: of the tensor.
        into: the destination, of the shape of the box.

    Raises:
        Exception: there is no such tensor; torch may raise errors of any type.
    """
    with opened(path) as file:
        part = PartOfFile(file, place.start, place.length)
        if place.transforms:
            whole = io.BytesIO(untransformed(part, place.transforms).read(-1))
            x = torch.load(whole, map_location="cpu", weights_only=True)
            _check(x, sizes, into.dtype)
            into.copy_(x[index_of(box)])
            return
        like = torch.load(cast("IO[bytes]", part), map_location="meta", weights_only=True)
        _check(like, sizes, into.dtype)
        order = sorted(range(like.ndim), key=lambda d: (-like.stride(d), d))
        lies = like.permute(order)
        if not lies.is_contiguous():
            raise ValueError(f"strides {like.stride()} of shape {tuple(like.shape)}")
        before = like.storage_offset() * like.itemsize
        at = place.start + _begin(part, before + like.nbytes) + before
        ordered = tuple(box[d] for d in order)
        target = into.permute(order)
        dense = target if target.is_contiguous() else target.new_empty(box_shape(ordered))
        _read(file, at, tuple(lies.shape), ordered, dense)
        if dense is not target:
            target.copy_(dense)


def _check(x: Any, sizes: Sequence[int], dtype: torch.dtype) -> None:
    if not isinstance(x, Tensor) or x.dtype != dtype or tuple(x.shape) != tuple(sizes):
        actual = f"{x.dtype} of {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"there is {actual} where {dtype} of {tuple(sizes)} should be")


def _begin(part: PartOfFile, nbytes: int) -> int:
    """Return the offset of an archive's only storage, which has this many bytes."""
    with zipfile.ZipFile(cast("IO[bytes]", part)) as archive:
        (data,) = (i for i in archive.infolist() if "/data/" in i.filename)
    if data.compress_type != zipfile.ZIP_STORED or data.file_size < nbytes:
        raise ValueError(f"{data.filename} is compressed, or has fewer bytes than its tensor")
    part.seek(data.header_offset + _LENGTHS)
    lengths = part.read(4)
    assert lengths is not None
    return (
        data.header_offset
        + _HEADER
        + sum(int.from_bytes(lengths[i : i + 2], "little") for i in (0, 2))
    )


def _read(file: BinaryIO, at: int, sizes: Sequence[int], box: Box, into: Tensor) -> None:
    """Read a box of a dense tensor at a place of a file into a dense one."""
    if not into.numel():
        return
    if all(of == (0, n) for of, n in zip(box[1:], sizes[1:], strict=True)):
        row = into.itemsize * math.prod(sizes[1:])
        file.seek(at + (box[0][0] if box else 0) * row)
        numbers: Any = into.reshape(-1).view(torch.uint8).numpy()
        if _fill(file, memoryview(numbers)) < into.nbytes:
            raise ValueError("the file ends within a tensor")
        return
    (first, last), row = box[0], into.itemsize * math.prod(sizes[1:])
    if row > _SHORT:
        for i in range(first, last):
            _read(file, at + i * row, sizes[1:], box[1:], into[i - first])
        return
    inside = tuple(slice(*of) for of in box[1:])
    for i in range(first, last, _SLAB // row):
        rows = min(_SLAB // row, last - i)
        slab = into.new_empty((rows, *sizes[1:]))
        _read(file, at + i * row, slab.shape, tuple((0, n) for n in slab.shape), slab)
        into[i - first : i - first + rows] = slab[(slice(None), *inside)]
