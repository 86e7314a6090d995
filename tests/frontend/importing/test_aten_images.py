"""What aten says of images, imported, beside the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.beside_module import MESHES, check_beside, numbers
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh


def placed(x: Tensor, corners: bool) -> Tensor:
    """Each image by a map of its own."""
    theta = torch.eye(2, 3, dtype=x.dtype) + x.mean((1, 2, 3))[:, None, None]
    grid = F.affine_grid(theta, list(x.shape), align_corners=corners)
    return F.grid_sample(x, grid, align_corners=corners)


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "sizes": lambda x: (
        F.interpolate(x[..., 0], scale_factor=2, mode="linear"), F.interpolate(x[..., 0], 8),
        F.interpolate(x, (7, 3), mode="nearest-exact"),
        F.interpolate(x, (6, 3), mode="bilinear", align_corners=True)),
    "cubics": lambda x: (
        F.interpolate(x, (7, 3), mode="bicubic"),
        F.interpolate(x, scale_factor=1.7, mode="bicubic", align_corners=True),
        F.interpolate(x, (2, 9), mode="bicubic", antialias=True),
        F.interpolate(x, (3, 2), mode="bilinear", antialias=True)),
    "grids": lambda x: (placed(x, False), placed(x, True)),
    "channels": lambda x: F.instance_norm(F.channel_shuffle(x, 2)),
    "pools": lambda x: (F.adaptive_max_pool2d(x, (2, 3)), F.adaptive_max_pool1d(x[..., 0], 2)),
    "windows": lambda x: F.fold(F.unfold(x, 2).sin(), (4, 4), 2),
}  # fmt: skip


class Images(nn.Module):
    """A function of the channels that a convolution makes."""

    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.call, self.into = call, nn.Conv2d(2, 4, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.call(self.into(x))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CALLS)
def test_images(name: str, mesh: str) -> None:
    check_beside(Images(CALLS[name]), (numbers(4, 2, 4, 4),), mesh)


def test_places_of_windows_of_one_size() -> None:
    x, module = numbers(4, 2, 4, 4), nn.AdaptiveMaxPool2d(2, return_indices=True)
    model = mf.from_torch(module, (x,), mesh=DeviceMesh.arange(tp=2))
    found = mf.simulate(model.compile(), [*model.load(), x]).outputs
    torch.testing.assert_close(model.outputs(found), module(x))


def test_places_of_windows_of_several_sizes_are_refused() -> None:
    module = nn.AdaptiveMaxPool2d(3, return_indices=True)
    with pytest.raises(DefinitionError, match="tensor 1 that AdaptiveMaxPool2d returns") as error:
        mf.from_torch(module, (numbers(4, 2, 4, 4),), mesh=DeviceMesh.arange(tp=2)).compile()
    assert "windows are of one size" in str(error.value)
