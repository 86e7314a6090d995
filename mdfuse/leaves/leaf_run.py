"""One run of a program on leaves, for the ranks of this process: a job's one, or all simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mdfuse.hir.program import BufferType, HostProgram
from mdfuse.hir.rank.pipelines import project
from mdfuse.layouts.layout import Layout
from mdfuse.leaves import lockstep
from mdfuse.leaves.border import PartBorder
from mdfuse.leaves.carrier import Carrier
from mdfuse.leaves.deal import Deal
from mdfuse.leaves.lockstep import RankLeaves, rank_leaves
from mdfuse.leaves.meeting import Rounds
from mdfuse.passes.meshes import moved
from mdfuse.plan.index_checks import IndexChecks
from mdfuse.runs.arguments import numbers
from mdfuse.runtime.watch.plan_position import ActiveStep, note_written

#: Rank -> something of it.
ByRank = Mapping[int, Any]


@dataclass(frozen=True)
class LeafCode:
    """A host program of leaves, and who computes them.

    Attributes:
        host: the program, whose ranks are the leaves.
        deal: who computes which.
    """

    host: HostProgram
    deal: Deal

    @cached_property
    def shown(self) -> HostProgram:
        """The inputs and outputs as callers see them: on the mesh of the ranks, without code."""
        names = {*self.host.inputs, *self.host.outputs}
        types = {n: self._on_ranks(self.host.types[n]) for n in self.host.types if n in names}
        aliases = {n: self.host.root(n) for n in self.host.outputs if n in self.host.aliases}
        return HostProgram(
            name=self.host.name,
            types=types,
            inputs=self.host.inputs,
            outputs=self.host.outputs,
            instructions=(),
            aliases=aliases,
        )

    def _on_ranks(self, kind: BufferType) -> BufferType:
        if kind.layout is None:
            return kind
        return replace(kind, layout=on_ranks(kind.layout, len(kind.shape), self.deal))

    def border(self, name: str) -> PartBorder | None:
        """Return the border of an input or output; None for a number."""
        kind, inner = self.shown.types[name], self.host.types[name]
        if kind.layout is None or inner.layout is None:
            return None
        return PartBorder(kind.shape, kind.layout, inner.layout, self.deal)

    @cached_property
    def borders(self) -> dict[str, PartBorder | None]:
        return {n: self.border(n) for n in (*self.host.inputs, *self.host.outputs)}

    @cached_property
    def programs(self) -> dict[int, HostProgram]:
        """The projections onto the leaves; ProgramError where these run different instructions."""
        every = {leaf: project(self.host, leaf) for leaf in self.deal.leaf_mesh.ranks}
        lockstep.check_alike([*every.values()])
        return every


def on_ranks(layout: Layout, ndim: int, deal: Deal) -> Layout:
    """Return a layout of leaves as one of the ranks."""
    return moved(layout, deal.mesh).normalized(ndim, may_vary=True)


@dataclass
class LeafRun:
    """Runs a program on leaves for some ranks of its mesh, again and again.

    Attributes:
        code: the program.
        ranks: those of this process.
        carrier: what takes parcels to the other ranks.
        device: where leaves compute.
        poison: see `Options.poison`.
        checks: of indices, or none.
        compiles: see `LeafMeeting`.
    """

    code: LeafCode
    ranks: Sequence[int]
    carrier: Carrier
    device: torch.device
    poison: bool = False
    checks: IndexChecks | None = None
    compiles: bool = False
    _leaves: list[RankLeaves] = field(default_factory=list)
    #: the step that was begun last; -1: none
    _at: int = -1

    def run(self, arguments: ByRank, out: ByRank | None = None) -> dict[int, list[Any]]:
        """Run once.

        Args:
            arguments: rank -> its arguments, in the order of the inputs.
            out: rank -> the caller's buffers for outputs, None for those without.

        Returns:
            Rank -> its outputs.
        """
        given, self._at = {r: numbers(self.code.host, arguments[r]) for r in self.ranks}, -1
        try:
            with torch.no_grad(), one_thread(self.device):
                return self._run(given, out)
        except BaseException as error:
            plans = (x.plans[0] for x in self._leaves if x.plans and self._at >= 0)
            note_written(error, {n for plan in plans for n in ActiveStep(plan, self._at).written})
            raise

    def _run(self, given: ByRank, out: ByRank | None) -> dict[int, list[Any]]:
        inner = self._cut(given)
        if not self._leaves:
            self._leaves = [self._planned(r, inner[r]) for r in self.ranks]
        slots = [
            [plan.start(inner[x.rank][leaf]) for leaf, plan in zip(x.leaves, x.plans, strict=True)]
            for x in self._leaves
        ]
        for number in lockstep.run(
            self._leaves, slots, self.code.deal, self.carrier, self.compiles
        ):
            self._at = number
        results = {
            x.rank: {
                leaf: plan.finish(values)
                for leaf, plan, values in zip(x.leaves, x.plans, of, strict=True)
            }
            for x, of in zip(self._leaves, slots, strict=True)
        }
        return self._joined(results, given, out)

    def forget(self) -> None:
        """Give up the plans; the next run makes them again."""
        self._leaves = []

    def _planned(self, rank: int, arguments: Mapping[int, Sequence[Any]]) -> RankLeaves:
        code = self.code
        return rank_leaves(
            code.deal, rank, code.programs, arguments, self.device, self.poison, self.checks
        )

    def _cut(self, given: ByRank) -> dict[int, dict[int, list[Any]]]:
        """Return rank -> leaf -> its arguments."""
        deal = self.code.deal
        inner: dict[int, dict[int, list[Any]]] = {
            r: {leaf: [] for leaf in deal.leaves_of(r)} for r in self.ranks
        }
        for n, name in enumerate(self.code.host.inputs):
            xs = {r: given[r][n] for r in self.ranks}
            parts = self._parts(self.code.borders[name], xs, inner)
            for r in self.ranks:
                for leaf, values in inner[r].items():
                    values.append(parts[r][leaf])
        return inner

    def _parts(
        self, border: PartBorder | None, xs: ByRank, leaves: ByRank
    ) -> dict[int, dict[int, Any]]:
        """Return rank -> leaf -> its part of an input."""
        if border is None:
            return {r: dict.fromkeys(leaves[r], x) for r, x in xs.items()}
        if border.is_cut:
            return {r: border.cut(r, x) for r, x in xs.items()}
        parts: dict[int, dict[int, Any]] = {r: {} for r in xs}
        self._carried({r: border.gathered(r, x, parts[r]) for r, x in xs.items()})
        return parts

    def _joined(self, results: ByRank, given: ByRank, out: ByRank | None) -> dict[int, list[Any]]:
        """Return rank -> its outputs, in the caller's buffers where there are some.

        These are written once all have come: where another rank is lost before, they stay whole.
        """
        host, every = self.code.host, list[dict[int, list[Any]]]()
        for n, name in enumerate(host.outputs):
            border, dtype = self.code.borders[name], host.types[name].dtype
            parts = {r: {leaf: x[n] for leaf, x in results[r].items()} for r in self.ranks}
            every.append(self._whole(border, dtype, parts))
        outputs: dict[int, list[Any]] = {r: [] for r in self.ranks}
        for n, (name, joined) in enumerate(zip(host.outputs, every, strict=True)):
            written = host.inputs.index(host.root(name)) if name in host.aliases else None
            for r in self.ranks:
                buffer = given[r][written] if written is not None else None
                buffer = out[r][n] if buffer is None and out is not None else buffer
                outputs[r].append(_in(buffer, joined[r][0] if joined[r] else None))
        return outputs

    def _whole(
        self, border: PartBorder | None, dtype: torch.dtype, parts: ByRank
    ) -> dict[int, list[Any]]:
        """Return rank -> its part of an output; nothing of a number on a rank without leaves."""
        if border is None:
            return {r: [*of.values()][:1] for r, of in parts.items()}
        if border.is_joined:
            return {r: [border.joined(r, of, dtype, self.device)] for r, of in parts.items()}
        whole: dict[int, list[Any]] = {r: [] for r in parts}
        self._carried(
            {r: border.exchanged(r, of, dtype, self.device, whole[r]) for r, of in parts.items()}
        )
        return whole

    def _carried(self, rounds: Mapping[int, Rounds]) -> None:
        self.carrier.carry([*rounds.items()])


def _in(buffer: Tensor | None, x: Any) -> Any:
    """Return a value in the caller's buffer, where there is one."""
    if buffer is None or buffer is x:
        return x
    return buffer.copy_(x)


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Compute with one thread on CPUs: torch adds up in as many parts as there are threads."""
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
