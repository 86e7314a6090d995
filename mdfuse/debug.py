"""Names for tools, tests and unusual programs; a first program needs none of them.

- `HostIrEvaluator` runs a host program that was written by hand: docs/host_ir.md
- `reference` runs a definition on one device, without layouts: docs/runs.md
- `FusionCache` holds the definitions of this process: docs/definitions.md
- `segmentation` merges expressions into segments: docs/segments.md
- `layout_of` and `spec_of` read the layout and the `TensorSpec` of a DTensor: docs/pytorch.md
- the classes of errors; all derive from `mdfuse.MdfuseError`

Each is an attribute of `mdfuse`, too, which `dir(mdfuse)` does not show.

>>> from mdfuse import MdfuseError, debug
>>> [name for name in dir(debug) if name.endswith("Error")][:3]
['BackendError', 'CommunicationError', 'CountsError']
>>> issubclass(debug.LayoutError, MdfuseError)
True
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mdfuse.errors import (
    BackendError,
    CommunicationError,
    CountsError,
    DefinitionError,
    IndexRangeError,
    LayoutError,
    LoweringError,
    MeshError,
    ProgramError,
)

if TYPE_CHECKING:
    from mdfuse.evaluator import HostIrEvaluator
    from mdfuse.frontend.cache import FusionCache
    from mdfuse.passes import segmentation
    from mdfuse.runs.dtensor import layout_of, spec_of
    from mdfuse.simulation.reference import reference

#: Names whose modules import torch -> these modules.
LAZY = {
    "FusionCache": "mdfuse.frontend.cache",
    "HostIrEvaluator": "mdfuse.evaluator",
    "layout_of": "mdfuse.runs.dtensor",
    "reference": "mdfuse.simulation.reference",
    "segmentation": "mdfuse.passes",
    "spec_of": "mdfuse.runs.dtensor",
}


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module 'mdfuse.debug' has no attribute {name!r}")
    module = LAZY[name]
    if name == "segmentation":
        value: Any = import_module(f"{module}.{name}")
    else:
        value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    # programs by hand, programs on one device
    "HostIrEvaluator",
    "reference",
    # how definitions are kept and cut
    "FusionCache",
    "segmentation",
    # DTensors
    "layout_of",
    "spec_of",
    # errors
    "BackendError",
    "CommunicationError",
    "CountsError",
    "DefinitionError",
    "IndexRangeError",
    "LayoutError",
    "LoweringError",
    "MeshError",
    "ProgramError",
]
