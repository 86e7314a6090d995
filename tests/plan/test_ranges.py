"""Ranges for profilers: each step has one with the user's line; without them nothing is called."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import mdfuse as mf
from mdfuse import DeviceMesh, Options
from mdfuse.plan import ranges
from mdfuse.seeing.traces import read

pytestmark = pytest.mark.usefixtures("unjoined")


def program(**options: Any) -> mf.Program:
    with mf.FusionDefinition("ranged") as fd:
        x = fd.define_tensor([4], mesh=DeviceMesh([0]))
        fd.add_output(fd.ops.exp(x) * 2)
    return mf.compile(fd, Options(**options))


def profiled(found: mf.Program) -> list[str]:
    """The names of the events of a second run."""
    found.run(torch.zeros(4))
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        (y,) = found.run(torch.zeros(4))
    assert y.tolist() == [2.0] * 4
    return [e.name for e in prof.events()]


def test_a_profile_has_the_users_lines() -> None:
    names = profiled(program(ranges="torch"))
    ours = [name for name in names if name.startswith("%")]
    assert [name.split("  ")[0] for name in ours] == ["%t = exp", "%t_1 = mul"]
    assert all(re.fullmatch(r".*  test_ranges\.py:\d+", name) for name in ours)
    assert names.index("aten::exp") > names.index(ours[0]), "the call is inside"


def test_without_ranges_nothing_is_called() -> None:
    plain = program()
    assert not [name for name in profiled(plain) if name.startswith("%")]
    text = str(plain.plans.recent)
    assert "enter" not in text and "end" not in text and ";" not in text


def test_ranges_are_nested_in_traces(tmp_path: Path) -> None:
    found = program(ranges="torch", trace=str(tmp_path))
    names = profiled(found)
    assert len([name for name in names if name.startswith("%")]) == 2
    assert [e.name for e in read(tmp_path)] == ["%t = exp", "%t_1 = mul"] * 2


class FakeNvtx:
    """NVTX of a process that has no GPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def range_push(self, text: str) -> None:
        self.calls.append(f"push {text}")

    def range_pop(self) -> None:
        self.calls.append("pop")


def test_nvtx_gets_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNvtx()
    monkeypatch.setattr(torch.cuda, "nvtx", fake)
    monkeypatch.setattr(ranges.torch.cuda, "is_available", lambda: True)
    found = program(compile="never")
    found.run(torch.zeros(4))
    plan = found.plans.recent
    assert plan is not None
    ranges.ranged(plan, "nvtx", 0).run([torch.zeros(4)])  # type: ignore[arg-type]
    assert [re.sub(r"py:\d+", "py", call) for call in fake.calls] == [
        "push %t = exp  test_ranges.py", "pop", "push %t_1 = mul  test_ranges.py", "pop",
    ]  # fmt: skip


def test_nvtx_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(mf.ProgramError, match='ranges="nvtx" for @ranged'):
        program(ranges="nvtx").run(torch.zeros(4))


def test_a_range_that_an_error_left_open_ends_with_the_next_run() -> None:
    fake: Any = type("Tool", (), {"calls": []})()
    fake.open = lambda text: fake.calls.append(text)
    fake.close = lambda: fake.calls.append("closed")
    found = ranges.Ranges(fake)
    first, second = found.begin("first", is_first=True), found.begin("second", is_first=False)
    first()
    found.end()
    second()  # and an error
    first()
    assert fake.calls == ["first", "closed", "second", "closed", "first"]


def test_graphs_hold_no_ranges() -> None:
    with pytest.raises(mf.ProgramError, match=r'ranges=.* with graph="always"'):
        Options(ranges="torch", graph="always")
    with pytest.raises(mf.ProgramError, match="ranges='all'"):
        Options(ranges="all")  # type: ignore[arg-type]


def test_the_environment_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MDFUSE_RANGES", "torch")
    with mf.FusionDefinition("by_environment") as fd:
        fd.add_output(fd.ops.exp(fd.define_tensor([4], mesh=DeviceMesh([0]))) * 2)
    assert len([name for name in profiled(mf.compile(fd)) if name.startswith("%")]) == 2
