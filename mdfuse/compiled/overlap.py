"""Choose by costs which communications are hidden behind products, and in how many chunks.

`mdfuse.passes.collective_matmul` knows the forms, a timeline predicts the time of each; here the
times are compared. The chosen form is never slower than the plain program, by the same table. A
candidate whose time cannot be predicted is left out, and `explain` says why: the program is right
without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from mdfuse import hir_lowering
from mdfuse.config import Options, backend_choice, options_from_environment
from mdfuse.errors import MdfuseError
from mdfuse.hir.passes import hoist_posts
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir_lowering import Emitted
from mdfuse.ir.graph import Fusion
from mdfuse.passes import collective_matmul
from mdfuse.passes.collective_matmul import Form, OverlapWindow
from mdfuse.passes.segment_ids import with_ids
from mdfuse.passes.segmentation import Section, ShouldMerge, segment
from mdfuse.seeing.costs import H100, Costs
from mdfuse.seeing.memory_use import memory_of
from mdfuse.seeing.named_tables import HERE, named, table_here
from mdfuse.seeing.rank_classes import rank_classes
from mdfuse.seeing.report.numbers import size_text
from mdfuse.seeing.timeline import Timeline, on_ranks
from mdfuse.seeing.waited_for import Hold, slack, waited_for

T = TypeVar("T")

#: Times that differ by this share are alike: the form with the fewest chunks is taken, and nothing
#: is tried that could gain no more.
_ALIKE = 0.01

#: How many of the largest receive buffers there may be room for, ahead of their place.
_ROOMS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision on a window.

    Attributes:
        window: the window.
        form: how it is computed in chunks; None: one after the other.
        plain: seconds one after the other.
        times: seconds of each form.
        staging: bytes beside inputs and outputs, in the form (the best one if none was chosen) and
            one after the other.
    """

    window: OverlapWindow
    form: Form | None
    plain: float
    times: Mapping[Form, float]
    staging: tuple[int, int]

    @property
    def gain(self) -> float:
        """The seconds that the form saves."""
        return self.plain - self.times[self.form] if self.form is not None else 0.0

    def __str__(self) -> str:
        plain = f"{_ms(self.plain)} one after the other"
        if self.form is not None:
            seconds = _ms(self.times[self.form])
            text = f"{self.form}: {seconds} predicted, {plain}"
        else:
            best = f"best of {len(self.times)} forms {_ms(min(self.times.values()))}"
            text = f"left as it is: {plain}, {best}"
        chunks, whole = map(size_text, self.staging)
        staging = f"staging: {chunks} in chunks, {whole} one after the other"
        return f"{self.window.text}: {text}; {staging}"


@dataclass(frozen=True, slots=True)
class OverlapDecisions:
    """The decisions for a program.

    Attributes:
        plain: the host program without it.
        decisions: the decisions and their reasons, a line each.
        is_measured: whether the first runs try both.
    """

    plain: HostProgram
    decisions: tuple[str, ...]
    is_measured: bool = False


def left(host: HostProgram, why: str, options: Options) -> OverlapDecisions | None:
    """Return why a program is left as it is; None where nothing was asked for."""
    return (
        OverlapDecisions(host, (f"left as it is: {why}",)) if options.overlap != "never" else None
    )


def choose(plain: float, times: Mapping[Form, float], error: float = 0.0) -> Form | None:
    """Return the fastest form, or the simplest of nearly equal ones; None: none gains.

    Args:
        plain: seconds one after the other.
        times: seconds of each form.
        error: the mean relative error of predicted times, which a form has to gain at least.

    >>> two, eight = Form((0,), 2), Form((0,), 8)
    >>> choose(10.0, {two: 7.0, eight: 6.0}), choose(10.0, {two: 6.02, eight: 6.0}).chunks
    (Form(dims=(0,), chunks=8, rotate=None), 2)
    >>> choose(10.0, {two: 9.0}, error=0.15), choose(10.0, {two: 10.0})
    (None, None)
    """
    best = min(times.values(), default=plain)
    near = [f for f, t in times.items() if t <= best * (1 + _ALIKE) and t < plain * (1 - error)]
    return min(near, key=lambda f: (f.chunks, f.rotate is None, f.dims), default=None)


#: A fusion, its sections, its host program.
Lowered = tuple[Fusion, tuple[Section, ...], HostProgram]


@dataclass(frozen=True, slots=True)
class Timed:
    """A program of a lowered fusion, its seconds, and the bytes that are received ahead."""

    of: Emitted
    host: HostProgram
    seconds: float
    room: int = 0

    @property
    def lowered(self) -> Lowered:
        return self.of.fusion, self.of.sections, self.host


@dataclass
class _Chooser:
    """Choices for one fusion; windows that are alike are gone through once."""

    fusion: Fusion
    costs: Costs
    error: float
    should_merge: ShouldMerge | None
    options: Options
    known: dict[object, Choice] = field(default_factory=dict)
    #: id of a whole program -> the program, which so stays alive, and its times
    clocked: dict[int, tuple[HostProgram, Timeline]] = field(default_factory=dict)
    #: the candidates whose time cannot be predicted, a line each
    left_out: list[str] = field(default_factory=list)

    def priced(self, what: str, price: Callable[[], T]) -> T | None:
        """Return the time of a candidate; None, and a line for the user, where it is not known."""
        try:
            return price()
        except MdfuseError as error:
            self.left_out.append(f"{what} is left out: {str(error).splitlines()[0]}")
            return None

    def emitted(self, fusion: Fusion) -> Emitted:
        prepared = with_ids(fusion)
        return hir_lowering.emitted(prepared, segment(prepared, self.should_merge), self.options)

    def timed(self, of: Emitted, rooms: Sequence[int]) -> list[Timed]:
        """Return a whole program, with room for buffers received ahead; 0: as the options say."""
        hosts = [(of.program(room or None), room) for room in rooms]
        return [Timed(of, host, self.clock(host).seconds, room) for host, room in hosts]

    def clock(self, host: HostProgram) -> Timeline:
        """Return the times of a whole program; more room often gives the same program."""
        if id(host) not in self.clocked:
            self.clocked[id(host)] = host, _timeline(host, self.costs)
        return self.clocked[id(host)][1]

    def choice(self, window: OverlapWindow) -> Choice:
        fusion = collective_matmul.alone(self.fusion, window)
        key = collective_matmul.likeness(fusion)
        if key not in self.known:
            self.known[key] = self._decided(window, fusion, collective_matmul.forms(fusion, window))
        return replace(self.known[key], window=window)

    def _decided(
        self, window: OverlapWindow, fusion: Fusion, forms: Mapping[Form, Fusion]
    ) -> Choice:
        plain = self._alone(window.text, fusion) if forms else None
        by_form = {f: self._alone(f"{window.text}: {f}", x) for f, x in forms.items() if plain}
        timed = {f: x for f, x in by_form.items() if x is not None}
        if plain is None or not timed:
            return Choice(window, None, 0.0, {}, (0, 0))
        times = {f: seconds for f, (_, seconds) in timed.items()}
        form = choose(plain[1], times, self.error)
        in_chunks, _ = timed[form or min(times, key=times.__getitem__)]
        return Choice(window, form, plain[1], times, (_staging(in_chunks), _staging(plain[0])))

    def _alone(self, what: str, fusion: Fusion) -> tuple[HostProgram, float] | None:
        """Return the program of a window, and its seconds."""

        def price() -> tuple[HostProgram, float]:
            host = self.emitted(fusion).program()
            return host, _timeline(host, self.costs).seconds

        return self.priced(what, price)

    def choices(self) -> list[Choice]:
        """Return the decision on each window; among those that share work the best go first."""
        choices = {w: self.choice(w) for w in collective_matmul.windows(self.fusion)}
        choices = {w: c for w, c in choices.items() if c.times}
        parts = {w: sum(choices[p].gain for p in w.parts if p in choices) for w in choices}
        best = [c for w, c in choices.items() if not w.parts or c.gain > parts[w]]
        best.sort(key=lambda c: -c.gain)
        taken: set[str] = set()
        free = []
        for c in best:
            if taken.isdisjoint(c.window.values):
                free.append(c)
                taken.update(c.window.values if c.form is not None else ())
        return free


def lower(
    fusion: Fusion, should_merge: ShouldMerge | None, options: Options | None
) -> tuple[Lowered, OverlapDecisions | None]:
    """Return a lowered fusion, and the decisions; None: no overlap was asked for."""
    chosen = options_from_environment(options)
    prepared = with_ids(hir_lowering.prepare(fusion, options=chosen))
    emitted = hir_lowering.emitted(prepared, segment(prepared, should_merge), chosen)
    plain = emitted.program()
    if chosen.overlap == "never" or not plain.communications:
        return (prepared, emitted.sections, plain), None
    return find(emitted, should_merge, chosen)


def find(
    emitted: Emitted, should_merge: ShouldMerge | None, options: Options
) -> tuple[Lowered, OverlapDecisions]:
    """Return a program with the chosen windows in chunks, and the reasons.

    Args:
        emitted: the program one after the other.
        should_merge: see `mdfuse.passes.segmentation.segment`.
        options: as the program is compiled.
    """
    fusion, plain = emitted.fusion, emitted.program()
    lowered = fusion, emitted.sections, plain
    costs, error, lines = table_of(options)
    if costs is None:
        return lowered, OverlapDecisions(plain, tuple(lines))
    chooser = _Chooser(fusion, costs, error, should_merge, options)
    times = chooser.priced("overlap", lambda: chooser.clock(plain))
    if times is None:
        return lowered, OverlapDecisions(plain, (*lines, *chooser.left_out))
    before, holds = Timed(emitted, plain, times.seconds), waited_for(times)
    choices = chooser.choices()
    place = {e.outputs[0]: n for n, e in enumerate(fusion.exprs)}
    in_order = sorted(choices, key=lambda c: place[c.window.values[0]])
    lines += [str(c) for c in in_order] or _nothing(fusion)
    fastest = _ahead(chooser, before, holds)
    forms = {c.window: c.form for c in choices if c.form is not None}
    gain = _gain(fusion, plain, choices, holds)
    if forms and gain <= before.seconds * _ALIKE:
        lines.append(
            f"left as it is after all: {_ms(before.seconds)} predicted, of which these could save "
            f"{_ms(gain)}: other work hides the rest"
        )
    elif (streamed := _streamed(fusion, forms)) is not fusion:
        before, fastest = _in_chunks(chooser, streamed, before, fastest, lines)
    if fastest.room:
        text = f"posted ahead of their place: at most {size_text(fastest.room)}"
        lines.append(f"{text}: {_ms(fastest.seconds)} predicted, {_ms(before.seconds)} without")
    is_new = fastest.host is not plain
    lines += chooser.left_out
    return fastest.lowered, OverlapDecisions(
        plain, tuple(lines), is_new and options.overlap == "measure"
    )


def _in_chunks(
    chooser: _Chooser, streamed: Fusion, before: Timed, ahead: Timed, lines: list[str]
) -> tuple[Timed, Timed]:
    """Return the best program, without posts ahead of their place and with them.

    Args:
        chooser: of the fusion.
        streamed: the fusion with all forms that were chosen.
        before: the program one after the other.
        ahead: the same, with posts ahead of their place.
        lines: gets a line.
    """
    rooms = (0, ahead.room) if ahead.room else (0,)
    timed = chooser.priced(
        "the whole program in chunks", lambda: chooser.timed(chooser.emitted(streamed), rooms)
    )
    if timed is None:
        return before, ahead
    best = min(timed, key=lambda x: x.seconds)
    whole = f"the whole program: {_ms(best.seconds)} predicted, {_ms(ahead.seconds)} one after"
    if best.seconds > ahead.seconds:
        lines.append(f"left as it is after all: {whole} the other")
        return before, ahead
    lines.append(f"{whole} the other, by {chooser.costs.name}")
    return timed[0], best


def _streamed(fusion: Fusion, chosen: Mapping[OverlapWindow, Form]) -> Fusion:
    """Return a fusion with windows in loops; the first one among those that exclude each other."""
    if not chosen:
        return fusion
    if (streamed := collective_matmul.apply(fusion, chosen)) is not None:
        return streamed
    for window, form in chosen.items():
        fusion = collective_matmul.apply(fusion, {window: form}) or fusion
    return fusion


def _gain(
    fusion: Fusion, plain: HostProgram, choices: Iterable[Choice], holds: Sequence[Hold]
) -> float:
    """Return the seconds that forms save at most: while work waits, and no more than by themselves.

    Windows count by whose posts the run is held up.
    """
    held, seconds = {id(i): i for hold in holds for i in hold.posts}.values(), 0.0
    values = [*map(partial(_values, fusion), held)]
    reached = set[str]()
    for c in choices:
        names = {x for e in c.window.exprs for x in (*e.reads, *e.outputs)}
        if c.form is not None and not all(map(names.isdisjoint, values)):
            reached |= names
            seconds += c.gain

    def most(hold: Hold) -> float:
        is_reached = any(not reached.isdisjoint(_values(fusion, i)) for i in hold.posts)
        return hold.seconds if is_reached else 0.0

    return min(seconds, _held(plain, holds, most))


def _values(fusion: Fusion, post: Instruction) -> set[str]:
    """Return the values whose buffers a post uses: these have their names, or begin so, `%x.recv`.

    All values, where a name tells none.
    """
    values = set[str]()
    for x in post.reads:
        while x and x not in fusion.values:
            x = x.rpartition(".")[0]
        if not x:
            return {*fusion.values}
        values.add(x)
    return values


def _held(plain: HostProgram, holds: Iterable[Hold], most: Callable[[Hold], float]) -> float:
    """Return how long a run waits at most for posts that may be made earlier, or shorter.

    Ranks of the same meshes wait at once, those of others perhaps one after the other, as stages.

    Args:
        plain: the program.
        holds: its waits.
        most: the seconds by which one of them may become shorter.
    """
    seconds = defaultdict[int, float](float)
    for hold in holds:
        seconds[hold.rank] += most(hold)
    longest = defaultdict[tuple[bool, ...], float](float)
    for rank, held in seconds.items():
        group = tuple(rank in mesh.ranks for mesh in plain.meshes)
        longest[group] = max(held, longest[group])
    return sum(longest.values())


def _ahead(chooser: _Chooser, plain: Timed, holds: Iterable[Hold]) -> Timed:
    """Return the program with posts of ready data ahead of their place, where that gains.

    There is room for the largest receive buffer, for two of them, or for four, which is about
    the size of the parameters of a layer. A budget that the user sets stays, and so does the next
    layer of a module. Nothing moves where work hardly waits for posts that could.
    """
    host = plain.host
    largest = hoist_posts.largest(host)
    is_said = isinstance(chooser.options.prefetch_bytes, int) and chooser.options.prefetch_bytes
    if is_said or not largest or hoist_posts.is_by_layers(host):
        return plain
    earlier = slack(chooser.clock(host), host, dict(_raised(host)))

    def most(hold: Hold) -> float:
        handles = {i.outputs[0] for i in hold.posts}
        if handles.isdisjoint(earlier):
            return 0.0
        if len(handles) > 1:  # one may overtake another, and so gain the time of that one, too
            return hold.seconds
        return min(hold.seconds, *map(earlier.__getitem__, handles))

    if _held(host, holds, most) <= plain.seconds * _ALIKE:
        return plain
    rooms = [room * largest for room in _ROOMS]
    timed = chooser.priced("posting ahead", lambda: chooser.timed(plain.of, rooms))
    if timed is None:
        return plain
    least = min(x.seconds for x in timed)
    enough = min(least * (1 + _ALIKE), plain.seconds * (1 - chooser.error))
    return next((x for x in timed if x.seconds <= enough and x.seconds < plain.seconds), plain)


def _raised(host: HostProgram) -> Iterator[tuple[str, int]]:
    """Yield the handles of posts that may go ahead of their place, and how far."""
    for raised in hoist_posts.raisable(host):
        for n in raised.posts:
            yield host.instructions[n].outputs[0], raised.since


def _timeline(host: HostProgram, costs: Costs) -> Timeline:
    """Return the times of a run; one rank of a ring is timed, since there are many forms."""
    return on_ranks(host, costs, rank_classes(host, are_rings_alike=True))


def _staging(host: HostProgram) -> int:
    """Return the bytes that the first rank holds beside inputs and outputs, at most."""
    return memory_of(project(host, host.meshes[0].ranks[0])).staging


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _nothing(fusion: Fusion) -> Iterator[str]:
    """Yield why no window was tried."""
    streamed = {x for x, v in fusion.values.items() if v.stream is not None}
    if not streamed <= collective_matmul.looped_apart(fusion):
        yield "left as it is: it has a Stream of its own"
    else:
        yield "no product stands beside a communication that could be cut with it"


def table_of(options: Options) -> tuple[Costs | None, float, list[str]]:
    """Return the table that counts, the error that a gain has to exceed, and lines for the user."""
    is_measured = options.overlap == "measure"
    usual, lines = backend_choice(options.backend).usual, list[str]()
    if options.costs != HERE:
        costs, error = named(options.costs, usual)
    else:
        table, lines = table_here(usual)
        if table is None and not is_measured:
            return None, 0.0, [*lines, "left as it is: mdfuse calibrate writes a table of costs"]
        if table is None:
            return H100, 0.0, [*lines, f"what is tried is chosen by {H100.name}"]
        costs, error = table.costs, table.mean_error
    if not costs.links:  # which `table_here` says last
        lines = [*lines[:-1], f"no links in {costs.name}: those of {H100.name} count"]
        costs = replace(costs, links=H100.links)
    return costs, 0.0 if is_measured else error, lines
