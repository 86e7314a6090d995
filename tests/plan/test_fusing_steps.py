"""Whole training steps on meshes: all units of local work are compiled, none runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.example_files import example

import mdfuse as mf
from mdfuse.cli.launched_runs import local_inputs
from mdfuse.cli.program_file import parse_mesh
from mdfuse.plan import compilation, inductor
from mdfuse.plan.inductor import TracedGraph


@pytest.fixture
def compiled(unjoined: None, monkeypatch: pytest.MonkeyPatch) -> list[TracedGraph]:
    """What a compiler is given, which runs it as it is."""
    given: list[TracedGraph] = []

    def run_as_it_is(found: TracedGraph) -> Callable[..., Any]:
        given.append(found)
        return lambda *values: list(found.graph(*values))

    monkeypatch.setattr(inductor, "compiled", run_as_it_is)
    monkeypatch.setattr(inductor, "folder", lambda: None)
    monkeypatch.setenv("MDFUSE_COMPILE", "always")  # what cannot be compiled is an error
    compilation._MADE.empty()
    return given


@pytest.mark.parametrize(("mesh", "microbatches"), [("tp=2", 2), ("sp=4", 1)])
def test_steps_of_a_llama(mesh: str, microbatches: int, compiled: list[TracedGraph]) -> None:
    where = parse_mesh(mesh)
    run(example("train_llama").program(where, microbatches), where.size)
    assert len(compiled) > 10


def test_steps_of_a_pipeline(compiled: list[TracedGraph]) -> None:
    """A unit for each way to compute a block, and the updates of the weights."""
    run(example("pipeline").compiled(parse_mesh("pp=2"), 2, 4, "1f1b"), 2)
    assert 5 < len(compiled) < 10  # the same for all microbatches


def run(program: mf.Program, size: int) -> None:
    """On the last rank, whose communications bring nothing."""
    comm = mf.init(backend="null", rank=size - 1, size=size)
    values = map(program.fusion.values.__getitem__, program.fusion.inputs)
    program.run(*local_inputs(program, [torch.zeros(v.shape, dtype=v.dtype) for v in values], comm))
