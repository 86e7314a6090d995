"""Values of an imported module that go from stage to stage: sets to the mesh of the next one."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing.joined import JoinedTensors
from mdfuse.frontend.importing.module_stages import ModelStages, carried
from mdfuse.frontend.ops.views import set as set_
from mdfuse.ir.graph import Fusion
from mdfuse.layouts.layout import Layout
from mdfuse.passes import propagate_layouts, streams


class HandOvers:
    """The stage that is being recorded, and what it has from other stages.

    Args:
        stages: of the module; None where it has one mesh, and nothing is handed over.
    """

    def __init__(self, stages: ModelStages | None) -> None:
        self._stages = stages
        #: the number of the stage that is being recorded
        self.stage = 0
        self._there: dict[tuple[int, int], Handle] = {}
        self._so_far: Fusion | None = None

    def enter(self, node: Node | None) -> None:
        """Go to the stage of a node; None: to the last one, where results are."""
        if self._stages is not None:
            last = len(self._stages.meshes) - 1
            self.stage = last if node is None else self._stages.of.get(node, 0)

    def layout(self, layout: Layout) -> Layout:
        """Return a layout as the stage that is being recorded has it."""
        if self._stages is None or layout.mesh == self._stages.meshes[self.stage]:
            return layout
        return carried(layout, self._stages.meshes[self.stage])

    def read(self, node: Node, x: Any) -> Any:
        """Return the value of a node in the stage that is being recorded."""
        if self._stages is None:
            return x
        at = self._stages.of.get(node, self.stage)
        is_given = node.op != "call_function"
        same = self._stages.meshes[at] == self._stages.meshes[self.stage]
        return x if at == self.stage or (is_given and same) else self._handed(x)

    def _handed(self, x: Any) -> Any:
        """Return a value, or several, on the mesh of the stage that is being recorded."""
        if isinstance(x, JoinedTensors):
            return x.mapped(self._handed)
        if isinstance(x, (list, tuple)):
            return type(x)(map(self._handed, x))
        if not isinstance(x, Handle) or not x.is_tensor:
            return x
        key = x.id, self.stage
        if key not in self._there:
            self._there[key] = set_(x).on(self.layout(self._layout(x)))
        return self._there[key]

    def _layout(self, x: Handle) -> Layout:
        """Return the layout of a value, as it is inferred from what is recorded so far."""
        if self._so_far is None or x.name not in self._so_far.values:
            fusion = x.definition.replayed()[0].fusion()
            self._so_far = propagate_layouts.run(streams.run(fusion))
        return self._so_far.layout(x.name)
