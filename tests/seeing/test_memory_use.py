"""Memory over time is what the simulator counts in the storages of its tensors."""

from __future__ import annotations

import pytest
from helpers.example_files import SMALL, example
from helpers.host_posts import CASES
from helpers.host_programs import Case
from helpers.stream_cases import CASES as STREAMED

import mdfuse as mf
from mdfuse import DeviceMesh, hir
from mdfuse.hir.rank.pipelines import project
from mdfuse.seeing.memory_use import memory_of

#: Programs for which the simulator makes copies that the program does not name: of a result that is
#: a view of another one, of what is sent to oneself, of terms that are reduced at the end, two of
#: which may be under way.
COPIED = {"permutes", "to_oneself", "rotated_reduction", "reduce_to_a_mesh"}

#: Programs whose plan does without a buffer that they name: a rank's own shard is read where it is.
SPARED = {"ring_in_a_grid"}


def check(name: str, host: hir.HostProgram, peaks: tuple[int, ...]) -> None:
    found = [memory_of(project(host, r)).peak for r in range(len(peaks))]
    if name in COPIED:
        assert all(0.5 * b < a <= b for a, b in zip(found, peaks, strict=True))
    elif name in SPARED:
        assert all(b < a < 1.5 * b for a, b in zip(found, peaks, strict=True))
    else:
        assert found == list(peaks)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("ranks", [2, 4])
def test_examples(name: str, ranks: int) -> None:
    definition, inputs = SMALL[name][0](DeviceMesh.arange(tp=ranks))
    program = mf.compile(definition)
    check(name, program.host, mf.simulate(program, inputs).peak_bytes)


@pytest.mark.parametrize("case", [c for c in CASES if str(c) != "a_group_of_columns"], ids=str)
def test_host_programs(case: Case) -> None:
    host = case.program()
    given = [case.inputs(rank) for rank in range(case.ranks)]
    check(str(case), host, mf.simulate(host, per_rank=given).peak_bytes)


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_programs(name: str) -> None:
    program = STREAMED[name].compile(4)
    check(name, program.host, mf.simulate(program, STREAMED[name].inputs(program)).peak_bytes)


def test_a_step_of_training() -> None:
    """Here a reshape of what torch lays out by itself may be a view or a copy."""
    definition, inputs = example("train_llama").build(DeviceMesh.arange(dp=2, tp=2))
    program = mf.compile(definition)
    (peak,) = {*mf.simulate(program, inputs).peak_bytes}
    assert memory_of(program.for_rank(0)).peak == pytest.approx(peak, rel=0.03)


def test_lives_add_up_to_what_is_held() -> None:
    local = project(
        hir.parse("""
host @lives on mesh(x=1) {
  input %x: f32[4] (x=R)
  %a: f32[4] (x=R) = exp(%x)
  %b: f32[8] (x=R) = cat(%a, %x, dim=0)
  %v: f32[4,2] (x=R) = reshape(%b, shape=[4,2])
  free %a, %b
  %y: f32[2] (x=R) = sum(%v, dims=[0])
  free %v
  return %y
}"""),
        0,
    )
    found = memory_of(local)
    assert [(x.name, x.nbytes, x.first, x.last) for x in found.lives] == [
        ("x", 16, -1, 7), ("a", 16, 0, 3), ("b", 32, 1, 5), ("y", 8, 4, 7),
    ]  # fmt: skip
    assert found.bytes == (16, 32, 64, 64, 48, 56, 24, 24)
    assert (found.peak, found.peak_at) == (64, 1)
    assert [x.name for x in found.lives if x.is_input] == ["x"]
