"""The examples on real ranks, against plain torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers import finetuned, sampling
from helpers.example_files import SMALL, example

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.cli.launched_runs import gather, local_inputs

pytestmark = pytest.mark.world(4)


def check(
    program: mf.Program,
    inputs: list[torch.Tensor],
    expected: list[torch.Tensor],
    comm: mf.Communicator,
) -> None:
    """Every rank's outputs are its parts of what is expected, and gathering puts them together."""
    results = program.run(*local_inputs(program, inputs, comm))
    gathered = gather(program, results, comm)
    for name, result, whole in zip(program.host.outputs, results, expected, strict=True):
        layout = program.host.types[name].layout
        assert layout is not None
        if comm.rank in layout.mesh:
            part = mf.shard_tensor(whole, layout, rank=comm.rank)
            torch.testing.assert_close(result.cpu(), part, rtol=1e-5, atol=1e-5)
        else:
            assert result is None
    if comm.rank == 0:
        for got, whole in zip(gathered, expected, strict=True):
            torch.testing.assert_close(got.cpu(), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_small_examples(name: str, comm: mf.Communicator) -> None:
    build, expected = SMALL[name]
    fd, inputs = build(DeviceMesh.arange(tp=4))
    check(mf.compile(fd), inputs, list(expected(*inputs)), comm)


@pytest.mark.parametrize("mesh", [DeviceMesh.arange(tp=4), DeviceMesh.arange(dp=2, tp=2)], ids=str)
def test_minilm(mesh: DeviceMesh, comm: mf.Communicator) -> None:
    minilm = example("minilm")
    fd, inputs = minilm.build(mesh)
    check(mf.compile(fd), inputs, [minilm.single_device()], comm)


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"fsdp": 4}], ids=str)
def test_training_goes_on_where_it_was_saved(
    axes: dict[str, int], comm: mf.Communicator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Losses are those of one device; what was loaded goes on to the bit."""
    train = example("train_llama")
    folder = tmp_path_factory.mktemp("state")
    alone = train.train(train.OneDevice(), 5)
    first, batches = train.Launched(DeviceMesh.arange(**axes)), train.batches()
    inputs = [(*next(batches), *train.angles(), torch.tensor(float(n))) for n in range(1, 6)]
    losses = [first(*given) for given in inputs[:3]]
    first.step.save(folder)
    losses += [first(*given) for given in inputs[3:]]
    second = train.Launched(DeviceMesh.arange(**axes))
    second.step.load(folder)
    assert [second(*given) for given in inputs[3:]] == losses[3:]
    assert losses == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"fsdp": 4}, {"dp": 2, "sp": 2}], ids=str)
def test_training_in_microbatches(axes: dict[str, int], comm: mf.Communicator) -> None:
    train = example("train_llama")
    mesh = DeviceMesh.arange(**axes)
    losses = train.train(train.Launched(mesh, train.BATCH // 4), 4)
    assert losses == pytest.approx(train.train(train.OneDevice(), 4), abs=1e-4)


def test_generating_runs_one_plan(comm: mf.Communicator) -> None:
    """Trained parameters are gathered for it."""
    generate, train = example("generate"), example("train_llama")
    engine, text = generate.opened_with(DeviceMesh.arange(tp=2, cp=2), None)
    if comm.rank:
        engine.follow()
    else:
        program = engine.programs.programs[False]
        generate.generate(engine, text.tokens("You may"), 8)
        before = program.plans.info()
        generate.generate(engine, text.tokens("You may"), 30)
        assert program.plans.info().misses == before.misses
        engine.close()
    trained = train.Launched(DeviceMesh.arange(fsdp=4)).parameters()
    for name, w in train.initial().items():
        assert torch.equal(trained[name].cpu(), w)


def test_training_stays_beside_one_device(comm: mf.Communicator) -> None:
    """Steps in f32; rank 0 has torch's losses, which would take four times as long on all."""
    train, steps = example("train_llama"), sampling.of(200, 60)
    losses = train.train(train.Launched(DeviceMesh.arange(dp=2, tp=2)), steps)
    assert losses[-1] < losses[0] / 2
    if comm.rank == 0:
        assert losses == pytest.approx(train.train(train.OneDevice(), steps), abs=1e-4)
    comm.barrier()


@pytest.mark.parametrize(
    ("axes", "schedule"), [({"pp": 2, "dp": 2}, "1f1b"), ({"pp": 4}, "zb1p")], ids=str
)
def test_training_in_stages(axes: dict[str, int], schedule: str, comm: mf.Communicator) -> None:
    """The ranks of the first rank group have the loss."""
    pipeline, train = example("pipeline"), example("train_llama")
    program = pipeline.compiled(DeviceMesh.arange(**axes), axes["pp"], 4, schedule)
    losses = train.train(pipeline.Launched(program), 4)
    if comm.rank < 4 // axes["pp"]:
        assert losses == pytest.approx(train.train(train.OneDevice(), 4), abs=1e-4)
    else:
        assert all(loss != loss for loss in losses)
    comm.barrier()


@pytest.mark.parametrize("name", ["Gemma3TextConfig", "GptOssConfig"])
def test_finetuning_goes_on_on_another_mesh(
    name: str, comm: mf.Communicator, tmp_path: Path
) -> None:
    """Split along two axes, saved, and read by fsdp alone; losses are those of torch.

    One layer of each kind takes seconds less on each rank; models of several are simulated.
    """
    if comm.rank == 0:
        comm.store.set(f"finetuned.{name}", str(tmp_path))
    shared = Path(comm.store.get(f"finetuned.{name}").decode())
    finetune = example("finetune")
    folder = finetuned.folder_of(name, tmp_path / "model", layers=1)
    given = ["--mesh", "fsdp=2,tp=2", "--recompute", "--save", str(shared / "saved")]
    losses, _ = finetune.main([*finetuned.arguments(folder, 3, *given, "--save-every", "2")])
    if comm.rank == 0:
        shutil.rmtree(shared / "saved" / "step-3")
    comm.barrier()
    given[1] = "fsdp=4"
    again, _ = finetune.main([*finetuned.arguments(folder, 3, *given, "--resume")])
    if comm.rank == 0:
        alone = finetuned.alone(folder, 3)
        assert losses == pytest.approx(alone, abs=2e-5)
        assert again == pytest.approx(alone[2:], abs=2e-5)
    comm.barrier()
