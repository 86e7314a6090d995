"""Boxes of chunks in files: the bytes that are read are those of the boxes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, ProgramError, Shard
from mdfuse.frontend.importing import chunks, load

#: What torch says of a tensor, and the archive of its numbers.
LABELS = 12_000


class _Counting(io.FileIO):
    """Counts the bytes that are read."""

    count = 0

    def readinto(self, buffer: Any) -> int:
        found = super().readinto(buffer) or 0
        _Counting.count += found
        return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[_Counting]:
    monkeypatch.setattr(chunks, "opened", lambda path: _Counting(path, "rb"))
    _Counting.count = 0
    return _Counting


TP = DeviceMesh.arange(tp=4)
#: how a matrix of a shape lies
LAYOUTS: dict[str, tuple[Layout, tuple[int, int]]] = {
    "rows": (Layout(TP, {"tp": Shard(0)}), (512, 768)),
    "columns": (Layout(TP, {"tp": Shard(1)}), (512, 2048)),
    "narrow columns": (Layout(TP, {"tp": Shard(1)}), (8192, 64)),
    "uneven": (Layout(TP, {"tp": Shard(0)}), (514, 770)),
    "blocks": (Layout(TP, {"tp": Shard(0, blocks=3)}), (513, 768)),
    "blocks of columns": (Layout(TP, {"tp": Shard(1, blocks=(2000, 2096))}), (256, 4096)),
}


@pytest.mark.parametrize("form", ["whole", "chunks", "turned"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_reads_its_boxes(
    name: str, form: str, tmp_path: Path, counted: type[_Counting]
) -> None:
    layout, shape = LAYOUTS[name]
    x = torch.randn(shape)
    model = mf.from_torch(
        _Holding(shape), (torch.zeros(()),), mesh=layout.mesh,
        layouts={"weight": {"tp": layout.placement("tp")}},
    )  # fmt: skip
    if form == "chunks":
        from mdfuse.frontend.importing import save as saving

        fsdp = mf.from_torch(
            _Holding(shape, x), (torch.zeros(()),), mesh=TP, layouts={"*": {"tp": Shard(0)}}
        )
        for rank in range(4):
            saving.write(tmp_path, fsdp.model, fsdp.load(rank=rank), rank)
        saving.finish(tmp_path, fsdp.model, 4)
    else:
        kept = x.T.contiguous().T if form == "turned" else x
        dcp.save({"weight": kept}, checkpoint_id=tmp_path, no_dist=True)
    for rank in (0, 3):
        counted.count = 0
        (found,) = model.load(tmp_path, rank=rank)
        rows = layout.rows(shape, rank)
        wanted = x[torch.cat([torch.arange(*r) for r in rows[0]])]
        wanted = wanted[:, torch.cat([torch.arange(*r) for r in rows[1]])]
        assert found is not None and torch.equal(found, wanted)
        pieces = 4 * sum(map(len, rows))  # of boxes in chunks
        is_narrow = name == "narrow columns" and form != "turned"
        most = x.nbytes if is_narrow and form == "whole" else found.nbytes * (4 if is_narrow else 1)
        assert found.nbytes <= counted.count <= most + LABELS * pieces


class _Holding(nn.Module):
    """One matrix."""

    def __init__(self, shape: tuple[int, int], x: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape) if x is None else x)

    def forward(self, y: Tensor) -> Tensor:
        return self.weight.sum() + y


def test_of_a_large_checkpoint_a_rank_reads_and_holds_its_share(
    tmp_path: Path, counted: type[_Counting]
) -> None:
    """A quarter of 32 MB."""
    module = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    dcp.save(module.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    layouts = {f"{n}.weight": {"tp": Shard(n % 2)} for n in range(8)}
    model = mf.from_torch(module, (torch.zeros(1, 1024),), mesh=TP, layouts=layouts)
    found = model.load(tmp_path, rank=2)
    whole = sum(x.nbytes for x in module.state_dict().values())
    assert sum(x.nbytes for x in found if x is not None) == whole // 4
    assert counted.count <= whole // 4 + 8 * LABELS


@pytest.mark.parametrize("name", LAYOUTS)
def test_of_safetensors_boxes_alone_are_taken(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, shape = LAYOUTS[name]
    x, taken = torch.randn(shape), []
    save_file({"weight": x}, tmp_path / "model.safetensors")
    checkpoint = load.opened(tmp_path)
    part = checkpoint.part

    def noted(name: str, box: Any) -> Tensor:
        taken.append(part(name, box))
        return taken[-1]

    monkeypatch.setattr(load.InFiles, "part", lambda self, name, box: noted(name, box))
    model = mf.from_torch(
        _Holding(shape), (torch.zeros(()),), mesh=TP,
        layouts={"weight": {"tp": layout.placement("tp")}},
    )  # fmt: skip
    (found,) = model.load(tmp_path, rank=1)
    assert found is not None
    assert sum(t.untyped_storage().nbytes() for t in taken) == found.nbytes


def test_all_kinds_of_tensors(tmp_path: Path) -> None:
    state = {
        "scalar": torch.tensor(3.5), "none": torch.zeros(0, 4), "bool": torch.ones(3) > 0,
        "half": torch.randn(7, 3).bfloat16(), "complex": torch.randn(3, 2, dtype=torch.cfloat),
        "cube": torch.randn(5, 40, 60).permute(1, 2, 0), "long": torch.arange(5000).view(10, 500),
    }  # fmt: skip
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = load.opened(tmp_path)
    for name, x in state.items():
        box = tuple((n // 3, n - n // 4) for n in x.shape)
        assert torch.equal(checkpoint.part(name, box), x[tuple(slice(*b) for b in box)]), name


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    dcp.save({"weight": torch.randn(64, 64)}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = load.opened(tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(ProgramError, match="cannot be read"):
        checkpoint.part("weight", ((0, 2), (0, 64)))
    file.unlink()
    with pytest.raises(ProgramError, match=r"cannot be read(?s:.)*FileNotFoundError"):
        checkpoint.part("weight", ((0, 2), (0, 64)))
