"""`mdfuse calibrate` keeps a table with its errors, and none of a noisy machine."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import mdfuse as mf
from mdfuse.cli.calibration import command, held_out, measuring, timed_samples
from mdfuse.cli.calibration.command import calibrated
from mdfuse.cli.calibration.microbenchmarks import Microbenchmark
from mdfuse.cli.calibration.scales import CPU, Scale
from mdfuse.cli.calibration.sending import beside, links, received, ways
from mdfuse.cli.calibration.suite import subjects
from mdfuse.cli.main import app
from mdfuse.hir.instructions import POSTS
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unrolled import written_out
from mdfuse.runtime.alone import by_itself
from mdfuse.seeing import LinkKey, WorkKey
from mdfuse.seeing.amounts import is_work
from mdfuse.seeing.cost_tables import machine_of, parsed

#: So little that it takes seconds.
TINY = replace(
    CPU, run_s=1e-5, sizes=(1 << 12, 1 << 14), rows=(4, 8), features=(16, 32),
    beside=(8, 16), lengths=(8,), messages=(1 << 10,), cache=1 << 14,
)  # fmt: skip


def tiny(comm: mf.Communicator, scale: Scale | None = None) -> command.CostTable:
    return calibrated(comm, TINY)


def like_a_gpu(comm: mf.Communicator, scale: Scale | None = None) -> command.CostTable:
    """With attention by blocks, of which a sequence of 8 has one, and what a GPU has compiled."""
    return calibrated(comm, replace(TINY, multiprocessors=2, compiled=(1 << 12, 1 << 14)))


@pytest.mark.usefixtures("unjoined")
def test_attention_by_blocks_and_what_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "calibrated", like_a_gpu)
    monkeypatch.setattr(command, "MOST_SPREAD", 1e9)
    out = tmp_path / "table.json"
    env = {"COLUMNS": "160", "NO_COLOR": "1"}
    done = CliRunner().invoke(app, ["calibrate", "--out", str(out)], env=env)
    assert done.exit_code == 0, done.output
    assert "attention f32 causal" in done.output
    costs = parsed(out.read_text()).costs
    assert {*map(str, costs.attentions)} == {"f32", "f32 causal"}
    blocks = {str(key): grid.axes[0] for key, grid in costs.attentions.items()}
    assert blocks == {"f32": (1.0, 2.0, 8.0), "f32 causal": (1.0, 2.0, 4.0, 8.0)}
    others = (8.0,), (32.0, 64.0, 128.0)
    assert {grid.axes[1:] for grid in costs.attentions.values()} == {others}
    assert not any(key.name == "attention" for key in costs.works)
    for key in ("compiled f32", "compiled across f32", "compiled rows across f32"):
        assert [size for size, _ in costs.works[WorkKey.of(key)].points] == [6144, 24576]


@pytest.mark.usefixtures("unjoined")
def test_a_table_has_everything_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "calibrated", tiny)
    monkeypatch.setattr(command, "MOST_SPREAD", 1e9)
    out = tmp_path / "folder" / "table.json"
    env = {"COLUMNS": "160", "NO_COLOR": "1"}
    done = CliRunner().invoke(app, ["calibrate", "--out", str(out)], env=env)
    assert done.exit_code == 0, done.output
    assert "programs it did not see: off by" in done.output
    assert [p.name for p in out.parent.iterdir()] == ["table.json"]
    table = parsed(out.read_text())
    costs = table.costs
    works = {"add", "gelu", "softmax", "layer_norm", "rms_norm", "cat", "across", "*"}
    assert {f"{name} f32" for name in works} <= {*map(str, costs.works)}
    heads = {f"query f32 {n}" for n in (32, 64, 128)}
    assert heads | {f"{name} causal" for name in heads} <= {*map(str, costs.works)}
    assert WorkKey("one query", "f32") in costs.works
    assert {*map(str, costs.products)} == {"linear f32", "matmul f32"}
    assert costs.products[WorkKey("linear", "f32")].axes == ((4.0, 8.0), (16.0, 32.0), (16.0, 32.0))
    assert costs.run_s >= 0 and costs.posting_s <= 1e-9, "one rank communicates with nobody"
    assert table.ranks == 1 and len(table.held_out) == 11 and not costs.is_fused
    assert table.machine == machine_of(mf.init().device, "gloo")


@pytest.mark.usefixtures("unjoined")
def test_a_run_takes_what_no_work_in_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock where each run takes 7 and each of its instructions of work 0.5."""
    monkeypatch.setattr(measuring, "call_of", lambda comm, program: program)
    monkeypatch.setattr(
        measuring, "seconds_of", lambda comm, program, runs, clock: 7.0 + 0.5 * works(program.host)
    )
    found = measuring.Measurements(mf.init(), TINY)._run()
    assert found == pytest.approx(7.0)
    monkeypatch.setattr(measuring, "seconds_of", lambda comm, program, runs, clock: 0.5)
    assert measuring.Measurements(mf.init(), TINY)._run() == pytest.approx(0.5)


@pytest.mark.usefixtures("unjoined")
def test_a_run_that_communicates_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock where a run takes 7, 4 more if it communicates, and each communication 0.5."""
    found = measuring.Measurements(mf.init(), TINY)
    monkeypatch.setattr(found.comm, "size", 2)
    found.times["run", "run"] = {1: 7.0}
    monkeypatch.setattr(measuring.Measurements, "_run_of", lambda self, host, options: host)
    monkeypatch.setattr(
        measuring, "seconds_of", lambda comm, host, runs: 7.0 + 4.0 + 0.5 * posts(host)
    )
    assert found._posting() == pytest.approx(4.0)
    monkeypatch.setattr(measuring, "seconds_of", lambda comm, host, runs: 3.0)
    assert found._posting() == 0.0, "no less than a run without"


@pytest.mark.usefixtures("unjoined")
def test_a_communication_behind_work_takes_what_the_rest_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock where a communication takes 0.5, a product 3 and other work 0.25."""

    def seconds(comm: mf.Communicator, host: mf.hir.HostProgram, runs: int, clock: object) -> float:
        found = [i for i in written_out(project(host, 0)).instructions if is_work(i)]
        products = sum(i.fn == "linear" for i in found)
        return 0.5 * posts(host) + 3.0 * products + 0.25 * (len(found) - products)

    measured = measuring.Measurements(mf.init(), TINY)
    monkeypatch.setattr(measuring.Measurements, "_run_of", lambda self, host, options: host)
    monkeypatch.setattr(measuring, "seconds_of", seconds)
    found = [measured._once(s, s.program) for s in links(TINY, ways(2))]
    assert found == pytest.approx([0.5] * 5)


def posts(host: mf.hir.HostProgram) -> int:
    return sum(i.op in POSTS for i in written_out(project(host, 0)).instructions)


@pytest.mark.usefixtures("unjoined")
@pytest.mark.parametrize(
    ("samples", "others", "count"),
    [
        ([4.0, 2.0, 2.01], None, 3),  # the two least are close
        ([4.0, 2.0, 2.1, 2.01], None, 4),
        ([4.0, 3.0, 2.9, 2.5, 2.0], None, 5),
        ([2.0, 2.0, 2.0, 2.0, 2.0], "its samples are far apart", 5),
    ],
)
def test_as_many_samples_as_it_takes(
    samples: list[float], others: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm, taken = mf.init(), iter([2 * x for x in samples])
    monkeypatch.setattr(timed_samples, "timed", lambda calls, comm, clock: next(taken))
    monkeypatch.setattr(comm, "all_ok", lambda text: (text, others))
    assert timed_samples.seconds_of(comm, lambda: None, runs=2) == min(samples)
    assert len(samples) == count and next(taken, None) is None


@pytest.mark.usefixtures("unjoined")
@pytest.mark.parametrize(("threads", "own"), [(1, time.thread_time), (2, time.perf_counter)])
def test_local_work_of_one_thread_has_its_processor_time(
    threads: int, own: timed_samples.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent has the time on the wall, since it waits for others."""
    clocks = list[timed_samples.Clock]()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(measuring.Measurements, "_run_of", lambda *args: None)
    monkeypatch.setattr(
        measuring, "seconds_of", lambda comm, call, runs, clock: clocks.append(clock) or 1.0
    )
    found = measuring.Measurements(mf.init(), TINY)
    found.times |= {("run", name): {1: 0.0} for name in ("run", "posting")}
    local, sent = next(subjects(TINY, 2)["work"]()), next(links(TINY, ways(2)))
    for subject in (local, sent):
        found._once(subject, lambda: None)
    assert clocks == [own, *[time.perf_counter] * 2]


def works(host: mf.hir.HostProgram) -> int:
    return sum(map(is_work, written_out(project(host, 0)).instructions))


@pytest.mark.usefixtures("unjoined")
def test_ranks_share_local_work_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks measures every other subject of local work, and has the other's times."""
    comm = mf.init()
    monkeypatch.setattr(comm, "size", 2)
    taken = dict[int, set[object]]()
    texts = dict[int, list[str]]()
    monkeypatch.setattr(measuring, "samples_of", lambda *args: [1.0])
    monkeypatch.setattr(measuring.Measurements, "_run_of", lambda *args: None)
    monkeypatch.setattr(measuring.Measurements, "_take_slows", lambda *args: None)
    for rank in (0, 1, 0):  # the first one once more, with what the other one says
        monkeypatch.setattr(comm, "rank", rank)
        found = measuring.Measurements(comm, TINY, lambda text: None, alone=by_itself(comm))
        mine, told = taken.setdefault(rank, set()), texts.setdefault(rank, [])
        others = iter(texts.get(1 - rank, ()))

        def once(
            self: object, subject: Microbenchmark, call: object, mine: set[object] = mine
        ) -> float:
            mine.add((subject.key, subject.at))
            return 1.0 + comm.rank if subject.table == "links" else 1.0

        def all_ok(text: str, told: list[str] = told, others: Iterator[str] = others) -> object:
            told.append(text)
            return text, next(others, text)

        monkeypatch.setattr(measuring.Measurements, "_once", once)
        monkeypatch.setattr(comm, "all_ok", all_ok)
        found.take(lambda: None)
    alike, local = taken[0] & taken[1], set[object]()
    for kind in ("work", "products", "attention"):
        some = {(s.key, s.at) for s in subjects(TINY, 2)[kind]()}
        assert len(taken[0] & some) - len(taken[1] & some) in (0, 1) and not alike & some
        local |= some
    assert taken[0] | taken[1] == local | alike, "all of it"
    keys = [way.key for way in ways(2)]
    assert {key for key, _ in alike} == {*keys}, "what is sent is measured by all"
    assert found.times["links", keys[0]] == dict.fromkeys(found.times["links", keys[0]], 1.5)
    costs = found.costs
    assert costs.products[WorkKey("linear", "f32")].axes == ((4.0, 8.0), (16.0, 32.0), (16.0, 32.0))


@pytest.mark.usefixtures("unjoined")
def test_products_beside_communications(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock where two products take 8, two communications 2, all of them 8.5, a post 1 more.

    What is sent has just been written, in both programs.
    """
    found = measuring.Measurements(mf.init(), TINY)
    monkeypatch.setattr(found.comm, "size", 2)
    monkeypatch.setattr(found, "_share", lambda: None)
    keys = [way.key for way in ways(2)]
    for way in ways(2):  # by what arrives: of more than that they would be too long
        host = beside(TINY, way, TINY.messages[0], sends=True)
        found.times["links", way.key] = {received(host): 1.0, 2 * received(host): 9.0}
    found.times["products", WorkKey("linear", "f32")] = {(8, 16, 16): 4.0}
    found.times["run", "posting"] = {1: 1.0}
    taken = iter([8.0, 9.5] * len(keys))
    monkeypatch.setattr(measuring.Measurements, "_run_of", lambda *args: None)
    monkeypatch.setattr(measuring, "seconds_of", lambda comm, call, runs, *clock: next(taken))
    found._take_slows(lambda: None)
    assert {key: found.costs.links[key].slows for key in keys} == dict.fromkeys(keys, 0.25)
    assert found.costs.links[LinkKey()].slows == 0.25 and next(taken, None) is None


@pytest.mark.usefixtures("unjoined")
def test_what_communications_take_more_behind_much_work() -> None:
    """Beside a line from 2 to 6; what is quicker then takes no more."""
    found = measuring.Measurements(mf.init(), replace(TINY, l2=64))
    found.times["links", LinkKey("Allreduce", ranks=2)] = {100: 2.0, 300: 6.0}
    found.times["links", LinkKey("Allgather", ranks=2)] = {100: 2.0}
    found.times["colds", LinkKey("Allreduce", ranks=2)] = {100: 1.5, 200: 4.5, 300: 9.0}
    costs = found.costs
    link = costs.links[LinkKey("Allreduce", ranks=2)]
    assert costs.cache == 64 and costs.links[LinkKey("Allgather", ranks=2)].cold is None
    assert link.cold is not None and costs.links[LinkKey()] is link
    assert link.cold.points == ((100.0, 1e-9), (200.0, 0.5), (300.0, 3.0))


@pytest.mark.usefixtures("unjoined")
def test_symmetric_is_measured_where_no_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MDFUSE_BACKEND", raising=False)
    comm, told = mf.init(), list[str]()
    monkeypatch.setattr(comm, "size", 2)
    monkeypatch.setattr(comm, "open", lambda names: None)
    found = command.carriers(comm, told.append)
    assert [*found] == [None, "symmetric"] and found[None].backend == comm.backend
    assert found["symmetric"].backend == f"{comm.backend}, x=symmetric, meshes=symmetric"

    def cannot(names: list[str]) -> None:
        raise mf.BackendError("rank 1 cannot use symmetric", because="it is on another planet")

    monkeypatch.setattr(comm, "open", cannot)
    assert [*command.carriers(comm, told.append)] == [None]
    assert told == ["symmetric is left out: it is on another planet"]
    monkeypatch.setenv("MDFUSE_BACKEND", comm.backend)
    assert [*command.carriers(comm, told.append)] == [None] and len(told) == 1


#: A table that nobody measured.
MADE = command.CostTable(
    costs=mf.seeing.UNIT,
    machine=machine_of(torch.device("cpu"), "gloo"),
    ranks=1,
    date="2026-11-23",
    mean_error=0.01,
    p95_error=0.02,
)


@pytest.mark.usefixtures("unjoined")
def test_nothing_is_written_on_a_noisy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "calibrated", lambda comm: replace(MADE, spread=0.34))
    done = CliRunner().invoke(app, ["calibrate", "--out", str(tmp_path / "t.json")])
    assert done.exit_code == 1 and not [*tmp_path.iterdir()]
    assert "this machine is too noisy (34%)" in done.output and "more than 20% apart" in done.output


@pytest.mark.usefixtures("unjoined")
def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "calibrated", lambda comm: MADE)
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["calibrate", "--out", str(tmp_path / "file" / "t.json")])
    assert done.exit_code == 1 and "cannot be written" in done.output and "--out" in done.output


def test_the_spread_is_that_of_quartiles() -> None:
    found = measuring.Measurements.__new__(measuring.Measurements)
    found.calm = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]  # quartiles 1.75, 2.5, 3.25
    assert found.spread == pytest.approx(1.5 / 2.5)
    found.calm = [1.0]
    assert found.spread == 0.0


def test_errors_are_those_of_all_pairs() -> None:
    mean, p95 = held_out.errors((100.0 + n, 100.0) for n in range(1, 21))
    assert mean == pytest.approx(0.105) and p95 == pytest.approx(0.1905)
