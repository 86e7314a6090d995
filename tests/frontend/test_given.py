"""What is of another sort than a call of an imported module takes is refused, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import mdfuse as mf
from mdfuse import DeviceMesh, Shard

MODULE = nn.Linear(4, 8)
X = torch.zeros(3, 4)
W = {"weight": torch.ones(8, 4), "bias": torch.ones(8)}
imported = partial(mf.from_torch, MODULE, (X,), mesh=DeviceMesh.arange(tp=2))
MODEL = imported(layouts={"weight": {"tp": Shard(0)}})
train = partial(MODEL.training_step, lambda y: y.sum())
sgd = partial(mf.optim.sgd, lr=0.1)


def each(change: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    return {name: change(x) for name, x in W.items()}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "load 5": (lambda: MODEL.load(5), "load of 5"),
    "load bytes": (lambda: MODEL.load(b"x"), "load of b'x'"),
    "load list": (lambda: MODEL.load([]), r"load of \[\]"),
    "load zero": (lambda: MODEL.load("a\0b"), "a path is text"),
    "a number": (lambda: MODEL.load({**W, "weight": 5}), "weight cannot be read(.|\n)*5, and no"),
    "arrays": (lambda: MODEL.load(each(lambda x: x.numpy())), "an ndarray of shape"),
    "sparse": (lambda: MODEL.load(each(lambda x: x.to_sparse())), "layout torch.sparse_coo"),
    "meta": (lambda: MODEL.load(each(lambda x: x.to("meta"))), "has no numbers"),
    "key 5": (lambda: MODEL.load({5: X, **W}), r"source\[5\](.|\n)*names, which are text"),
    "rename 5": (lambda: MODEL.load(W, rename=5), "rename=5"),
    "rename none": (lambda: MODEL.load(W, rename=lambda n: None), r"'weight'\) returns None"),
    "comm 5": (lambda: MODEL.load(W, comm=5), "comm=5"),
    "save comm": (lambda: MODEL.save("x", [*W.values()], comm=5), "comm=5"),
    "save weights": (lambda: MODEL.save("x", 5), "weights=5"),
    "save a weight": (lambda: MODEL.save("x", [5, None]), r"weights\[0\](.|\n)*it is 5"),
    "rank text": (lambda: MODEL.load(W, rank="a"), "rank='a'"),
    "rank float": (lambda: MODEL.load(W, rank=1.0), "rank=1.0"),
    "rank bool": (lambda: MODEL.load(W, rank=True), "rank=True"),
    "rank below": (lambda: MODEL.load(W, rank=-1), "rank=-1"),
    "device": (lambda: MODEL.load(W, device="nope"), "device='nope'"),
    "device 5.5": (lambda: MODEL.load(W, device=5.5), "device=5.5"),
    "gather 5": (lambda: imported(gather=5), "gather=5"),
    "skipped": (lambda: imported(skipped=[5]), r"skipped=\[5\]"),
    "no buffer": (lambda: imported(buffers={"nope": X}), "none of its buffers"),
    "alpha": (lambda: imported(adapters={"*": (2, float("nan"))}), "a finite alpha"),
    "alpha huge": (lambda: imported(adapters={"*": (2, 10**400)}), "a finite alpha"),
    "kwargs 5": (lambda: imported(kwargs={5: X}), r"kwargs\[5\]"),
    "plan 5": (lambda: mf.from_plan(MODULE, {5: ColwiseParallel()}), r"plan\[5\]"),
    "plan of 5": (lambda: mf.from_plan(5, {"": ColwiseParallel()}), "from_plan of int"),
    "axis 5": (lambda: mf.from_plan(MODULE, {"": ColwiseParallel()}, 5), "axis=5"),
    "extra": (lambda: train(optimizer=sgd, extra=5), "extra=5"),
    "frozen": (lambda: train(optimizer=sgd, frozen=5), "frozen=5"),
    "master": (lambda: train(optimizer=sgd, master=1), "master=1"),
    "clip": (lambda: train(optimizer=sgd, clip=-1.0), "clip=-1.0"),
    "clip nan": (lambda: train(optimizer=sgd, clip=float("nan")), "clip=nan"),
    "clip str": (lambda: train(optimizer=sgd, clip="1"), "clip='1'"),
    "loss": (lambda: MODEL.training_step(5, optimizer=sgd), "loss=5"),
    "optimizer": (lambda: train(optimizer=10**5000), "optimizer=an integer of"),
    "outputs": (lambda: MODEL.outputs(5), "results=5"),
    "state": (lambda: train(optimizer=sgd).state(5), "weights=5"),
    "updated": (lambda: train(optimizer=sgd).updated([]), r"outputs=\[\]"),
    "arguments": (lambda: train(optimizer=sgd).arguments([*W.values()], {}, X), r"\(none\)"),
    "compile": (lambda: mf.compile(MODEL.definition, should_merge={}), r"should_merge=\{\}"),
    "pipeline": (lambda: mf.pipeline(5, microbatches=1, batch={"x": 0}), "pipeline takes a Fus"),
    "schedule": (lambda: mf.Schedule.named("1f1b", stages=2, microbatches=10**12), "1048576"),
    "rows": (lambda: mf.Schedule.from_rows([[5]]), "5 where rows"),
    "digits": (lambda: mf.Schedule.from_rows([["0F" + "9" * 5000]]), "no action"),
    "init device": (lambda: mf.init(backend="null", device="nope"), "device='nope'"),
    "init size": (lambda: mf.init(backend="null", rank=0, size=2.0), "size=2.0"),
    "hosts": (lambda: DeviceMesh([0, 1], hosts=[torch.tensor(1.5), 0]), "not a host"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(mf.MdfuseError, match=text):
        call()


def test_buffers_have_their_shapes_and_dtypes() -> None:
    with torch.device("meta"):
        module = nn.BatchNorm1d(4).eval()
    assert module.running_mean is not None
    many = {"num_batches_tracked": torch.tensor(1)}
    for given, text in (
        ({"running_mean": torch.ones(5)}, r"\[5\], and the buffer \[4\]"),
        ({"running_mean": torch.ones(4).double()}, "float64, and the buffer torch.float32"),
        ({"running_mean": np.ones(4)}, "no tensor"),
    ):
        with pytest.raises(mf.DefinitionError, match=text):
            mf.from_torch(module, (X,), mesh=DeviceMesh([0]), buffers=given)
    mf.from_torch(module, (X,), mesh=DeviceMesh([0]), buffers=many)


def test_flags_of_states(tmp_path: Path) -> None:
    with mf.FusionDefinition("count") as fd:
        n = fd.define_tensor([2], name="n")
        fd.add_output(n + 1, reuse=n)
    step = mf.Step(mf.compile(fd), {"n": torch.zeros(2)})
    for call in (
        lambda: step.save(tmp_path, portable=np.ones(2)),  # type: ignore[arg-type]
        lambda: step.load(tmp_path, cast=1),  # type: ignore[arg-type]
        lambda: mf.Step(mf.compile(fd), 5),  # type: ignore[arg-type]
    ):
        with pytest.raises(mf.ProgramError):
            call()
    assert not [*tmp_path.iterdir()]
