"""Reports warn where a split value is brought together, and name the pattern and the reshape."""

from __future__ import annotations

from helpers.tiny_models import MODELS, llama

import mdfuse as mf
from mdfuse import DeviceMesh, Shard


def warned(report: str) -> list[str]:
    return [line.strip() for line in report.splitlines() if "warning" in line]


def test_fewer_heads_than_ranks() -> None:
    tiny = MODELS["llama"]
    module = llama(num_key_value_heads=1).eval().double()
    model = mf.from_torch(module, tiny.args, mesh=DeviceMesh.arange(tp=2), layouts=tiny.layouts())
    found = warned(model.report())
    assert found and all("brought together (modeling_llama.py:" in line for line in found)
    behind = "behind the reshape [4, 8, 8] -> [4, 1, 8, 8]: *.v_proj.weight splits it, 2 times"
    assert any(behind in line.replace("[4, 8, 1, 8]", "[4, 1, 8, 8]") for line in found)
    assert any("*.k_proj.weight splits it, 2 times" in line for line in found)
    layouts = {p: x for p, x in tiny.layouts().items() if p[2:8] not in ("k_proj", "v_proj")}
    model = mf.from_torch(module, tiny.args, mesh=DeviceMesh.arange(tp=2), layouts=layouts)
    assert warned(model.report()) == []


def test_a_fused_matrix_without_blocks() -> None:
    tiny = MODELS["gpt2"]
    model = mf.from_torch(
        tiny.module(), tiny.args, mesh=DeviceMesh.arange(tp=2), layouts=tiny.layouts()
    )
    assert any("modeling_gpt2.py" in w and "c_attn" in w for w in warned(model.report()))


def test_what_is_asked_for_is_no_warning() -> None:
    """Gathering parameters, and placing outputs."""
    tiny = MODELS["encoder"]
    split = {"fsdp": Shard(0)}
    model = mf.from_torch(
        tiny.module(), tiny.args, mesh=DeviceMesh.arange(fsdp=2), gather="fsdp",
        layouts={"*": split, "input:*": split, "output:0": {}},
    )  # fmt: skip
    assert warned(model.report()) == []
