"""States of steps in files: nothing is rounded unasked, and no half of one is taken for a state."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.full_disk import failing
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, ProgramError
from mdfuse.compiled.training import RunningStep

MESH = DeviceMesh.arange(dp=1)


def step(dtypes: dict[str, torch.dtype], number: float = 0.0) -> mf.Step:
    """A step that keeps vectors of these dtypes, of numbers that 16 bits do not have."""
    with mf.FusionDefinition("kept") as fd:
        for name, dtype in dtypes.items():
            x = fd.define_tensor([4], dtype, mesh=MESH, name=name)
            fd.add_output(x + 1, reuse=x)
    kept = {n: torch.full((4,), number).to(dtype) for n, dtype in dtypes.items()}
    return mf.Step(mf.compile(fd), kept)


F32 = {"w": torch.bfloat16, "m": torch.float32, "n": torch.int64}


@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats_are_refused_or_cast(
    portable: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    step(F32, 1.001).save(folder, portable=portable)
    other = step({**F32, "m": dtype})
    with pytest.raises(ProgramError, match=r"another state: %m is .*float32|%m is f32") as error:
        other.load(folder)
    assert error.value.hint == "load(folder, cast=True) casts floats"
    assert all(x is not None and not x.any() for x in other.state.values())
    other.load(folder, cast=True)
    wanted = torch.full((4,), 1.001).to(dtype)
    assert other.state["m"] is not None and torch.equal(other.state["m"], wanted)
    assert other.state["w"] is not None and other.state["w"].dtype == torch.bfloat16
    same = step(F32)
    same.load(folder)
    assert same.state["m"] is not None and same.state["m"].tolist() == pytest.approx([1.001] * 4)


@pytest.mark.parametrize("portable", [True, False])
def test_integers_are_never_cast(portable: bool, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    step(F32, 3.0).save(folder, portable=portable)
    for dtypes in ({**F32, "n": torch.int32}, {**F32, "n": torch.float32}):
        for cast in (False, True):
            with pytest.raises(ProgramError, match="of another state: %n is") as error:
                step(dtypes).load(folder, cast=cast)
            assert "cast=True" not in (error.value.hint or "")


def trained(dtype: torch.dtype, master: bool = False) -> RunningStep:
    torch.manual_seed(0)
    module, x = nn.Linear(3, 2).to(dtype), torch.zeros(4, 3, dtype=dtype)
    found = mf.from_torch(module, (x,), mesh=MESH)
    adamw = partial(mf.optim.adamw, lr=0.1)
    step = found.training_step(lambda y: (y * y).sum(), optimizer=adamw, master=master)
    return step.start(found.load())


@pytest.mark.parametrize("portable", [True, False])
def test_steps_of_imported_modules(portable: bool, tmp_path: Path) -> None:
    """Moments of f32 go into none of bf16 unasked; with their masters all goes on to the bit."""
    x = torch.randn(4, 3)
    whole, masters = trained(torch.float32), trained(torch.bfloat16, master=True)
    whole(x), masters(x.bfloat16())
    whole.save(tmp_path / "whole", portable=portable)
    masters.save(tmp_path / "masters", portable=portable)
    halves = trained(torch.bfloat16)
    with pytest.raises(ProgramError, match=r"of another state(?s:.)*cast=True"):
        halves.load(tmp_path / "whole")
    halves.load(tmp_path / "whole", cast=True)
    for name, part in whole.state.items():
        kept = halves.state[name]
        assert part is not None and kept is not None
        assert torch.equal(kept, part.to(kept.dtype)), name
    with pytest.raises(ProgramError, match=r"of another state|the checkpoint lacks"):
        halves.load(tmp_path / "masters", cast=True)
    again = trained(torch.bfloat16, master=True)
    again.load(tmp_path / "masters")
    assert torch.equal(again(x.bfloat16()), masters(x.bfloat16()))
    for name, part in masters.state.items():
        assert torch.equal(again.state[name], part)  # type: ignore[arg-type]


# -- bad days ------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["write", "fsync", "open", "folder", "rename"])
@pytest.mark.parametrize("portable", [True, False])
def test_a_save_that_fails_leaves_what_was_there(
    portable: bool, moment: str, tmp_path: Path
) -> None:
    """A folder without a checkpoint has none after it, and is saved into again."""
    kept, folder = step(F32, 2.0), tmp_path / "saved"
    with (
        failing(moment),
        pytest.raises(ProgramError, match=rf"{re.escape(str(folder))}.* cannot be"),
    ):
        kept.save(folder, portable=portable)
    assert not folder.exists() or not [*folder.iterdir()]
    with pytest.raises(ProgramError):
        kept.load(folder)
    kept.save(folder, portable=portable)
    if not portable:  # a file that is there stays
        before = step(F32, 5.0)
        with failing(moment if moment != "folder" else "open"), pytest.raises(ProgramError):
            before.save(folder)
        assert [path.name for path in folder.iterdir()] == ["rank0000.pt"]
    fresh = step(F32)
    fresh.load(folder)
    assert fresh.state["m"] is not None and fresh.state["m"].tolist() == [2.0] * 4


@pytest.mark.parametrize("only", [".distcp", ".written", ".metadata"])
def test_each_file_of_a_portable_save(only: str, tmp_path: Path) -> None:
    kept = step(F32)
    with failing("open", only), pytest.raises(ProgramError, match=re.escape(only)) as error:
        kept.save(tmp_path / "a", portable=True)
    assert error.value.because == "[Errno 30] Read-only file system"
    assert not [*(tmp_path / "a").iterdir()]


def test_a_place_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for portable in (True, False):
        with pytest.raises(ProgramError, match="cannot be written"):
            step(F32).save(tmp_path / "file", portable=portable)
        with pytest.raises(ProgramError, match="cannot be read"):
            step(F32).load(tmp_path / "file" / "in it")


def _of(change: Any) -> Any:
    return lambda saved: {**saved, **change(saved)}


OTHERS: dict[str, Any] = {
    "no dict": lambda saved: [1, 2],
    "no types": _of(lambda saved: {"types": 3}),
    "no state": _of(lambda saved: {"state": None}),
    "a tensor is gone": _of(lambda saved: {"state": {}}),
    "no tensor": _of(lambda saved: {"state": {**saved["state"], "m": 3}}),
    "another shape": _of(lambda saved: {"state": {**saved["state"], "m": torch.zeros(1)}}),
    "no id": lambda saved: {k: saved[k] for k in ("types", "state")},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_file_of_something_else(kind: str, tmp_path: Path) -> None:
    path = step(F32, 2.0).save(tmp_path)
    torch.save(OTHERS[kind](torch.load(path, weights_only=True)), path)
    kept = step(F32)
    with pytest.raises(ProgramError, match=re.escape(f"{path} cannot be read")):
        kept.load(tmp_path)
    assert all(x is not None and not x.any() for x in kept.state.values())


class Code:
    """What runs a command when it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.flag}",)


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    path, flag = step(F32).save(tmp_path / "saved"), tmp_path / "ran"
    torch.save({"types": {}, "state": Code(flag), "id": ""}, path)
    with pytest.raises(ProgramError, match="cannot be read"):
        step(F32).load(tmp_path / "saved")
    assert not flag.exists()


def test_cut_files(tmp_path: Path) -> None:
    path = step(F32, 2.0).save(tmp_path)
    whole = path.read_bytes()
    kept = step(F32)
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        with pytest.raises(ProgramError, match="cannot be read"):
            kept.load(tmp_path)


def test_parts_of_larger_tensors(tmp_path: Path) -> None:
    """A portable save writes the numbers of a view, and nothing around them."""
    large: Tensor = torch.arange(1_000_000.0)
    with mf.FusionDefinition("kept") as fd:
        x = fd.define_tensor([4], mesh=MESH, name="x")
        fd.add_output(x + 1, reuse=x)
    kept = mf.Step(mf.compile(fd), {"x": large[10:14]})
    kept.save(tmp_path / "a", portable=True)
    assert sum(path.stat().st_size for path in (tmp_path / "a").iterdir()) < 5_000
    fresh = mf.Step(kept.program, {"x": torch.zeros(4)})
    fresh.load(tmp_path / "a")
    assert torch.equal(fresh.state["x"], large[10:14])  # type: ignore[arg-type]
