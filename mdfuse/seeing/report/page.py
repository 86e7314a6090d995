"""The page of a report: everything about a program, made of its host program and a few texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import mdfuse.seeing.report
from mdfuse.communication import Communication
from mdfuse.config import VERSION
from mdfuse.errors import counted
from mdfuse.hir.program import HostProgram
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.traffic import group_of, received
from mdfuse.ir.graph import Fusion
from mdfuse.layouts.layout import Layout
from mdfuse.layouts.picture import Picture
from mdfuse.pipelines.schedules import Schedule
from mdfuse.reshard.lower_bounds import bound
from mdfuse.seeing.action_times import by_action
from mdfuse.seeing.costs import Costs
from mdfuse.seeing.events import Event
from mdfuse.seeing.memory_use import Memory, memory_of
from mdfuse.seeing.rank_classes import Classes, rank_classes
from mdfuse.seeing.rank_groups import rank_groups
from mdfuse.seeing.report import listing
from mdfuse.seeing.report.charts import lanes_chart, memory_chart
from mdfuse.seeing.report.numbers import size_text, time_text
from mdfuse.seeing.timeline import Timeline, on_ranks

#: More pictures, and ranks of other classes, are left out.
_PICTURES, _RANKS = 48, 4
#: The number of values of a layout that are named.
_NAMES = 6


#: The shape and the layout of a value.
Lies = tuple[tuple[int, ...], Layout]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The subject of a report.

    Attributes:
        host: the host program for all ranks, with numbers for extents.
        definition: the text of the definition, with layouts.
        segments: the texts of its segments.
        explained: the text of `program.explain()`.
        values: name -> shape and layout of each value of the fusion.
        costs: predicts times.
        measured: the events of a run; none where nothing ran.
        schedule: of a pipeline, with the names of its meshes; None for any other program.
    """

    host: HostProgram
    definition: str
    segments: Sequence[str]
    explained: str
    values: Mapping[str, Lies]
    costs: Costs
    measured: Sequence[Event] = field(default=())
    schedule: Schedule | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """A row of the table of communications: posts that change layouts alike.

    Attributes:
        kind: of the communication, with its reduce op.
        where: the axes.
        change: the layouts.
        shape: of the sent tensor.
        count: how often in a run.
        nbytes: that arrive at a rank each time, at most.
        total: that arrive in a run at the rank that gets most of these.
        least: the bytes that must arrive there at least; None where they are not known.
    """

    kind: str
    where: str
    change: str
    shape: str
    count: int
    nbytes: int
    total: int
    least: int | None

    @property
    def ratio(self) -> str:
        """The bytes that arrive, as a multiple of the bound."""
        if self.least is None:
            return "–"
        return (
            f"{self.nbytes / self.least:.2f}" if self.least else "1.00" if not self.nbytes else "∞"
        )


def html(subject: Subject) -> str:
    """Return the report of a program: one page of HTML, which needs nothing else."""
    from jinja2 import Environment, StrictUndefined

    host = subject.host
    classes = rank_classes(host)
    timeline = on_ranks(host, subject.costs, classes)
    shown = classes.firsts[:_RANKS]
    names = {m[0]: _named(m) for m in classes.members}
    memories = [memory_of(project(host, r)) for r in shown]
    traffic = communications(host, classes)
    lines, drawn = listing.rows(host), by_layout(subject.values)
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {"size": size_text, "time": time_text}
    return environment.from_string(_template()).render(
        subject=subject,
        host=host,
        version=VERSION,
        meshes=[str(m) for m in host.meshes],
        facts=_facts(subject, classes, traffic, memories, timeline),
        counted=counted,
        pictures=[(text, Picture(x, shape).svg()) for text, shape, x in drawn[:_PICTURES]],
        pictures_more=max(0, len(drawn) - _PICTURES),
        lines=lines[: listing.MOST],
        lines_more=max(0, len(lines) - listing.MOST),
        traffic=traffic,
        memories=[(names[m.rank], m, memory_chart(m)) for m in memories],
        simulated=lanes_chart([e for e in timeline.events if e.rank in shown], names),
        measured=lanes_chart(subject.measured, {}) if subject.measured else "",
        more_classes=len(classes.firsts) - len(shown),
        schedules=_schedules(subject, timeline),
        groups=rank_groups(host, subject.schedule, classes) if subject.schedule else (),
    )


@cache
def _template() -> str:
    text = files(mdfuse.seeing.report).joinpath("page.html.jinja").read_text(encoding="utf-8")
    return text


def _facts(
    subject: Subject,
    classes: Classes,
    traffic: Sequence[TrafficRow],
    memories: Sequence[Memory],
    timeline: Timeline,
) -> list[tuple[str, str]]:
    """Return the headline figures of a program."""
    host, segments = subject.host, counted(len(subject.segments), "segment")
    counts = (
        counted(sum(map(len, classes.members)), "rank"),
        f"{counted(len(host), 'instruction')}, {segments}",
        f"{counted(sum(t.count for t in traffic), 'communication')} per run",
    )
    arrives = max(sum(n for _, n in received(host, r)) for r in classes.firsts)
    peak = max((m.peak for m in memories), default=0)
    return [
        *[(much, of) for much, _, of in (text.partition(" ") for text in counts)],
        (size_text(arrives), "received per rank, at most"),
        (size_text(peak), "peak memory of a rank"),
        (time_text(timeline.seconds), f"predicted: {subject.costs.name}"),
    ]


def _schedules(subject: Subject, timeline: Timeline) -> list[tuple[str, str]]:
    """Return pictures of a schedule with their titles: by units, predicted, and measured."""
    if subject.schedule is None:
        return []
    shown = [("forwards, and each half of a backward, take 1", subject.schedule.timed())]
    for text, events in ((f"predicted, {subject.costs.name}", timeline.events),
                         ("measured", subject.measured)):  # fmt: skip
        shown += [(text, by_action(subject.host, subject.schedule, events))] if events else []
    return [(text, timing.svg()) for text, timing in shown]


def _named(members: Sequence[int]) -> str:
    others = len(members) - 1
    return f"rank {members[0]}" + (f" (and {others} alike)" if others else "")


def values_of(fusion: Fusion) -> dict[str, Lies]:
    """Return name -> shape and layout of each tensor of a fusion that has one."""
    values = {}
    for name, value in fusion.values.items():
        if value.layout is not None:
            values[name] = value.shape, value.layout.with_stream(value.stream)
    return values


def by_layout(values: Mapping[str, Lies]) -> list[tuple[str, tuple[int, ...], Layout]]:
    """Return (names, shape, layout) of values that lie alike, those of most values first."""
    alike: dict[Lies, list[str]] = {}
    for name, key in values.items():
        alike.setdefault(key, []).append(name)
    rows = sorted(alike.items(), key=lambda row: -len(row[1]))
    pictures = []
    for (shape, layout), names in rows:
        text = ", ".join(f"%{n}" for n in names[:_NAMES])
        others = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        pictures.append((text + others, shape, layout))
    return pictures


def communications(host: HostProgram, classes: Classes) -> list[TrafficRow]:
    """Return the communications of a run, those that change layouts alike in one row."""
    counts: dict[tuple[str, ...], list[int]] = {}
    sizes: dict[tuple[str, ...], int] = {}
    totals: dict[tuple[str, ...], list[int]] = {}
    first: dict[tuple[str, ...], Communication | None] = {}
    for at, rank in enumerate(classes.firsts):
        for i, size in received(host, rank):
            key = _key(i.comm)
            counts.setdefault(key, [0] * len(classes.firsts))[at] += 1
            totals.setdefault(key, [0] * len(classes.firsts))[at] += size
            sizes[key] = max(size, sizes.get(key, 0))
            first.setdefault(key, i.comm)
    return [
        TrafficRow(
            kind=key[0],
            where=key[1],
            change=key[2],
            shape=key[3],
            count=max(counts[key]),
            nbytes=sizes[key],
            total=max(totals[key]),
            least=_least(first[key]),
        )
        for key in counts
    ]


def _key(c: Communication | None) -> tuple[str, ...]:
    if c is None:
        return (*group_of(c), "", "")
    before, after = (x.with_stream(None) for x in (c.source, c.destination))
    return (*group_of(c), f"{before} → {after}", "×".join(map(str, c.shape)) or "a number")


def _least(c: Communication | None) -> int | None:
    """Return the bytes that must arrive at the rank that gets most; None for chunks, for pairs."""
    if c is None or c.dtype is None or c.source.stream or c.destination.stream:
        return None
    if c.source.varying_axes or c.destination.varying_axes:
        return None
    return round(bound(c.source, c.destination, c.shape).worst * c.dtype.itemsize)
