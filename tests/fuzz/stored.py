"""Files of bytes that others wrote: checkpoints, states, notes, functions; real ones, changed.

Each is read, and has tensors of the shapes and dtypes that it says, or is refused with an error of
mdfuse. What is changed among the numbers of a tensor is a number like any other.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import mdfuse as mf
from fuzz.files import changed
from mdfuse.frontend.importing import save as saving
from mdfuse.frontend.importing.load import opened
from mdfuse.plan.artefacts import Artefacts, UnreadableError

STATE = {"weight": torch.arange(12.0).view(3, 4), "bias": torch.ones(3).bfloat16()}
LARGE = (
    b"\xff" * 4,
    b"\xff\xff\xff\x7f",
    (1 << 40).to_bytes(8, "little"),
    b"9" * 5000,
    b"\x00" * 9,
)


def bent(data: bytes, drawn: random.Random) -> bytes:
    """Bytes with some of them flipped, cut off, repeated, or large numbers among them."""
    for _ in range(drawn.choice((1, 1, 2, 4))):
        at = drawn.randrange(len(data) + 1)
        if drawn.random() < 0.4:  # where what says something of the rest mostly stands
            at = min(len(data), drawn.choice((at % 64, len(data) - at % 128)))
        match drawn.randrange(6):
            case 0 | 1:
                data = data[:at] + drawn.randbytes(1) + data[at + 1 :]
            case 2:
                data = data[:at]
            case 3:
                data = data[:at] + data[at : at + 40] * drawn.choice((2, 50)) + data[at + 40 :]
            case 4:
                data = data[:at] + drawn.choice(LARGE) + data[at + drawn.choice((0, 4, 8)) :]
            case _:
                data = data[:at] + data[at + drawn.randrange(20) :]
    return data


@cache
def written() -> dict[str, dict[str, bytes]]:
    """Folders by what wrote them: the bytes of each file."""
    found: dict[str, dict[str, bytes]] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, write in (
            ("torch", lambda path: dcp.save(STATE, checkpoint_id=path, no_dist=True)),
            ("safetensors", lambda path: save_file(STATE, path / "model.safetensors")),
            ("portable", lambda path: step().save(path, portable=True)),
            ("state", lambda path: step().save(path)),
        ):
            path = Path(folder, kind)
            if kind == "safetensors":
                path.mkdir()
            write(path)
            found[kind] = {x.name: x.read_bytes() for x in path.iterdir() if x.is_file()}
    return found


@cache
def counting() -> mf.Program:
    with mf.FusionDefinition("count") as fd:
        n, m = fd.define_tensor([2, 3], name="n"), fd.define_tensor([5], torch.int64, name="m")
        fd.add_output(n + 1, reuse=n)
        fd.add_output(m + 1, reuse=m)
    return mf.compile(fd)


def step() -> mf.Step:
    return mf.Step(counting(), {"n": torch.ones(2, 3), "m": torch.arange(5)})


def use(kind: str, drawn: random.Random, reader: Callable[[Path], None]) -> None:
    """Write a folder with one of its files changed, and read it."""
    files = written()[kind]
    name = drawn.choice(sorted(files))
    with tempfile.TemporaryDirectory() as folder:
        for other, data in files.items():
            Path(folder, other).write_bytes(bent(data, drawn) if other == name else data)
        reader(Path(folder))


def _parts(folder: Path) -> None:
    found = opened(folder)
    for name in found.names:
        shape = found.shape(name)
        if torch.Size(shape).numel() < 10**6:
            assert tuple(found.part(name, tuple((0, n) for n in shape)).shape) == shape


def _state(folder: Path) -> None:
    running = step()
    kinds = {name: (x.shape, x.dtype) for name, x in running.state.items() if x is not None}
    running.load(folder)
    assert kinds == {n: (x.shape, x.dtype) for n, x in running.state.items() if x is not None}


def checkpoints(drawn: random.Random) -> None:
    """Read a folder that torch wrote, or one of safetensors."""
    use(drawn.choice(("torch", "torch", "safetensors")), drawn, _parts)


def states(drawn: random.Random) -> None:
    """Read the state of a step."""
    use(drawn.choice(("portable", "state")), drawn, _state)


def notes(drawn: random.Random) -> None:
    """Read what a rank noted in a folder that ranks share."""
    boxes = {((0, 3), (0, 4)): 0}
    saved = saving.Saved(names=("w",), shape=(3, 4), dtype=torch.float32, boxes=boxes)
    with tempfile.TemporaryDirectory() as folder:
        saving.write_parts(Path(folder), [(saved, ((0, 3), (0, 4)), torch.ones(3, 4))], 0)
        (note,) = Path(folder).glob("*.written")
        text = note.read_text()
        note.write_bytes(
            bent(text.encode(), drawn) if drawn.random() < 0.5 else changed(text, drawn)
        )
        saving.finish_parts(Path(folder), [saved], 1)
        part = opened(Path(folder)).part("w", ((0, 3), (0, 4)))
        assert torch.equal(part, torch.ones(3, 4))


def functions(drawn: random.Random) -> None:
    """Read a compiled function's files: bytes that no compiler wrote are never given to it."""
    about = json.dumps({"sha256": "0" * 64, "results": [[[2, 3], [3, 1], "float32", "cpu"]]})
    with tempfile.TemporaryDirectory() as folder:
        kept = Artefacts(Path(folder, "own"))
        kept.folder.mkdir(mode=0o700)
        kept._code("f").write_bytes(drawn.randbytes(50))
        kept._about("f").write_bytes(changed(about, drawn))
        with suppress(UnreadableError):
            assert kept.load("f") is None
        shutil.rmtree(kept.folder)


def schedules(drawn: random.Random) -> None:
    """Read the table of a pipeline."""
    text = mf.Schedule.named("zb1p", stages=2, microbatches=3).to_csv()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.csv")
        path.write_bytes(
            bent(text.encode(), drawn) if drawn.random() < 0.6 else changed(text, drawn)
        )
        found = mf.Schedule.from_csv(path)
        str(found)
        found.check(stages=2, microbatches=3, groups=2)


FUZZERS = {
    "checkpoints": checkpoints,
    "states": states,
    "notes": notes,
    "functions": functions,
    "schedules": schedules,
}
