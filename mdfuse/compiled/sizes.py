"""Programs whose runs take the plan of the next larger of some sizes, instead of one of their own.

A run fills its inputs up to the size; the rows that fill up write into no state, and results are
cut. So as many plans and graphs as sizes serve runs of any number of rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from mdfuse.caching import Cache
from mdfuse.compiled.program import Program
from mdfuse.compiled.specialisations import lowerings_of
from mdfuse.config import Options, options_from_environment
from mdfuse.errors import MdfuseError, ProgramError
from mdfuse.extents.extent import Extent, with_numbers
from mdfuse.frontend.cache import NamedDefinition
from mdfuse.ir.graph import Fusion, Value, fresh_name
from mdfuse.ir.tensors import PLAIN
from mdfuse.layouts.layout import Layout, Placement, Replicate, Shard
from mdfuse.passes.in_place.drop_rows import depends
from mdfuse.passes.segmentation import ShouldMerge
from mdfuse.runs.arguments import (
    check_count,
    check_global,
    check_kind,
    check_no_gradients,
    has_dtensors,
)
from mdfuse.runs.extents import check_extents
from mdfuse.runtime.communicator import Communicator, init
from mdfuse.torch_private import forward_level, transform_level, untraced

Extents = Mapping[str, int]
Shape = tuple[int, ...]

#: How many combinations of sizes are planned ahead, at most.
_AHEAD = 64


def with_masks(fusion: Fusion, options: Options) -> tuple[Fusion, dict[str, str]]:
    """Return a definition with an input for each symbol of sizes: which of its rows are there.

    Raises:
        ProgramError: a name is no symbol of the definition.
    """
    masks: dict[str, str] = {}
    values = dict(fusion.values)
    for symbol in dict(options.sizes or ()):
        places = (
            (values[name], d)
            for name in fusion.inputs
            for d, n in enumerate(values[name].shape)
            if isinstance(n, Extent) and str(n) == symbol
        )
        first = next(places, None)
        if first is None:
            raise ProgramError(
                f"sizes of {symbol!r}, which is no extent that a run of @{fusion.name} chooses",
                because="sizes have the names that extents= takes: of an input and its dim",
                hint='fd.define_tensor([-1, 64], name="x") and sizes={"x.0": (1, 2, 4)}',
            )
        value, dim = first
        mask = fresh_name(values, f"rows_of_{symbol.replace('.', '_')}")
        layout = None if value.layout is None else _rows_of(value.layout, dim)
        values[mask] = Value(
            name=mask, shape=(value.shape[dim],), dtype=torch.bool, order=(0,), layout=layout,
            is_law=value.is_law,
        )  # fmt: skip
        masks[symbol] = mask
    return replace(fusion, values=values, inputs=(*fusion.inputs, *masks.values())), masks


def _rows_of(layout: Layout, dim: int) -> Layout:
    """Return the layout of one dim of a value."""
    placements: dict[str, Placement] = {
        axis: Shard(0) if p == Shard(dim) else Replicate()
        for axis, p in zip(layout.mesh.axes, layout.placements, strict=True)
    }
    return Layout(layout.mesh, placements)


@dataclass(frozen=True)
class SizedProgram(Program):
    """A program with `Options.sizes`; see `Program`.

    `fusion`, `host` and printed text are those of the program that serves all sizes; `run` takes
    and returns tensors of the number of rows that there are.
    """

    masks: Mapping[str, str] | None = None

    @cached_property
    def whole(self) -> Program:
        """The program of filled up inputs, and of the masks of rows behind them."""
        options = options_from_environment(self.options)
        plans = max(options.plans, 2 * len(self._combinations))
        fusion = replace(self.fusion, inputs=(*self.fusion.inputs, *(self.masks or {}).values()))
        options = replace(options, plans=plans)
        return Program(fusion, self.segments, self.host, options, self.symbolic)

    @property
    def definition(self) -> Fusion:
        """The fusion as defined, with the masks behind its inputs."""
        assert self.symbolic is not None
        return self.symbolic.fusion

    @cached_property
    def _sizes(self) -> dict[str, tuple[int, ...]]:
        return dict(options_from_environment(self.options).sizes or ())

    @cached_property
    def _combinations(self) -> list[dict[str, int]]:
        """All choices of a size for each symbol, the largest first."""
        orders = [sorted(sizes, reverse=True) for sizes in self._sizes.values()]
        return [dict(zip(self._sizes, chosen, strict=True)) for chosen in product(*orders)]

    @cached_property
    def is_silent(self) -> bool:
        """True if a run without rows changes no state: it is written by rows alone."""
        return all(map(self._is_written_by_rows, self.fusion.reuse))

    def _is_written_by_rows(self, output: str) -> bool:
        name, state = output, self.fusion.reuse[output]
        while name != state:
            expr = self.fusion.producers.get(name)
            if expr is None or not expr.kwargs.get("drops"):
                return False
            name = expr.reads[-1]
        return True

    def explain(self) -> str:
        """Return the choices of the compiler as text, with their reasons."""
        sizes = ", ".join(f"{name} of {', '.join(map(str, n))}" for name, n in self._sizes.items())
        when = "before the first run"
        if not self.is_silent:
            when = "in the first run of each, since one without rows would change state"
        where = "inputs are filled up in the memory of the largest"
        return f"{super().explain()}\n  sizes: {sizes}, planned {when}; {where}"

    @untraced
    def run(
        self,
        *inputs: Any,
        out: Sequence[Tensor | None] | None = None,
        extents: Mapping[str, int] | None = None,
        options: Options | None = None,
    ) -> list[Any]:
        """Run with the plan of the next larger sizes; see `Program.run`.

        Raises:
            ProgramError: as there; more rows than the largest size; `out=`, `options=` or DTensors.
        """
        comm = init(self.options)
        rank, problem = comm.rank, None
        try:
            if out is not None or options is not None or has_dtensors(inputs):
                raise ProgramError(
                    f"@{self.host.name}: a run of sizes with out=, options= or DTensors",
                    because="inputs are filled up, and results cut, as plain tensors",
                    hint="program.run(*inputs)",
                )
            known = self._extents_of(rank, inputs, extents)
            sizes = self.sizes_for(known)
        except MdfuseError as error:
            problem = error
        if problem is not None:
            self.whole.refuse(problem)
        if rank not in self._planned:
            self._plan_ahead(inputs, known, comm)
            self._planned.add(rank)
        given = self._filled(inputs, known, sizes, comm)
        results = self.whole.run(*given, extents=sizes)
        shapes = self._shapes(known, rank)
        return [
            self._cut(x, shapes.get(n)) for n, x in zip(self.fusion.outputs, results, strict=True)
        ]

    def run_all(self, inputs: Sequence[Any], extents: Mapping[str, int] | None = None) -> list[Any]:
        """Run as `run`, with all inputs in one sequence."""
        return self.run(*inputs, extents=extents)

    def _extents_of(
        self, rank: int, inputs: Sequence[Any], extents: Mapping[str, int] | None
    ) -> Extents:
        """Return the extents of a run; those of inputs of the same forms are looked up."""
        local = self.whole._local_extents
        key = _forms_of(inputs, check_extents(local.fusion.name, local.symbols, extents))
        known = None if key is None else self._known.find(key)
        if known is None:
            known = local.of(rank, inputs, extents)
            self._check_filled(rank, inputs, known)
            if key is not None:
                self._known.put(key, known)
        return known

    def _check_filled(self, rank: int, inputs: Sequence[Any], extents: Extents) -> None:
        """Raise ProgramError unless those inputs fit of which a run sees copies alone."""
        program, device = self.host, init(self.options).device
        check_count(program.name, rank, inputs, self.fusion.inputs)
        shapes = self._shapes(extents, None)
        given = {n: x for n, x in zip(self.fusion.inputs, inputs, strict=True) if n in shapes}
        for name, x in given.items():
            kind = replace(program.types[name], shape=shapes[name] or ())
            check_kind(
                kind, rank, name, x, device, f"rank {rank}, input %{name} of @{program.name}"
            )
        check_no_gradients(program.name, given, given.values())

    @cached_property
    def _known(self) -> Cache[Extents]:
        """Forms of inputs -> the extents of a run."""
        return Cache(limit=4096)

    def sizes_for(self, extents: Extents) -> dict[str, int]:
        """Return extents with the next larger sizes, in which each rank has room for its rows.

        Raises:
            ProgramError: there are more rows than the largest size.
        """
        chosen = dict(extents)
        for symbol, sizes in self._sizes.items():
            fits = (s for s in sizes if s >= extents[symbol] and self._has_room(symbol, extents, s))
            size = next(fits, None)
            if size is None:
                raise ProgramError(
                    f"@{self.host.name}: {symbol} is {extents[symbol]}, and the largest of its "
                    f"sizes {sizes[-1]}",
                    because="a run takes the plan of a size in which all of its rows are",
                    hint=f'Options(sizes={{"{symbol}": ...}}) with a larger one, or fewer rows',
                )
            chosen[symbol] = size
        return chosen

    def _has_room(self, symbol: str, extents: Extents, size: int) -> bool:
        """Return whether no rank has more of the rows than of the size."""
        layout = self._layout((self.masks or {})[symbol])
        if layout is None or not layout.split_axes(0):
            return True
        parts = ((layout.local_shape((n,), r)[0] for n in (extents[symbol], size))
                 for r in layout.mesh.ranks)  # fmt: skip
        return all(rows <= room for rows, room in parts)

    def _layout(self, name: str) -> Layout | None:
        return self.host.types[name].layout

    @cached_property
    def _rooms(self) -> dict[Any, dict[str, _Room]]:
        """Other extents -> the memory of what is filled up: graphs find it at one address."""
        return {}

    @cached_property
    def _planned(self) -> set[int]:
        """This rank once sizes are planned: where a rank refuses that run, all plan in the next."""
        return set()

    @cached_property
    def _numbers(self) -> Tensor:
        """The numbers of rows, on this rank's device."""
        most = max(map(max, self._sizes.values()))
        return torch.arange(most, device=init(self.options).device)

    @cached_property
    def _filled_at(self) -> set[int]:
        """Addresses of the memory that later runs fill up: results that lie there are copied."""
        return set()

    def _shapes(self, extents: Extents, rank: int | None) -> dict[str, Shape | None]:
        """Return the shape of each sized input, mask and output on a rank; None: on all at once.

        A value that is not on the rank has None.
        """
        key = (rank, *extents.items())
        shapes = self._known_shapes.find(key)
        if shapes is None:
            shapes = {name: self._shape(name, extents, rank) for name in self._sized}
            self._known_shapes.put(key, shapes)
        return shapes

    @cached_property
    def _known_shapes(self) -> Cache[dict[str, Shape | None]]:
        """Rank and extents -> shapes."""
        return Cache(limit=4096)

    @cached_property
    def _sized(self) -> list[str]:
        """The inputs, masks and outputs with a dim whose extent has sizes."""
        values = self.definition.values
        return [
            name
            for name in dict.fromkeys((*self.whole.fusion.inputs, *self.fusion.outputs))
            if any(depends(n, symbol) for n in values[name].shape for symbol in self._sizes)
        ]

    def _shape(self, name: str, extents: Extents, rank: int | None) -> Shape | None:
        shape: Shape = with_numbers(self.definition.values[name].shape, extents)
        layout = self._layout(name)
        if layout is None or rank is None:
            return shape
        return layout.local_shape(shape, rank) if rank in layout.mesh else None

    def _filled(
        self, inputs: Sequence[Any], extents: Extents, sizes: Extents, comm: Communicator
    ) -> list[Any]:
        """Return the inputs filled up, and the masks of rows."""
        rank = comm.rank
        others = tuple((name, n) for name, n in sizes.items() if name not in self._sizes)
        room = self._rooms.setdefault(others, {})
        shapes, given = self._shapes(extents, rank), list[Any]()
        for name, x in zip(self.fusion.inputs, inputs, strict=False):
            if isinstance(x, Tensor) and name in shapes:
                x = _in(self._room(room, name, sizes, rank, x.device), x)
            given.append(x)
        for mask in (self.masks or {}).values():
            rows = None
            if (shape := shapes[mask]) is not None:
                rows = self._room(room, mask, sizes, rank, comm.device)
                torch.lt(self._numbers[: len(rows)], shape[0], out=rows)
            given.append(rows)
        return given

    def _room(
        self, room: dict[str, _Room], name: str, sizes: Extents, rank: int, device: torch.device
    ) -> Tensor:
        if name not in room:
            each = (self._shapes({**sizes, **c}, rank)[name] or () for c in self._combinations)
            dtype = self.definition.values[name].dtype
            with torch.inference_mode(False):  # later runs write into it, in any mode
                memory = torch.zeros(max(map(prod, each)), dtype=dtype, device=device)
            room[name] = _Room(memory)
            self._filled_at.add(memory.data_ptr())
        return room[name].of(self._shapes(sizes, rank)[name] or ())

    def _cut(self, x: Any, shape: Shape | None) -> Any:
        """Return the rows of a result that there are; `shape` is None where it is not cut."""
        if not isinstance(x, Tensor) or shape is None:
            return x
        rows = _first(x, shape)
        return rows.clone() if x.untyped_storage().data_ptr() in self._filled_at else rows

    def _plan_ahead(self, inputs: Sequence[Any], extents: Extents, comm: Communicator) -> None:
        """Plan all sizes by runs without rows: twice where a second run captures graphs."""
        if not self.is_silent or len(self._combinations) > _AHEAD:
            return
        times = 2 if comm.device.type == "cuda" else 1
        nothing = {**extents, **dict.fromkeys(self._sizes, 0)}
        shapes = self._shapes(nothing, comm.rank)
        empty = [
            _first(x, shapes[name] or ()) if isinstance(x, Tensor) and name in shapes else x
            for name, x in zip(self.fusion.inputs, inputs, strict=False)
        ]
        for chosen in self._combinations:
            sizes = {**extents, **chosen}
            for _ in range(times):
                self.whole.run(*self._filled(empty, nothing, sizes, comm), extents=sizes)

    def filled_up(
        self, inputs: Sequence[Any], extents: Extents
    ) -> tuple[list[Any], dict[str, int]]:
        """Return global inputs filled up, with masks, and the sizes: for simulations."""
        sizes, given = self.sizes_for(extents), []
        shapes, there = self._shapes(sizes, None), self._shapes(extents, None)
        for name, x in zip(self.fusion.inputs, inputs, strict=True):
            if isinstance(x, Tensor) and (shape := shapes.get(name)) is not None:
                dtype = self.definition.values[name].dtype
                check_global(self.fusion.name, name, x, there[name], dtype)
                x = _in(torch.zeros(shape, dtype=dtype), x)
            given.append(x)
        for symbol in self.masks or {}:
            given.append(torch.arange(sizes[symbol]) < extents[symbol])
        return given, sizes

    def cut_all(self, results: Sequence[Any], extents: Extents) -> Iterator[Any]:
        """Yield the rows of global results that there are."""
        shapes = self._shapes(extents, None)
        for name, x in zip(self.fusion.outputs, results, strict=True):
            yield self._cut(x, shapes.get(name))


def _forms_of(inputs: Sequence[Any], extents: Extents) -> Hashable | None:
    """Return a key of plain tensors; None where they need a closer look."""
    if not PLAIN.issuperset(map(type, inputs)):
        return None
    if transform_level() is not None or forward_level() >= 0:
        return None
    try:
        forms = [(x.shape, x.dtype, x.layout, x.device, x.requires_grad) for x in inputs]
        if any(not x.data_ptr() and x.numel() for x in inputs):  # its memory was given up
            return None
    except RuntimeError:  # nested, or without memory
        return None
    return (torch.is_grad_enabled(), *forms, *extents.items())


def sized(
    named: NamedDefinition, options: Options, should_merge: ShouldMerge | None
) -> SizedProgram:
    """Return the program of a definition with `Options.sizes`, lowered anew.

    Raises:
        MdfuseError: rows of a size depend on each other, with the line of the op that reads them.
    """
    fusion, masks = with_masks(named.fusion, options)
    symbolic = lowerings_of(fusion, named.examples, named.assumed, should_merge, options, masks)
    (first,) = symbolic.lowerings
    inputs = tuple(name for name in first.fusion.inputs if name not in masks.values())
    shown = replace(first.fusion, inputs=inputs)
    return SizedProgram(shown, first.segments, first.host, options, symbolic, masks=masks)


@dataclass
class _Room:
    """Memory of the largest size of a value, which all sizes share.

    Attributes:
        memory: dense, along one dim.
        shape: of the value that it has; None: nobody has written it.
        value: it, a view.
    """

    memory: Tensor
    shape: Shape | None = None
    value: Tensor = field(init=False)

    def of(self, shape: Shape) -> Tensor:
        """Return a tensor in it; rows that fill up have numbers of this input, or zeros."""
        if shape != self.shape:  # another row's numbers may be no index where they lie now
            self.memory.zero_()
            with torch.inference_mode(False):  # as the memory
                self.shape, self.value = shape, self.memory[: prod(shape)].view(shape)
        return self.value


def _first(x: Tensor, shape: Shape) -> Tensor:
    """Return the first elements of a tensor along each dim."""
    for dim, (n, most) in enumerate(zip(shape, x.shape, strict=True)):
        if n != most:
            x = x.narrow(dim, 0, n)
    return x


def _in(room: Tensor, x: Tensor) -> Tensor:
    """Copy a tensor into the first rows of a larger one."""
    _first(room, x.shape).copy_(x)
    return room
