"""Calls of submodules in exported graphs, and patterns of submodules."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers.tiny_models import llama
from torch import Tensor, nn

from mdfuse import LayoutError
from mdfuse.frontend.importing.capture import capture
from mdfuse.frontend.importing.submodules import (
    SubmoduleCall,
    Submodules,
    blocks_by_call,
    calls_of,
    listing,
    word_by_word,
)


class Layer(nn.Module):
    """A residual layer; the norm runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.norm(x)
        return x + self.linear(y)


class Net(nn.Module):
    """Two layers, of which the first has a second name, and is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.again, self.head = self.layers[0], nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.again(self.layers[0](x))
        x += 1
        return self.head(x) * 2


def _nodes(module: nn.Module, *args: Any) -> list[Any]:
    return [*capture(module, args).graph.graph.nodes]


def _of(nodes: list[Any], target: str) -> list[tuple[SubmoduleCall, ...]]:
    return [calls_of(n) for n in nodes if str(n.target) == f"aten.{target}.default"]


def test_calls_of_each_node_outermost_first() -> None:
    nodes = _nodes(Net(), torch.zeros(3, 4))
    first, second = SubmoduleCall("layers.0"), SubmoduleCall("layers.0", 1)
    assert _of(nodes, "linear") == [
        (first, SubmoduleCall("layers.0.linear")),
        (SubmoduleCall("layers.1"), SubmoduleCall("layers.1.linear")),
        (second, SubmoduleCall("layers.0.linear", 1)),
        (SubmoduleCall("again"), SubmoduleCall("again.linear")),
        (SubmoduleCall("head"),),
    ]
    assert _of(nodes, "layer_norm")[2] == (second, SubmoduleCall("layers.0.norm", 1))
    assert [calls_of(n) for n in nodes if str(n.target) == "aten.mul.Tensor"] == [()]
    assert all(calls_of(n) == () for n in nodes if n.op == "placeholder")
    assert (str(first), str(second)) == ("layers.0", "layers.0 (call 1)")


def test_blocks_are_of_the_outermost_call() -> None:
    module = Net()
    nodes, names = _nodes(module, torch.zeros(3, 4)), Submodules(module)
    blocks = blocks_by_call(nodes, names.chosen("recompute", {"layers.*": None, "*.*.linear": 1}))
    assert [*blocks] == [
        SubmoduleCall("layers.0"),
        SubmoduleCall("layers.1"),
        SubmoduleCall("layers.0", 1),
        SubmoduleCall("again"),
    ]
    targets = Counter(str(n.target) for n in blocks[SubmoduleCall("layers.0", 1)])
    assert targets["aten.linear.default"] == targets["aten.layer_norm.default"] == 1
    assert targets["aten.add.Tensor"] == 1
    head = blocks_by_call(nodes, ["head"])
    assert [*head] == [SubmoduleCall("head")]
    assert [str(n.target) for n in head[SubmoduleCall("head")]] == ["aten.linear.default"]


def test_layers_of_transformers() -> None:
    module = llama()
    nodes = _nodes(module, torch.zeros(2, 8, dtype=torch.int64))
    assert {n: len(all_) for n, all_ in Submodules(module).names.items() if len(all_) > 1} == {}
    blocks = blocks_by_call(nodes, ["model.layers.0", "model.layers.1"])
    linears = [sum(str(n.target) == "aten.linear.default" for n in block)
               for block in blocks.values()]  # fmt: skip
    assert linears == [7, 7]


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


def test_the_longest_literal_part_counts() -> None:
    said = {"*.*": "all", "layers.*": "layer", "layers.1": "second", "layers.*.norm": "norm"}
    chosen = Submodules(Net()).chosen("recompute", said)
    settings = {name: setting for name, (_, setting) in chosen.items()}
    assert settings == {
        "layers.0": "layer", "layers.1": "second", "again": "layer", "layers.0.norm": "norm",
        "layers.1.norm": "norm", "again.norm": "norm", "layers.0.linear": "all",
        "again.linear": "all",
    }  # fmt: skip
    assert listing(chosen) == {
        "layers.*": ["layers.0", "again"],
        "layers.*.norm": ["layers.0.norm", "layers.1.norm", "again.norm"],
        "layers.1": ["layers.1"],
        "*.*": ["layers.0.linear", "again.linear"],
    }


def test_errors_of_patterns() -> None:
    names = Submodules(Net())
    with pytest.raises(LayoutError) as error:
        names.chosen("recompute", {"layer.*": None})
    text = str(error.value)
    assert "recompute['layer.*'] matches no submodule" in text
    assert "layers, layers.*, layers.*.norm, layers.*.linear, again" in text
    assert "near it are layers" in text
    with pytest.raises(LayoutError, match=r"both match layers\.0"):
        names.chosen("recompute", {"layers.*": 1, "*ayers.0": 2})
    with pytest.raises(LayoutError, match="submodules are none"):
        Submodules(nn.Linear(2, 2)).chosen("stages", {"layers.*": None})
