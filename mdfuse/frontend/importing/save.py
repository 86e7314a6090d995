"""Write parameters, or a state, as `torch.distributed.checkpoint` does, each rank its own boxes.

The files are those of torch's own writer, so that its `load` reads them in any layout; nothing is
sent between ranks, and no process group of torch's is needed.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdfuse.errors import ProgramError, counted
from mdfuse.extents.extent import is_symbolic
from mdfuse.frontend.importing.build import Model
from mdfuse.ir.graph import Fusion
from mdfuse.layouts.boxes import Box, boxes_of, index_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A tensor of a checkpoint.

    Attributes:
        names: all of its names; the first one is that of its files.
        shape, dtype: of the whole.
        boxes: box -> the rank that writes it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: dict[Box, int]


def check_folder(folder: Path) -> None:
    """Raise ProgramError for a folder with a checkpoint, which would be neither old nor new."""
    if (folder / ".metadata").exists():
        raise ProgramError(
            f"{folder} has a checkpoint",
            because="files of two checkpoints would lie beside each other",
            hint="a folder of its own for each, as step-0100",
        )


#: What a rank writes: boxes that no rank before it has.
Parts = Iterable[tuple[Saved, Box, Tensor]]


def write(folder: Path, model: Model, weights: Sequence[Tensor | None], rank: int | None) -> None:
    """Write the boxes of one rank of a model, and what `finish` reads about them.

    Args:
        folder: of the checkpoint.
        model: whose parameters are saved.
        weights: as they are loaded: this rank's parts, or wholes.
        rank: whose; None: there are only wholes.

    Raises:
        ProgramError: other weights; the folder cannot be written.
    """
    write_parts(folder, _parts(model, weights, rank), rank or 0)


def write_state(
    folder: Path, fusion: Fusion, state: Mapping[str, Tensor | None], rank: int
) -> None:
    """Write the boxes of one rank of inputs of a fusion; as `write`."""
    parts = []
    for saved in of_state(fusion, state):
        layout, x = fusion.layout(saved.names[0]), state[saved.names[0]]
        if x is not None and rank in layout.mesh:
            for box, place in boxes_of(layout.rows(saved.shape, rank)):
                if saved.boxes.get(box) == rank:
                    parts.append((saved, box, x[index_of(place)]))
    write_parts(folder, parts, rank)


def of_state(fusion: Fusion, names: Iterable[str]) -> list[Saved]:
    """Return inputs of a fusion, with the boxes in which they are written, and by whom.

    Raises:
        ProgramError: one is no whole, or of no shape that is known.
    """
    found = []
    for name in names:
        value, layout = fusion.values[name], fusion.layout(name)
        if layout.partial_axes or is_symbolic(value.shape):
            raise ProgramError(
                f"a checkpoint of %{name}: {value.type_text()}",
                because="it has parts of wholes, of extents that no run chooses",
                hint="save(folder) writes a file for each rank, which the same program reads",
            )
        boxes: dict[Box, int] = {}
        for rank in sorted(layout.mesh.ranks):
            for box, _ in boxes_of(layout.rows(value.shape, rank)):
                if all(first < last for first, last in box):
                    boxes.setdefault(box, rank)
        found.append(Saved(names=(name,), shape=value.shape, dtype=value.dtype, boxes=boxes))
    return found


def write_parts(folder: Path, parts: Parts, rank: int) -> None:
    """Write boxes of tensors into the files of a rank; as `write`."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan

    planner, items = _planner(), []
    for saved, box, x in parts:
        items.append(_item(saved, box))
        planner.tensors[items[-1].index] = x
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writer = FileSystemWriter(folder, sync_files=False)
        plans = [SavePlan([])] * rank + [SavePlan(items)]
        results = writer.write_data(writer.prepare_global_plan(plans)[-1], planner).wait()
        _note(folder, rank).write_bytes(pickle.dumps(results))
    except OSError as error:
        raise ProgramError(
            f"{folder} cannot be written",
            because=str(error),
            hint="a folder that all ranks share",
        ) from error


def _parts(
    model: Model, weights: Sequence[Tensor | None], rank: int | None
) -> Iterator[tuple[Saved, Box, Tensor]]:
    """Yield what this rank writes: boxes that no rank before it has."""
    names = model.weight_names()
    if len(weights) != len(names):
        raise ProgramError(
            f"save of {model.captured.name} with {counted(len(weights), 'weight')}",
            because=f"the model has {len(names)} parameters and constants",
            hint="pass what model.load() returned, or `running.weights` of a step of training",
        )
    given = iter(zip(names, weights, strict=True))
    for node, saved in zip(model.parameters, _tensors(model, rank is None), strict=True):
        for boxes in model.boxes(node, rank):
            name, x = next(given)
            written = [pair for pair in boxes or () if saved.boxes.get(pair[0]) == (rank or 0)]
            ends = [[stop for _, stop in place] for _, place in boxes or ()]
            expected = [max(of) for of in zip(*ends, strict=True)]
            if x is not None and written and [*x.shape] != expected:
                raise ProgramError(
                    f"{name} of shape {list(x.shape)}",
                    because=f"this rank's part of it is {expected}",
                    hint="save(folder, weights, comm=comm) for parts; without comm wholes",
                )
            if x is not None:
                yield from ((saved, box, x[index_of(place)]) for box, place in written)


def _tensors(model: Model, is_whole: bool) -> Iterator[Saved]:
    """Yield each parameter, with the boxes in which it is written, and by whom."""
    for node in model.parameters:
        value = node.meta["val"]
        ranks = [None] if is_whole else sorted(model.layout(node).mesh.ranks)
        boxes: dict[Box, int] = {}
        for rank in ranks:
            held = (pairs for pairs in model.boxes(node, rank) if pairs is not None)
            for box, _ in (pair for pairs in held for pair in pairs):
                if all(first < last for first, last in box):
                    boxes.setdefault(box, rank or 0)
        names = model.captured.parameters[node].names
        shape = tuple(value.shape)
        yield Saved(names=names, shape=shape, dtype=value.dtype, boxes=boxes)


def finish(folder: Path, model: Model, ranks: int | None) -> None:
    """Write what the checkpoint of a model has, once all ranks have written their boxes.

    Args:
        folder: of the checkpoint.
        model: whose parameters are saved.
        ranks: how many; None: wholes were written.

    Raises:
        ProgramError: a rank wrote elsewhere.
    """
    finish_parts(folder, [*_tensors(model, ranks is None)], ranks or 1)


def finish_state(folder: Path, fusion: Fusion, names: Iterable[str], ranks: int) -> None:
    """Write what the checkpoint of inputs of a fusion has; as `finish`."""
    finish_parts(folder, of_state(fusion, names), ranks)


def finish_parts(folder: Path, tensors: Sequence[Saved], ranks: int) -> None:
    """Write what a checkpoint has; as `finish`."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    notes = [_note(folder, rank) for rank in range(ranks)]
    missing = [note for note in notes if not note.exists()]
    if missing:
        raise ProgramError(
            f"{missing[0]} is not there",
            because="each rank writes its boxes into the folder, and one rank says what is in it",
            hint="a folder that all ranks share",
        )
    results = [r for note in notes for r in pickle.loads(note.read_bytes())]
    other = {x.names[0]: x.names[1:] for x in tensors}
    results += [_renamed(r, name) for r in results for name in other[r.index.fqn]]
    known: dict[str, Any] = {}
    for x in tensors:
        chunks = [ChunkStorageMetadata(*_extent(box)) for box in x.boxes]
        of = TensorProperties(dtype=x.dtype)
        kept = TensorStorageMetadata(properties=of, size=torch.Size(x.shape), chunks=chunks)
        known |= dict.fromkeys(x.names, kept)
    writer = FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(True)
    writer.finish(Metadata(state_dict_metadata=known), [results])
    for note in notes:
        note.unlink()


def _note(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank:04d}.written"


def _extent(box: Box) -> tuple[torch.Size, torch.Size]:
    """Where a box begins, and how long it is."""
    return torch.Size(first for first, _ in box), torch.Size(last - first for first, last in box)


def _item(saved: Saved, box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    offsets, sizes = _extent(box)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets, sizes),
        properties=TensorProperties(dtype=saved.dtype),
        size=torch.Size(saved.shape),
    )
    index = MetadataIndex(saved.names[0], offsets)
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _renamed(result: Any, name: str) -> Any:
    """The same part of a file, as that of a tensor of another name."""
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.storage import WriteResult

    index = MetadataIndex(name, result.index.offset)
    return WriteResult(index, result.size_in_bytes, result.storage_data)


def _planner() -> Any:
    """What the writer asks for tensors: it has the plan already."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Planner(DefaultSavePlanner):
        def __init__(self) -> None:
            super().__init__()
            self.tensors: dict[Any, Tensor] = {}

        def resolve_data(self, write_item: Any) -> Tensor:
            return self.tensors[write_item.index].detach().cpu().contiguous()

    return Planner()
