"""Recurrent networks of torch, imported, beside themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.beside_module import MESHES, check_beside, numbers
from torch import nn

import mdfuse as mf
from mdfuse import DefinitionError, DeviceMesh

F64 = torch.float64

#: name -> the network, and its input: rows first, but for one.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lstm": (
        lambda: nn.LSTM(4, 8, 2, bidirectional=True, batch_first=True, dtype=F64), (4, 2, 4)
    ),
    "lstm with a projection": (
        lambda: nn.LSTM(4, 8, proj_size=4, bias=False, batch_first=True, dtype=F64), (4, 2, 4)
    ),
    "gru": (lambda: nn.GRU(4, 8, bidirectional=True, dtype=F64), (4, 4, 4)),
    "rnn": (lambda: nn.RNN(4, 8, 2, nonlinearity="relu", batch_first=True, dtype=F64), (4, 2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_itself(name: str, mesh: str) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    check_beside(make(), (numbers(*shape),), mesh)


class Cells(nn.Module):
    """One step of each cell."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.gated = nn.RNNCell(4, 8, dtype=F64), nn.GRUCell(8, 8, dtype=F64)
        self.long = nn.LSTMCell(8, 8, dtype=F64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.plain(x)
        result: tuple[torch.Tensor, torch.Tensor] = self.long(self.gated(h, h))
        return result


def test_cells() -> None:
    torch.manual_seed(0)
    check_beside(Cells(), (numbers(4, 4),), "dp=2,tp=2")


def test_dropout_between_layers_is_refused() -> None:
    network = nn.GRU(4, 8, 2, dropout=0.5).train()
    with pytest.raises(DefinitionError, match="gru with dropout between its layers") as error:
        mf.from_torch(network, (torch.zeros(2, 3, 4),), mesh=DeviceMesh.arange(tp=2)).compile()
    assert "nn.Dropout between them" in str(error.value)
