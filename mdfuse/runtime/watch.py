"""What was posted outside torch.distributed, and a thread that sees when it does not finish.

Each post is noted in a ring buffer before it is made, and marked behind it, so that the watchdog
finds the oldest one that is not done without asking the device: see `Track`. The watchdog sleeps,
looks, and, where a post is overdue, says which instruction it is and what the other ranks did, and
ends the process: buffers that such a communication writes to hold garbage.
"""

from __future__ import annotations

import linecache
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from mdfuse.backends.noting import Subject, Track
from mdfuse.errors import PACKAGE
from mdfuse.runtime.watch_report import Alarm, Bulletin, Position, Progress, report

if TYPE_CHECKING:
    from mdfuse.backends.c10d_groups import Store

_log = logging.getLogger("mdfuse.comm")

#: The exit status of a process that the watchdog ends (sysexits.h: EX_SOFTWARE).
EXIT_STATUS = 70

#: Code that is not the user's, besides installed packages.
_LIBRARIES = (PACKAGE, sys.base_prefix + "/lib/", "<")


class Post(NamedTuple):
    """One entry of the ring.

    Attributes:
        place: its number among all posts of this process.
        sequence: its number in its family and team, from 1.
        subject: what it is.
        is_done: whether the post of a sequence number is done.
        posted_at: seconds, on the watch's clock.
    """

    place: int
    sequence: int
    subject: Subject
    is_done: Callable[[int], bool]
    posted_at: float

    def text(self) -> str:
        """As reports name it."""
        subject = self.subject
        return f"{subject.kind} #{self.sequence} ({subject.where})"


class Ring:
    """The last posts; writing one costs 0.2 us, reading them is for reports.

    Args:
        size: how many, a power of two; more than the launch queue of a GPU takes (1,024).
        clock: seconds.
    """

    def __init__(self, size: int, clock: Callable[[], float]) -> None:
        assert size & (size - 1) == 0
        self._entries: list[tuple[Any, ...] | None] = [None] * size
        self._clock = clock
        self._next = count().__next__
        self._tallies: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def writer(self, subject: Subject, is_done: Callable[[int], bool]) -> Callable[[], int]:
        """A function that notes a post of `subject` and returns its sequence number."""
        entries, mask, following, clock = (
            self._entries,
            len(self._entries) - 1,
            self._next,
            self._clock,
        )
        tally = self._tallies.setdefault((subject.family, subject.team), [0])

        def write() -> int:
            number = tally[0] = tally[0] + 1
            place = following()
            entries[place & mask] = (place, number, subject, is_done, clock())
            return number

        return write

    def posts(self, after: int = -1) -> list[Post]:
        """The last posts, of those with a place above `after`, oldest first."""
        entries = list(self._entries)
        return sorted(Post(*e) for e in entries if e is not None and e[0] > after)

    def tallies(self) -> dict[tuple[str, tuple[int, ...]], int]:
        """How many were posted, by family and team."""
        return {key: tally[0] for key, tally in list(self._tallies.items())}


class Watch:
    """The ring buffer of posts of this process, and its watchdog.

    Args:
        rank: this rank.
        timeout_s: a post that is not done so many seconds after it, and after any other post was
            done, is overdue.
        store: where the ranks tell each other how far they are; nobody else uses its keys.
        is_capturing: whether posts are being captured into a CUDA graph now.
        clock: seconds.
        write: takes the report.
        end: ends the process with a status.
        size: entries of the ring, a power of two.
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
    ) -> None:
        self.ring = Ring(size, clock)
        #: the subjects of posts that were captured, in order; who captures clears it before
        self.captured: list[Subject] = []
        self._rank = rank
        self._timeout = timeout_s
        self._tick = min(1.0, timeout_s / 10)
        self._bulletin = Bulletin(store, rank, min(4.0, timeout_s / 10)) if store else None
        self._is_capturing = is_capturing
        self._clock = clock
        self._write = write or _write_error
        self._end = end or _end_process
        self._sources: list[tuple[tuple[int, ...], Callable[[], str | None]]] = []
        self._seen = -1
        self._oldest: Post | None = None
        self._moved_at = clock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def prepare(
        self, subject: Subject, track: Track
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """What to call before and behind each post of `subject`.

        While a graph is captured nothing is posted: the subject joins `captured`, and nothing is
        marked, for a replay would write the old number again. Whoever replays notes the replay.
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
        """Ask for errors of a team's communicator at each look; a text is one."""
        self._sources.append((team, ask))

    def forget(self, *functions: Callable[..., object]) -> None:
        """Take back what was given to `on_error`."""
        self._sources = [row for row in self._sources if row[1] not in functions]

    def start(self) -> None:
        """Start the watchdog, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mdfuse-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * self._tick)

    def look(self) -> None:
        """Look once: raise the alarm where it is time to, answer another rank's."""
        alarm = self._failed() or self._overdue()
        if alarm is not None:
            self._raise(alarm)
        elif self._bulletin is not None and self._bulletin.is_asked(self._clock()):
            self._bulletin.publish(self.position(is_hanging=False))

    def position(self, is_hanging: bool) -> Position:
        """How far this rank is, for the others."""
        posts = self._posts()
        open_posts = [post for post in posts if not post.is_done(post.sequence)]
        progress = []
        for (family, team), posted in self.ring.tallies().items():
            mine = [p for p in open_posts if (p.subject.family, p.subject.team) == (family, team)]
            done = mine[0].sequence - 1 if mine else posted
            last = [p for p in posts if (p.subject.family, p.subject.team) == (family, team)]
            text = last[-1].text() if last else ""
            progress.append(Progress(family, team, posted, done, text))
        return Position(self._rank, is_hanging, tuple(progress), _host_line())

    def _posts(self) -> list[Post]:
        """The ring's, and the oldest that is not done, even where the ring came round to it."""
        posts, oldest = self.ring.posts(), self._oldest
        is_lost = oldest is not None and posts and posts[0].place > oldest.place
        return [oldest, *posts] if is_lost and oldest else posts

    def _run(self) -> None:
        while not self._stop.wait(self._tick):
            try:
                self.look()
            except Exception:  # the thread must live: without it a hang would be silent
                _log.exception("rank %d: the watchdog stumbled", self._rank)

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

    def _find_oldest(self) -> Post | None:
        """The first post that is not done; kept, in case the ring comes round to it."""
        oldest = self._oldest
        if oldest is not None and not oldest.is_done(oldest.sequence):
            return oldest
        posts = self.ring.posts(after=self._seen)
        open_posts = (post for post in posts if not post.is_done(post.sequence))
        self._oldest = next(open_posts, None)
        if posts:
            self._seen = (self._oldest.place if self._oldest else posts[-1].place + 1) - 1
        self._moved_at = self._clock()
        return self._oldest

    def _raise(self, alarm: Alarm) -> None:
        others: dict[int, Position] = {}
        position = self.position(is_hanging=True)
        if self._bulletin is not None:
            self._bulletin.call(position)
            others = self._bulletin.answers(alarm.team)
        self._write(report(alarm, position, others, self._posts()))
        if self._bulletin is not None:
            self._bulletin.linger(others)
        self._stop.set()
        # no communicator is aborted first: that would let the program go on with what is in the
        # buffers, and even end well
        self._end(EXIT_STATUS)


def _host_line() -> str:
    """Where the main thread is: its innermost line outside mdfuse, torch and Python's library."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" not in name and not name.startswith(_LIBRARIES):
            break
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    name, line = frame.f_code.co_filename, frame.f_lineno
    return f"{os.path.basename(name)}:{line}   {linecache.getline(name, line).strip()}".rstrip()


def _write_error(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _end_process(status: int) -> None:
    """At once: an orderly exit would wait for the device, which hangs."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(status)
