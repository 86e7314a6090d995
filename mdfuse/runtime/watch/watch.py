"""The watchdog of a process: it reports hanging communications, and the positions of ranks.

Each post outside torch.distributed is noted in a ring buffer before it is made, and marked behind
it, so that the watchdog finds the oldest post that is not done without asking the device: see
`Track`. For all others it reads the host's position in its plans: see
`mdfuse.runtime.watch.plan_position`. The watchdog sleeps and looks in turn. If a post or wait is
overdue, it reports the instruction and the positions of the other ranks, and ends the process:
buffers that such a communication writes to hold garbage.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mdfuse.backends.post_notes import PostInfo, Track
from mdfuse.errors import BackendError
from mdfuse.interpreter import threads
from mdfuse.interpreter.threads import within
from mdfuse.runtime.deadline import NEVER, Deadline
from mdfuse.runtime.watch import plan_position
from mdfuse.runtime.watch.hang_report import (
    NEVER_TOLD,
    RAISED,
    Alarm,
    Interrupting,
    Table,
    blame,
    explained,
    ranks_text,
    report,
)
from mdfuse.runtime.watch.neighbours import Neighbours
from mdfuse.runtime.watch.plan_position import RunCount
from mdfuse.runtime.watch.position_store import Answers, Bulletin, patience_of
from mdfuse.runtime.watch.positions import OwnPosition, Position, Progress, standing
from mdfuse.runtime.watch.post_ring import Post, Ring
from mdfuse.runtime.watch.process import EXIT_STATUS, end_process, host_line, write_error
from mdfuse.runtime.watch.reports import Page, tell_torchrun
from mdfuse.runtime.watch.tallies import Tallies

if TYPE_CHECKING:
    from mdfuse.torch_private import Store

_log = logging.getLogger("mdfuse.comm")

#: How long after its timeout the watchdog ends a wait that did not end by itself, seconds.
_SLACK_S = 2.0

#: How long a rank that reports lives on, so that others see that it had come, seconds.
_SEEN_S = 2.0

#: From an error, or an alarm, to the moment when this process no longer waits for anybody, seconds.
#: An alarm may come three seconds after the deadline of the wait, an error one.
_ERROR_S, _ALARM_S = 7.0, 5.0


class Watch:
    """The ring buffer of posts of this process, and its watchdog.

    Args:
        rank: this rank.
        timeout_s: a post is overdue so many seconds after it was made, and after the oldest open
            post last changed.
        store: through which the ranks exchange positions; nobody else uses its keys.
        is_capturing: returns whether posts are being captured into a CUDA graph now.
        clock: returns seconds.
        write: writes the report.
        end: ends the process with a status.
        size: entries of the ring, a power of two.
        ranks: the size of the world, all of whose ranks reports show; 0: they show the team
            concerned.
        host: the rank whose process keeps the store; None: another process does.
        reports: the folder of reports; None: there is none.
        neighbours: shows other ranks of this host as long as there is no store.
    """

    def __init__(
        self,
        *,
        rank: int,
        timeout_s: float,
        store: Store | None = None,
        is_capturing: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], object] | None = None,
        end: Callable[[int], object] | None = None,
        size: int = 4096,
        ranks: int = 0,
        host: int | None = None,
        reports: Path | None = None,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.ring = Ring(size, clock)
        #: the handle of a stream -> the track of replays on it
        self.tracks: dict[int, Track] = {}
        #: the subjects of posts that were captured, in order; cleared before each capture
        self.captured: list[PostInfo] = []
        self._rank = rank
        self._timeout = timeout_s
        self._tick = min(1.0, timeout_s / 10)
        self._beat = max(self._tick, ranks / 1000)  # at most 1,000 ranks a second
        self._world = tuple(range(ranks))
        self._bulletin: Bulletin | None = None
        if store is not None:
            self.connect(store)
        self._host = host
        self._folder = reports
        self._neighbours = neighbours
        #: the last meeting place of ranks without a store that this rank came to; or ""
        self._place = ""
        #: the moment when this process stops waiting for others, once there is an error
        self.ending = NEVER
        self._is_capturing = is_capturing
        self._clock = clock
        self._write = write or write_error
        self._end = end or end_process
        self._sources: list[tuple[tuple[int, ...], Callable[[], str | None]]] = []
        self._seen, self._reports = -1, 0
        self._oldest: Post | None = None
        self._moved_at = clock()
        #: ends the waits of this process; returns whether it could
        self.abort: Callable[[], bool] = lambda: False
        #: raises the error of a device that hangs in the program; None: the process ends
        self.interruption: Interrupting | None = None
        self._is_raised = self._is_aborted = False
        self._tallies = Tallies(gone=lambda tally: self.ring.forget(tally.title))
        self._waits: list[tuple[str, float]] = []
        self._stood: tuple[object, float] = (None, clock())
        self._refused: str | None = None
        self._broke: OwnPosition | None = None
        #: the way this rank left the others, in words
        self.leaves = "closed its communicator"
        self._ended = ""
        self._stop = threading.Event()
        self._threads: list[threads.Job] = []

    @property
    def is_cut_off(self) -> bool:
        """True if the store broke or does not answer, so that no rank hears of this one."""
        return self._bulletin is not None and self._bulletin.is_lost

    @property
    def store(self) -> str:
        """The store, and the rank that keeps it, in words."""
        return "the store" if self._host is None else f"the store that rank {self._host} keeps"

    @property
    def patience_s(self) -> float:
        """The age of its last word at which a rank is called gone, seconds."""
        return patience_of(self._beat)

    def prepare(
        self, subject: PostInfo, track: Track
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return a function to call before each post of `subject`, and one to call after it.

        While a graph is captured nothing is posted: the subject joins `captured`, and nothing is
        marked, since a replay would write the old number again. Replays are noted by `Replays`.
        """
        write, mark = self.ring.writer(subject, track.is_done), track.mark
        is_capturing, captured = self._is_capturing, self.captured
        number = 0

        def before() -> None:
            nonlocal number
            if is_capturing():
                number = 0
                captured.append(subject)
            else:
                number = write()

        def behind() -> None:
            if number:
                mark(number)

        return before, behind

    def on_error(self, team: tuple[int, ...], ask: Callable[[], str | None]) -> None:
        """Register a function to ask at each look for an error of a team's communicator."""
        self._sources.append((team, ask))

    def forget(self, *functions: Callable[..., object]) -> None:
        """Unregister functions that were given to `on_error`."""
        self._sources = [row for row in self._sources if row[1] not in functions]

    def start(self) -> None:
        """Start the threads of the watchdog, unless they run."""
        if self._threads:
            return
        for name, run in (("mdfuse-watch", self.look), ("mdfuse-bulletin", self.tell)):
            self._threads.append(threads.start(partial(self._run, run), name))

    def connect(self, store: Store) -> None:
        """Let the ranks exchange their positions in this store from now on."""
        self._bulletin = Bulletin(store, self._rank, self._beat, len(self._world))

    def position_of(self, rank: int) -> Position | None:
        """Return the last position that a rank told; None: it left, or nothing is known."""
        answers: list[Position | None] = [None]
        bulletin = self._bulletin
        if bulletin is not None:
            within(self._beat, lambda: answers.append(bulletin.position_of(rank)))
        return answers[-1]

    def close(self) -> None:
        """Stop watching, and tell the others that this rank left. A second close does nothing."""
        if self._ended:
            return
        self._stop.set()
        for job in self._threads:
            if job.thread is not threading.current_thread():
                job.join(self.ending.left(min(0.5, 2 * self._tick)))
        self._ended = self.leaves
        if self._bulletin is not None and self._threads:
            within(self.ending.left(2 * self._beat), self.tell)

    def count(self, tally: RunCount, owner: object) -> None:
        """Add a program's count of runs to this rank's position.

        It is kept as long as its owner; the posts of its runs stay in the sums.
        """
        self._tallies.add(tally, owner)

    @contextmanager
    def waiting(self, what: str, place: str = "") -> Iterator[None]:
        """Watch over a wait for other ranks in this context; the wait has a deadline of its own.

        Where that deadline does not end the wait, as where the host of the store is stopped, the
        watchdog ends the process.

        Args:
            what: the wait, in words.
            place: the name of the place where ranks without a store meet; else "".
        """
        if place and self._neighbours is not None:
            self._place = place
            self._neighbours.come_to(place)
        row = what, self._clock()
        self._waits.append(row)
        try:
            yield
        finally:
            self._waits.remove(row)

    def look(self) -> None:
        """Look once, and raise the alarm if a post or wait is overdue; ask no other process."""
        if self._is_raised:
            return
        alarm = self._failed() or self._overdue() or self._stuck() or self._broken()
        alarm = alarm or self._bereft() or self._called()
        if alarm is not None:
            self._raise(alarm)

    def tell(self) -> None:
        """Tell the other ranks this one's position once, and read their alarms and refusals."""
        if self._bulletin is None:
            return
        now = self._standing()
        self._bulletin.tell(self.position(self._reports > 0, now))
        self._bulletin.hear()
        self._bulletin.look_around()
        if self._bulletin.is_broken and now.is_waiting and not self._is_aborted:
            self._is_aborted = self.abort()  # others gave up: nobody will come
        if now.is_waiting and now.occasion is not None and self._refused is None:
            refusal = self._bulletin.refusal(now.occasion)
            if refusal is not None and not self.abort():
                self._refused = refusal

    def explain(self, error: BackendError) -> BackendError:
        """Return an error extended by the positions of all ranks; takes up to three seconds."""
        if self._bulletin is None and not self._place:
            return error
        self.ending = Deadline.after(_ERROR_S)
        now = standing(self._tallies, plan_position.raised(error) or plan_position.running())
        alarm = Alarm.at(now, error.what, self._world)
        self._broke = replace(now, is_waiting=False) if now.doing else None
        with self._reporting(alarm, now) as table:
            extended = explained(error, alarm, table)
            self._keep(extended, table)
            return extended

    def position(self, is_hanging: bool, now: OwnPosition | None = None) -> Position:
        """Return the position of this rank, in the form told to others."""
        now = now or self._standing()
        posts = self._posts()
        open_posts = [post for post in posts if not post.is_done()]
        progress = []
        for (family, team), posted in self.ring.tallies().items():
            mine = [p for p in open_posts if (p.subject.family, p.subject.team) == (family, team)]
            done = mine[0].sequence - 1 if mine else posted
            last = [p for p in posts if (p.subject.family, p.subject.team) == (family, team)]
            text = last[-1].text() if last else ""
            progress.append(Progress(family, team, posted, done, text))
        progress += now.progress
        waits = [what for what, _ in self._waits]
        doing = now.doing or (f"in {waits[-1]}" if waits else "")
        progress_of = tuple(progress)
        return Position(self._rank, is_hanging, progress_of, host_line(), doing, self._ended)

    def _standing(self) -> OwnPosition:
        """Return the position of this process in its plans, or that of its last run."""
        now = standing(self._tallies, plan_position.running() if self._tallies else None)
        if now.doing:
            self._broke = None
        return self._broke or now

    def _posts(self) -> list[Post]:
        """Return the ring's posts, and the oldest open one even where the ring overwrote it."""
        posts, oldest = self.ring.posts(), self._oldest
        is_lost = oldest is not None and posts and posts[0].place > oldest.place
        return [oldest, *posts] if is_lost and oldest else posts

    def _run(self, act: Callable[[], None]) -> None:
        while not self._stop.wait(self._tick if act == self.look else self._beat):
            try:
                act()
            except Exception as error:  # the thread must live: else a hang would be silent
                _log.exception("rank %d: the watchdog stumbled: %r", self._rank, error)

    def _failed(self) -> Alarm | None:
        for team, ask in list(self._sources):
            text = ask()
            if text is not None:
                return Alarm(team=team, what=f"a communicator failed on rank {self._rank}: {text}")
        return None

    def _overdue(self) -> Alarm | None:
        now, oldest = self._clock(), self._find_oldest()
        if oldest is None or now - max(oldest.posted_at, self._moved_at) <= self._timeout:
            return None
        return Alarm.of(oldest, self._rank, self._timeout, now - oldest.posted_at)

    def _bereft(self) -> Alarm | None:
        """Return the alarm over a post whose team has lost a process of this host, or None."""
        now, oldest = self._clock(), self._find_oldest()
        if oldest is None or self._bulletin is None:
            return None
        lost = self._bulletin.gone & {*oldest.subject.team}
        if not lost or now - max(oldest.posted_at, self._moved_at) <= 2 * self._beat:
            return None
        alarm = Alarm.of(oldest, self._rank, self._timeout, now - oldest.posted_at)
        return replace(alarm, what=f"{alarm.what}: {ranks_text(sorted(lost))} ended without a word")

    def _find_oldest(self) -> Post | None:
        """Return the first post that is not done, kept in case the ring overwrites it."""
        oldest = self._oldest
        if oldest is not None and not oldest.is_done():
            return oldest
        posts = self.ring.posts(after=self._seen)
        open_posts = (post for post in posts if not post.is_done())
        self._oldest = next(open_posts, None)
        if posts:
            self._seen = (self._oldest.place if self._oldest else posts[-1].place + 1) - 1
        self._moved_at = self._clock()
        return self._oldest

    def _stuck(self) -> Alarm | None:
        """Return the alarm over a wait that should have ended by itself, or None."""
        now, moment, limit = self._standing(), self._clock(), self._timeout + _SLACK_S
        if now.key != self._stood[0]:
            self._stood = now.key, moment
        since = self._stood[1]
        if now.is_waiting and moment - since > limit:
            name = now.name or now.where
            return Alarm.at(now, self._not_done(name, moment - since), self._world, now.where)
        for what, since in list(self._waits):
            if moment - since > limit:
                return Alarm(team=self._world, what=self._not_done(what, moment - since))
        return None

    def _not_done(self, what: str, age_s: float) -> str:
        limit = f"timeout_s={self._timeout:g}"
        return f"{what} is not done on rank {self._rank} after {age_s:.1f} s ({limit})"

    def _broken(self) -> Alarm | None:
        """Return the alarm over a wait for a rank that left the run; None if it can be ended."""
        if self._refused is None:
            return None
        now = self._standing()
        why, _, words = self._refused.partition("\n")
        what = f"{now.doing or 'a run'} broke off on rank {self._rank}: {why}"
        return Alarm.at(now, what, self._world, words)

    def _called(self) -> Alarm | None:
        """Come to a meeting that another rank called; return the alarm where the program works."""
        bulletin, program = self._bulletin, self.interruption
        if bulletin is None or not bulletin.is_ending or program is None or program.is_over:
            return None
        now = self._standing()
        if self._broke is None and (now.doing or self._find_oldest() is not None):
            what = f"rank {self._rank} ends its posts, as others do"
            return Alarm.at(now, what, self._world) if program.can_begin() else None
        program.stand_by()
        return None

    def meet(self) -> bool:
        """Wait until all ranks that live know that posts are about to be ended.

        Returns:
            False: one that lives does not come in time, or there is no store.
        """
        limit = Deadline.after(self._timeout + _SLACK_S + self.patience_s)
        bulletin = self._bulletin
        return bulletin is not None and bulletin.meet(self._world, limit)

    def come(self) -> bool:
        """Tell others that versions are noted; return False where they did not wait for that."""
        bulletin = self._bulletin
        return bulletin is None or (within(self.patience_s, bulletin.come) and bulletin.has_come)

    @contextmanager
    def _reporting(self, alarm: Alarm, now: OwnPosition) -> Iterator[Table]:
        """Gather the facts of a report; afterwards let other ranks gather theirs from this one."""
        position, ranks = self.position(True, now), self._world or alarm.team
        bulletin, answers = self._bulletin, Answers(is_complete=True)
        self._reports += 1
        if bulletin is not None:
            bulletin.give_up()
            within(self.ending.left(self._beat), bulletin.break_off)
            within(self.ending.left(self._beat), lambda: bulletin.tell(position))
            answers = bulletin.gather(ranks, self.ending)
        table = self._table(position, ranks, answers)
        try:
            if bulletin is not None and answers.is_complete:
                word = f"rank {self._rank} said: {alarm.what}: {blame(alarm, table)}"
                within(self.ending.left(self._beat), lambda: bulletin.alarm(word))
            yield table
        finally:
            self._reports -= 1
            if bulletin is not None and answers.is_complete:
                said = replace(position, is_hanging=False)
                within(self.ending.left(self._beat), lambda: bulletin.tell(said))
                bulletin.linger(answers.positions, self.ending)
            elif bulletin is None and self._place:
                time.sleep(self.ending.left(_SEEN_S))

    def _table(self, position: Position, ranks: Sequence[int], answers: Answers) -> Table:
        is_there = answers.is_complete
        lost = f"{self.store} does not answer: nothing is known of other ranks"
        store = "" if is_there else lost
        missing: Mapping[int, str] = {}
        if self._bulletin is None and self._place:
            store = "the ranks share no store here: only what this host shows is known"
            missing = self._neighbours.missing(self._place) if self._neighbours else {}
        elif self._bulletin is not None and is_there:
            reached = {self._rank, *answers.positions}
            missing = {rank: NEVER_TOLD for rank in ranks if rank not in reached}
        elif self._neighbours and self._place:
            missing = self._neighbours.stopped(self._place)
        heard = self._bulletin.heard if self._bulletin is not None else ""
        return Table(
            position=position,
            others=dict(answers.positions),
            ranks=ranks,
            posts=self._posts(),
            store=store,
            missing=missing,
            heard="" if heard.startswith(f"rank {self._rank} ") else heard,
            lost=None if is_there else self._host,
            page=Page(self._folder, self._rank),
        )

    def _keep(self, error: BackendError, table: Table) -> str:
        """Write a report to its file, and return its text."""
        text = f"mdfuse.{type(error).__name__}: {error}"
        if table.page is not None:
            table.page.write(text)
        return text

    def _raise(self, alarm: Alarm) -> None:
        self.ending = Deadline.after(_ALARM_S)
        with self._reporting(alarm, self._standing()) as table:
            if self.interruption is not None and self.interruption.can_begin():
                error = report(alarm, table, RAISED)
                self._keep(error, table)
                self._is_raised = self.interruption.begin(error)
            if not self._is_raised:
                error = report(alarm, table)
                self._write(self._keep(error, table))
                tell_torchrun(error)
        if self._is_raised:
            self.ending = NEVER
            return
        self._stop.set()
        # no communicator is aborted first: an abort would let the program go on with garbage in the
        # buffers, and even end well
        self._end(EXIT_STATUS)
