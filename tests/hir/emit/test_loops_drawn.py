"""Drawn programs with streams on some of their values, against plain torch on global tensors.

A drawn program is a chain of operations, some of them changes of layout, most of them streamed over
a drawn dim in a drawn number of chunks. What cannot be streamed so is left plain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import torch
from helpers import sampling
from helpers.drawn_views import (
    Drawn,
    Operand,
    Step,
    layouts,
    mesh_pairs,
    operations,
    reduce_ops,
    shapes,
    tensor,
)
from helpers.oracle import check_everywhere
from hypothesis import assume, given
from torch import Tensor

import mdfuse as mf
from mdfuse import Layout, Partial, Stream, hir, hir_lowering
from mdfuse.errors import LoweringError
from mdfuse.passes.segmentation import ShouldMerge, merge_local, merge_nothing

DTYPES = (torch.float32, torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool)


@dataclass(frozen=True)
class How:
    """How a drawn program is lowered, and in which order its streams go on."""

    options: mf.Options
    merge: ShouldMerge | None
    schedule: int


@st.composite
def hows(draw: st.DrawFn) -> How:
    options = mf.Options(
        streams=draw(st.integers(1, 3)),
        stream_policy=draw(st.sampled_from(["auto", "round_robin", "copy_compute"])),
    )
    merge = draw(st.sampled_from([None, merge_local, merge_nothing]))
    return How(options, merge, draw(st.integers(0, 99)))


@st.composite
def streams(draw: st.DrawFn, layout: Layout, ndim: int, last: Stream | None) -> Stream:
    """Often as the value before it, so that loops have several members."""
    axes = (None, *layout.mesh.axes)
    if last is not None and last.dim < ndim and last.rotate in axes and draw(st.integers(0, 3)):
        return last
    axis = draw(st.sampled_from(layout.mesh.axes))
    size = layout.mesh.axis_size(axis)
    chunks = draw(st.sampled_from([size, size, draw(st.integers(1, 5))]))
    rotate = axis if draw(st.booleans()) else None
    return Stream(draw(st.integers(0, ndim - 1)), chunks, rotate)


@dataclass(frozen=True)
class Branching(Drawn):
    """A program each of whose steps reads any of the values before it.

    Attributes:
        sources: for each step which value it reads: 0 the input, 1 the first step's result, …
        kept: the values that are outputs.
        written: the one of them that goes into the input's buffer; 0: none.
    """

    sources: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    written: int = 0

    def __repr__(self) -> str:
        into = f", {self.written} into the input" if self.written else ""
        return f"{super().__repr__()}\n    reads {self.sources}, gives {self.kept}{into}"

    def plain(self) -> list[Tensor]:
        """The outputs."""
        return [self.values()[i] for i in self.kept]

    def values(self) -> list[Tensor]:
        """The input, and the result of each step."""
        x, *rest = self.tensors()
        values = [x]
        for step, source in zip(self.steps, self.sources, strict=True):
            operand = rest.pop(0) if step.operand is not None else None
            values.append(step.plain(values[source], operand))
        return values

    def define(self) -> mf.FusionDefinition:
        with mf.FusionDefinition("drawn") as fd:
            values = [fd.define_tensor(self.shape, self.dtype, self.source)]
            seconds = [
                fd.define_tensor(s.operand.shape, self.dtype, s.operand.layout)
                for s in self.steps
                if s.operand is not None
            ]
            for step, source in zip(self.steps, self.sources, strict=True):
                second = seconds.pop(0) if step.operand is not None else None
                h = step.fused(fd.ops, values[source], second)
                values.append(h if step.law is None else h.on(step.law))
            for i in self.kept:
                fd.add_output(values[i], reuse=values[0] if i == self.written else None)
        return fd

    def then(self, step: Step, source: int) -> Branching:
        """The program with one more step, whose result is its only output."""
        steps, sources = (*self.steps, step), (*self.sources, source)
        return replace(self, steps=steps, sources=sources, kept=(len(steps),))


def is_streamable(drawn: Branching) -> bool:
    """Whether the last step can be computed as its law says."""
    try:
        hir_lowering.prepare(drawn.define().fusion)
    except LoweringError as error:
        is_said = re.search(r"is streamed (over dim|with rotate=)", str(error))
        if is_said and error.because and error.hint and error.where:
            return False
        raise
    return True


SET = Step("set", lambda ops, x, y: ops.set(x), lambda x, y: x)


@st.composite
def programs(draw: st.DrawFn) -> Branching:
    before, after = draw(mesh_pairs())
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(shapes(1, 3))
    op = draw(st.sampled_from([None, *reduce_ops(dtype)]))
    drawn = Branching(shape, dtype, draw(layouts(before, len(shape), op)), ())
    values, last = [tensor(shape, dtype)], None
    for n in range(draw(st.integers(1, 6))):
        source = draw(st.sampled_from([n, n, n, draw(st.integers(0, n))]))
        mesh = draw(st.sampled_from([before, after]))
        step = draw(st.sampled_from([SET, None, None]))
        step = step or draw(operations(values[source], [before, after]))
        second = tensor(step.operand.shape, dtype) if step.operand is not None else None
        x = step.plain(values[source], second)
        assume(x.numel() <= 2000 and x.ndim <= 4)
        values.append(x)
        law = draw(layouts(mesh, x.ndim)) if draw(st.integers(0, 3)) else None
        plain = drawn.then(replace(step, law=law), source)
        if law is not None and x.ndim and draw(st.integers(0, 4)):
            stream = draw(streams(law, x.ndim, last))
            assume(law.blocked.get(stream.dim) != "zigzag")
            drawn = drawn.then(replace(step, law=law.with_stream(stream)), source)
            if is_streamable(drawn):
                last = stream
                continue
        drawn = plain
    more = draw(st.sets(st.integers(1, len(values) - 1), max_size=2))
    return replace(drawn, kept=(*drawn.kept, *sorted(more - {*drawn.kept})))


@st.composite
def updates(draw: st.DrawFn) -> Branching:
    """A program that writes a streamed result into its input, which others may read as well."""
    drawn = draw(programs())
    assume(not any(isinstance(p, Partial) for p in drawn.source.placements))
    x, *rest = drawn.values()
    alike = [n for n, v in enumerate(rest, 1) if (v.shape, v.dtype) == (x.shape, x.dtype)]
    streamed = [s.law.stream for s in drawn.steps if s.law is not None and s.law.stream is not None]
    kept, last = drawn.kept, streamed[-1] if streamed else None
    for source in draw(st.lists(st.sampled_from([0, 0, *alike]), min_size=1, max_size=2)):
        stream = draw(streams(drawn.source, x.ndim, last))
        assume(drawn.source.blocked.get(stream.dim) != "zigzag")
        law = drawn.source.with_stream(stream)
        second = Operand(drawn.shape, drawn.source) if draw(st.booleans()) else None
        step = draw(st.sampled_from([SET, MORE])) if second is None else SUM
        drawn = drawn.then(replace(step, law=law, operand=second), source)
        assume(is_streamable(drawn))
        kept, last = (*kept, len(drawn.steps)), law.stream
    new = range(len(rest) + 1, len(drawn.steps) + 1)
    return replace(drawn, kept=kept, written=draw(st.sampled_from(new)))


MORE = Step("x * x", lambda ops, x, y: x * x, lambda x, y: x * x)
SUM = Step("x + y", lambda ops, x, y: x + y, lambda x, y: x + y)


@given(drawn=programs(), how=hows())
@sampling.examples(300)
def test_streams_change_nothing(drawn: Branching, how: How) -> None:
    program = mf.compile(drawn.define(), how.options, how.merge)
    tensors, expected = drawn.tensors(), drawn.plain()
    is_exact = not any(p == Partial("avg") for p in drawn.source.placements)
    for schedule in (None, how.schedule):
        check_everywhere(program, tensors, expected, exact=is_exact, schedule=schedule)
    check_texts(program, how)


def check_texts(program: mf.Program, how: How) -> None:
    """What is printed is read back as it was, for all ranks and for a drawn one."""
    assert hir.parse(str(program)) == program.host
    local = program.for_rank(how.schedule % (program.host.last_rank + 1))
    assert hir.parse(str(local)) == local


@given(drawn=updates(), how=hows())
@sampling.examples(150)
def test_streamed_results_go_into_the_input(drawn: Branching, how: How) -> None:
    program = mf.compile(drawn.define(), how.options, how.merge)
    for schedule in (None, how.schedule):
        check_everywhere(program, drawn.tensors(), drawn.plain(), exact=True, schedule=schedule)
    check_texts(program, how)
