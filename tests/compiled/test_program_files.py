"""Lowered programs in files: a start that reads one has the program that it would have lowered."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse.compiled import lowering_names, overlap, program_files
from mdfuse.config import Options
from mdfuse.hir.verify.check import verify_once
from mdfuse.ir.graph import Fusion
from mdfuse.mesh import DeviceMesh
from mdfuse.seeing.costs import H100

_MESH = DeviceMesh.arange(fsdp=2)
_OPTIONS = Options(costs="h100", compile="always")


def define(
    rows: int = 8, dtype: torch.dtype = torch.float32, gathers: bool = True, name: str = "w"
) -> mf.FusionDefinition:
    """A step of two layers whose weights are split, and gathered before they are read."""
    split = {"fsdp": mf.Shard(0)}
    with mf.FusionDefinition("step") as fd:
        x = fd.define_tensor([rows, 4], dtype, _MESH, split, name="x")
        weights = [
            fd.define_tensor([4, 4], dtype, _MESH, split if gathers else {}, name=f"{name}{n}")
            for n in range(2)
        ]
        h = x
        for w in weights:
            h = fd.ops.gelu(fd.ops.linear(h, fd.ops.set(w).on(_MESH, {})))
        for w, dw in zip(weights, mf.grad((h * h).mean(), weights), strict=True):
            fd.add_output(w - 0.1 * dw, reuse=w)
    return fd


@pytest.fixture
def lowerings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fusions that are lowered, while programs of any size have files in a new folder."""
    lowered = list[str]()
    lower = overlap.lower

    def counted(fusion: Any, *how: Any) -> Any:
        lowered.append(fusion.name)
        return lower(fusion, *how)

    monkeypatch.setattr(overlap, "lower", counted)
    monkeypatch.setattr(program_files, "FEWEST", 0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    program_files._unused.cache_clear()
    return lowered


def compiled(options: Options | None = _OPTIONS, **how: Any) -> mf.Program:
    """The program of a definition that no earlier call has left in memory."""
    mf.debug.FusionCache.reset()
    return mf.compile(define(**how), options)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "mdfuse").glob("*.program"))


def told(program: mf.Program) -> tuple[object, ...]:
    return (
        str(program), program.explain(), str(program.fusion), program.fusion.notes,
        [str(s) for s in program.segments], program.overlap, program.options,
    )  # fmt: skip


def test_a_program_that_is_read_is_the_one_that_was_lowered(
    lowerings: list[str], tmp_path: Path
) -> None:
    first, again = compiled(), compiled()
    assert lowerings == ["step"] and len(files(tmp_path)) == 1
    assert told(first) == told(again)
    assert (first.fusion, first.segments, first.host) == (again.fusion, again.segments, again.host)
    assert first.host.checked.orders == again.host.checked.orders
    given = [torch.randn(8, 4), torch.randn(4, 4), torch.randn(4, 4)]
    results = [mf.simulate(p, [x.clone() for x in given]).outputs for p in (first, again)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_program_that_was_written_was_verified(lowerings: list[str]) -> None:
    verdict = f"{verify_once.__module__}.{verify_once.__qualname__}"
    for options in (_OPTIONS, replace(_OPTIONS, verify=False)):
        compiled(options)
        assert (verdict in vars(compiled(options).host)) == options.verify
    assert len(lowerings) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 16}, {"dtype": torch.float64}, {"gathers": False}, {"name": "v"},
        {"options": replace(_OPTIONS, overlap="never")}, {"options": replace(_OPTIONS, streams=2)},
        {"options": replace(_OPTIONS, costs="unit")}, {"options": None},
    ],
    ids=["rows", "dtype", "layout", "name", "overlap", "streams", "costs", "environment"],
)  # fmt: skip
def test_another_definition_or_option_is_lowered(
    lowerings: list[str], change: dict[str, Any]
) -> None:
    before, after = compiled(), compiled(**change)
    assert len(lowerings) == 2 and told(before) != told(after)
    assert told(compiled(**change)) == told(after) and len(lowerings) == 2


def test_lines_of_the_user_are_part_of_a_program(lowerings: list[str]) -> None:
    def at(line: int) -> str:
        code = "\n" * line + "with mf.FusionDefinition('f') as fd:\n"
        code += " x = fd.define_tensor([4])\n fd.add_output(x + 1)\n"
        space = {"mf": mf}
        exec(compile(code, "user.py", "exec"), space)
        mf.debug.FusionCache.reset()
        return str(mf.compile(space["fd"]))  # type: ignore[arg-type]

    assert "user.py:3" in at(0) and "user.py:8" in at(5) and len(lowerings) == 2
    assert "user.py:3" in at(0) and len(lowerings) == 2


@pytest.mark.parametrize(
    "what",
    [
        lambda patch: patch.setattr(lowering_names, "own_code", lambda: "another version"),
        lambda patch: patch.setattr(lowering_names.inductor, "fingerprint", lambda _: "torch 9"),
        lambda patch: patch.setattr(lowering_names, "settings", lambda: ("other settings",)),
        lambda patch: patch.setattr(
            program_files, "table_of", lambda _: (replace(H100, launch_s=1.0), 0.0, [])
        ),
        lambda patch: patch.setattr(
            lowering_names.form_fusion_groups, "is_grouped", lambda _: False
        ),
    ],
    ids=["mdfuse", "torch", "settings", "costs", "device"],
)
def test_another_world_is_lowered(
    lowerings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    what: Callable[[pytest.MonkeyPatch], None],
) -> None:
    compiled()
    what(monkeypatch)
    compiled()
    assert len(lowerings) == 2


def test_a_damaged_file_is_written_again(
    lowerings: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "mdfuse.compile")
    right = told(compiled())
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    damages = [b"", whole[:20], whole[:-1], whole[:99] + bytes([whole[99] ^ 1]) + whole[100:]]
    for count, damaged in enumerate(damages, 1):
        path.write_bytes(damaged)
        assert told(compiled()) == right and len(lowerings) == 1 + count
        assert "is of no use, and its program is lowered" in caplog.messages[-1]
        assert path.read_bytes() == whole
    assert len(caplog.messages) == len(damages)


class _Calls:
    """What calls something when it is read by `pickle.load`."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.what = call, args

    def __reduce__(self) -> Any:
        return self.what


@pytest.mark.parametrize(
    "data",
    [
        _Calls(os.mkdir, "there"),
        _Calls(exec, "x"),
        (os.getpid, 1),
        mf.simulate,
        program_files._File,
    ],
    ids=["mkdir", "exec", "function", "of mdfuse", "class of mdfuse"],
)
def test_a_file_names_data_alone(
    lowerings: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, data: Any
) -> None:
    compiled()
    (path,) = files(tmp_path)
    bad = pickle.dumps((data, True))
    path.write_bytes(hashlib.sha256(path.name.encode() + bad).digest() + bad)
    compiled()
    assert len(lowerings) == 2 and "is no data" in caplog.text
    assert not Path("there").exists()


@pytest.mark.parametrize("data", [(1, 2, 3), (1, (), "host"), "a text"], ids=str)
def test_a_file_of_something_else_is_lowered(
    lowerings: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, data: Any
) -> None:
    right = told(compiled())
    (path,) = files(tmp_path)
    other = pickle.dumps((data, True))
    path.write_bytes(hashlib.sha256(path.name.encode() + other).digest() + other)
    assert told(compiled()) == right and len(lowerings) == 2
    assert "is of no use, and its program is lowered" in caplog.text


def test_a_file_changes_no_class() -> None:
    """A state that is set on a class, and not on an object of it."""
    layout = Fusion.layout
    for name in (b"layout", b"lay0ut"):
        data = b"cmdfuse.ir.graph\nFusion\nN}X\x06\0\0\0" + name + b"cbuiltins\nrange\ns\x86b."
        with pytest.raises(pickle.UnpicklingError, match="it changes Fusion"):
            program_files._DataReader(io.BytesIO(data)).load()
        assert Fusion.layout is layout and not hasattr(Fusion, "lay0ut")


def test_the_file_of_another_program_is_not_read(
    lowerings: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = told(compiled())
    (first,) = files(tmp_path)
    compiled(rows=16)
    (other,) = {*files(tmp_path)} - {first}
    first.write_bytes(other.read_bytes())
    assert told(compiled()) == right and lowerings == ["step"] * 3
    assert "the checksum is another one" in caplog.text


def test_the_files_read_least_recently_go(
    lowerings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, rows in enumerate((8, 16, 24)):
        compiled(rows=rows)
        for path in files(tmp_path):
            os.utime(path, (path.stat().st_mtime - 10,) * 2)
        assert len(files(tmp_path)) == n + 1
    compiled(rows=8)  # read last
    left = tmp_path / "mdfuse" / ".name.program.5.55"  # of a process that was ended
    left.write_bytes(bytes(9))
    os.utime(left, (1.0, 1.0))
    monkeypatch.setattr(
        program_files, "MOST_BYTES", 3 * max(p.stat().st_size for p in files(tmp_path))
    )
    compiled(rows=32)
    assert len(files(tmp_path)) == 3 and len(lowerings) == 4 and not left.exists()
    compiled(rows=8)
    assert len(lowerings) == 4
    compiled(rows=16)
    assert len(lowerings) == 5


def test_a_folder_that_others_may_write_into_has_no_programs(
    lowerings: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled()
    (tmp_path / "mdfuse").chmod(0o777)
    for _ in range(2):
        compiled()
    assert len(lowerings) == 3
    assert [m for m in caplog.messages if "others may write into" in m] == caplog.messages
    assert len(caplog.messages) == 1


def test_code_of_the_user_has_no_file(lowerings: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        mf.debug.FusionCache.reset()
        mf.compile(define(), _OPTIONS, lambda group, expr: False)
    assert len(lowerings) == 2 and not files(tmp_path)
    mf.register_op("twice", lambda x: 2 * x, "... -> ...")
    for _ in range(2):
        mf.debug.FusionCache.reset()
        with mf.FusionDefinition("f") as fd:
            fd.add_output(fd.ops.twice(fd.define_tensor([4])))
        mf.compile(fd)
    assert len(lowerings) == 4 and not files(tmp_path)


def test_symbolic_extents_have_no_file(lowerings: list[str], tmp_path: Path) -> None:
    with mf.FusionDefinition("f") as fd:
        fd.add_output(fd.define_tensor([-1, 4]) + 1)
    assert "# guards" in str(mf.compile(fd)) and not files(tmp_path)


def test_small_programs_have_none(
    lowerings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_files, "FEWEST", len(define().fusion.exprs) + 1)
    compiled()
    assert not files(tmp_path)


def test_pipelines_have_files(lowerings: list[str], tmp_path: Path) -> None:
    meshes, x = [DeviceMesh([n]) for n in range(2)], torch.randn(6, 4)

    def program(count: int) -> mf.Program:
        mf.debug.FusionCache.reset()
        with mf.FusionDefinition("stages") as fd:
            h = fd.define_tensor([6, 4], mesh=meshes[0], name="x")
            w = fd.define_tensor([4, 4], mesh=meshes[0], name="w")
            fd.add_output(fd.ops.relu(fd.ops.set(fd.ops.linear(h, w)).on(meshes[1], {})))
        return mf.pipeline(fd, microbatches=count, batch={"x": 0})

    first, other, again = program(3), program(2), program(3)
    assert len(files(tmp_path)) == 2
    assert told(first) == told(again) != told(other) and first.schedule == again.schedule
    w = torch.randn(4, 4)
    (y,) = mf.simulate(again, [x, w]).outputs
    torch.testing.assert_close(y, (x @ w.T).relu())


def test_a_table_that_is_not_there_is_an_error_where_it_is_needed(lowerings: list[str]) -> None:
    options = Options(costs="nowhere.json")
    with mf.FusionDefinition("f") as fd:
        fd.add_output(fd.define_tensor([4]) + 1)
    mf.compile(fd, options)
    with pytest.raises(mf.ProgramError, match=r"costs nowhere\.json"):
        compiled(options)
