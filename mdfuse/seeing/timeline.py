"""Timelines: when each rank would do what, by a virtual clock over the ranks' host programs.

The ranks go on in lockstep, as in the simulator, with a table of costs in the place of tensors. One
rank of each class stands for all that run alike (`mdfuse.seeing.rank_classes`), so a program for
1,024 ranks takes as long as one for a few.

A stream of a rank does its work in order, and the host is ahead of all of them. A post begins once
the stream that it stands on has come there on all ranks that take part, and the link is free; a
wait holds the stream up until the data is there. Communications along one axis share a link, in
the order in which they are posted; those between pairs of ranks have a link for each direction.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mdfuse.communication import Communication
from mdfuse.errors import CommunicationError
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.seeing.costs import Costs, buffer_bytes
from mdfuse.seeing.events import Event, Part, makespan, name_of
from mdfuse.seeing.rank_classes import Classes, rank_classes

#: The stream of the caller, whose work is the host's where there are no others.
_CALLER = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each rank would do what.

    Attributes:
        name: of the program.
        events: in the order of their starts; of ranks that run alike those of the first.
        ranks: rank -> the ranks that run like it, itself included.
        costs: the name of the table that it follows.
    """

    name: str
    events: tuple[Event, ...]
    ranks: dict[int, tuple[int, ...]]
    costs: str

    @property
    def seconds(self) -> float:
        """The seconds until the last rank is done."""
        return makespan(self.events) / 1e9

    def svg(self) -> str:
        """Return the timeline as an SVG element, a row for each lane; notebooks show it."""
        from mdfuse.seeing.report.charts import alone, lanes_chart

        return alone(lanes_chart(self.events, self._names))

    def _repr_svg_(self) -> str:
        return self.svg()

    @property
    def _names(self) -> dict[int, str]:
        return {r: _alike(r, found) for r, found in self.ranks.items()}

    def to_perfetto(self, path: str) -> None:
        """Write the timeline as Chrome trace JSON, which https://ui.perfetto.dev shows.

        OSError where the file cannot be written.
        """
        from mdfuse.seeing.perfetto import write

        write(path, self.events, self._names)


def _alike(rank: int, ranks: tuple[int, ...]) -> str:
    more = len(ranks) - 1
    return f"rank {rank}" + (f" and {more} like it" if more else "")


def timeline(program: HostProgram, costs: Costs) -> Timeline:
    """Return when each rank of a program would do what, by a table of costs.

    Args:
        program: for all ranks, with numbers for extents.
        costs: what each instruction takes.

    Raises:
        CommunicationError: the ranks wait for each other.
        ProgramError: a rank's program cannot be written out.
    """
    return on_ranks(program, costs, rank_classes(program))


def on_ranks(program: HostProgram, costs: Costs, classes: Classes) -> Timeline:
    """Return a timeline of the first rank of each class."""
    clock = _Clock(costs=costs, classes=classes)
    ranks = [_Rank(program.project(r).written_out, clock) for r in classes.firsts]
    clock.run(ranks)
    events = sorted(clock.events, key=lambda e: (e.start_ns, e.rank, e.stop_ns))
    members = {m[0]: m for m in classes.members}
    return Timeline(name=program.name, events=tuple(events), ranks=members, costs=costs.name)


@dataclass(slots=True)
class _Post:
    """A post of one rank, and its transfer once it is known when that is."""

    rank: int
    what: str
    lane: str
    at: float
    seconds: float
    nbytes: int
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
    """What the ranks share: the links between them, and who has posted what."""

    costs: Costs
    classes: Classes
    events: list[Event] = field(default_factory=list)
    #: (rank, lane) -> when its link is free
    free: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    meetings: dict[Hashable, _Meeting] = field(default_factory=dict)
    counts: Counter[Hashable] = field(default_factory=Counter)
    flows: int = 0

    def run(self, ranks: Iterable[_Rank]) -> None:
        waiting = [*ranks]
        while waiting:
            progress = [r.step() for r in waiting]
            waiting = [r for r in waiting if not r.is_done]
            if waiting and not any(progress):
                raise CommunicationError(
                    "no rank can go on",
                    where=[f"rank {r.rank} waits at {r.where}" for r in waiting],
                    because="each waits for a communication that another rank has not posted",
                )

    def meet(self, key: Hashable, expected: frozenset[Hashable], me: Hashable, post: _Post) -> None:
        """Take a post; once all that are expected have posted, say when the transfer is."""
        number = self.counts[key, me]
        self.counts[key, me] += 1
        meeting = self.meetings.setdefault((key, number), _Meeting(expected))
        meeting.posts[me] = post
        if meeting.posts.keys() < expected:
            return
        del self.meetings[key, number]
        posts = [*meeting.posts.values()]
        start = max(max(p.at, self.free[p.rank, p.lane]) for p in posts)
        stop = start + max(p.seconds for p in posts)
        for p in posts:
            p.start, p.stop, p.flow = start, stop, self.flows
            self.free[p.rank, p.lane] = stop
            self._transferred(p)
        self.flows += 1

    def _transferred(self, p: _Post) -> None:
        """Note a post and its transfer."""
        assert p.start is not None
        change = f"{p.i.comm.source} -> {p.i.comm.destination}" if p.i.comm is not None else ""
        more: dict[str, Any] = {"flow": p.flow, "source": str(p.i.source or "")}
        self.add(p.rank, p.stream, f"post {p.what}", p.at, p.at, p.number, "post", **more)
        more |= {"detail": change, "nbytes": p.nbytes}
        self.add(p.rank, p.lane, p.what, p.start, p.stop, p.number, "transfer", **more)

    def add(
        self,
        rank: int,
        lane: str,
        name: str,
        start: float,
        stop: float,
        number: int,
        part: Part = "work",
        **more: Any,
    ) -> None:
        begin, end = round(start * 1e9), round(stop * 1e9)
        event = Event(rank, lane, name, begin, end, number, part=part, **more)
        self.events.append(event)


@dataclass
class _Rank:
    """One rank on its way through its program."""

    program: HostProgram
    clock: _Clock
    at: int = 0
    stream: str = _CALLER
    #: stream -> when it is done with what it was given
    streams: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    #: name of a handle -> its post and the stream that it stood on; of a stream -> the stream
    handles: dict[str, _Post] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

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
        """When the current stream comes to the next instruction."""
        return self.streams[self.stream]

    def step(self) -> bool:
        """Go on up to the next wait for a transfer that is not known, and tell whether any ran."""
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
                self._work(i)
        return True

    def _named(self, i: Instruction) -> str:
        return self.names[i.reads[0]] if i.reads else f"stream {i.kwargs['stream']}"

    def _work(self, i: Instruction) -> None:
        seconds = self.clock.costs.seconds(self.program, i)
        if seconds:
            start = self.now
            self.streams[self.stream] = start + seconds
            line = str(i.source or "")
            name = name_of(i)
            self.clock.add(
                self.rank, self.stream, name, start, start + seconds, self.at, source=line
            )

    # -- communications --------------------------------------------------------------------------

    def _post(self, i: Instruction) -> None:
        if i.comm is not None and len(i.comm.team(self.rank)) < 2:
            post = self._made(i, "", "", 0, 0.0)
            post.start = post.stop = post.at
            self.handles[i.outputs[0]] = post
            return
        key, expected, me, post = self._transfer(i) if i.comm is None else self._collective(i)
        self.handles[i.outputs[0]] = post
        self.clock.meet(key, expected, me, post)

    def _made(self, i: Instruction, what: str, lane: str, nbytes: int, seconds: float) -> _Post:
        pieces = i.kwargs.get("pieces") or 1
        return _Post(
            self.rank, what, lane, self.now, seconds, nbytes, self.at, i, self.stream, pieces
        )

    def _class(self, rank: int) -> int:
        return self.clock.classes.of[rank]

    def _transfer(self, i: Instruction) -> tuple[Hashable, frozenset[Hashable], Hashable, _Post]:
        """Return the post of a send or a receive, and which one of another rank it meets."""
        is_send = i.op == "send"
        peer = self._class(i.kwargs["to" if is_send else "from"])
        size = buffer_bytes(self.program, i.reads[0])
        layout = self.program.types[i.reads[0]].layout
        axes = layout.mesh.axes if layout is not None else ()
        where = axes[0] if len(axes) == 1 else "pairs"
        seconds = self.clock.costs.transfer_seconds("SendRecv", where, size)
        lane = f"to {peer}" if is_send else f"from {peer}"
        post = self._made(i, i.op, lane, 0 if is_send else size, seconds)
        pair = (self.rank, peer) if is_send else (peer, self.rank)
        return ("pair", pair), frozenset(("send", "recv")), i.op, post

    def _collective(self, i: Instruction) -> tuple[Hashable, frozenset[Hashable], Hashable, _Post]:
        """Return the post of a communication, and the classes of ranks that it meets."""
        comm = i.comm
        assert comm is not None
        team = comm.team(self.rank)
        size = comm.bytes_received(self.rank)
        name = f"{comm.kind}[{comm.reduce_op}]" if comm.reduce_op else comm.kind
        if _is_pair(comm):
            sender, receiver = map(self._class, team)
            is_send = self.rank == team[0]
            lane = f"to {receiver}" if is_send else f"from {sender}"
            seconds = self.clock.costs.transfer_seconds(comm.kind, "meshes", size)
            post = self._made(i, name, lane, size, seconds)
            return ("sent", sender, receiver), frozenset({0, 1}), int(not is_send), post
        where = ",".join(comm.axes) if comm.is_along_axes else "meshes"
        seconds = self.clock.costs.transfer_seconds(comm.kind, where, size)
        team = comm.whole_group if comm.kind == "SendRecv" else team
        found = frozenset[Hashable](map(self._class, team))
        return (where, found), found, self.rank, self._made(i, name, where, size, seconds)

    def _wait(self, i: Instruction) -> bool:
        post = self.handles.get(i.reads[0])
        if post is None:  # of what this rank has no part in
            return True
        if post.start is None:
            return False
        piece = i.kwargs.get("piece")
        share = 1.0 if piece is None else (piece + 1) / post.pieces
        ready = post.start + (post.stop - post.start) * share
        start, stop = self.now, max(self.now, ready)
        if post.what:
            self._noted(post, start, stop, i)
        self.streams[self.stream] = stop
        return True

    def _noted(self, post: _Post, start: float, stop: float, i: Instruction) -> None:
        """Note a wait for a transfer."""
        add, line = self.clock.add, str(i.source or "")
        wait = "wait" if self.stream == _CALLER else f"wait {self.stream}"
        add(self.rank, wait, f"wait {post.what}", start, stop, self.at, "wait",
            flow=post.flow, source=line)  # fmt: skip

    def _barrier(self, i: Instruction) -> bool:
        comm = i.comm
        assert comm is not None
        key = f"barrier {self.at}"
        if key not in self.handles:
            team = frozenset[Hashable](map(self._class, comm.team(self.rank)))
            seconds = self.clock.costs.transfer_seconds("Barrier", ",".join(comm.axes), 0)
            self.handles[key] = self._made(i, "barrier", "barrier", 0, seconds)
            self.clock.meet(("barrier", team), team, self.rank, self.handles[key])
        post = self.handles[key]
        if post.start is None:
            return False
        start, stop = self.now, max(self.now, post.stop)
        self._noted(post, start, stop, i)
        self.streams[self.stream] = stop
        return True


def _is_pair(comm: Communication) -> bool:
    """Return whether each rank sends, or receives, one buffer: none does both."""
    if comm.kind != "SendRecv" or comm.is_along_axes:
        return False
    return not any(r in comm.destination.mesh for r in comm.source.mesh)
