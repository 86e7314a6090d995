"""Lowerings of a fusion with symbolic extents: each serves all extents that satisfy its guards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from mdfuse import hir_lowering
from mdfuse.caching import Cache
from mdfuse.compiled.segments import Segment, program_limit, segments_of
from mdfuse.config import Options
from mdfuse.errors import MdfuseError, ProgramError
from mdfuse.extents.assumptions import Assumptions, Guard, assuming
from mdfuse.extents.extent import with_numbers
from mdfuse.hir.program import HostProgram
from mdfuse.ir.graph import Fusion
from mdfuse.ir.symbolic import check_definition, is_possible, with_new_examples
from mdfuse.passes.segmentation import ShouldMerge

Extents = Mapping[str, int]


@dataclass(frozen=True)
class Lowering:
    """A lowered fusion, and the conditions on the extents under which it is valid.

    Attributes:
        fusion: the fusion as lowered.
        segments: runs of expressions without a reshard.
        host: the global host program, with symbols where its numbers depend on them.
        assumed: the assumptions on the symbols.
    """

    fusion: Fusion
    segments: tuple[Segment, ...]
    host: HostProgram
    assumed: Assumptions = field(compare=False)

    @property
    def guards(self) -> tuple[Guard, ...]:
        """The conditions that the extents must satisfy."""
        return self.assumed.guards

    def __str__(self) -> str:
        """The host program with the guards in front."""
        with assuming(self.assumed.copy()):
            head, *rows = str(self.host).split("\n")
        guards = ", ".join(map(str, self.guards)) or "none"
        return "\n".join((head, f"  # guards: {guards}", *rows))


@dataclass
class Lowerings:
    """All lowerings of one fusion so far.

    Attributes:
        fusion: the fusion as defined, with the definition's examples.
        examples: an example of each symbol.
        assumed: the assumptions that the definition itself made.
        lower: lowers a fusion: returns it as lowered, its segments and its host program.
        options: those that it is lowered with.
        chunks: the number of chunks into which the lowering cuts the program.
    """

    fusion: Fusion
    examples: Extents
    assumed: Assumptions
    lower: Callable[[Fusion], tuple[Fusion, tuple[Segment, ...], HostProgram]]
    options: Options | None = None
    chunks: int = 1
    lowerings: list[Lowering] = field(default_factory=list)

    @cached_property
    def _hosts(self) -> Cache[HostProgram]:
        """The host programs for extents that were asked for."""
        return Cache(program_limit(self.options))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the symbolic extents."""
        return tuple(self.examples)

    def first(self) -> Lowering:
        """Lower the fusion with examples that meshes and loops divide, as far as possible."""
        return self._add(_good_examples(self.fusion, self.examples, self.assumed, self.chunks))

    def _add(self, examples: Extents) -> Lowering:
        assumed = Assumptions()
        assumed.seen(examples)
        with assuming(assumed):
            fusion, segments, host = self.lower(with_new_examples(self.fusion, examples))
        guards = (*self.assumed.guards, *assumed.guards)
        segments = tuple(replace(s, guards=guards, examples=dict(examples)) for s in segments)
        lowering = Lowering(fusion, segments, host, assumed)
        self.lowerings.append(lowering)
        return lowering

    def host_for(self, extents: Extents) -> HostProgram:
        """Return the host program for some extents, with numbers in the place of symbols.

        Raises:
            MdfuseError: the definition means nothing for them.
        """
        key = tuple(extents[s] for s in self.symbols)
        return self._hosts.get_or(
            key, lambda: with_numbers(self.lowering_for(extents).host, extents)
        )

    def lowering_for(self, extents: Extents) -> Lowering:
        """Return a lowering whose guards some extents satisfy; a new one where there is none."""
        check_definition(self.fusion.name, self.assumed, extents)
        _check_sizes(self.fusion, extents)
        fits = (x for x in self.lowerings if x.assumed.hold(extents))
        return next(fits, None) or self._lower_again(extents)

    def _lower_again(self, extents: Extents) -> Lowering:
        try:
            return self._add(extents)
        except ZeroDivisionError:
            raise ProgramError(
                f"@{self.fusion.name} for the extents {dict(extents)}",
                because="an extent that follows from them divides by 0",
                hint="other extents",
            ) from None
        except MdfuseError as error:
            raise type(error)(
                f"@{self.fusion.name} for the extents {dict(extents)}: {error.what}",
                where=error.where,
                because=error.because,
                hint=error.hint,
            ) from error


def _check_sizes(fusion: Fusion, extents: Extents) -> None:
    """Raise ProgramError where a value would have 2^63 bytes or more."""
    for name, value in fusion.values.items():
        shape = with_numbers(value.shape, extents)
        if math.prod(max(n, 1) for n in shape) * value.dtype.itemsize >= 1 << 63:
            raise ProgramError(
                f"@{fusion.name} for the extents {dict(extents)}: %{name} has shape {tuple(shape)}",
                because="a tensor has less than 2^63 bytes",
                hint="other extents",
            )


def lowerings_of(
    fusion: Fusion,
    examples: Extents,
    assumed: Assumptions,
    should_merge: ShouldMerge | None,
    options: Options | None,
    masks: Mapping[str, str] | None = None,
) -> Lowerings:
    """Lower a fusion with symbolic extents once; further lowerings are made on demand."""
    lower = partial(_lowered, should_merge=should_merge, options=options, masks=masks)
    lowerings = Lowerings(fusion, examples, assumed, lower, options)
    lowerings.first()
    return lowerings


def _lowered(
    fusion: Fusion,
    should_merge: ShouldMerge | None,
    options: Options | None,
    masks: Mapping[str, str] | None,
) -> tuple[Fusion, tuple[Segment, ...], HostProgram]:
    fusion, parts, host = hir_lowering.lower(fusion, should_merge, options=options, masks=masks)
    return fusion, segments_of(fusion, parts, host, options), host


# -- examples ------------------------------------------------------------------------------------


def _good_examples(fusion: Fusion, examples: Extents, assumed: Assumptions, chunks: int) -> Extents:
    """Choose examples that all meshes and loops divide, and that differ where they may."""

    def fits(changed: Extents) -> bool:
        return assumed.hold(changed) and is_possible(fusion, changed)

    base = math.lcm(max(examples.values()), *(n * chunks for n in _divisors(fusion)))
    largest = {s: base if n == max(examples.values()) else n for s, n in examples.items()}
    good = largest if base < 1 << 20 and fits(largest) else dict(examples)
    for i, name in enumerate(good):
        changed = {**good, name: good[name] * (i + 1)}
        if i and fits(changed):
            good = changed
    return good


def _divisors(fusion: Fusion) -> Iterable[int]:
    """Yield for each value the size of its mesh times its number of chunks."""
    for value in fusion.values.values():
        if value.layout is not None:
            stream = value.layout.stream
            yield value.layout.mesh.size * (stream.count if stream is not None else 1)
