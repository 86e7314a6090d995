"""Patterns of names: which one counts, what none matches, what contradicts another one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, LayoutError, MdfuseError, Partial, Replicate, Shard
from mdfuse.compiled.imported import ImportedModel
from mdfuse.frontend.importing.place import word_by_word

MESH = DeviceMesh.arange(dp=2, tp=2)


class Layers(nn.Module):
    """Three matrices; the last is the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = ids
        for layer in self.layers:
            x = layer(x)
        return {"logits": x}


def imported(layouts: Any, **more: Any) -> ImportedModel:
    return mf.from_torch(Layers(), (torch.zeros(4, 8),), mesh=MESH, layouts=layouts, **more)


def placed(layouts: Any) -> dict[str, str]:
    fusion = imported(layouts).fusion
    return {name: str(fusion.values[name].layout) for name in fusion.inputs}


def test_the_most_exact_pattern_counts() -> None:
    found = placed(
        {
            "*": {"dp": Shard(0)},
            "layers.*": {"tp": Shard(0)},
            "layers.[1]*.weight": {"tp": Shard(1)},
            "layers.1.weight": {"dp": Shard(1)},
            "input:0": {"dp": Shard(1)},
        }
    )
    assert found == {
        "layers.0.weight": "(dp=R, tp=S0)",
        "layers.0.bias": "(dp=R, tp=S0)",
        "layers.1.weight": "(dp=S1, tp=R)",
        "layers.1.bias": "(dp=R, tp=S0)",
        "layers.2.bias": "(dp=R, tp=S0)",
        "ids": "(dp=S1, tp=R)",
    }


def test_a_pattern_for_one_name_of_a_tied_parameter_counts() -> None:
    for name in ("layers.0.weight", "layers.2.weight"):
        found = placed({"*.weight": {"dp": Shard(0)}, name: {"tp": Shard(1)}})
        assert found["layers.0.weight"] == "(dp=R, tp=S1)"


def test_patterns_of_parameters_say_nothing_of_inputs_and_outputs() -> None:
    model = imported({"*": {"dp": Shard(0)}, "input:*": {"tp": Shard(0)}, "input:0": {}})
    assert str(model.fusion.values["ids"].layout) == "(dp=R, tp=R)"
    assert model.model.outputs == {}


def test_layouts_and_negative_dims() -> None:
    order = mf.Layout(MESH, {"dp": Shard(0), "tp": Shard(0)}, order={0: ("tp", "dp")})
    model = imported({"*.1.weight": order, "*.1.bias": {"tp": Shard(-1)}})
    values = model.fusion.values
    assert values["layers.1.weight"].layout == order
    assert str(values["layers.1.bias"].layout) == "(dp=R, tp=S0)"


def test_the_report_of_patterns_of_tied_names_and_of_one_that_others_hide() -> None:
    split = {"tp": Shard(0)}
    model = imported({"layers.0.weight": split, "layers.2.weight": split, "*.1.*": {},
                      "layers.1.weight": split, "layers.1.bias": {"dp": Shard(0)}})  # fmt: skip
    assert [" ".join(line.split()) for line in model.report().splitlines()[1:6]] == [
        "layers.0.weight tp=S0 1: layers.0.weight",
        "layers.2.weight tp=S0 1: layers.0.weight",
        "*.1.* replicated 0: others count, or it is unused",
        "layers.1.weight tp=S0 1: layers.1.weight",
        "layers.1.bias dp=S0 1: layers.1.bias",
    ]


@pytest.mark.parametrize("name", ["output:logits", "output:0", "output:*"])
def test_outputs(name: str) -> None:
    model = imported({name: {"tp": Shard(1)}, "input:ids": {"dp": Shard(0)}})
    program = model.compile()
    (output,) = program.host.outputs
    assert str(program.host.types[output].layout) == "(dp=R, tp=S1)"
    x = torch.randn(4, 8)
    torch.manual_seed(0)
    found = model.outputs(mf.simulate(program, [*model.load(), x]).outputs)["logits"]
    wanted = model.model.captured.module(x)["logits"]
    torch.testing.assert_close(found, wanted.detach())


def test_the_report_shows_what_matched() -> None:
    model = imported({"layers.*.weight": {"tp": Shard(0)}, "input:*": {"dp": Shard(0)}})
    report = re.sub(r"py:\d+", "py:9", model.report())
    assert report == (
        "Layers on mesh(dp=2, tp=2): 5 parameters, 0 constants, 1 input, 1 output\n"
        "  layers.*.weight  tp=S0       2: layers.0.weight, layers.1.weight\n"
        "  input:*          dp=S0       1: input:ids\n"
        "  (no pattern)     replicated  3: layers.0.bias, layers.1.bias, layers.2.bias\n"
        "  tied: layers.0.weight = layers.2.weight\n"
        "  warning: a value split along tp is brought together (test_place.py:9): "
        "layers.*.weight splits it, 2 times"
    )


@pytest.mark.parametrize(
    ("layouts", "text"),
    [
        ({"layers.*.wieght": {"tp": Shard(0)}}, r"matches nothing(.|\n)*layers\.0\.weight"),
        ({"input:idx": {"dp": Shard(0)}}, r"matches nothing(.|\n)*input:ids"),
        (
            {"layers.0.weight": {"tp": Shard(0)}, "layers.2.weight": {"tp": Shard(1)}},
            "layers.0.weight and layers.2.weight are one, and layouts say two things of it",
        ),
        (
            {"*.1.weight": {"tp": Shard(0)}, "layers.1.*": {"tp": Shard(1)}},
            "both match layers.1.weight",
        ),
        ({"*.weight": {"pp": Shard(0)}}, r"layouts\['\*\.weight'\]: (.|\n)*pp"),
        ({"*.bias": {"tp": Shard(1)}}, r"layouts\['\*\.bias'\] for layers\.0\.bias: (.|\n)*dim"),
        ({"*.weight": {"tp": Partial("sum")}}, "layers.0.weight is Partial along tp"),
        ({"output:*": {"tp": Partial("sum")}}, "output:logits is Partial along tp"),
        ({"*.weight": {"tp": 0}}, r"layouts\['\*\.weight'\]: axis tp: 0 is not a placement"),
        ({3: {"tp": Shard(0)}}, "says something of names"),
    ],
)
def test_refused(layouts: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        imported(layouts)


def test_equal_patterns_that_agree_are_refused_too() -> None:
    layouts = {"*.1.weight": {"tp": Shard(0)}, "layers.1.*": {"tp": Shard(0)}}
    with pytest.raises(LayoutError, match="both match"):
        imported(layouts)


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ({"*.wieght": 3}, r"blocks\['\*\.wieght'\] matches nothing"),
        ({"layers.1.weight": 3}, "the blocks make up dim 0, which has 8 places"),
        ({"layers.1.weight": [4, 3]}, "the blocks make up dim 0"),
        ({"layers.1.weight": "two"}, "the blocks make up dim 0"),
        ({"layers.1.bias": 2}, "blocks stand along one dim"),
        ({"layers.1.weight": {2: 2}}, "blocks stand along one dim"),
        ({"*.1.weight": 2, "layers.1.*": 2}, "blocks: (.|\n)*both match layers.1.weight"),
    ],
)
def test_blocks_that_are_refused(blocks: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        imported({"*.weight": {"tp": Shard(0)}}, blocks=blocks)


@pytest.mark.parametrize("gather", ["pp", ("dp", "pp")])
def test_axes_that_are_gathered_are_axes(gather: Any) -> None:
    with pytest.raises(MdfuseError, match="pp"):
        imported({}, gather=gather)


def test_replicate_is_a_placement_as_well() -> None:
    assert placed({"*": {"tp": Replicate()}})["ids"] == "(dp=R, tp=R)"


@pytest.mark.parametrize(("name", "pattern", "wanted"), [
    ("layers.0", "layers.*", True),
    ("layers.0.mlp", "layers.*", False),
    ("layers.12.mlp", "layers.1?.m*", True),
    ("layers", "*", True),
    ("layers.0", "*", False),
    ("layers.3", "layers.[0-2]", False),
])  # fmt: skip
def test_patterns_go_word_by_word(name: str, pattern: str, wanted: bool) -> None:
    assert word_by_word(name, pattern) is wanted
