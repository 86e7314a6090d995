"""mdfuse: one tensor program in global view, one inspectable program per rank.

A `FusionDefinition` records tensor operations in global view. Layouts say which part of each tensor
each rank of a `DeviceMesh` holds. `compile` infers the layouts that were not stated, makes every
change of layout an explicit `set`, and lowers the whole to one host program: local operations, and
communications exactly where the placement changes. A rank runs its projection of it; `simulate`
runs all ranks in this process.

Meshes and layouts: DeviceMesh, Layout, Shard, Replicate, Partial, Stream.
Modules of torch: from_torch, from_plan, differentiable, to_dtensor.
Definitions: FusionDefinition, TensorSpec, fusion, ops, register_op.
Training: grad, recompute, optim, Step, pipeline, Schedule.
Survivors: rebuild, recover, Run.
Serving: generate.
Programs: compile, Program, Options, init, simulate, shard_tensor, unshard_tensor.
A closer look: hir (host programs), seeing (costs, traces), debug, MdfuseError.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mdfuse import debug
from mdfuse.config import VERSION, Options
from mdfuse.errors import BackendError as BackendError
from mdfuse.errors import CommunicationError as CommunicationError
from mdfuse.errors import CountsError as CountsError
from mdfuse.errors import DefinitionError as DefinitionError
from mdfuse.errors import IndexRangeError as IndexRangeError
from mdfuse.errors import LayoutError as LayoutError
from mdfuse.errors import LoweringError as LoweringError
from mdfuse.errors import MdfuseError
from mdfuse.errors import MeshError as MeshError
from mdfuse.errors import ProgramError as ProgramError
from mdfuse.layouts.layout import Layout, Partial, Replicate, Shard
from mdfuse.layouts.sharding import shard_tensor, unshard_tensor
from mdfuse.layouts.stream import Stream
from mdfuse.mesh import DeviceMesh

__version__ = VERSION

if TYPE_CHECKING:
    from mdfuse import hir, seeing
    from mdfuse.compiled.differentiable import differentiable
    from mdfuse.compiled.from_torch import from_torch
    from mdfuse.compiled.imported import ImportedModel as ImportedModel
    from mdfuse.compiled.pipeline import pipeline
    from mdfuse.compiled.program import Program, compile
    from mdfuse.compiled.run import Run
    from mdfuse.compiled.step import Step, recover
    from mdfuse.compiled.traced_functions import fusion
    from mdfuse.compiled.training import RunningStep as RunningStep
    from mdfuse.compiled.training import TrainingStep as TrainingStep
    from mdfuse.evaluator import HostIrEvaluator as HostIrEvaluator
    from mdfuse.frontend import ops, optim
    from mdfuse.frontend.cache import FusionCache as FusionCache
    from mdfuse.frontend.definition import FusionDefinition
    from mdfuse.frontend.grad import grad, recompute
    from mdfuse.frontend.importing.plans import from_plan
    from mdfuse.frontend.registering import register_op
    from mdfuse.frontend.spec import TensorSpec
    from mdfuse.passes import segmentation as segmentation
    from mdfuse.pipelines.schedules import Schedule
    from mdfuse.runs.dtensor import layout_of as layout_of
    from mdfuse.runs.dtensor import spec_of as spec_of
    from mdfuse.runs.dtensor import to_dtensor
    from mdfuse.runtime.communicator import Communicator as Communicator
    from mdfuse.runtime.communicator import init
    from mdfuse.runtime.rebuilding import rebuild
    from mdfuse.serving.engine import generate
    from mdfuse.simulation.reference import reference as reference
    from mdfuse.simulation.simulate import simulate

#: Names whose modules import torch: they are imported when they are first used.
_LAZY = {
    "Communicator": "mdfuse.runtime.communicator",
    "FusionDefinition": "mdfuse.frontend.definition",
    "ImportedModel": "mdfuse.compiled.imported",
    "Program": "mdfuse.compiled.program",
    "Run": "mdfuse.compiled.run",
    "RunningStep": "mdfuse.compiled.training",
    "Schedule": "mdfuse.pipelines.schedules",
    "Step": "mdfuse.compiled.step",
    "TensorSpec": "mdfuse.frontend.spec",
    "TrainingStep": "mdfuse.compiled.training",
    "compile": "mdfuse.compiled.program",
    "differentiable": "mdfuse.compiled.differentiable",
    "from_plan": "mdfuse.frontend.importing.plans",
    "from_torch": "mdfuse.compiled.from_torch",
    "fusion": "mdfuse.compiled.traced_functions",
    "generate": "mdfuse.serving.engine",
    "grad": "mdfuse.frontend.grad",
    "init": "mdfuse.runtime.communicator",
    "pipeline": "mdfuse.compiled.pipeline",
    "rebuild": "mdfuse.runtime.rebuilding",
    "recompute": "mdfuse.frontend.grad",
    "recover": "mdfuse.compiled.step",
    "register_op": "mdfuse.frontend.registering",
    "simulate": "mdfuse.simulation.simulate",
    "to_dtensor": "mdfuse.runs.dtensor",
}
_LAZY_MODULES = {
    "hir": "mdfuse.hir",
    "ops": "mdfuse.frontend.ops",
    "optim": "mdfuse.frontend.optim",
    "seeing": "mdfuse.seeing",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        value: Any = import_module(_LAZY_MODULES[name])
    elif name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
    elif name in debug.LAZY:
        value = getattr(debug, name)
    else:
        raise AttributeError(f"module 'mdfuse' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


#: The names that a user meets. Those of `debug`, and the types that are only handed out
#: (`Communicator`, `ImportedModel`, `TrainingStep`, `RunningStep`), are attributes besides.
__all__ = [
    # meshes and layouts
    "DeviceMesh",
    "Layout",
    "Shard",
    "Replicate",
    "Partial",
    "Stream",
    # modules of torch
    "from_torch",
    "from_plan",
    "differentiable",
    "to_dtensor",
    # definitions
    "FusionDefinition",
    "TensorSpec",
    "fusion",
    "ops",
    "register_op",
    # training
    "grad",
    "recompute",
    "optim",
    "Step",
    "pipeline",
    "Schedule",
    # survivors
    "rebuild",
    "recover",
    "Run",
    # serving
    "generate",
    # programs
    "compile",
    "Program",
    "Options",
    "init",
    "simulate",
    "shard_tensor",
    "unshard_tensor",
    # a closer look
    "hir",
    "seeing",
    "debug",
    "MdfuseError",
]
