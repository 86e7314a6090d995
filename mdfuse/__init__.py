"""mdfuse: one tensor program in global view, one inspectable program per rank.

A `FusionDefinition` records tensor operations in global view. Layouts say which part of each tensor
each rank of a `DeviceMesh` holds. `compile` infers the layouts that were not stated, makes every
change of layout an explicit `set`, and lowers the whole to one host program: local operations, and
communications exactly where the placement changes. A rank runs its projection of it; `simulate`
runs all ranks in this process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mdfuse.config import VERSION, Options
from mdfuse.errors import (
    BackendError,
    CommunicationError,
    DefinitionError,
    IndexRangeError,
    LayoutError,
    LoweringError,
    MdfuseError,
    MeshError,
    ProgramError,
)
from mdfuse.layouts.layout import Layout, Partial, Replicate, Shard
from mdfuse.layouts.sharding import shard_tensor, unshard_tensor
from mdfuse.layouts.stream import Stream
from mdfuse.mesh import DeviceMesh

__version__ = VERSION

if TYPE_CHECKING:
    from mdfuse import hir, seeing
    from mdfuse.compiled.differentiable import differentiable
    from mdfuse.compiled.imported import from_torch
    from mdfuse.compiled.pipeline import pipeline
    from mdfuse.compiled.program import Program, compile
    from mdfuse.compiled.step import Step
    from mdfuse.compiled.traced import fusion
    from mdfuse.evaluator import HostIrEvaluator
    from mdfuse.frontend import ops, optim
    from mdfuse.frontend.cache import FusionCache
    from mdfuse.frontend.definition import FusionDefinition
    from mdfuse.frontend.grad import grad, recompute
    from mdfuse.frontend.importing.plans import from_plan
    from mdfuse.frontend.registering import register_op
    from mdfuse.frontend.spec import TensorSpec
    from mdfuse.passes import segmentation
    from mdfuse.pipelines.schedules import Schedule
    from mdfuse.runs.dtensor import layout_of, spec_of, to_dtensor
    from mdfuse.runtime.communicator import Communicator, init
    from mdfuse.simulation.reference import reference
    from mdfuse.simulation.simulate import simulate

#: Names whose modules import torch: they are imported when they are first used.
_LAZY = {
    "Communicator": "mdfuse.runtime.communicator",
    "FusionCache": "mdfuse.frontend.cache",
    "FusionDefinition": "mdfuse.frontend.definition",
    "HostIrEvaluator": "mdfuse.evaluator",
    "Program": "mdfuse.compiled.program",
    "Schedule": "mdfuse.pipelines.schedules",
    "Step": "mdfuse.compiled.step",
    "TensorSpec": "mdfuse.frontend.spec",
    "compile": "mdfuse.compiled.program",
    "differentiable": "mdfuse.compiled.differentiable",
    "from_plan": "mdfuse.frontend.importing.plans",
    "from_torch": "mdfuse.compiled.imported",
    "fusion": "mdfuse.compiled.traced",
    "grad": "mdfuse.frontend.grad",
    "init": "mdfuse.runtime.communicator",
    "layout_of": "mdfuse.runs.dtensor",
    "pipeline": "mdfuse.compiled.pipeline",
    "recompute": "mdfuse.frontend.grad",
    "register_op": "mdfuse.frontend.registering",
    "reference": "mdfuse.simulation.reference",
    "simulate": "mdfuse.simulation.simulate",
    "spec_of": "mdfuse.runs.dtensor",
    "to_dtensor": "mdfuse.runs.dtensor",
}
_LAZY_MODULES = {
    "hir": "mdfuse.hir",
    "ops": "mdfuse.frontend.ops",
    "optim": "mdfuse.frontend.optim",
    "seeing": "mdfuse.seeing",
    "segmentation": "mdfuse.passes.segmentation",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        found: Any = import_module(_LAZY_MODULES[name])
    elif name in _LAZY:
        found = getattr(import_module(_LAZY[name]), name)
    else:
        raise AttributeError(f"module 'mdfuse' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES})


__all__ = [
    "BackendError",
    "CommunicationError",
    "Communicator",
    "DefinitionError",
    "DeviceMesh",
    "FusionCache",
    "FusionDefinition",
    "HostIrEvaluator",
    "IndexRangeError",
    "Layout",
    "LayoutError",
    "LoweringError",
    "MdfuseError",
    "MeshError",
    "Options",
    "Partial",
    "Program",
    "ProgramError",
    "Replicate",
    "Schedule",
    "Shard",
    "Step",
    "Stream",
    "TensorSpec",
    "compile",
    "differentiable",
    "from_plan",
    "from_torch",
    "fusion",
    "grad",
    "hir",
    "init",
    "layout_of",
    "ops",
    "optim",
    "pipeline",
    "recompute",
    "reference",
    "register_op",
    "seeing",
    "segmentation",
    "shard_tensor",
    "simulate",
    "spec_of",
    "to_dtensor",
    "unshard_tensor",
]
