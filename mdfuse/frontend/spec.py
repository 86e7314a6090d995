"""Descriptions of tensors that do not exist yet."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from mdfuse.errors import DefinitionError
from mdfuse.layouts.layout import Layout, Placement
from mdfuse.mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh


@dataclass(frozen=True)
class TensorSpec:
    """Describe a tensor argument of a traced function, as `FusionDefinition.define_tensor` does."""

    shape: Sequence[int]
    dtype: torch.dtype = torch.float32
    mesh: DeviceMesh | TorchMesh | Layout | None = None
    layout: Mapping[str, Placement] | None = None
    order: Mapping[int, Sequence[str]] | None = None
    stride_order: Sequence[int] | None = None

    @cached_property
    def key(self) -> Hashable:
        """A key that equal specs share, however their layouts are written."""
        if not isinstance(self.shape, Sequence):
            raise DefinitionError(f"shape {self.shape!r}", hint="a list of integers: [8, 16]")
        places = None if self.stride_order is None else tuple(self.stride_order)
        return tuple(self.shape), self.dtype, self._where, places

    @property
    def _where(self) -> Hashable:
        for given in (self.mesh, self.layout):
            if isinstance(given, Layout):
                return given.normalized(len(self.shape), singles=True)
        if self.mesh is None:
            return None if self.layout is None else repr(self.layout)
        mesh = self.mesh if isinstance(self.mesh, DeviceMesh) else DeviceMesh(self.mesh)
        layout = Layout(mesh, self.layout, self.order)
        return layout.normalized(len(self.shape), singles=True)
