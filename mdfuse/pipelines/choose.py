"""Choose the schedule of a pipeline: by name, or a table that fits its stages."""

from __future__ import annotations

from collections.abc import Sequence

from mdfuse.errors import DefinitionError, shown
from mdfuse.pipelines.schedules import Schedule
from mdfuse.pipelines.tables import NAMED
from mdfuse.pipelines.timing import Reads


def choose(
    wanted: object,
    *,
    microbatches: int,
    groups: Sequence[int],
    gradients: bool,
    reads: Reads | None = None,
) -> Schedule:
    """Return the schedule of a pipeline.

    Args:
        wanted: a name, or a table.
        microbatches: their number.
        groups: the rank group of each of its stages.
        gradients: whether its stages go back as well.
        reads: stage -> the stages that it reads, where not each reads the one before it.

    Raises:
        DefinitionError: it is neither; as `Schedule.named` and `Schedule.check` raise it; a name
            is of a schedule that goes back where stages do not, or the other way round; stages are
            no chain, and the schedule of that name is for chains.
    """
    count = len(groups)
    match wanted:
        case str():
            schedule = Schedule.named(
                wanted, stages=count, microbatches=microbatches, groups=groups
            )
            _check_name(wanted, gradients, reads)
        case Schedule():
            schedule = wanted
        case _:
            raise DefinitionError(
                f"schedule={shown(wanted)}",
                because="a schedule is a name, or a table: an mf.Schedule",
                hint="one of " + ", ".join(NAMED),
            )
    schedule.check(
        stages=count, microbatches=microbatches, groups=groups, gradients=gradients, reads=reads
    )
    return schedule


def _check_name(name: str, gradients: bool, reads: Reads | None) -> None:
    named = NAMED[name]
    if named.goes_back != gradients:
        raise DefinitionError(
            f"schedule {name!r} for a program {'with' if gradients else 'without'} gradients",
            because=f"it {'has' if named.goes_back else 'has no'} backwards",
            hint="one of " + ", ".join(n for n, x in NAMED.items() if x.goes_back == gradients),
        )
    if reads is not None and not named.anywhere:
        sources = (f"stage {s} reads {' and '.join(map(str, of))}" for s, of in reads.items() if of)
        raise DefinitionError(
            f"schedule {name!r} for stages that are no chain",
            because=f"each of its stages reads the one before it; here {', '.join(sources)}",
            hint="gpipe, or a table: mf.Schedule.from_csv(path), .from_rows(rows)",
        )
