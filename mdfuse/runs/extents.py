"""Find and check the extents of a run, which are given by name or read off the inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from mdfuse.errors import ProgramError, listed, shown
from mdfuse.extents.extent import Extent
from mdfuse.hir.program import HostProgram
from mdfuse.ir.graph import Fusion
from mdfuse.ir.tensors import why_not
from mdfuse.layouts.layout import Layout
from mdfuse.runs.arguments import described, has_dtensors

Extents = Mapping[str, int]


def check_extents(program: str, symbols: Iterable[str], given: Extents | None) -> dict[str, int]:
    """Check the extents that a caller gave, and return them as a dict.

    Raises:
        ProgramError: a name is no symbol of the program, or a value is no extent.
    """
    symbols = tuple(symbols)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ProgramError(
            f"@{program}: extents={shown(given)}",
            because="extents are given by name",
            hint='for example extents={"x.0": 7}',
        )
    unknown = [name for name in given if name not in symbols]
    if unknown:
        raise ProgramError(
            f"@{program}: extents {dict(given)}, but there is no {', '.join(map(str, unknown))}",
            because="its symbolic extents are " + ", ".join(symbols)
            if symbols
            else "this program has no symbolic extents",
            hint="name the input and the dim: x.0" if symbols else "leave extents= out",
        )
    for name, n in given.items():
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 1 << 63:
            raise ProgramError(
                f"@{program}: {name}={described(n)}",
                because="an extent is an integer of at least 0, and of 63 bits at most",
                hint=f'for example extents={{"{name}": 7}}',
            )
    return dict(given)


#: The reason why a program asks for extents.
_NOT_SEEN = (
    "an extent that is sharded, or that some rank does not see, does not follow from a rank's "
    "inputs, and all ranks must post the same"
)


def complete_extents(
    program: str, symbols: Iterable[str], known: Extents, why: str = _NOT_SEEN
) -> Extents:
    """Return the extents that are known, unless one of the program's is missing.

    Raises:
        ProgramError: some are.
    """
    missing = [name for name in symbols if name not in known]
    if missing:
        texts = ", ".join(f'"{name}": ...' for name in missing)
        raise ProgramError(
            f"@{program}: the extents {', '.join(missing)} are missing",
            because=why,
            hint=f"pass extents={{{texts}}}",
        )
    return known


@dataclass(frozen=True)
class _Dim:
    """A symbolic dim of an input: a symbol, or an expression of the symbols of other inputs."""

    at: int
    name: str
    dim: int
    extent: Extent

    @cached_property
    def symbol(self) -> str | None:
        """The symbol that the extent is; None where the extent follows from others."""
        text = str(self.extent)
        return text if text in self.extent.examples else None

    def of(self, inputs: Sequence[Any], ndim: int) -> int | None:
        """Return the extent that an input has; None where there is no tensor with `ndim` dims."""
        x = inputs[self.at] if self.at < len(inputs) else None
        if not isinstance(x, Tensor) or why_not(x) is not None:
            return None
        return x.shape[self.dim] if x.ndim == ndim else None


def _symbolic_dims(fusion: Fusion) -> list[_Dim]:
    return [
        _Dim(at, name, dim, n)
        for at, name in enumerate(fusion.inputs)
        for dim, n in enumerate(fusion.values[name].shape)
        if isinstance(n, Extent)
    ]


def _ndim(fusion: Fusion, d: _Dim) -> int:
    return len(fusion.values[d.name].shape)


def global_extents(
    fusion: Fusion, inputs: Sequence[Any], given: Extents | None = None
) -> dict[str, int]:
    """Return the extents of a run on global inputs.

    Raises:
        ProgramError: given extents contradict the inputs; an input has too few dims.
    """
    dims = _symbolic_dims(fusion)
    known = check_extents(fusion.name, (d.symbol for d in dims if d.symbol), given)
    for d in sorted(dims, key=lambda d: d.symbol is None):
        n = d.of(inputs, _ndim(fusion, d))
        if n is None:
            raise ProgramError(
                f"@{fusion.name}: no global tensor for %{d.name}, of which {d.extent} is an extent",
                where=f"input %{d.name}: {fusion.values[d.name].type_text()}",
                hint="pass global tensors, in this order: " + listed(fusion.inputs),
            )
        expected = known.setdefault(d.symbol, n) if d.symbol else d.extent.poly.value(known)
        if expected != n:
            raise ProgramError(
                f"@{fusion.name}: {d.extent} is {expected}, but dim {d.dim} of %{d.name} has {n}",
                because="one symbol is one extent",
                hint="pass inputs that agree, and leave extents= out: they follow from the inputs",
            )
    return known


@dataclass(frozen=True)
class LocalExtents:
    """The rules by which symbolic extents of a program follow from one rank's inputs.

    Attributes:
        fusion: the definition.
        dims: its symbolic dims, each with the layout of its input.
        seen: its symbolic dims that every rank sees whole.
    """

    fusion: Fusion
    dims: tuple[tuple[_Dim, Layout], ...]
    seen: tuple[_Dim, ...]

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The names of the extents."""
        return tuple(dict.fromkeys(d.symbol for d, _ in self.dims if d.symbol))

    def of(self, rank: int, inputs: Sequence[Any], given: Extents | None) -> Extents:
        """Return the extents of a run on one rank: those given, and those that every rank sees.

        Raises:
            ProgramError: extents are missing, unknown, or contradict the local shapes.
        """
        known = check_extents(self.fusion.name, self.symbols, given)
        for d in self.seen:
            n = d.of(inputs, _ndim(self.fusion, d))
            if d.symbol and n is not None:
                known.setdefault(d.symbol, n)
        complete_extents(self.fusion.name, self.symbols, known)
        for d, layout in self.dims:
            n = d.of(inputs, _ndim(self.fusion, d))
            if n is not None and rank in layout.mesh:  # otherwise the evaluator raises the error
                _check_local(self.fusion, d, n, known, layout, rank)
        return known


def local_extents(host: HostProgram, fusion: Fusion) -> LocalExtents:
    """Return the rules for the extents of a definition with local inputs, laid out as in `host`."""
    dims = tuple((d, _layout(host, d)) for d in _symbolic_dims(fusion))
    everyone = {r for mesh in host.meshes for r in mesh}
    seen = (d for d, at in dims if not at.split_axes(d.dim) and everyone <= {*at.mesh.ranks})
    return LocalExtents(fusion, dims, tuple(seen))


def known_extents(
    local: LocalExtents, inputs: Sequence[Any], given: Extents | None
) -> dict[str, int]:
    """Return the extents that are given, and those read off the global shapes of DTensors.

    Raises:
        ProgramError: as `check_extents`.
    """
    known = check_extents(local.fusion.name, local.symbols, given)
    for d, _ in local.dims:
        x = inputs[d.at] if d.at < len(inputs) else None
        if d.symbol is not None and x is not None and has_dtensors((x,)) and x.ndim > d.dim:
            known.setdefault(d.symbol, x.shape[d.dim])
    return known


def _layout(host: HostProgram, d: _Dim) -> Layout:
    layout = host.types[d.name].placed
    return layout


def _check_local(
    fusion: Fusion, d: _Dim, n: int, known: Extents, layout: Layout, rank: int
) -> None:
    whole = d.extent.poly.value(known)
    shape = tuple(whole if dim == d.dim else 1 for dim in range(_ndim(fusion, d)))
    expected = layout.local_shape(shape, rank)[d.dim]
    if n != expected:
        raise ProgramError(
            f"{d.extent} is {whole}, but dim {d.dim} of %{d.name} has {n} on rank {rank}",
            where=f"rank {rank}, input %{d.name} of @{fusion.name}",
            because=f"the rank's part of {whole} laid out as {layout} is {expected}",
            hint="pass the local part of a tensor of that extent, or the extent that it has",
        )
