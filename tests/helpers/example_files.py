"""The examples as modules, and what each small one must give, in plain torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn.functional import gelu

FOLDER = Path(__file__).parents[2] / "examples"


@cache
def example(name: str) -> ModuleType:
    """An example, imported once; one may import another, as one that is run may."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    spec = spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _hello_mesh(x: Tensor) -> list[Tensor]:
    return [x.sum(0), x + x]


def _mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> list[Tensor]:
    return [x + gelu(x @ w1.T + b1) @ w2.T + b2]


def _two_stages(x: Tensor, *weights: Tensor) -> list[Tensor]:
    for w1, w2 in (weights[:2], weights[2:]):
        x = x + gelu(x @ w1.T) @ w2.T
    return [x]


def _overlap(x: Tensor, w1: Tensor, w2: Tensor) -> list[Tensor]:
    return [(x @ w1).relu() @ w2]


def _build(name: str, **settings: Any) -> Callable[[Any], Any]:
    return partial(example(name).build, **settings)


#: name -> (build, what it gives on one device)
SMALL: dict[str, tuple[Callable[[Any], Any], Callable[..., Sequence[Tensor]]]] = {
    "hello_mesh": (_build("hello_mesh"), _hello_mesh),
    "tp_mlp": (_build("tp_mlp"), _mlp),
    "tp_mlp, sequence-parallel": (_build("tp_mlp", is_sequence_parallel=True), _mlp),
    "two_stages": (_build("two_stages"), _two_stages),
    "overlap": (_build("overlap"), _overlap),
}
