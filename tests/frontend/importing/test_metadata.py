"""`.metadata` is read as data: no file that is read runs code, or leads out of its folder."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import pickletools
import time
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as of

import mdfuse as mf
from mdfuse import DeviceMesh, ProgramError
from mdfuse.frontend.importing import chunks, load, metadata


class Code:
    """What calls something when it is read by `pickle.load`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.said = function, args

    def __reduce__(self) -> Any:
        return self.said


def saved(folder: Path) -> of.Metadata:
    """A checkpoint, and what its folder has."""
    state = {"weight": torch.arange(12.0).view(3, 4), "bias": torch.ones(3).bfloat16(), "step": 3}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    found: of.Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


def write(folder: Path, found: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    there = saved(tmp_path)
    found = metadata.read(tmp_path)
    assert there.storage_meta is not None and found.id == there.storage_meta.save_id
    assert {*found.tensors} == {"weight", "bias"}
    weight = found.tensors["weight"]
    assert (weight.dtype, weight.shape, [*weight.chunks]) == (torch.float32, (3, 4), [(0, 0)])
    assert weight.chunks[0, 0].sizes == (3, 4)
    assert weight.chunks[0, 0].place.file == "__0_0.distcp"
    assert found.tensors["bias"].dtype == torch.bfloat16
    # as Python 3.11 may write members of enums, and as checkpoints of one rank's own planner are
    there.planner_data = {
        "weight": ("weight",),
        "other": [Code(getattr, of.StorageMeta, "load_id")],
    }
    write(tmp_path, there)
    assert metadata.read(tmp_path).tensors == found.tensors


def test_what_is_written_torch_reads(tmp_path: Path) -> None:
    place = metadata.StoredBytes("a", 3, 5)
    stored = metadata.Stored(torch.float16, (4,), {(0,): metadata.Chunk(sizes=(4,), place=place)})
    made = metadata.as_torch({"x": stored, "y": stored})
    write(tmp_path, made)
    found = metadata.read(tmp_path)
    assert found.tensors == {"x": stored, "y": stored} and found.id
    assert dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata["x"].size == (4,)


CODE: dict[str, Callable[[str], Any]] = {
    "a command": lambda flag: Code(os.system, f"touch {flag}"),
    "a built-in": lambda flag: Code(eval, f"open({flag!r}, 'w')"),
    "a file": lambda flag: Code(open, flag, "w"),
    "a class of torch's in other modules": lambda flag: Code(torch.save, 3, flag),
    "an attribute of a class": lambda flag: Code(
        builtins.getattr, Code(builtins.getattr, of.Metadata, "__init__"), "__globals__"
    ),
}


@pytest.mark.parametrize("kind", CODE)
@pytest.mark.parametrize("place", ["alone", "a value", "a key", "planner_data"])
def test_no_code_of_a_folder_runs(kind: str, place: str, tmp_path: Path) -> None:
    folder, flag = tmp_path / "saved", tmp_path / "ran"
    there, code = saved(folder), CODE[kind](str(flag))
    before = vars(of.Metadata).copy()
    if place == "alone":
        there = code
    elif place == "planner_data":
        there.planner_data = {"weight": code}
    elif place == "a key":
        there.planner_data = {(code, 1): 3}
    else:
        there.state_dict_metadata["weight"].size = code
    write(folder, there)
    is_nothing = kind.startswith("an attribute") and place in ("planner_data", "a key")
    refused = pytest.raises(ProgramError, match="cannot be read")
    with nullcontext() if is_nothing else refused:  # nobody reads that
        load.opened(folder)
    assert not flag.exists() and vars(of.Metadata) == before


def test_a_pickle_cannot_change_a_class(tmp_path: Path) -> None:
    """`BUILD` on a class sets attributes of it; classes here are made for each file."""
    text = b"\x80\x04c" + of.__name__.encode() + b"\nMetadata\nN}\x8c\x07versionK\x03s\x86b."
    assert pickle.loads(text) is of.Metadata and of.Metadata.version == 3  # what torch would read
    of.Metadata.version = None
    (tmp_path / ".metadata").write_bytes(text)
    with pytest.raises(ProgramError, match="cannot be read"):
        metadata.read(tmp_path)
    assert of.Metadata.version is None


def test_safetensors_go_first(tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    save_file({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    write(tmp_path, Code(os.system, f"touch {flag}"))
    model = mf.from_torch(nn.Linear(3, 2), (torch.zeros(4, 3),), mesh=DeviceMesh.arange(x=1))
    weight, bias = model.load(tmp_path)
    assert weight is not None and bool((weight == 1).all()) and not flag.exists()
    (tmp_path / ".metadata").unlink()
    with pytest.raises(ProgramError, match="has a checkpoint"):  # it would not be what is read
        model.save(tmp_path, [weight, bias])


# -- what is damaged -----------------------------------------------------------------------------


def _moved(to: Any) -> Callable[[of.Metadata], None]:
    def change(there: of.Metadata) -> None:
        for info in there.storage_data.values():
            info.relative_path = to

    return change


def _twice(there: of.Metadata) -> None:
    there.state_dict_metadata["weight"].chunks *= 2


def _outside(there: of.Metadata) -> None:
    there.state_dict_metadata["weight"].chunks[0].sizes = torch.Size([4, 4])


def _without(there: of.Metadata) -> None:
    there.storage_data = {}


def _no_dtype(there: of.Metadata) -> None:
    there.state_dict_metadata["weight"].properties.dtype = torch.strided  # type: ignore[assignment]


def _negative(there: of.Metadata) -> None:
    for info in there.storage_data.values():
        info.offset = -1


DAMAGED: dict[str, tuple[Callable[[of.Metadata], None], str]] = {
    "above": (_moved("../secret"), "not in the folder"),
    "through": (_moved("sub/../../secret"), "not in the folder"),
    "absolute": (_moved("/etc/passwd"), "not in the folder"),
    "no path": (_moved(3), "not in the folder"),
    "twice": (_twice, "has a box"),
    "outside": (_outside, "has a box"),
    "without": (_without, "KeyError"),
    "dtype": (_no_dtype, "has the dtype"),
    "negative": (_negative, "where numbers of elements or bytes belong"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_folder(kind: str, tmp_path: Path) -> None:
    change, text = DAMAGED[kind]
    there = saved(tmp_path)
    change(there)
    write(tmp_path, there)
    with pytest.raises(ProgramError, match="cannot be read") as error:
        load.opened(tmp_path)
    assert text in (error.value.because or "")


def test_a_file_that_ends_anywhere(tmp_path: Path) -> None:
    saved(tmp_path)
    whole = (tmp_path / ".metadata").read_bytes()
    for end in range(0, len(whole), 7):
        (tmp_path / ".metadata").write_bytes(whole[:end])
        with pytest.raises(ProgramError, match="cannot be read"):
            load.opened(tmp_path)


@pytest.mark.parametrize("text", [
    b"", b"\x80\x04N.", b"\x80\x04]\x94.", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f",
    b"\x80\x04" + b"(" * 100_000 + b".", b"\x80\x04cos\nsystem\n.", b"\x80\x04\x82\x01.",
])  # fmt: skip
def test_something_else(text: bytes, tmp_path: Path) -> None:
    """Nothing, None, a list, more bytes than there are, marks, a command, a number for a class."""
    (tmp_path / ".metadata").write_bytes(text)
    with pytest.raises(ProgramError, match="cannot be read"):
        load.opened(tmp_path)


#: A tuple of two, each of which is the one before it: 2**60 of them to look at.
_DOUBLED = b"K\x01K\x01\x86\x94" + b"".join(b"h%c\x86\x94" % n for n in range(60))
BOMBS: dict[str, bytes] = {
    "a large note": b"\x80\x04]r\xff\xff\xff\x0f.",
    "a large note, as text": b"\x80\x02]p268435455\n.",
    "a long note": b"\x80\x02]p" + b"9" * 100_000 + b"\n.",
    "a long number": b"\x80\x02L" + b"9" * 1_000_000 + b"L\n.",
    "a number of gigabytes": b"\x80\x04\x8b\xff\xff\xff\x7f\x01.",
    "bytes of gigabytes": b"\x80\x04B\xff\xff\xff\x7f\x01.",
    "an array of gigabytes": b"\x80\x05\x96" + (1 << 36).to_bytes(8, "little") + b".",
    "text of terabytes": b"\x80\x04\x8d" + (1 << 42).to_bytes(8, "little") + b"x.",
    "a frame of terabytes": b"\x80\x04\x95" + (1 << 42).to_bytes(8, "little") + b"N.",
    "lists one inside the other": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "tuples one inside the other": b"\x80\x04)" + b"\x85" * 100_000 + b".",
    "a doubled tuple as a key": b"\x80\x04}" + _DOUBLED + b"K\x01s.",
    "a copied list": b"\x80\x02](" + b"K\x01" * 50_000 + b"e\x940cbuiltins\nset\n\x940"
    + b"h\x01h\x00\x85R" * 10_000 + b"\x87.",
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMBS)
def test_few_bytes_that_announce_many(kind: str, tmp_path: Path) -> None:
    """They take no time and no memory, whatever they say."""
    (tmp_path / ".metadata").write_bytes(BOMBS[kind])
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(ProgramError, match="cannot be read"):
        load.opened(tmp_path)
    assert time.process_time() - start < 5
    assert tracemalloc.get_traced_memory()[1] < 300 * len(BOMBS[kind]) + (1 << 20)
    tracemalloc.stop()


def test_sizes_that_take_forever_to_print(tmp_path: Path) -> None:
    there = saved(tmp_path)
    doubled: Any = [1]
    for _ in range(60):
        doubled = [doubled, doubled]
    there.state_dict_metadata["weight"].size = doubled
    write(tmp_path, there)
    with pytest.raises(ProgramError, match="cannot be read") as error:
        load.opened(tmp_path)
    assert len(str(error.value)) < 10_000


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_each_protocol(protocol: int, tmp_path: Path) -> None:
    there = saved(tmp_path)
    found = metadata.read(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(there, protocol))
    assert metadata.read(tmp_path) == found
    pure = io.BytesIO()
    pickle._Pickler(pure, protocol).dump(there)  # type: ignore[attr-defined]
    (tmp_path / ".metadata").write_bytes(pickletools.optimize(pure.getvalue()))
    assert metadata.read(tmp_path) == found


def test_chunks_that_leave_holes_or_are_of_other_shapes(tmp_path: Path) -> None:
    there = saved(tmp_path)
    weight = there.state_dict_metadata["weight"]
    weight.size = torch.Size([5, 4])
    write(tmp_path, there)
    with pytest.raises(ProgramError, match="cannot be read") as error:
        load.opened(tmp_path).part("weight", ((0, 5), (0, 4)))
    assert "its chunks have 12 of 20 elements" in (error.value.because or "")
    weight.chunks[0].sizes = weight.size
    write(tmp_path, there)
    with pytest.raises(ProgramError, match="cannot be read") as error:
        load.opened(tmp_path).part("weight", ((0, 1), (0, 4)))
    assert "of (3, 4) where" in (error.value.because or "")


def test_chunks_that_overlap_leave_holes(tmp_path: Path) -> None:
    """As many elements as the tensor has, of which some are there twice and others never."""
    there = saved(tmp_path)
    weight = there.state_dict_metadata["weight"]
    weight.size = torch.Size([4, 4])
    (index,) = (i for i in there.storage_data if i.fqn == "weight")
    there.storage_data.pop(index)
    weight.chunks.clear()
    for first in (0, 1):
        torch.save(torch.ones(2, 4), tmp_path / f"{first}")
        offsets = torch.Size([first, 0])
        weight.chunks.append(of.ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([2, 4])))
        size = (tmp_path / f"{first}").stat().st_size
        place = filesystem._StorageInfo(f"{first}", 0, size)
        there.storage_data[of.MetadataIndex("weight", offsets)] = place
    write(tmp_path, there)
    with pytest.raises(ProgramError, match="cannot be read") as error:
        load.opened(tmp_path).part("weight", ((0, 4), (0, 4)))
    assert "two chunks have the same elements of weight" in (error.value.because or "")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "model.safetensors.index.json"])
def test_a_pipe_that_nobody_writes_into(name: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ProgramError, match="cannot be read") as error:
        load.opened(tmp_path).part("weight", ((0, 3), (0, 4)))
    assert "it is no file" in (error.value.because or "")


def test_chunks_that_were_compressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read whole; torch knows how they were."""
    there, x = saved(tmp_path), torch.arange(12.0).view(3, 4)
    buffer = io.BytesIO()
    torch.save(x, buffer)
    packed = zlib.compress(buffer.getvalue())
    (tmp_path / "packed").write_bytes(b"ab" + packed)
    index = of.MetadataIndex("weight", [0, 0])
    there.storage_data[index] = filesystem._StorageInfo("packed", 2, len(packed), ["zip"])
    write(tmp_path, there)
    with pytest.raises(ProgramError, match="cannot be read"):  # torch does not know this one
        load.opened(tmp_path).part("weight", ((1, 3), (0, 2)))
    monkeypatch.setattr(
        chunks, "untransformed", lambda s, names: io.BytesIO(zlib.decompress(s.read(-1)))
    )
    assert torch.equal(load.opened(tmp_path).part("weight", ((1, 3), (0, 2))), x[1:, :2])
