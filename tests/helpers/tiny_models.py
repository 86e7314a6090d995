"""Small models of transformers and torch, with arguments, and where their parameters live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Shard
from mdfuse.compiled.imported import ImportedModel


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A model.

    Attributes:
        make: builds the module, with random numbers.
        args, kwargs: what it is called with.
        splits: pattern -> dim that tensor parallelism splits.
        blocks: pattern -> how many blocks the parameter has.
        posts: how many of which communication its forward posts on tp=2.
    """

    make: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    splits: Mapping[str, int]
    blocks: Mapping[str, int] = field(default_factory=dict)
    posts: Mapping[str, int]

    def module(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The module in eval mode; the same numbers each time."""
        torch.manual_seed(0)
        return self.make().eval().to(dtype)

    def layouts(self, axis: str = "tp") -> dict[str, dict[str, Shard]]:
        """The splits as layouts along an axis."""
        return {pattern: {axis: Shard(dim)} for pattern, dim in self.splits.items()}


def _ids(rows: int = 4, length: int = 8, below: int = 64) -> Tensor:
    return torch.randint(below, (rows, length), generator=torch.Generator().manual_seed(1))


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def llama(layers: int = 2, **more: Any) -> nn.Module:
    """A Llama of two layers; four heads of queries, two of keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    said = {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2, **more}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, num_hidden_layers=layers, num_attention_heads=4,
                    max_position_embeddings=64, **said)
    )  # fmt: skip


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                   bos_token_id=0, eos_token_id=0)
    )  # fmt: skip


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                   intermediate_size=64, max_position_embeddings=32)
    )  # fmt: skip


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(
        ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                  intermediate_size=64, image_size=32, patch_size=8)
    )  # fmt: skip


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def _mixtral() -> nn.Module:
    """Two of four experts per token, whose matrices are looked up for each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    module = MixtralForCausalLM(
        MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                      num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
                      max_position_embeddings=64)
    )  # fmt: skip
    module.set_experts_implementation("batched_mm")
    return module


class _Residual(nn.Module):
    """Two convolutions beside what they are added to, as in a ResNet."""

    def __init__(self, planes: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(planes, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        is_same = stride == 1 and planes == out
        self.down = (
            None
            if is_same
            else nn.Sequential(nn.Conv2d(planes, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.down is None else self.down(x)
        result: Tensor = self.relu(y)
        return result


class _ResNet(nn.Module):
    """The parts of torchvision's ResNet, small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.layers = nn.Sequential(_Residual(8, 8, 1), _Residual(8, 16, 2))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        x = F.adaptive_avg_pool2d(self.layers(x), (1, 1))
        result: Tensor = self.fc(torch.flatten(x, 1))
        return result


LLAMA = {
    "*.q_proj.weight": 0, "*.k_proj.weight": 0, "*.v_proj.weight": 0, "*.o_proj.weight": 1,
    "*.gate_proj.weight": 0, "*.up_proj.weight": 0, "*.down_proj.weight": 1,
    "model.embed_tokens.weight": 0, "lm_head.weight": 0,
}  # fmt: skip

MODELS: dict[str, Tiny] = {
    "llama": Tiny(make=llama, args=(_ids(),), splits=LLAMA, posts={"Allreduce": 5}),
    "bert": Tiny(
        make=_bert,
        args=(_ids(),),
        kwargs={"attention_mask": (_ids() > 9).long(), "token_type_ids": _ids(below=2)},
        splits={
            "*.query.*": 0, "*.key.*": 0, "*.value.*": 0, "*.attention.output.dense.weight": 1,
            "*.intermediate.dense.*": 0, "*.layer.?.output.dense.weight": 1,
        },
        posts={"Allreduce": 4},
    ),
    "gpt2": Tiny(
        make=_gpt2,
        args=(_ids(),),
        splits={
            "*.c_attn.weight": 1, "*.c_attn.bias": 0, "*.attn.c_proj.weight": 0,
            "*.c_fc.weight": 1, "*.c_fc.bias": 0, "*.mlp.c_proj.weight": 0,
            "transformer.wte.weight": 0,
        },
        blocks={"*.c_attn.*": 3},
        posts={"Allreduce": 5},
    ),
    "encoder": Tiny(
        make=_encoder,
        args=(_randn(4, 8, 32),),
        splits={
            "*.in_proj_*": 0, "*.out_proj.weight": 1, "*.linear1.*": 0, "*.linear2.weight": 1,
        },
        blocks={"*.in_proj_*": 3},
        posts={"Allreduce": 4},
    ),
    "mixtral": Tiny(
        make=_mixtral,
        args=(_ids(),),
        splits={
            **{p: d for p, d in LLAMA.items() if p[2:5] not in ("gat", "up_", "dow")},
            "*.experts.gate_up_proj": 1, "*.experts.down_proj": 2,
        },
        blocks={"*.gate_up_proj": 2},
        posts={"Allreduce": 5},
    ),
    "resnet": Tiny(
        make=_ResNet,
        args=(_randn(4, 3, 32, 32),),
        splits={
            "layers.*.conv1.weight": 0, "layers.*.bn1.*": 0, "layers.*.conv2.weight": 1,
        },
        posts={"Allreduce": 2},
    ),
    "vit": Tiny(
        make=_vit,
        args=(_randn(4, 3, 32, 32),),
        splits={
            "*.q_proj.*": 0, "*.k_proj.*": 0, "*.v_proj.*": 0, "*.o_proj.weight": 1,
            "*.fc1.*": 0, "*.fc2.weight": 1,
        },
        posts={"Allreduce": 4},
    ),
}  # fmt: skip

#: mesh, and where inputs (fully sharded: parameters, too) live on it, besides tensor parallelism.
MESHES: dict[str, tuple[DeviceMesh, dict[str, Any]]] = {
    "tp=2": (DeviceMesh.arange(tp=2), {}),
    "dp=2,tp=2": (DeviceMesh.arange(dp=2, tp=2), {"input:*": {"dp": Shard(0)}}),
    "fsdp=4": (DeviceMesh.arange(fsdp=4), {"*": {"fsdp": Shard(0)}, "input:*": {"fsdp": Shard(0)}}),
}


@cache
def imported(name: str, mesh: str) -> ImportedModel:
    """A model on a mesh: imported once for all tests, since export takes a second or two."""
    tiny, (where, layouts) = MODELS[name], MESHES[mesh]
    if "tp" not in mesh:
        said: dict[str, Any] = {"layouts": layouts, "gather": "fsdp"}
    else:
        said = {"layouts": {**tiny.layouts(), **layouts}, "blocks": tiny.blocks}
    return mf.from_torch(tiny.module(), tiny.args, tiny.kwargs, mesh=where, **said)
