"""A graph that the caller captures holds no posts that take turns with replays."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh, Options, ProgramError, Shard
from mdfuse.plan.signature import Signature
from mdfuse.runs import capture_checks


def gathering(backend: str = "null") -> mf.Program:
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("gathering") as fd:
        x = fd.define_tensor([4], mesh=mesh, layout={"tp": Shard(0)})
        fd.add_output(fd.ops.set(x).on(mesh, {}))
    return mf.compile(fd, Options(backend=backend))


def on_stream(handle: int, asked: Callable[[], bool], patch: pytest.MonkeyPatch) -> None:
    """As if this were the current stream, of which the driver tells whether it is captured."""
    patch.setattr(capture_checks, "is_capturing", asked)
    patch.setattr(capture_checks, "current_raw_stream", lambda device: handle)
    patch.setattr(Signature, "stream", lambda signature: handle)


@pytest.mark.parametrize(
    ("backend", "usual", "device", "is_refused"),
    [
        ("symmetric", "symmetric", "cuda", True),
        ("nccl, tp=symmetric", "nccl", "cuda", True),
        ("nccl", "nccl", "cuda", False),
        ("symmetric", "symmetric", "cpu", False),
    ],
)
def test_what_posts_in_turn(
    backend: str, usual: str, device: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_capturing = False
    on_stream(7, lambda: is_capturing, monkeypatch)
    comm: Any = SimpleNamespace(device=torch.device(device), backend=usual)
    host = gathering(backend).host
    capture_checks.check_capture(host, comm)
    is_capturing = True
    assert (capture_checks.captured_by_caller(host, comm) is not None) == is_refused
    if is_refused:
        with pytest.raises(ProgramError, match=r"@gathering is called while .* 'symmetric'"):
            capture_checks.check_capture(host, comm)
    else:
        capture_checks.check_capture(host, comm)


@pytest.mark.usefixtures("unjoined")
def test_each_run_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, one with a plan, and those that are surely like the last two."""
    is_capturing = True
    on_stream(7, lambda: is_capturing, monkeypatch)
    monkeypatch.setattr(capture_checks, "_in_turn", lambda *_: iter(["symmetric"]))
    mf.init(backend="null", rank=0, size=2)
    program, x = gathering(), torch.ones(2)
    for runs in (1, 2, 3, 4):
        is_capturing = True
        for _ in range(2):
            with pytest.raises(ProgramError, match="while a CUDA graph is captured") as caught:
                program.run(x)
            assert "call it outside of the capture" in str(caught.value)
        is_capturing = False
        for _ in range(runs):
            assert program.run(x)[0].shape == (4,)


@pytest.mark.usefixtures("unjoined")
def test_on_the_stream_of_the_device_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be captured."""
    on_stream(0, lambda: pytest.fail("the driver is asked"), monkeypatch)
    monkeypatch.setattr(capture_checks, "_in_turn", lambda *_: iter(["symmetric"]))
    mf.init(backend="null", rank=0, size=2)
    program, x = gathering(), torch.ones(2)
    for _ in range(5):
        assert program.run(x)[0].shape == (4,)
