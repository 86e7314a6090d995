"""Arguments of the wrong kind where modules of torch are imported, loaded, trained and saved.

Right arguments but for one or two: in place of these stands something odd, or one of their own
items or keys is. Each is refused by an error of mdfuse, or is right after all.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable
from contextlib import chdir
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import mdfuse as mf
from fuzz.arguments import MESH, ODD, defined, mixed
from mdfuse import Shard, TensorSpec
from mdfuse.compiled.imported import ImportedModel
from mdfuse.compiled.training import TrainingStep

Calls = dict[Callable[..., Any], dict[str, Callable[[], Any]]]

#: What a function that a user passes may return; what it raises is the user's own error.
RETURNED = (None, 5, b"x", [], (), "x", 1.5, torch.ones(2), {}, object())
ODDER: tuple[Callable[[], Any], ...] = (
    *(x for x in ODD if not callable(x())), lambda: torch.nan, lambda: "../x",
    lambda: "x" * 300, lambda: "/proc/1", lambda: [b"x"], lambda: {"weight": 5}, lambda: {5: X},
    lambda: {"0.weight": np.ones((8, 4), "f")}, lambda: {"*": 2**70}, lambda: {"*": (2, torch.nan)},
    lambda: {"*": True}, lambda: {"*": {0: -1}}, lambda: {"": 1}, lambda: "*", lambda: ["*"],
    lambda: torch.ones(8, 4, device="meta"), lambda: [None] * 4, lambda: {"n": None},
    lambda: "meta", lambda: torch.ones(2).to_mkldnn(),
    lambda: torch.nested.nested_tensor([torch.ones(2)]),
    *(lambda x=x: lambda *_, **__: x for x in RETURNED),
)  # fmt: skip
X = torch.ones(6, 4)


@cache
def module() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4))


@cache
def model() -> ImportedModel:
    layouts = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}
    return mf.from_torch(module().eval(), (X,), mesh=MESH, layouts=layouts)


def optimizer() -> Any:
    return partial(mf.optim.sgd, momentum=0.9, lr=0.1)


def loss(y: Any, target: Any = None, *_: Any, **__: Any) -> Any:
    return mf.ops.mse_loss(y, target)


@cache
def training() -> TrainingStep:
    extra = {"target": TensorSpec((6, 4))}
    return model().training_step(loss, optimizer=optimizer(), extra=extra)


def counted() -> mf.Program:
    """A program with a state, of one rank."""
    with mf.FusionDefinition("count") as fd:
        n, by = fd.define_tensor([2], name="n"), fd.define_tensor([2], name="by")
        fd.add_output(n.sum())
        fd.add_output(n + by, reuse=n)
    return mf.compile(fd)


def importing() -> Calls:
    """What imports, by right arguments."""
    return {
        mf.from_torch: {
            "module": module,
            "args": lambda: (X,),
            "kwargs": dict,
            "mesh": lambda: MESH,
            "layouts": lambda: {"0.*": {"tp": Shard(0)}, "input:0": {}},
            "blocks": lambda: {"0.weight": {0: 2}},
            "gather": lambda: ["tp"],
            "adapters": lambda: {"0": (2, 1.5)},
            "dynamic_shapes": lambda: {"input": {0: "rows"}},
            "buffers": lambda: {"3.running_mean": torch.zeros(4)},
            "skipped": lambda: ["x"],
        },
    }


def others() -> Calls:
    """What takes no longer than a blink, by right arguments."""
    step, named = training(), {n: x for n, x in module().state_dict().items() if x.ndim}
    weights = model().load()
    running = mf.Step(counted(), {"n": torch.zeros(2)})
    return {
        mf.from_plan: {
            "module": module,
            "plan": lambda: {"0": ColwiseParallel(), "2": RowwiseParallel(), "3": "replicate"},
            "axis": lambda: "tp",
        },
        model().load: {
            "source": lambda: {**named},
            "rank": lambda: 1,
            "comm": lambda: None,
            "device": lambda: "cpu",
            "rename": lambda: str,
        },
        model().save: {
            "folder": lambda: "new",
            "weights": lambda: [*weights],
            "comm": lambda: None,
        },
        model().training_step: {
            "loss": lambda: loss,
            "optimizer": optimizer,
            "extra": lambda: {"target": TensorSpec((6, 4), layout={"tp": Shard(0)})},
            "frozen": lambda: ["2.*"],
            "clip": lambda: 1.0,
            "master": lambda: True,
        },
        model().compile: {"options": mf.Options},
        model().outputs: {"results": lambda: [torch.ones(6, 4)]},
        step.compile: {"options": mf.Options},
        step.state: {"weights": lambda: [*weights]},
        step.arguments: {"weights": lambda: [*weights], "state": lambda: step.state(weights)},
        step.updated: {"outputs": lambda: [*step.fusion.outputs]},
        step.start: {"weights": lambda: [*weights], "options": mf.Options},
        mf.Step: {"program": counted, "state": lambda: {"n": torch.zeros(2)}},
        running.__call__: {"extents": dict},
        running.save: {"folder": lambda: "state", "portable": lambda: True},
        running.load: {"folder": lambda: "state", "cast": lambda: True},
        mf.pipeline: {
            "definition": defined,
            "microbatches": lambda: 2,
            "batch": lambda: {"x": 0},
            "schedule": lambda: "forward",
            "options": mf.Options,
            "should_merge": lambda: None,
        },
        mf.Schedule.named: {
            "name": lambda: "1f1b",
            "stages": lambda: 2,
            "microbatches": lambda: 3,
            "groups": lambda: [0, 1],
        },
        mf.Schedule.from_rows: {"rows": lambda: [["0F0", "0F1"], ["1F0", "", "1F1"]]},
        mf.compile: {
            "definition": defined, "options": mf.Options, "should_merge": lambda: None,
        },
        TensorSpec: {
            "shape": lambda: (6, 4),
            "dtype": lambda: torch.float32,
            "mesh": lambda: MESH,
            "layout": lambda: {"tp": Shard(0)},
            "order": lambda: {0: ["tp"]},
            "stride_order": lambda: [0, 1],
        },
        mf.init: {"options": mf.Options, "backend": lambda: "null", "rank": lambda: 0,
                  "size": lambda: 1, "device": lambda: "cpu"},
    }  # fmt: skip


def fuzz(drawn: random.Random) -> None:
    """Call something with an odd argument or two, and use what comes of it."""
    calls = importing() if drawn.random() < 0.3 else others()
    call = drawn.choice([*calls])
    with tempfile.TemporaryDirectory() as folder, chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = call(**mixed(drawn, call, calls[call], ODDER))
        if isinstance(found, ImportedModel):
            found.compile()
            found.report()
        if isinstance(found, TensorSpec):
            model().training_step(lambda y, x: y.sum(), optimizer=optimizer(), extra={"x": found})
