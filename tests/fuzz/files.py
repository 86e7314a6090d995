"""Files that others wrote: tables of costs, traces, indices of checkpoints; real ones, changed.

Each is read, or is refused with an error of mdfuse.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import mdfuse as mf
import mdfuse.seeing
from mdfuse import DeviceMesh, Options, Shard
from mdfuse.frontend.importing.load import opened
from mdfuse.seeing.cost_tables import parsed
from mdfuse.seeing.merging import merge
from mdfuse.seeing.named_tables import named
from mdfuse.seeing.traces import read

#: What texts of JSON are made of.
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|\w+|\s+|.', re.DOTALL)
WORDS = (
    "null", "true", "{}", "[]", '""', '"x"', "-1", "0", "1e999", "-1e-999", "NaN", "Infinity",
    "9" * 30, "9" * 5000, "[1]", '{"a": 1}', "[[]]", "{", "}", "[", "]", ",", ":", '"', "é", "\x00",
    "\udcff", "\ufeff", str(2**63), "-0", '"\\ud800"', '["x", []]',
)  # fmt: skip


def changed(text: str, drawn: random.Random) -> bytes:
    """A text with something changed, which need not be a text any more."""
    tokens = TOKEN.findall(text)
    for _ in range(drawn.choice((1, 1, 2, 3))):
        at = drawn.randrange(len(tokens)) if tokens else 0
        match drawn.randrange(8) if tokens else 7:
            case 0:
                del tokens[at]
            case 1:
                tokens[at] = drawn.choice(WORDS)
            case 2:
                tokens.insert(at, drawn.choice(tokens))
            case 3:
                tokens = tokens[:at]
            case 4:
                deep = drawn.choice((10, 70, 900, 100_000))
                sort, end = drawn.choice((("[", "]"), ('{"a":', "}")))
                tokens[at] = sort * deep + drawn.choice(("", "1" + end * deep))
            case 5 | 6:
                numbers = [n for n, t in enumerate(tokens) if t[0].isdigit() or t[0] == '"']
                if numbers:
                    tokens[drawn.choice(numbers)] = drawn.choice(WORDS)
            case _:
                return drawn.randbytes(drawn.randrange(40))
    return "".join(tokens).encode("utf-8", "surrogateescape" if drawn.random() < 0.9 else "replace")


def use(text: str, name: str, reader: Callable[[Path], Any], drawn: random.Random) -> None:
    """Write a text, changed, beside nothing or in the place of others, and read it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(changed(text, drawn))
        reader(path)


# -- tables of costs -------------------------------------------------------------------------------


@cache
def tables() -> tuple[str, ...]:
    """Tables that come with mdfuse, and one of fields alone."""
    here = files(mdfuse.seeing).joinpath("tables")
    found = [p.read_text(encoding="utf-8") for p in here.iterdir() if p.name.endswith(".json")]
    short = min(found, key=len)
    fields = {
        "launch_s": 1e-6,
        "flops": 1e12,
        "links": {"*": {"latency_s": 1e-6, "bandwidth": 1e9}},
    }
    return (
        short,
        short,
        json.dumps(fields),
        json.dumps({"works": {"* f32": [[1, 1e-6], [9, 1e-5]]}}),
    )


def _named(path: Path) -> None:
    costs, _ = named(str(path))
    repr(costs)
    assert costs.launch_s >= 0


def costs(drawn: random.Random) -> None:
    """Read a table: as `Options(costs=…)` does, and as a calibration's folder."""
    text = drawn.choice(tables())
    if drawn.random() < 0.3:
        parsed(changed(text, drawn).decode("utf-8", "replace"))
    else:
        use(text, "table.json", _named, drawn)


# -- traces ----------------------------------------------------------------------------------------


@cache
def traced() -> tuple[str, str]:
    """The file of a rank that was traced, and a Chrome trace of it."""
    with tempfile.TemporaryDirectory() as folder:
        comm = mf.init(backend="null", rank=0, size=2)
        with mf.FusionDefinition("traced") as fd:
            x = fd.define_tensor([4, 4], mesh=DeviceMesh.arange(tp=2), layout={"tp": Shard(0)})
            fd.add_output(fd.ops.set(fd.ops.relu(x).sum(0)).on(DeviceMesh.arange(tp=2), {}))
        program = mf.compile(fd, Options(trace=folder))
        for _ in range(3):
            program.run(torch.ones(2, 4))
        comm.close()
        (path,) = Path(folder).iterdir()
        out = Path(folder, "out.json")
        merge([folder], out)
        return path.read_text(), out.read_text()


def traces(drawn: random.Random) -> None:
    """Read the file of a rank: mostly one line of it is changed."""
    lines = traced()[0].splitlines()
    at = drawn.randrange(len(lines))
    line = changed(lines[at], drawn)
    with tempfile.TemporaryDirectory() as folder:
        text = [x.encode() for x in lines]
        Path(folder, "rank0.jsonl").write_bytes(b"\n".join((*text[:at], line, *text[at + 1 :])))
        read(folder)
        merge([folder], Path(folder, "out.json"))


def chrome_traces(drawn: random.Random) -> None:
    """Merge a Chrome trace."""
    use(traced()[1], "trace.json", lambda path: merge([path], path.with_suffix(".out")), drawn)


# -- checkpoints -----------------------------------------------------------------------------------


def _checkpoint(path: Path) -> None:
    save_file({"a": torch.ones(2)}, path.parent / "one.safetensors")
    found = opened(path)
    for name in found.names:
        found.shape(name)


def indices(drawn: random.Random) -> None:
    """Open a checkpoint by its index."""
    text = json.dumps({"metadata": {"size": 8}, "weight_map": {"a": "one.safetensors"}})
    use(text, "model.safetensors.index.json", _checkpoint, drawn)


FUZZERS = {"costs": costs, "traces": traces, "chrome_traces": chrome_traces, "indices": indices}
