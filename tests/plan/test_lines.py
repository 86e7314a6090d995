"""What a second run calls, counted to the last call, on the backend that moves nothing.

The plan's function is made of calls of torch and of the process group's own methods alone, as many
as one would write by hand; around it a run makes a fixed number of Python calls, whatever the
length of the program.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

MESH = DeviceMesh.arange(tp=8)
SPLIT, TURNED = {"tp": Shard(0)}, {"tp": Shard(1)}

pytestmark = pytest.mark.usefixtures("null")


@pytest.fixture
def null(unjoined: None) -> mf.Communicator:
    return mf.init(backend="null", rank=0, size=8)


@dataclass
class Counts(TorchDispatchMode):
    """Calls of one run.

    Attributes:
        by_plan: what the plan's function calls, by name.
        frames: Python functions that run outside of it, by name.
        dispatched: operators that reach torch's dispatcher, but for those of the backend.
    """

    by_plan: Counter[str] = field(default_factory=Counter)
    frames: Counter[str] = field(default_factory=Counter)
    dispatched: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: FrameType | None = sys._getframe()
        while frame is not None and "_NullGroup" not in frame.f_code.co_qualname:
            frame = frame.f_back
        if frame is None:
            self.dispatched[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def called(self, name: str) -> None:
        self.by_plan[name] += 1

    def entered(self, frame: FrameType) -> None:
        """A Python function begins; that the plan calls it was counted if it was."""
        if not is_plan(frame.f_back) and "_NullGroup" not in frame.f_code.co_qualname:
            self.frames[frame.f_code.co_qualname] += 1

    def watch(self, run: Callable[[], object]) -> None:
        """Count the calls of a run, with the means of this Python.

        From 3.12 on `sys.setprofile` says nothing of a C function that is called as a bound
        method, as all methods of pybind11 are; `sys.monitoring` names whatever is called.
        """
        if sys.version_info < (3, 12):
            sys.setprofile(self._profiled)
            try:
                run()
            finally:
                sys.setprofile(None)
            return
        monitor, tool = sys.monitoring, sys.monitoring.PROFILER_ID
        events = monitor.events
        monitor.use_tool_id(tool, "call counts")
        monitor.register_callback(tool, events.CALL, self._calls)
        monitor.register_callback(tool, events.PY_START, self._starts)
        monitor.register_callback(tool, events.PY_RESUME, self._starts)
        monitor.set_events(tool, events.CALL | events.PY_START | events.PY_RESUME)
        try:
            run()
        finally:
            monitor.set_events(tool, 0)
            monitor.free_tool_id(tool)

    def _profiled(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "c_call" and is_plan(frame):
            self.called(what.__name__)
        elif event == "call" and frame.f_code.co_filename != __file__:
            if is_plan(frame.f_back):
                self.called(frame.f_code.co_name)
            self.entered(frame)

    def _calls(self, code: CodeType, offset: int, what: Any, first: Any) -> None:
        if is_plan_code(code):
            self.called(what.__name__)

    def _starts(self, code: CodeType, offset: int) -> None:
        if code.co_filename != __file__:
            self.entered(sys._getframe(1))


def is_plan(frame: FrameType | None) -> bool:
    return frame is not None and is_plan_code(frame.f_code)


def is_plan_code(code: CodeType) -> bool:
    return code.co_filename.startswith("<plan")


def counts(fd: mf.FusionDefinition) -> Counts:
    """Count the calls of a later run: Python's in one, the dispatcher's in another."""
    program, found = mf.compile(fd), Counts()
    values = [program.fusion.values[name] for name in program.fusion.inputs]
    local = [torch.randn(v.layout.local_shape(v.shape, 0)) for v in values if v.layout is not None]
    for _ in range(3):
        program.run(*local)
    found.watch(lambda: program.run(*local))
    with found:
        program.run(*local)
    return found


def chain(steps: int) -> mf.FusionDefinition:
    """All-gather, matmul, reduce-scatter."""
    with mf.FusionDefinition("chain") as fd:
        h = fd.define_tensor([16, 32], mesh=MESH, layout=SPLIT)
        for _ in range(steps):
            w = fd.define_tensor([32, 32], mesh=MESH, layout=SPLIT)
            split = fd.ops.set(fd.ops.set(h).on(MESH, {})).on(MESH, TURNED)
            h = fd.ops.set(split @ w).on(MESH, SPLIT)
        fd.add_output(h)
    return fd


def local(steps: int) -> mf.FusionDefinition:
    """Matmul, add, tanh."""
    with mf.FusionDefinition("local") as fd:
        h = fd.define_tensor([16, 32], mesh=MESH, layout=SPLIT)
        w = fd.define_tensor([32, 32], mesh=MESH, layout={})
        for _ in range(steps):
            h = fd.ops.tanh(h @ w + 1.0)
        fd.add_output(h * 2.0)
    return fd


def totals(steps: int) -> mf.FusionDefinition:
    """Partial sums, all-reduced in place, and a bias."""
    with mf.FusionDefinition("totals") as fd:
        h = fd.define_tensor([16, 32], mesh=MESH, layout={})
        for _ in range(steps):
            w = fd.define_tensor([32, 32], mesh=MESH, layout=SPLIT)
            split = fd.ops.set(h).on(MESH, TURNED)
            h = fd.ops.set(split @ w).on(MESH, {}) + 1.0
        fd.add_output(h * 2.0)
    return fd


def turns(steps: int) -> mf.FusionDefinition:
    """All-to-all there and back."""
    with mf.FusionDefinition("turns") as fd:
        h = fd.define_tensor([16, 32], mesh=MESH, layout=SPLIT)
        for _ in range(steps):
            turned = fd.ops.set(h).on(MESH, TURNED)
            h = fd.ops.set(fd.ops.exp(turned)).on(MESH, SPLIT)
        fd.add_output(h * 2.0)
    return fd


Build = Callable[[int], mf.FusionDefinition]

#: Per step: what the plan calls, and what of it reaches the dispatcher.
STEPS: dict[str, tuple[Build, dict[str, int], dict[str, int]]] = {
    "all-gather, matmul, reduce-scatter": (
        chain,
        {"_allgather_base": 1, "mm": 1, "_reduce_scatter_base": 1, "wait": 2},
        {"aten.mm.out": 1},
    ),
    "matmul, add, tanh": (
        local,
        {"mm": 1, "add": 1, "tanh": 1},
        {"aten.mm.out": 1, "aten.add.out": 1, "aten.tanh.out": 1},
    ),
    "matmul, all-reduce, add": (
        totals,
        {"mm": 1, "allreduce": 1, "wait": 1, "add": 1},
        {"aten.mm.out": 1, "aten.add.out": 1},
    ),
    "all-to-all, exp, all-to-all": (
        turns,
        {"copy_": 2, "alltoall_base": 2, "wait": 2, "exp": 1},
        {"aten.copy_.default": 2, "aten.exp.out": 1},
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_calls_per_step(name: str) -> None:
    """Eight more steps are eight times the calls of one, and nothing else."""
    build, calls, dispatched = STEPS[name]
    few, many = counts(build(8)), counts(build(16))
    assert {k: n / 8 for k, n in (many.by_plan - few.by_plan).items()} == calls
    assert {k: n / 8 for k, n in (many.dispatched - few.dispatched).items()} == dispatched


#: The Python functions that a run goes through, each once.
FRAMES = {
    "Program.run", "HostIrEvaluator.call", "repeated.<locals>.again", "HostIrEvaluator._run",
    "likeness.<locals>.where", "Plan.run", "Plan.call", "run",
}  # fmt: skip


@pytest.mark.parametrize("steps", [1, 8, 40])
def test_calls_around_a_plan(steps: int) -> None:
    assert counts(chain(steps)).frames == Counter(FRAMES)
    assert counts(local(steps)).frames == Counter(FRAMES - {"HostIrEvaluator._run"})


def test_a_reshard_is_two_calls() -> None:
    """The post and its wait, and a new buffer for the output."""
    with mf.FusionDefinition("gather") as fd:
        x = fd.define_tensor([16, 32], mesh=MESH, layout=SPLIT)
        fd.add_output(fd.ops.set(x).on(MESH, {}))
    found = counts(fd)
    assert found.by_plan == {"empty_strided": 1, "_allgather_base": 1, "wait": 1}
    assert found.dispatched == {"aten.empty_strided.default": 1}
