"""Timelines: predicted times of each rank's work, by a virtual clock over the host programs.

The ranks go on in lockstep, as in the simulator, with a table of costs in the place of tensors. One
rank of each class stands for all that run alike (`mdfuse.seeing.rank_classes`), so a program for
1,024 ranks takes as long as one for a few.

A stream of a rank does its work in order, and the host is ahead of all of them. A post begins once
the stream that it stands on has come there on all ranks that take part, and the link is free; a
wait holds the stream up until the data is there. Communications of one team share a link, in the
order in which they are posted. Sends and receives share one link out of each rank, and one into it.

Where the table says that communications slow down work beside them, the ranks go through their
programs once more, with the delays of the work beside the transfers of the first pass
(`mdfuse.seeing.contention`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mdfuse.communication import Communication
from mdfuse.errors import CommunicationError, counted
from mdfuse.hir.analysis.clobbers import uncopied
from mdfuse.hir.counted_rows import bytes_received, with_expected_rows
from mdfuse.hir.instructions import TRANSFERS
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.pipelines import as_run, project
from mdfuse.ir.graph import dtype_name
from mdfuse.seeing.amounts import buffer_bytes
from mdfuse.seeing.contention import slowed
from mdfuse.seeing.costs import Costs
from mdfuse.seeing.events import Event, Part, makespan
from mdfuse.seeing.rank_classes import Classes, rank_classes
from mdfuse.seeing.works import WorkTime, works_of

#: The stream of the caller; its work is the host's where there are no other streams.
_CALLER = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The predicted times of each rank's work.

    Attributes:
        name: of the program.
        events: in the order of their starts; those of the first one of ranks that run alike.
        ranks: rank -> the ranks that run like it, itself included.
        costs: the name of the table that it follows.
        run_s: seconds of a run outside of all events.
        programs: what the first ones of ranks that run alike run, which events number.
    """

    name: str
    events: tuple[Event, ...]
    ranks: dict[int, tuple[int, ...]]
    costs: str
    run_s: float = 0.0
    programs: tuple[HostProgram, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        """Return the whole in a line; notebooks and prompts show no thousands of events."""
        ranks = sum(map(len, self.ranks.values()))
        what = f"{self.seconds:.4g} s, {len(self.events)} events"
        return f"<Timeline of @{self.name} on {counted(ranks, 'rank')}: {what}>"

    @property
    def seconds(self) -> float:
        """The seconds of a run: until the last rank is done, and `run_s`."""
        return makespan(self.events) / 1e9 + self.run_s

    def svg(self) -> str:
        """Return the timeline as an SVG element, a row for each lane; notebooks show it."""
        from mdfuse.seeing.report.charts import alone, lanes_chart

        return alone(lanes_chart(self.events, self._names))

    def _repr_svg_(self) -> str:
        return self.svg()

    @property
    def _names(self) -> dict[int, str]:
        return {r: _alike(r, alike) for r, alike in self.ranks.items()}

    def to_perfetto(self, path: str) -> None:
        """Write the timeline as Chrome trace JSON, which https://ui.perfetto.dev shows.

        OSError where the file cannot be written.
        """
        from mdfuse.seeing.perfetto import write

        write(path, self.events, self._names)


def _alike(rank: int, ranks: tuple[int, ...]) -> str:
    others = len(ranks) - 1
    return f"rank {rank}" + (f" and {others} like it" if others else "")


def timeline(program: HostProgram, costs: Costs, at_worst: bool = False) -> Timeline:
    """Return the predicted times of each rank's work, by a table of costs.

    Args:
        program: for all ranks, with numbers for extents.
        costs: the time of each instruction.
        at_worst: where a run counts rows, as many are there as may be; else as many as are
            expected, where parts are full and experts equally busy.

    Raises:
        CommunicationError: the ranks wait for each other.
        ProgramError: a rank's program cannot be written out.
    """
    return on_ranks(program, costs, rank_classes(program), at_worst)


def on_ranks(
    program: HostProgram, costs: Costs, classes: Classes, at_worst: bool = False
) -> Timeline:
    """Return a timeline of the first rank of each class."""
    programs = [as_run(project(program, r)) for r in classes.firsts]
    if not at_worst:
        programs = [*map(with_expected_rows, programs)]
    works = [works_of(p, costs) for p in programs]
    clock = _Clock(costs=costs, classes=classes, at_worst=at_worst)
    clock.run([_Rank(p, w, clock) for p, w in zip(programs, works, strict=True)])
    if delays := slowed(clock.events, clock.slows):
        clock = _Clock(costs=costs, classes=classes, delays=delays, at_worst=at_worst)
        clock.run([_Rank(p, w, clock) for p, w in zip(programs, works, strict=True)])
    events = sorted(clock.events, key=lambda e: (e.start_ns, e.rank, e.stop_ns))
    members = {m[0]: m for m in classes.members}
    return Timeline(
        name=program.name,
        events=tuple(events),
        ranks=members,
        costs=costs.name,
        run_s=costs.run_s + (costs.posting_s if clock.flows else 0.0),
        programs=tuple(programs),
    )


@dataclass(slots=True)
class _Post:
    """A post of one rank, and its transfer once its times are known."""

    rank: int
    what: str
    lane: str
    at: float
    seconds: float
    nbytes: int
    slows: float
    number: int
    i: Instruction
    stream: str
    pieces: int = 1
    flow: int = -1
    start: float | None = None
    stop: float = 0.0


@dataclass
class _Meeting:
    """The posts of one communication, by the class of rank (and the side of a transfer)."""

    expected: frozenset[Hashable]
    posts: dict[Hashable, _Post] = field(default_factory=dict)


@dataclass
class _Clock:
    """The shared state of the ranks: the links between them, and their posts."""

    costs: Costs
    classes: Classes
    events: list[Event] = field(default_factory=list)
    #: (rank, lane) -> when its link is free
    free: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    meetings: dict[Hashable, _Meeting] = field(default_factory=dict)
    counts: Counter[Hashable] = field(default_factory=Counter)
    #: the posts of complete communications whose times are not known yet
    ready: list[tuple[_Post, ...]] = field(default_factory=list)
    flows: int = 0
    #: (rank, instruction) -> seconds that its work takes longer beside communications
    delays: Mapping[tuple[int, int], float] = field(default_factory=dict)
    #: (rank, flow) -> the share of its speed that work loses while this is transferred
    slows: dict[tuple[int, int], float] = field(default_factory=dict)
    #: as many rows are there as may be, where a run counts them
    at_worst: bool = False

    def run(self, ranks: Iterable[_Rank]) -> None:
        waiting = [*ranks]
        while waiting:
            progress = [r.step() for r in waiting]
            waiting = [r for r in waiting if not r.is_done]
            if waiting and not any(progress) and not self._transfer():
                raise CommunicationError(
                    "no rank can go on",
                    where=[f"rank {r.rank} waits at {r.where}" for r in waiting],
                    because="each waits for a communication that another rank has not posted",
                )
        while self._transfer():
            pass

    def meet(self, key: Hashable, expected: frozenset[Hashable], me: Hashable, post: _Post) -> None:
        """Take a post; once all that are expected have posted, the transfer has its turn."""
        number = self.counts[key, me]
        self.counts[key, me] += 1
        meeting = self.meetings.setdefault((key, number), _Meeting(expected))
        meeting.posts[me] = post
        if meeting.posts.keys() < expected:
            return
        del self.meetings[key, number]
        self.ready.append(tuple(meeting.posts.values()))

    def _transfer(self) -> bool:
        """Set the times of the transfer that can begin first; False where none can.

        No rank can go on meanwhile, so all later posts begin later.
        """
        if not self.ready:
            return False
        posts = min(self.ready, key=lambda p: (self._begin(p), max(x.number for x in p)))
        self.ready.remove(posts)
        start = self._begin(posts)
        stop = start + max(p.seconds for p in posts)
        for p in posts:
            p.start, p.stop, p.flow = start, stop, self.flows
            self.free[p.rank, p.lane] = stop
            if p.slows:
                self.slows[p.rank, p.flow] = p.slows
            self._transferred(p)
        self.flows += 1
        return True

    def _begin(self, posts: Iterable[_Post]) -> float:
        return max(max(p.at, self.free[p.rank, p.lane]) for p in posts)

    def _transferred(self, p: _Post) -> None:
        """Note a post and its transfer."""
        assert p.start is not None
        change = f"{p.i.comm.source} -> {p.i.comm.destination}" if p.i.comm is not None else ""
        details: dict[str, Any] = {"flow": p.flow, "source": str(p.i.source or "")}
        self.add(p.rank, p.stream, f"post {p.what}", p.at, p.at, p.number, "post", **details)
        details |= {"detail": change, "nbytes": p.nbytes}
        self.add(p.rank, p.lane, p.what, p.start, p.stop, p.number, "transfer", **details)

    def add(
        self,
        rank: int,
        lane: str,
        name: str,
        start: float,
        stop: float,
        number: int,
        part: Part = "work",
        **fields: Any,
    ) -> None:
        begin, end = round(start * 1e9), round(stop * 1e9)
        event = Event(rank, lane, name, begin, end, number, part=part, **fields)
        self.events.append(event)


@dataclass
class _Rank:
    """One rank on its way through its program."""

    program: HostProgram
    works: Mapping[int, WorkTime]
    clock: _Clock
    at: int = 0
    stream: str = _CALLER
    #: stream -> the time at which it has done its queued work
    streams: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    #: name of a handle -> its posts; name of a stream -> the stream
    handles: dict[str, list[_Post]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    #: bytes that its work has gone through since its last communication
    passed: int = 0
    #: axes -> the teams of this rank along them, in the order of their first posts
    links: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        assert self.program.rank is not None
        return self.program.rank

    @property
    def is_done(self) -> bool:
        return self.at == len(self.program.instructions)

    @property
    def where(self) -> str:
        i = self.program.instructions[self.at]
        return f"{i.op} {', '.join(f'%{n}' for n in i.reads)}".strip()

    @property
    def now(self) -> float:
        """The time at which the current stream comes to the next instruction."""
        return self.streams[self.stream]

    def step(self) -> bool:
        """Go on up to the next wait for an unknown transfer; return whether any instruction ran."""
        start = self.at
        while not self.is_done and self._run(self.program.instructions[self.at]):
            self.at += 1
        return self.at > start

    def _run(self, i: Instruction) -> bool:
        """Run an instruction; False where its data is not known to arrive yet."""
        match i.op:
            case "post" | "send" | "recv":
                self._post(i)
            case "wait":
                return self._wait(i)
            case "barrier":
                return self._barrier(i)
            case "get_stream":
                self.names[i.outputs[0]] = self.stream
            case "set_stream":
                self.stream = self._named(i)
            case "sync":
                self.streams[self.stream] = max(self.now, self.streams[self._named(i)])
            case _:
                self._work()
        return True

    def _named(self, i: Instruction) -> str:
        return self.names[i.reads[0]] if i.reads else f"stream {i.kwargs['stream']}"

    def _work(self) -> None:
        work = self.works.get(self.at)
        if work is None:
            return
        self.passed += work.nbytes
        seconds = work.seconds + self.clock.delays.get((self.rank, self.at), 0.0)
        start = self.now
        self.streams[self.stream] = stop = start + seconds
        self.clock.add(self.rank, self.stream, work.name, start, stop, self.at, source=work.source)

    # -- communications --------------------------------------------------------------------------

    def _post(self, i: Instruction) -> None:
        if i.comm is None:
            posts = [self._transfer(i)]
        elif i.comm.kind == "SendRecv" and not i.comm.is_along_axes:
            posts = self._pairs(i, i.comm)
        else:
            posts = self._collective(i, i.comm)
        self.handles[i.outputs[0]] = posts

    def _post_of(
        self, i: Instruction, what: str, lane: str, nbytes: int, seconds: float, slows: float
    ) -> _Post:
        pieces = i.kwargs.get("pieces") or 1
        return _Post(
            self.rank, what, lane, self.now, seconds, nbytes, slows, self.at, i, self.stream, pieces
        )

    def _share_passed(self) -> float:
        """Return the share of the cache that work has gone through since the last communication."""
        passed, self.passed = self.passed, 0
        return min(1.0, passed / self.clock.costs.cache) if passed else 0.0

    def _class(self, rank: int) -> int:
        return self.clock.classes.of[rank]

    def _transfer(self, i: Instruction) -> _Post:
        """Post a send or a receive, which meets one of another rank."""
        is_send = i.op == "send"
        size = buffer_bytes(self.program, i.reads[0])
        layout = self.program.types[i.reads[0]].layout
        axes = layout.mesh.axes if layout is not None else ()
        where = axes[0] if len(axes) == 1 else "pairs"
        peer = i.kwargs["to" if is_send else "from"]
        costs = self.clock.costs
        link = costs.link("SendRecv", where, backend=i.kwargs.get("backend"))
        seconds = link.seconds(size, self._share_passed())
        if peer == self.rank and i.outputs[0] in uncopied(self.program):
            seconds = 0.0
        elif peer == self.rank:  # its own part, which only moves in memory
            seconds = costs.copy_seconds(size, dtype_name(self.program.types[i.reads[0]].dtype))
        return self._side(i, i.op, peer, is_send, size, seconds, link.slows)

    def _pairs(self, i: Instruction, comm: Communication) -> list[_Post]:
        """Post a rank's sends and receives from one mesh to another."""
        call = comm.part(self.rank).call
        if call is None:  # its data is local already
            return []
        size = comm.bytes_received(self.rank)
        link = self.clock.costs.link(comm.kind, "meshes", backend=comm.backend)
        seconds = link.seconds(size, self._share_passed())
        sides = [(peer, True) for peer in call.sends] + [(peer, False) for peer in call.recvs]
        return [
            self._side(i, comm.kind, p, is_send, size, seconds, link.slows) for p, is_send in sides
        ]

    def _side(
        self,
        i: Instruction,
        what: str,
        peer: int,
        is_send: bool,
        size: int,
        seconds: float,
        slows: float,
    ) -> _Post:
        """Post one side of a transfer between two ranks."""
        other = self._class(peer)
        lane = f"to {other}" if is_send else f"from {other}"
        if what in TRANSFERS and peer != self.rank:  # the link is the same for all peers
            lane = "out" if is_send else "in"
        post = self._post_of(i, what, lane, 0 if is_send else size, seconds, slows)
        pair = (self.rank, other) if is_send else (other, self.rank)
        self.clock.meet((what in TRANSFERS, pair), frozenset((True, False)), is_send, post)
        return post

    def _collective(self, i: Instruction, comm: Communication) -> list[_Post]:
        """Post a communication of a team."""
        team = comm.team(self.rank)
        if len(team) < 2:
            return []
        size = bytes_received(i, self.rank, self.clock.at_worst)
        name = f"{comm.kind}[{comm.reduce_op}]" if comm.reduce_op else comm.kind
        where = ",".join(comm.axes) if comm.is_along_axes else "meshes"
        link = self.clock.costs.link(comm.kind, where, len(team), comm.backend)
        members = frozenset[Hashable](map(self._class, team))
        lane = self._lane(where, team)
        post = self._post_of(
            i, name, lane, size, link.seconds(size, self._share_passed()), link.slows
        )
        key = where, comm.source.mesh, comm.destination.mesh, members
        self.clock.meet(key, members, self.rank, post)
        return [post]

    def _lane(self, where: str, team: tuple[int, ...]) -> str:
        """Return the link of a team: each has its own, as libraries have a group for each."""
        known = self.links.setdefault(where, [])
        if team not in known:
            known.append(team)
        n = known.index(team)
        return f"{where} {n + 1}" if n else where

    def _wait(self, i: Instruction) -> bool:
        posts = self.handles.get(i.reads[0], [])  # none for posts without this rank
        if any(p.start is None for p in posts):
            return False
        for post in posts:
            assert post.start is not None
            piece = i.kwargs.get("piece")
            share = 1.0 if piece is None else (piece + 1) / post.pieces
            self._noted(post, post.start + (post.stop - post.start) * share, i)
        return True

    def _noted(self, post: _Post, ready: float, i: Instruction) -> None:
        """Hold the current stream up until data is ready, and note the wait."""
        start, stop = self.now, max(self.now, ready)
        self.streams[self.stream] = stop
        add, line = self.clock.add, str(i.source or "")
        wait = "wait" if self.stream == _CALLER else f"wait {self.stream}"
        add(self.rank, wait, f"wait {post.what}", start, stop, self.at, "wait",
            flow=post.flow, source=line)  # fmt: skip

    def _barrier(self, i: Instruction) -> bool:
        comm = i.comm
        assert comm is not None
        key = f"barrier {self.at}"
        if key not in self.handles:
            ranks = comm.team(self.rank)
            team = frozenset[Hashable](map(self._class, ranks))
            where = ",".join(comm.axes)
            seconds = self.clock.costs.link("Barrier", where, len(ranks)).seconds(0)
            post = self._post_of(i, "barrier", "barrier", 0, seconds, 0.0)
            self.handles[key] = [post]
            self.clock.meet(("barrier", team), team, self.rank, post)
        (post,) = self.handles[key]
        if post.start is None:
            return False
        self._noted(post, post.stop, i)
        return True
