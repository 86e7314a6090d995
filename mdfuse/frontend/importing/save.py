"""Write parameters, or a state, as `torch.distributed.checkpoint` does, each rank its own boxes.

The files have the format of torch's own writer, so that its `load` reads them in any layout; ranks
do not communicate, and need no process group of torch. Each rank writes the places of its boxes to
a JSON note; one rank reads these notes, and writes `.metadata` last: a folder without it is no
checkpoint.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mdfuse import files
from mdfuse.errors import ProgramError, counted
from mdfuse.extents.extent import is_symbolic
from mdfuse.frontend.given import parts as as_parts
from mdfuse.frontend.importing import metadata
from mdfuse.frontend.importing.record_graph import Model
from mdfuse.ir.graph import Fusion
from mdfuse.layouts.boxes import Box, boxes_of, index_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A tensor of a checkpoint.

    Attributes:
        names: all of its names; the first one is used in the files.
        shape, dtype: of the whole.
        boxes: box -> the rank that writes it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: dict[Box, int]


def check_folder(folder: Path) -> None:
    """Raise ProgramError for a folder with a checkpoint, which would be neither old nor new."""
    try:
        there = os.listdir(folder)
    except OSError:  # the folder does not exist yet, or writing into it will raise the error
        return
    if any(name == metadata.NAME or name.endswith(".safetensors") for name in there):
        raise ProgramError(
            f"{folder} has a checkpoint",
            because="files of two checkpoints would lie beside each other",
            hint="a folder of its own for each, as step-0100",
        )


#: A box that a rank writes, which no lower rank has.
Part = tuple[Saved, Box, Tensor]


def write(folder: Path, model: Model, weights: Sequence[Tensor | None], rank: int | None) -> None:
    """Write the boxes of one rank of a model, and its note for `finish`.

    Args:
        folder: of the checkpoint.
        model: whose parameters are saved.
        weights: as they are loaded: this rank's parts, or wholes.
        rank: the writer; None: all tensors are whole.

    Raises:
        ProgramError: other weights; the folder cannot be written.
    """
    write_parts(folder, _parts(model, weights, rank), rank or 0)


def parts_of_state(fusion: Fusion, state: Mapping[str, Tensor | None], rank: int) -> list[Part]:
    """Return the boxes of inputs of a fusion that one rank writes, as `write_parts` takes them."""
    parts = []
    for saved in of_state(fusion, state):
        layout, x = fusion.layout(saved.names[0]), state[saved.names[0]]
        if x is not None and rank in layout.mesh:
            for box, place in boxes_of(layout.rows(saved.shape, rank)):
                if saved.boxes.get(box) == rank:
                    parts.append((saved, box, x[index_of(place)]))
    return parts


def of_state(fusion: Fusion, names: Iterable[str]) -> list[Saved]:
    """Return inputs of a fusion, with their boxes and the rank that writes each.

    Raises:
        ProgramError: an input is Partial, or has symbolic extents.
    """
    saved = []
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
        saved.append(Saved(names=(name,), shape=value.shape, dtype=value.dtype, boxes=boxes))
    return saved


def write_parts(folder: Path, parts: Iterable[Part], rank: int) -> None:
    """Write boxes of tensors into the files of a rank; as `write`."""
    rows: list[_Row] = []
    with files.new_file(_data(folder, rank)) as file:
        for saved, box, x in parts:
            at = file.tell()
            torch.save(_alone(x), file)
            rows.append((saved.names[0], [first for first, _ in box], at, file.tell() - at))
    with files.new_file(_note(folder, rank)) as note:
        note.write(json.dumps(rows).encode())


def remove_parts(folder: Path, rank: int) -> None:
    """Remove the files of a rank for a failed checkpoint."""
    files.remove(_data(folder, rank), _note(folder, rank), _part(folder))


#: A box in a note: tensor, first element, and bytes in the file.
_Row = tuple[str, list[int], int, int]


def _alone(x: Tensor) -> Tensor:
    """Return a contiguous CPU tensor whose storage holds only its numbers."""
    x = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def _parts(model: Model, weights: Sequence[Tensor | None], rank: int | None) -> Iterator[Part]:
    """Yield the boxes that this rank writes, which no lower rank has."""
    names = model.weight_names()
    hint = "pass what model.load() returned, or `running.weights` of a step of training"
    weights = as_parts(f"save of {model.captured.name}", "weights", weights, hint)
    if len(weights) != len(names):
        raise ProgramError(
            f"save of {model.captured.name} with {counted(len(weights), 'weight')}",
            because=f"the model has {len(names)} parameters and constants",
            hint=hint,
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
    """Yield each parameter, with its boxes and the rank that writes each."""
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
    """Write the metadata of a model's checkpoint, after all ranks have written their boxes.

    Args:
        folder: of the checkpoint.
        model: whose parameters are saved.
        ranks: their number; None: all tensors are whole.

    Raises:
        ProgramError: a rank wrote elsewhere.
    """
    finish_parts(folder, [*_tensors(model, ranks is None)], ranks or 1)


def finish_state(folder: Path, fusion: Fusion, names: Iterable[str], ranks: int) -> None:
    """Write the metadata of a checkpoint of a fusion's inputs; as `finish`."""
    finish_parts(folder, of_state(fusion, names), ranks)


def finish_parts(folder: Path, tensors: Sequence[Saved], ranks: int) -> None:
    """Write the metadata of a checkpoint; as `finish`."""
    places: dict[tuple[str, metadata.Extents], metadata.StoredBytes] = {}
    for rank in range(ranks):
        places |= _noted(folder, rank, tensors)
    stored: dict[str, metadata.Stored] = {}
    for x in tensors:
        chunks = {}
        for box in x.boxes:
            first, sizes = tuple(a for a, _ in box), tuple(b - a for a, b in box)
            chunks[first] = metadata.Chunk(sizes=sizes, place=places[x.names[0], first])
        stored |= dict.fromkeys(x.names, metadata.Stored(x.dtype, x.shape, chunks))
    part = _part(folder)
    with files.new_file(part) as file:
        file.write(pickle.dumps(metadata.as_torch(stored)))
    files.remove(*(_note(folder, rank) for rank in range(ranks)))
    files.put(part, folder / metadata.NAME)


def _noted(
    folder: Path, rank: int, tensors: Sequence[Saved]
) -> dict[tuple[str, tuple[int, ...]], metadata.StoredBytes]:
    """Return the places of a rank's boxes, by tensor and first element.

    Raises:
        ProgramError: its note is missing, or of other tensors.
    """
    note, wanted = _note(folder, rank), set[tuple[str, tuple[int, ...]]]()
    for x in tensors:
        wanted |= {
            (x.names[0], tuple(a for a, _ in box))
            for box, writer in x.boxes.items()
            if writer == rank
        }
    try:
        rows: list[_Row] = json.loads(note.read_bytes())
        name = _data(folder, rank).name
        places = {
            (of, tuple(first)): metadata.StoredBytes.of(name, *where) for of, first, *where in rows
        }
    except FileNotFoundError as error:
        raise ProgramError(
            f"{note} is not there",
            because="each rank writes its boxes into the folder, and one rank says what is in it",
            hint="a folder that all ranks share",
        ) from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _no_note(note, str(error)) from error
    if {*places} != wanted:
        raise _no_note(note, "it is of other boxes than those that this rank writes")
    return places


def _no_note(note: Path, why: str) -> ProgramError:
    return ProgramError(
        f"{note} cannot be read", because=why, hint="nobody else writes into the folder meanwhile"
    )


def _data(folder: Path, rank: int) -> Path:
    return folder / f"__{rank}_0.distcp"


def _note(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank:04d}.written"


def _part(folder: Path) -> Path:
    """Return the temporary path of the metadata file."""
    return folder / f"{metadata.NAME}.part"
