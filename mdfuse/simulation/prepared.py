"""State that simulations of one program share: each rank's projection, its verdict, the plans."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdfuse.config import Options
from mdfuse.hir.program import HostProgram
from mdfuse.hir.verify.check import verify, verify_once
from mdfuse.plan.build import Plan, build
from mdfuse.plan.index_checks import IndexChecks
from mdfuse.runs.arguments import check_arguments, check_outputs
from mdfuse.simulation.network import SimNetwork

#: How many programs are kept ready for another simulation, and kinds of arguments for each.
_LIMIT = 4


class BoundPlans(NamedTuple):
    """The plans of all ranks for arguments of one kind, and what they are bound to."""

    plans: list[Plan]
    network: SimNetwork
    checks: IndexChecks


@dataclass(frozen=True)
class PreparedSimulation:
    """A program, what each rank has of it, and plans that no simulation is using.

    Attributes:
        program: a global program, or the projections of all ranks.
        locals_: what each rank has of it.
        idle: plans, by the kinds of their arguments.
    """

    program: HostProgram | tuple[HostProgram, ...]
    locals_: tuple[HostProgram, ...]
    idle: OrderedDict[Hashable, BoundPlans] = field(default_factory=OrderedDict)

    def check(self) -> None:
        """Verify the program, unless that was done before.

        Raises:
            MdfuseError: it is wrong; see `mdfuse.hir.verify`.
        """
        if isinstance(self.program, HostProgram):
            verify_once(self.program)
        else:
            assert self._fit_together

    @cached_property
    def _fit_together(self) -> bool:
        verify(dict(enumerate(self.locals_)))
        return True

    def take(
        self,
        arguments: Sequence[Sequence[Any]],
        out: Sequence[Sequence[Any]],
        options: Options,
        is_late: bool,
    ) -> tuple[Hashable, BoundPlans]:
        """Return plans for these arguments, which are checked, and the key for `give_back`.

        A simulation that fails does not give them back: posts are left over in their network.

        Raises:
            ProgramError: the arguments do not fit.
        """
        device = device_of(arguments)
        for rank, (local, given, buffers) in enumerate(
            zip(self.locals_, arguments, out, strict=True)
        ):
            check_arguments(local, rank, given, device)
            check_outputs(local, rank, given, buffers, device, is_partial=True)
        kinds = tuple(_kind(x) for row in (*arguments, *out) for x in row)
        key = kinds, device, options.poison, options.check_indices, is_late
        plans = self.idle.pop(key, None)
        if plans is None:
            plans = self._built(arguments, out, options, device, is_late)
        return key, plans

    def _built(
        self,
        arguments: Sequence[Sequence[Any]],
        out: Sequence[Sequence[Any]],
        options: Options,
        device: torch.device,
        is_late: bool,
    ) -> BoundPlans:
        network, checks = SimNetwork(is_late=is_late), IndexChecks()
        how: dict[str, Any] = {
            "is_simulated": True,
            "checks": checks if options.check_indices else None,
        }
        plans = [
            build(local, network.bind, device, options.poison, given, buffers, **how)
            for local, given, buffers in zip(self.locals_, arguments, out, strict=True)
        ]
        return BoundPlans(plans, network, checks)

    def give_back(self, key: Hashable, ready: BoundPlans) -> None:
        """Keep plans for the next simulation."""
        _keep(self.idle, key, ready)


#: Numbers of programs -> what is known of them; it holds them, so that the numbers stay theirs.
_known: OrderedDict[Hashable, PreparedSimulation] = OrderedDict()


def known(program: HostProgram | tuple[HostProgram, ...]) -> PreparedSimulation | None:
    """Return what is prepared of a program, or of projections."""
    return _known.get(_numbers(program))


def keep(prepared: PreparedSimulation) -> None:
    """Keep what is prepared of a program, and drop what was used least recently."""
    _keep(_known, _numbers(prepared.program), prepared)


def _numbers(program: HostProgram | tuple[HostProgram, ...]) -> Hashable:
    return id(program) if isinstance(program, HostProgram) else tuple(map(id, program))


def _keep(cache: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > _LIMIT:
        cache.popitem(last=False)


def _kind(x: Any) -> Hashable:
    """Return what a plan depends on of an argument."""
    if not isinstance(x, Tensor):
        return x is None
    return x.shape, x.stride(), x.dtype, x.requires_grad


def device_of(arguments: Sequence[Sequence[Any]]) -> torch.device:
    """Return where the arguments lie; the CPU where there are none."""
    devices = (x.device for row in arguments for x in row if isinstance(x, Tensor))
    return next(devices, torch.device("cpu"))
