"""Stands for Inductor, in all processes that share a folder: runs graphs as they are.

python -m helpers.stand_in_compiler FOLDER [PROCESSES]    # runs `stack`; prints a line of JSON
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mdfuse as mf
from mdfuse.config import HELPERS
from mdfuse.plan import inductor
from mdfuse.plan.inductor import TracedGraph
from mdfuse.plan.tensor_meta import Form, form_of

#: How long processes wait for each other, seconds.
_PATIENCE_S = 120.0


@dataclass
class Compiled:
    """A graph that is run as it is, on tensors of the forms that it was traced for."""

    graph: torch.fx.GraphModule
    forms: list[Form]
    results: list[Form]

    def __call__(self, *values: Tensor) -> list[Tensor]:
        _check(values, self.forms)
        results = self.graph(*values)
        _check(results, self.results)
        return list(results)


def _check(values: Sequence[Tensor], forms: Sequence[Form]) -> None:
    """Raise where a value is not of its form; strides of dims of one element mean nothing."""
    for value, (shape, strides, dtype, device) in zip(values, forms, strict=True):
        assert (value.shape, value.dtype, value.device) == (shape, dtype, device)
        pairs = zip(shape, value.stride(), strides, strict=True)
        assert 0 in shape or all(n == 1 or s == t for n, s, t in pairs), (value.stride(), strides)


@dataclass
class StandIn:
    """What takes the place of `mdfuse.plan.inductor`.

    Attributes:
        folder: what all processes share; `folder/began` has a file for each compilation.
        processes: a compilation goes on once so many processes have begun one.
    """

    folder: Path
    processes: int = 1

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for function in (self.compiled, self.save, self.load):
            patch.setattr(inductor, function.__name__, function)
        patch.setattr(inductor, "folder", lambda: self.folder)
        patch.setenv(HELPERS, "0")  # they would run Inductor

    @property
    def began(self) -> list[str]:
        """The processes that began a compilation, once for each."""
        return [path.name.split("-")[0] for path in (self.folder / "began").glob("*")]

    def compiled(self, found: TracedGraph) -> Compiled:
        began = self.folder / "began"
        began.mkdir(parents=True, exist_ok=True)
        (began / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        until(lambda: len({*self.began}) >= self.processes)
        forms = [form_of(x) for x in found.arguments]
        return Compiled(found.graph, forms, found.results)

    def save(self, function: Any, path: Path) -> None:
        path.write_bytes(pickle.dumps(function))

    def load(self, path: Path) -> Any:
        return pickle.loads(path.read_bytes())


def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so, and fail where it takes too long."""
    end = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


#: How many units of `stack` differ.
UNITS = 4


def stack(layers: int = 3) -> mf.FusionDefinition:
    """Layers on two meshes in turns, so that no unit goes on behind a product: `UNITS` in each."""
    here, there = mf.DeviceMesh.arange(t=1), mf.DeviceMesh.arange(u=1)
    with mf.FusionDefinition("stack") as fd:
        x = fd.define_tensor([4, 6], torch.float32, here, {})
        ws = [fd.define_tensor([6, 6], torch.float32, mesh, {}) for mesh in (here, there)]
        for _ in range(layers):
            x = _on(fd, (x.exp() * 0.1) @ ws[0], there)
            x = _on(fd, (x.sin() + 1.0) @ ws[1], here)
            x = _on(fd, (x.cos() - 0.5) @ ws[0], there)
            x = _on(fd, (x * x + 0.25) @ ws[1], here)
        fd.add_output(x)
    return fd


def _on(fd: mf.FusionDefinition, x: Any, mesh: mf.DeviceMesh) -> Any:
    return fd.ops.set(x).on(mesh, {})


def expected(x: Tensor, w: Tensor, layers: int = 3) -> Tensor:
    """What `stack` comes to."""
    for _ in range(layers):
        x = (x.exp() * 0.1) @ w
        x = (x.sin() + 1) @ w
        x = (x.cos() - 0.5) @ w
        x = (x * x + 0.25) @ w
    return x


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    """What `stack` is run with."""
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(6, 6, generator=generator) / 6
    return torch.randn(4, 6, generator=generator), w, w.clone()


def main(folder: str, processes: str = "1") -> None:
    StandIn(Path(folder), int(processes)).install(pytest.MonkeyPatch())
    program = mf.compile(stack(), options=mf.Options(compile="always"))
    (got,) = program.run(*arguments())
    torch.testing.assert_close(got, expected(*arguments()[:2]))
    print(json.dumps(vars(program._usual.fuser.tally)))


if __name__ == "__main__":
    from helpers import stand_in_compiler  # the classes under the name that others read

    stand_in_compiler.main(*sys.argv[1:])
