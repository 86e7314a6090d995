"""Benchmarks run and store what they measured; how long things take is not tested."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import sampling
from helpers.bare import bare_environment
from torch import Tensor

import mdfuse as mf

ROOT = Path(__file__).resolve().parent.parent


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start Python in another folder, without what a launcher sets."""
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**bare_environment(), "PYTHONPATH": path, "NO_COLOR": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def written(folder: Path, script: str, *arguments: str, ranks: int = 1) -> Any:
    """The file that a benchmark writes on some ranks; it ends well."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
    started = (*torchrun, "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    path = str(ROOT / "benchmarks" / script)
    done = run(folder, *started, path, *arguments, "--output", "a.json")
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "a.json").read_text())


Ended = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ended_at_once(
    unjoined: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Ended:
    """Runs a script in this process, which is for arguments that it refuses: torch is there."""

    def main(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        for name in os.environ.keys() - bare_environment().keys():
            monkeypatch.delenv(name)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        gradients, threads = torch.is_grad_enabled(), torch.get_num_threads()
        try:
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
        finally:  # what a process would have taken with it
            torch.set_grad_enabled(gradients)
            torch.set_num_threads(threads)
            if dist.is_initialized():
                dist.destroy_process_group()
        said = capsys.readouterr()
        code = ended.value.code
        if isinstance(code, str):  # which Python would print
            return subprocess.CompletedProcess(arguments, 1, said.out, said.err + code)
        return subprocess.CompletedProcess(arguments, code or 0, said.out, said.err)

    return main


def test_host_latency_stores_every_row(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        *("-m", "mdfuse", "bench", "host_latency"),
        *("--quick", "--output", "found/result.json"),
    )
    assert done.returncode == 0, done.stderr
    stored = json.loads((tmp_path / "found" / "result.json").read_text())
    names = [row["name"] for row in stored["rows"]]
    for words in ("all-gather, matmul, reduce-scatter", "added", "reshard", "lower", "peak"):
        assert [name for name in names if words in name], words
    assert stored["world"] == {"backend": "null", "ranks": 8, "device": "cpu", "fast_lane": False}
    assert stored["machine"]["processor"] and stored["versions"]["torch"] and stored["date"]
    for row in stored["rows"]:
        rounds = row["rounds"]
        assert len(rounds["ours"]) == len(rounds["against"]) > 0
        assert min(rounds["ours"]) > 0 and min(rounds["against"]) > 0
        assert row["figure"]["least"] <= row["figure"]["median"] <= row["figure"]["most"]


def test_lowering_stores_each_stage(tmp_path: Path) -> None:
    """Each stage takes time although the same stack was lowered before: nothing is found again."""
    rows = written(tmp_path, "lowering.py", "--layers", "1,1", "--rounds", "2")["rows"]
    times = {row["name"].split(",")[0]: row["rounds"]["ours"] for row in rows}
    assert {"define", "compile", "verify", "first run"} <= times.keys()
    assert min(times["define"] + times["compile"]) > 1e6  # ns; a program found again takes 0.02 ms


def test_reshards_are_near_the_bound(tmp_path: Path) -> None:
    """No pair moves more than DTensor's planner of least cost, and the worst pairs are shown."""
    script = str(ROOT / "benchmarks" / "reshard.py")
    done = run(tmp_path, script, "--quick", "--output", "result.json")
    assert done.returncode == 0, done.stderr
    stored = json.loads((tmp_path / "result.json").read_text())
    means = {row["group"]: row["mean"] for row in stored["rows"]}
    assert means["no Partial"] == means["Partial that stays"] == 1.0
    assert 1.0 < means["Partial, reduced"] <= 1.05
    assert means["blocks; no Partial"] == means["blocks; Partial that stays"] == 1.0
    assert 1.0 < means["blocks; Partial, reduced"] <= 1.06
    reachable = {row["group"]: row["reachable"] for row in stored["rows"]}
    assert means["Partial, reduced"] == pytest.approx(reachable["Partial, reduced"])
    owners = {row["group"]: row["owners"] for row in stored["rows"]}
    assert 1.0 < owners["Partial, reduced"] < means["Partial, reduced"]
    for row in stored["rows"]:
        assert row["more_than_dtensor"] == 0 and row["total"] <= 1.03
        assert 1.0 <= row["whole"] <= row["mean"]
        assert all(pair in done.stdout for _, pair, _ in row["worst"])
    assert means["Partial, all shapes"] == means["Partial"]  # of one shape
    planned = [(row["name"], row["pairs"]) for row in stored["planning"]]
    assert len(planned) == 4 and {n for _, n in planned} == {12}
    hosts = stored["hosts"]
    ratios = [row["microseconds"] / row["least_microseconds"] for row in hosts]
    assert len(hosts) == 16 and min(ratios) >= 1 and max(ratios) <= 1.6
    assert math.prod(ratios) <= 1.15 ** len(ratios)
    assert all(row["crossing"] >= row["least_crossing"] for row in hosts)


@pytest.mark.parametrize("rows", ["graph", "instructions,luck"])
def test_rows_that_are_not_there(rows: str, tmp_path: Path) -> None:
    done = run(tmp_path, str(ROOT / "benchmarks" / "host_latency.py"), "--rows", rows)
    assert done.returncode == 1
    assert "there are instructions, reshard, lowering, memory" in done.stderr


def test_it_explains_itself(ended_at_once: Ended) -> None:
    done = ended_at_once("host_latency.py", "--help")
    assert done.returncode == 0, done.stderr
    assert "docs/measured.md" in done.stdout and "--rows" in done.stdout


def test_backends_are_compared(tmp_path: Path) -> None:
    few = ("--bytes", "64", "400", "--rounds", "3")
    rows = written(tmp_path, "backends.py", "gloo", "ucx", *few, ranks=2)["rows"]
    assert [row["name"] for row in rows[::2]] == [
        f"{kind}: ucx" for kind in ("Allreduce", "Allgather", "AllToAll", "Exchange")
    ]
    assert all(row["alternative"] == "gloo" for row in rows)


def test_one_rank_has_nobody_to_communicate_with(ended_at_once: Ended) -> None:
    done = ended_at_once("backends.py", "gloo", "ucx")
    assert done.returncode == 1 and "one rank has nobody" in done.stderr


def test_one_backend_alone_is_no_comparison(ended_at_once: Ended) -> None:
    done = ended_at_once("backends.py", "gloo")
    assert done.returncode == 2 and "name two backends, or more" in done.stderr


ON_CPUS = ("--device", "cpu", "--small", "--compiler", "aot_eager", "--rounds", "2")


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_agree_with_float64(tmp_path: Path, ranks: int) -> None:
    """The benchmark ends with an error where a contender is wrong."""
    models = ("llama3-8b", "gpt3-175b" if ranks > 1 else "minilm")
    phases = ("prefill",) if ranks > 1 else ("prefill", "decode")
    chosen = ("--model", *models, *(("--phase", *phases) * (ranks > 1)))
    file = written(tmp_path, "layers.py", *ON_CPUS, *chosen, ranks=ranks)
    assert file["world"]["ranks"] == ranks and not file["world"]["left_out"]
    layers = {row["name"].partition(":")[0] for row in file["rows"]}
    assert layers == {f"{m}, {p}" for m in models for p in phases} - {"minilm, decode"}
    for layer in layers:
        times = [row for row in file["rows"] if row["name"] == f"{layer}: time"]
        alternatives = [row["alternative"] for row in times]
        assert alternatives == ["eager", "compiled", "dtensor", "dtensor-compiled"]
    errors = [row for row in file["rows"] if row["measured"] == "relative error"]
    assert len(errors) == 2 * len(layers)
    for row in errors:
        assert 0 < row["ours"]["median"] < 1e-5 and 0 < row["against"]["median"] < 1e-5


def test_training_steps_agree_with_float64(tmp_path: Path) -> None:
    """The benchmark ends with an error where a contender's step is wrong."""
    rows = written(tmp_path, "training.py", *ON_CPUS, "--model", "llama3-8b", "minilm")["rows"]
    names = [(row["name"], row["alternative"]) for row in rows]
    for model in ("llama3-8b", "minilm"):
        for peer in ("eager", "compiled"):
            assert (f"{model}, prefill: time", peer) in names
    errors = [row for row in rows if row["measured"] == "relative error"]
    assert len(errors) == 4
    for row in errors:
        assert 0 < row["ours"]["median"] < 1e-4 and 0 < row["against"]["median"] < 1e-4


@pytest.mark.parametrize(
    ("style", "layers", "peers"),
    [("dp", 2, ["unbucketed", "ddp", "ddp-compiled"]), ("tp", 1, ["eager", "compiled"])],
)
def test_training_steps_on_ranks_agree_with_float64(
    tmp_path: Path, style: str, layers: int, peers: list[str]
) -> None:
    """So do those of `DistributedDataParallel`, and those with all-reduces by hand."""
    chosen = ("--parallel", style, "--layers", str(layers))
    stored = written(tmp_path, "training.py", *ON_CPUS, *chosen, ranks=2)
    assert (stored["world"]["ranks"], stored["world"]["layers"]) == (2, layers)
    assert not stored["world"]["left_out"]
    times = [row for row in stored["rows"] if row["name"].endswith("time")]
    assert [row["alternative"] for row in times] == peers
    errors = [row for row in stored["rows"] if row["measured"] == "relative error"]
    assert len(errors) == 2
    for row in errors:
        assert 0 < row["ours"]["median"] < 1e-4 and 0 < row["against"]["median"] < 1e-4


def test_one_rank_shares_no_step(ended_at_once: Ended) -> None:
    done = ended_at_once("training.py", *ON_CPUS, "--parallel", "dp")
    assert done.returncode == 1 and "--parallel tp is for several ranks" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--peers", "eager,luck,graph"), "peers luck, graph: here there are eager, compiled"),
        (("--model", "minilm", "--phase", "decode"), "minilm has no decode"),
    ],
)
def test_layers_that_cannot_be_measured(
    ended_at_once: Ended, arguments: tuple[str, ...], words: str
) -> None:
    done = ended_at_once("layers.py", *ON_CPUS, *arguments)
    assert done.returncode == 1 and words in done.stderr


@pytest.mark.parametrize(
    ("style", "recompute", "peer"),
    [
        ("fsdp", "both", "FSDP2"),
        ("tp", "no", "sequence parallelism by hand"),
        ("cp", "yes", "FSDP2, keys gathered"),
    ],
)
def test_whole_models_train_as_their_peers(
    tmp_path: Path, style: str, recompute: str, peer: str
) -> None:
    """Losses of several steps are alike, also where layers are computed again."""
    small = ("--device", "cpu", "--small", "--compiler", "eager", "--layers", "1", "--tokens", "16")
    few = ("--rounds", "2", "--losses", "4", "--no-warm", "--recompute", recompute)
    stored = written(tmp_path, "whole_models.py", *small, *few, "--rows", style, ranks=2)
    names = [(row["name"], row["alternative"]) for row in stored["rows"]]
    whats = ("time of a step", "start, cold", "losses of 4 steps")
    ends = {"no": [""], "yes": [", recompute"], "both": ["", ", recompute"]}[recompute]
    cases = [f"{style}=2{end}" for end in ends]
    assert names == [(f"{case}: {what}", peer) for case in cases for what in whats]
    all_ = stored["world"]["contenders"]
    plain = all_[f"{cases[0]}: {peer}"]["losses"]
    for case in cases:
        mine, theirs = (all_[f"{case}: {name}"]["losses"] for name in ("mdfuse", peer))
        assert theirs[2] < theirs[0] and theirs[3] < theirs[1], "batches take turns"
        assert mine[:4] == pytest.approx(theirs[:4], rel=1e-3)
        assert theirs == pytest.approx(plain, rel=1e-5)


def test_one_rank_trains_no_split_model(ended_at_once: Ended) -> None:
    done = ended_at_once("whole_models.py", "--device", "cpu", "--small", "--rows", "alone,fsdp,tp")
    assert done.returncode == 1 and "rows fsdp, tp: on 1 rank there are alone" in done.stderr


DECODES, DECODERS = ("attention", "layer"), ("mdfuse", "torch")

#: Script -> its arguments, and the names of its rows with their alternatives.
SPLIT = {
    "experts.py": (
        ("--what", "step", "--skew", "2"),
        {("step", "hand"), ("step", "hand-compiled")},
        {f"step: {name}" for name in ("mdfuse", "hand", "hand-compiled")},
    ),
    "context.py": (
        ("--what", "layer,decode", "--tokens", "64", "--alone", "32", "--cache", "128"),
        {("mdfuse, auto", "ulysses"), ("mdfuse, auto", "1/2 of one device")}
        | {(f"decode, {what}", f"one device, {by}") for what in DECODES for by in DECODERS},
        {"mdfuse, auto", "ulysses"}
        | {f"{what.capitalize()}: one device, {by}" for what in DECODES for by in DECODERS}
        | {f"{what.capitalize()}: mdfuse" for what in DECODES},
    ),
}


@pytest.mark.parametrize("script", [[*SPLIT][n] for n in sampling.window(len(SPLIT), len(SPLIT))])
def test_split_layers_give_the_values_of_whole_ones(tmp_path: Path, script: str) -> None:
    """The scripts themselves compare all contenders with f64."""
    arguments, names, errors = SPLIT[script]
    small = ("--device", "cpu", "--small", "--compiler", "eager", "--rounds", "2")
    stored = written(tmp_path, script, *small, *arguments, ranks=2)
    assert {(row["name"], row["alternative"]) for row in stored["rows"]} == names
    assert stored["world"]["errors"].keys() == errors
    received = stored["world"].get("bytes", {})  # sums and averages of all heads, and no keys
    assert all(0 < x <= 2 * 4 * 4 * (16 + 2) for x in received.values()), received


SHAPES = ("AG+MM 64 x 16 x 24", "MM+RS 64 x 16 x 24")
SMALL = ("--device", "cpu", "--small", "--rounds", "2")


def check_ideal(rows: list[dict[str, Any]], moved: str, others: set[str]) -> None:
    """The ideal is the longer one of the product and what moves, in each round."""
    for shape in SHAPES:
        mine = [row for row in rows if row["name"] == f"{shape}: time"]
        (best,) = {row["sizes"] for row in mine}
        against = {row["alternative"]: row["rounds"]["against"] for row in mine}
        forms = {"one after the other", "one piece", "two pieces", "four pieces", "eight pieces"}
        forms.add("uneven pieces")
        assert {*against} == {"ideal", "product", moved} | others | forms - {best}
        longer = zip(against["product"], against[moved], strict=True)
        assert against["ideal"] == [max(pair) for pair in longer]


@pytest.mark.parametrize("ranks", [2, 4])
def test_overlap_beside_copies(tmp_path: Path, ranks: int) -> None:
    """The benchmark ends with an error where a product in chunks is wrong."""
    stored = written(tmp_path, "overlap.py", *SMALL, "--of", str(ranks))
    assert stored["world"]["stands for rank 0 of"] == ranks and stored["world"]["eager"] == []
    by_hand = {"by hand"} if ranks == 2 else set[str]()
    check_ideal(stored["rows"], "copies", {"by itself"} | by_hand)
    assert {*stored["world"]["by hand"]} == ({*SHAPES} if by_hand else set())
    for lines in stored["world"]["by itself"].values():
        assert any("one after the other" in line for line in lines)


@pytest.mark.parametrize("backend", ["gloo", "symmetric"])
def test_overlap_on_ranks(tmp_path: Path, backend: str) -> None:
    chosen = ("--backend", backend, "--compiler", "aot_eager")
    stored = written(tmp_path, "overlap.py", *SMALL, *chosen, ranks=2)
    assert stored["world"]["backend"] == backend and not stored["world"]["left_out"]
    assert stored["world"]["eager"] == []
    check_ideal(stored["rows"], "communication", {"gloo", "compiled"})


def test_host_times_of_stand_ins(tmp_path: Path) -> None:
    """Graphs that do nothing: a run takes longer than they do."""
    rows = written(tmp_path, "replays.py", "--device", "cpu", "--rounds", "2")["rows"]
    assert [row["sizes"] for row in rows] == ["12 inputs", "59 inputs", "27 inputs"]
    for row in rows:
        assert min(row["rounds"]["ours"]) > max(row["rounds"]["against"])


@pytest.mark.parametrize(
    ("row", "alternatives"),
    [
        ("decode", {"decode: a token": "reduce-overhead"}),
        ("together", {"together: all answers": "continuous batching"}),
        ("sizes", {"sizes: each once": "graphs by hand"}),
        ("token", {"token: of one request": "a copy", "token: of the host": "replay alone"}),
    ],
)
def test_serving_beside_its_peers(tmp_path: Path, row: str, alternatives: dict[str, str]) -> None:
    """The script judges tokens of both sides by logits in float64, and layers by their values."""
    stored = written(tmp_path, "serving.py", *SMALL, "--rows", row)
    assert {x["name"]: x["alternative"] for x in stored["rows"]} == alternatives
    world = stored["world"]
    assert world["behind"].keys() == {row} - {"sizes"}
    if row in ("decode", "together"):
        assert world[row]["same tokens"] == 1
    if row == "sizes":
        assert world["sizes"]["errors"].keys() == {"ours", "against"}
    for x in stored["rows"]:
        assert min(x["rounds"]["ours"] + x["rounds"]["against"]) > 0


def test_serving_on_ranks(tmp_path: Path) -> None:
    """Ranks that split heads; and sums with norms, whose values are compared with float64."""
    rows = ("--rows", "decode,sums", "--carrier", "symmetric")
    stored = written(tmp_path, "serving.py", *SMALL, *rows, ranks=2)
    found = {(row["name"], row["alternative"]): row for row in stored["rows"]}
    sums = {
        (f"sums [{count}, 64]: {name}", peer)
        for count, limit in ((6, "7 us"), (138, "13 us"))
        for name in ("symmetric", "symmetric, apart", "gloo")
        for peer in ("by hand", limit)
    }
    assert found.keys() == {("decode: a token", "reduce-overhead")} | sums
    assert found["sums [6, 64]: gloo", "7 us"]["rounds"]["against"] == [7000.0] * 2
    world = stored["world"]
    assert world["decode"]["same tokens"] == 1 and world["behind"].keys() == {"decode"}
    names = {"by hand", "symmetric", "symmetric, apart", "gloo"}
    assert {*world["sums"]["sums [6, 64]"]} == names


def test_serving_has_rows(ended_at_once: Ended) -> None:
    done = ended_at_once("serving.py", "--rows", "decode,luck")
    assert done.returncode == 1 and "rows luck: there are decode, together" in done.stderr
    done = ended_at_once("serving.py", "--rows", "decode,sums")
    assert done.returncode == 1 and "row sums needs ranks" in done.stderr


def test_survivors_beside_limits(tmp_path: Path) -> None:
    """A rank is killed; losses of the one that is left are those of plain torch in float64."""
    few = ("--backend", "gloo", "--small", "--moments", "1", "--rounds", "2")
    stored = written(tmp_path, "survivors.py", *few)
    found = {row["name"]: row for row in stored["rows"]}
    kill = {f"kill: {name}" for name in ("detection", "rebuild", "next step", "losses")}
    assert found.keys() == kill | {"idle: a run", "save: steps beside it"}
    assert all(min(row["rounds"]["ours"] + row["rounds"]["against"]) > 0 for row in stored["rows"])
    limits = {
        name: found[f"kill: {name}"]["rounds"]["against"] for name in ("detection", "next step")
    }
    assert limits == {"detection": [5e9], "next step": [5e9]}
    (moment,) = stored["world"]["kill"]
    assert moment["went on"] and moment["lost"] <= 1 and moment["left"] == [], moment
    assert moment["error"] < 1e-6
    assert len(stored["world"]["save"]["a save returns after, ns"]) == 3


@pytest.mark.parametrize("what", ["naps", "layers"])
def test_pipelines_beside_tables_and_torch(tmp_path: Path, what: str) -> None:
    """The benchmark ends with an error where a result is wrong."""
    few = ("--schedules", "gpipe,interleaved,zb1p", "--compiler", "eager", "--costs", "h100")
    few = (*few, "--microbatches", "2" if what == "layers" else "4")
    rows = written(tmp_path, "pipelines.py", what, *SMALL, *few, ranks=2)["rows"]
    found = {(row["name"], row["alternative"]): row["rounds"] for row in rows}
    if (
        what == "naps"
    ):  # of 1 ms: forwards and both halves of backwards of 4 microbatches, idle time
        slots = {"gpipe": 15, "1f1b": 15, "interleaved": 27, "zb1p": 13, "zbv": 25, "dualpipev": 26}
        for name, count in slots.items():
            times = found[f"naps of 1 ms, {name}: time", "table, as told"]
            assert times["against"] == pytest.approx([count * 1e6] * 2)
            assert min(times["ours"]) > (24e6 if count > 24 else 12e6)  # what a rank works
            measured = found[f"naps of 1 ms, {name}: time", "table"]["against"]
            assert min(measured) > count * 1e6  # no nap is shorter than it is told to be
        by_hand = {name for name, alternative in found if alternative == "by hand"}
        assert by_hand == {f"naps of 1 ms, {name}: time" for name in slots}
        return
    peers = {name: {"torch", "torch, compiled"} for name in ("gpipe", "interleaved")}
    for name, others in {**peers, "zb1p": {"torch"}}.items():
        for peer in others:
            assert min(found[f"llama3-8b, {name}: time", peer]["ours"]) > 0
        for what in ("formula", "predicted"):
            assert min(found[f"llama3-8b, {name}: bubble", what]["against"]) > 0
    assert len(found) == 11


def test_what_ran_eagerly_is_told(layers_models: Any) -> None:
    """A number that is computed is known when the program runs: no graph can hold it."""
    eagerly = importlib.import_module("_measure").eagerly
    mesh = mf.DeviceMesh([0])
    with mf.FusionDefinition("scaled") as fd:
        x, a = fd.define_tensor([8], mesh=mesh), fd.define_scalar(dtype=float)
        fd.add_output(x * (a * 2.0) + 1.0)
    lines = eagerly(mf.compile(fd))
    assert lines and all(re.match(r"%.*: runs? eagerly, it uses %", line) for line in lines)
    with mf.FusionDefinition("plain") as fd:
        fd.add_output(fd.define_tensor([8], mesh=mesh) * 2.0)
    assert eagerly(mf.compile(fd)) == []


@pytest.fixture
def layers_models(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("_layers_models")


def drawn(models: Any, name: str, phase: str) -> tuple[Any, dict[str, Tensor], Tensor]:
    """A small layer, its inputs in float64, and what it gives."""
    (case,) = models.cases([name], phase, None, 7, True)
    w = case.draw(torch.device("cpu"), torch.float64)
    return case, w, case.layer(w, lambda n, x: F.linear(x, w[n], w.get(f"{n}_bias")))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_llama_layer_is_one(layers_models: Any, phase: str) -> None:
    case, w, got = drawn(layers_models, "llama3-70b", phase)
    m, x = case.model, w["x"]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def heads(weight: Tensor) -> Tensor:
        return torch.stack((norm(x, w["norm_1"]) @ weight.T).split(m.head, -1), 1)

    half, at = m.head // 2, torch.arange(x.shape[1]) + (case.cache if phase == "decode" else 0)
    turn = torch.polar(  # the angles are computed in float32
        torch.ones(len(at), half, dtype=torch.float64),
        torch.outer(at.float(), 500000.0 ** -(torch.arange(half).float() / half)).double(),
    )

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    q, k, v = turned(heads(w["q"])), turned(heads(w["k"])), heads(w["v"])
    if phase == "decode":
        k, v = torch.cat([w["keys"], k], 2), torch.cat([w["values"], v], 2)
    times = m.heads // m.kv_heads
    mixed = []
    for head in range(m.heads):
        scores = q[:, head] @ k[:, head // times].mT / m.head**0.5
        if phase == "prefill":
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        mixed.append(scores.exp() / scores.exp().sum(-1, keepdim=True) @ v[:, head // times])
    y = x + torch.cat(mixed, -1) @ w["o"].T
    z = norm(y, w["norm_2"])
    gate = z @ w["gate"].T
    want = y + (gate * torch.sigmoid(gate) * (z @ w["up"].T)) @ w["down"].T
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt3-175b", "minilm"])
def test_other_layers_are_those_of_torch(layers_models: Any, name: str) -> None:
    case, w, got = drawn(layers_models, name, "prefill")
    m, is_gpt = case.model, name == "gpt3-175b"
    theirs = torch.nn.TransformerEncoderLayer(
        m.width, m.heads, m.hidden, 0.0, norm_first=is_gpt, batch_first=True, dtype=torch.float64,
        activation=partial(F.gelu, approximate="tanh" if is_gpt else "none"),
    )  # fmt: skip
    of = {
        "self_attn.out_proj.": "o", "linear1.": "up", "linear2.": "down",
        "norm1.": "norm_1", "norm2.": "norm_2",
    }  # fmt: skip
    state = {f"{theirs}weight": w[ours] for theirs, ours in of.items()}
    state |= {f"{theirs}bias": w[f"{ours}_bias"] for theirs, ours in of.items()}
    state["self_attn.in_proj_weight"] = torch.cat([w[n] for n in "qkv"])
    state["self_attn.in_proj_bias"] = torch.cat([w[f"{n}_bias"] for n in "qkv"])
    theirs.load_state_dict(state)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(case.tokens, dtype=torch.float64)
    torch.testing.assert_close(got, theirs(w["x"], mask if is_gpt else None))


def test_an_option_that_is_not_there(
    layers_models: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = importlib.import_module("_layers_peers")
    old = dataclasses.make_dataclass("Options", [])
    new = dataclasses.make_dataclass("Options", [("compile", str, "auto")])
    monkeypatch.setattr("mdfuse.Options", new)
    assert peers.options("always") == new("always")
    assert peers.options(None) is None
    monkeypatch.setattr("mdfuse.Options", old)
    with pytest.raises(SystemExit):
        peers.options("always")
    assert "no field `compile`" in capsys.readouterr().err


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_result_that_is_not_computed_anew(layers_models: Any, is_stale: bool) -> None:
    figures = importlib.import_module("_layers_figures")
    x = torch.randn(4)
    layer = SimpleNamespace(parts={"x": x}, wholes={"x": x.clone()})
    kept, want = x * 2, x * 2
    error = figures._error(layer, lambda: kept if is_stale else x * 2, want.double())
    assert math.isnan(error) if is_stale else error < 1e-6


def test_host_time_is_measured_in_turns_and_by_itself(layers_models: Any) -> None:
    """The limit is that of a replay which nothing else stands between."""
    figures = importlib.import_module("_layers_figures")
    (case,) = layers_models.cases(["llama3-8b"], "prefill", None, 0, True)
    called: list[str] = []
    ranks = SimpleNamespace(
        device=torch.device("cuda"), comm=SimpleNamespace(size=1), settle=lambda: None
    )
    plan = figures.Plan(ranks=ranks, rounds=5, peers=(), options=None, compiler="inductor")
    ready = {
        name: figures.Ready(call=partial(called.append, name), peak=0, error=0.0)
        for name in ("mdfuse", "graph", "eager")
    }

    def changes() -> int:
        return sum(a != b for a, b in pairwise(called))

    found = list(figures._times(plan, case, ready, "host, in turns", figures.host_time, 8))
    assert [row.limit for row in found] == [None, None] and changes() > len(ready)
    called.clear()
    *beside, alone = figures._by_itself(plan, case, ready)
    assert changes() == len(ready) - 1
    assert [row.alternative for row in beside] == ["graph", "eager"]
    assert {row.name for row in (*beside, alone)} == {"llama3-8b, prefill: host, by itself"}
    assert [row.limit for row in beside] == [None, None]
    assert (alone.sizes, alone.limit, alone.kind) == ("12 inputs", 25.0, "added")
    assert alone.ours == beside[0].ours and len(alone.ours) == 5
    called.clear()
    (alone,) = figures._by_itself(plan, case, {"mdfuse": ready["mdfuse"]})  # without peers
    assert alone.alternative == "nothing" and {*called} == {"mdfuse"}


def test_times_to_draw(tmp_path: Path, layers_models: Any) -> None:
    plot = importlib.import_module("_layers_plot")
    row = {"name": "a, decode: GPU, one call", "sizes": "4 rows", "alternative": "graph"}
    took = {"ours": {"median": 2000.0}, "against": {"median": 1000.0}}
    host = {**row, "name": "a, decode: host"}
    (tmp_path / "a.json").write_text(json.dumps({"rows": [row | took, host | took]}))
    assert plot.times([tmp_path / "a.json"]) == {"a, decode\n4 rows": {"mdfuse": 2, "graph": 1}}


def results(name: str, key: str = "alternative") -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of a result that the repository keeps, by name and what they are beside."""
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    return {(row["name"], row[key]): row for row in json.loads(file.read_text())["rows"]}


def stored(name: str) -> dict[str, dict[str, Any]]:
    """These rows by name alone."""
    return {what: row for (what, _), row in results(name).items()}


def shown(*heading: str) -> list[list[str]]:
    """The rows of the table of docs/measured.md whose heading has these words."""
    page = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    tables = re.findall(r"^(\|.*\|)\n\|[-|]+\|\n((?:\|.*\|\n)+)", page, re.MULTILINE)
    (rows,) = (rows for first, rows in tables if all(word in first for word in heading))
    return [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in rows.splitlines()]


def time_of(text: str) -> float:
    """Nanoseconds."""
    number, unit = text.split()
    return float(number) * {"µs": 1e3, "ms": 1e6}[unit]


def is_time(text: str, figure: dict[str, Any]) -> bool:
    return bool(time_of(text) == pytest.approx(figure["median"], rel=0.005))


def is_ratio(cell: str, row: dict[str, Any], off: float = 0.0006) -> bool:
    """Whether a cell begins with the median of a ratio."""
    return bool(float(cell.split()[0]) == pytest.approx(row["figure"]["median"], abs=off))


def is_told(cell: str, row: dict[str, Any], off: float = 0.0006) -> bool:
    """Whether a cell has the median and the quartiles of a ratio."""
    wanted = [row["figure"][key] for key in ("median", "low", "high")]
    return [float(x) for x in re.findall(r"[\d.]+", cell)] == pytest.approx(wanted, abs=off)


def test_host_times_that_the_page_shows() -> None:
    loop = "8 x (all-gather, matmul, reduce-scatter)"
    names = {"replayed": f"replayed, {{}}: {loop}", "run": loop}
    rows = shown("host_latency", "by hand")
    assert len(rows) == 6
    for name, what, ours, against, ratio in rows:
        kind, _, measure = what.partition(", ")
        row = stored(f"host_latency-{name}")[names[kind].format(measure)]
        assert is_time(ours, row["ours"])
        assert is_time(against, row["against"])
        assert is_told(ratio, row, 0.006)


def test_what_seeing_costs_on_the_page() -> None:
    file = stored("tracing")
    rows = shown("each instruction", "traced")
    assert len(rows) == 2
    for what, plain, *added in rows:
        name, _, count = what.replace("`", "").partition(": ")
        for kind, cell in zip(("traced", "ranges"), added, strict=True):
            row = file[f"{name}, {kind}: added per instruction"]
            assert row["sizes"] == count
            assert is_ratio(cell, row, 0.006)
        each = file[f"{name}, traced: added per instruction"]
        assert time_of(plain) == pytest.approx(each["against"]["median"] / each["per"], abs=6)
    for what, of, time in shown("processor time"):
        assert file[what]["sizes"] == of
        assert is_time(time, file[what]["ours"])


def test_what_verification_takes_on_the_page() -> None:
    found = results("lowering", "sizes")
    rows = shown("verified", "defined and lowered")
    assert len(rows) == sum("against lowering" in name for name, _ in found)
    for what, ours, against, ratio in rows:
        name, _, count = what.rpartition(": ")
        row = found[f"verify, against lowering: {name}", count]
        assert time_of(ours) == pytest.approx(row["ours"]["median"], abs=6e4)
        assert time_of(against) == pytest.approx(row["against"]["median"], abs=6e4)
        assert is_told(ratio, row, 0.006)


def test_what_same_bits_cost_is_measured(tmp_path: Path) -> None:
    rows = written(tmp_path, "same_bits.py", "--quick")["rows"]
    names = [row["name"] for row in rows]
    assert names[0] == "forward on 1 rank" and names[2] == "a step of training on 1 rank"
    assert [row["ours"]["median"] for row in rows[1::2]] == [0.0, 0.0]
    assert min(row["ours"]["median"] for row in rows[::2]) > 0


def test_what_seeing_costs_is_measured(tmp_path: Path) -> None:
    names = [row["name"] for row in written(tmp_path, "tracing.py", "--quick")["rows"]]
    for words in ("chain, traced", "chain, ranges", "posting, traced", "timeline", "report"):
        assert [name for name in names if name.startswith(words)], words


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("costs-h200", "predicted on a GPU"),
        ("costs-nccl-2", "predicted on two GPUs"),
        ("costs-nccl-2-h200", "predicted on two H200s"),
    ],
)
def test_predicted_times_that_the_page_shows(name: str, header: str) -> None:
    file, rows = stored(name), shown(header)
    assert {cells[0] for cells in rows} == file.keys()
    for name, of, predicted, measured, ratio in rows:
        row = file[name]
        assert of == row["sizes"]
        assert is_time(predicted, row["ours"])
        assert is_time(measured, row["against"])
        assert is_told(ratio, row, 0.006)


def test_predicted_times_stand_beside_measured_ones(tmp_path: Path) -> None:
    """A second for each piece of work: predictions are what the table says."""
    from mdfuse.seeing import UNIT, CostTable
    from mdfuse.seeing.cost_tables import machine_of

    table = CostTable(
        costs=UNIT, machine=machine_of(torch.device("cpu"), "gloo"), ranks=1, date="2026-11-23",
        mean_error=0.5, p95_error=0.5, held_out={"mlp": (1.0, 2.0)},
    )  # fmt: skip
    (tmp_path / "table.json").write_text(table.as_json())
    chosen = ("--costs", "table.json", "--model", "minilm", "--kinds")
    file = written(tmp_path, "costs.py", *SMALL, *chosen)
    assert file["world"]["held_out"] == {"mlp": [1.0, 2.0]}
    assert "off by 50% on average" in file["world"]["table"] and file["world"]["eager"] == []
    (row,) = file["rows"]
    works = 6 * 12  # of a layer: six linear layers, attention, GELU, two sums, two norms
    assert set(row["rounds"]["ours"]) == {works * 1e9}
    assert min(row["rounds"]["against"]) > 0 and row["alternative"] == "measured"
    (kinds,) = file["world"]["kinds"].values()
    predicted = {kind: seconds for kind, (seconds, _) in kinds.items() if seconds}
    once = {"scaled_dot_product_attention": 6.0, "gelu": 6.0, "add": 12.0, "layer_norm": 12.0}
    assert predicted == {"linear": 36.0, **once}
    assert all(kinds[kind][1] > 0 for kind in predicted), "all of them were run"


def test_posts_that_the_page_shows() -> None:
    names = ("dist.", "process group", "lane, forked", "lane, at once")
    rows = shown("way to post")
    for name, (_, median) in zip(names, rows, strict=True):
        row = stored("posting_lanes-nccl-2")[f"all-gather: {name}"]
        assert is_time(median, row["ours"])


def test_definitions_that_the_page_shows() -> None:
    rows = shown("definitions.json")
    for place, name in enumerate(("definitions", "definitions-xeon"), 1):
        file = ROOT / "benchmarks" / "results" / f"{name}.json"
        for row, cells in zip(json.loads(file.read_text())["rows"], rows, strict=False):
            figure = row["figure"]["median"]
            assert time_of(cells[place]) == pytest.approx(figure * 1e3, abs=51)


def in_turns(found: Mapping[tuple[str, str], dict[str, Any]], layer: str) -> float:
    """Nanoseconds of the host for a replay; older results call that just "host"."""
    row = found.get((f"{layer}: host, in turns", "graph")) or found[f"{layer}: host", "graph"]
    return float(row["ours"]["median"])


def test_layers_that_the_page_shows() -> None:
    found = results("layers-h100")
    rows = shown("layer", "compiled-graph")
    assert {cells[0] for cells in rows} == {name.partition(":")[0] for name, _ in found}
    for layer, ours, by_hand, compiled, host, memory in rows:
        queued = {
            peer: found[f"{layer}: GPU, queued", peer] for peer in ("graph", "compiled-graph")
        }
        assert is_time(ours, queued["compiled-graph"]["ours"])
        for cell, peer in ((by_hand, "graph"), (compiled, "compiled-graph")):
            ratio = queued[peer]["figure"]["median"]
            assert float(cell.split()[0]) == pytest.approx(ratio, abs=0.0006)
        alone = found[f"{layer}: host, by itself", "graph"]["ours"]["median"]
        assert time_of(host) == pytest.approx(alone, rel=0.005)
        assert is_ratio(memory, found[f"{layer}: memory at the peak", "compiled-graph"], 0.006)
        error = found[f"{layer}: error against float64", "compiled"]["figure"]["median"]
        assert error == pytest.approx(1, abs=0.002)


#: what -> the file, how its rows are named behind what the table says, the table's first heading,
#: whom it compares with, and how many rows it has.
RATIOS: dict[str, tuple[str, str, str, tuple[str, ...], int]] = {
    "layers on two GPUs": (
        "layers-h200-2", "GPU, queued", "on two GPUs",
        ("graph", "compiled-graph", "dtensor", "dtensor-compiled", "dtensor-compiled-graph"), 2,
    ),
    "layers whose tokens are split": (
        "layers-sequence-2", "GPU, queued", "with tokens split",
        ("alone-graph", "compiled-graph", "reduced-graph"), 1,
    ),
    "layers whose tokens are split over four": (
        "layers-sequence-4", "GPU, queued", "four GPUs, tokens split",
        ("alone-graph", "compiled-graph", "reduced-graph"), 1,
    ),
    "overlap beside copies": (
        "overlap-alone-h100", "time", "as over 180 GB/s",
        ("ideal", "one after the other", "by hand"), 8,
    ),
    "overlap beside shorter copies": (
        "overlap-alone-h100-353", "time", "as over 353 GB/s",
        ("ideal", "one after the other", "by hand"), 4,
    ),
    "overlap on two GPUs": (
        "overlap-symmetric-2", "time", "two GPUs: rows",
        ("ideal", "nccl", "compiled", "torch, fused"), 8,
    ),
    "overlap on four GPUs": (
        "overlap-symmetric-4", "time", "four GPUs: rows",
        ("ideal", "nccl", "compiled", "torch, fused"), 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", RATIOS)
def test_ratios_that_the_page_shows(what: str) -> None:
    name, of, heading, peers, count = RATIOS[what]
    found = results(name)
    rows = shown(heading, peers[-1])
    assert len(rows) == count
    for layer, ours, *ratios in rows:
        for cell, peer in zip(ratios, peers, strict=True):
            row = found[f"{layer}: {of}", peer]
            assert is_time(ours, row["ours"])
            assert is_ratio(cell, row)


def test_what_is_told_of_layers_whose_tokens_are_split() -> None:
    found = results("layers-sequence-2")
    layer = "llama3-70b, prefill"
    told = f"takes {found[f'{layer}: GPU, queued', 'alone-graph']['figure']['median']:.2f} times"
    assert told in (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "measured.md").read_text()
    peak = found[f"{layer}: memory at the peak", "alone-graph"]
    ours, others = (peak[side]["median"] >> 20 for side in ("ours", "against"))
    assert f"{ours} MiB at the peak beside {others}" in page
    once = found[f"{layer}: GPU, one call", "alone-graph"]["figure"]["median"]
    assert f"(`GPU, one call` is {once:.2f} of `alone-graph`)" in page


def test_training_that_the_page_shows() -> None:
    found = results("training-h200")
    rows = shown("a step", "compiled-graph")
    assert len(rows) == 3
    for what, ours, *ratios, host, memory, error in rows:
        layer = f"{what.partition(',')[0]}, prefill"
        for cell, peer in zip(ratios, ("graph", "compiled", "compiled-graph"), strict=True):
            row = found[f"{layer}: GPU, queued", peer]
            assert is_time(ours, row["ours"])
            assert is_ratio(cell, row)
        assert time_of(host) == pytest.approx(in_turns(found, layer), rel=0.005)
        assert is_ratio(memory, found[f"{layer}: memory at the peak", "compiled-graph"], 0.006)
        assert is_ratio(error, found[f"{layer}: error against float64", "compiled"])


def test_training_on_two_gpus_that_the_page_shows() -> None:
    rows = shown("two GPUs", "memory")
    assert len(rows) == 2
    for style, peer, ours, ratio, memory in rows:
        found = results(f"training-{style}-h200-2")
        row = found["llama3-8b, prefill: GPU, queued", peer]
        assert is_time(ours, row["ours"])
        assert is_told(ratio, row)
        assert is_ratio(memory, found["llama3-8b, prefill: memory at the peak", peer], 0.006)


def test_pipelines_that_the_page_shows() -> None:
    found, rows = results("pipelines-layers-symmetric-h100-2"), shown("a pipeline of two GPUs")
    assert len(rows) == 4
    for what, peer, ours, ratio in rows:
        row = found[f"llama3-8b, interleaved: {what}", peer]
        assert is_time(ours, row["ours"])
        assert is_told(ratio, row)
    naps, rows = results("pipelines-naps-gloo-4"), shown("naps", "20 ms")
    assert len(rows) == 6
    for schedule, *cells in rows:
        columns = [(n, peer) for n in (5, 20) for peer in ("table", "by hand")]
        for (n, peer), cell in zip(columns, cells, strict=True):
            row = naps[f"naps of {n} ms, {schedule}: time", peer]
            assert is_ratio(cell, row)


def test_ucx_and_nccl_that_the_page_shows() -> None:
    found = results("backends-nccl-ucx-2-cuda", "sizes")
    for kind, *cells in shown("4 B", "256 MiB"):
        for size, cell in zip(("4 B", "1 MiB", "16 MiB", "256 MiB"), cells, strict=True):
            row = found[f"{kind}: ucx", f"{size} each, 2 ranks"]
            ours, against, ratio = (float(x) for x in re.findall(r"[\d.]+", cell))
            assert ours * 1e3 == pytest.approx(row["ours"]["median"], abs=501)
            assert against * 1e3 == pytest.approx(row["against"]["median"], abs=501)
            assert ratio == pytest.approx(row["figure"]["median"], abs=0.051)
