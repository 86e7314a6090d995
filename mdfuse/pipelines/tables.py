"""Named schedules: the actions of each rank group, in order.

A row is made of two lists of the same length, forwards and backwards, each in the order in which
the group takes them: some forwards to warm up, then one of each in turn, then the backwards that
are left. GPipe warms up with all forwards; 1F1B with one for each group behind this one (Narayanan
et al., arXiv:1806.03377); its interleaved kind (arXiv:2104.04473) goes through the group's stages a
round of microbatches at a time; ZB-H1 (arXiv:2401.10241) warms up as 1F1B does, and takes the
gradients of weights later. ZBV (section 6 there) and DualPipeV (arXiv:2412.19437) are written in
words, phase by phase: their stages go down the groups and up again.

The rows are those that `torch.distributed.pipelining` makes, where it makes any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import cast

from mdfuse.pipelines.actions import Action, Overlap, Phase, of


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleGroup:
    """The rank group of a row, and the size of the pipeline.

    Attributes:
        stages: of this rank group, in ascending order.
        rank: the number of the group.
        groups: the number of groups.
        microbatches: their number.
    """

    stages: tuple[int, ...]
    rank: int
    groups: int
    microbatches: int

    def all(self, phase: Phase, stages: Sequence[int]) -> list[Action]:
        """Return all microbatches of one stage, then those of the next."""
        return [Action(s, phase, k) for s in stages for k in range(self.microbatches)]

    def in_rounds(self, phase: Phase, stages: Sequence[int]) -> list[Action]:
        """Return a round of microbatches of each stage, then the next round."""
        m, size = self.microbatches, self.round
        rounds = [range(first, first + size) for first in range(0, m, size)]
        return [Action(s, phase, k) for turn in rounds for s in stages for k in turn]

    @property
    def round(self) -> int:
        """The number of microbatches that go through a stage before the next stage of its group."""
        return self.microbatches // rounds(self.groups, self.microbatches)

    @property
    def behind(self) -> int:
        """The number of groups behind this one."""
        return self.groups - 1 - self.rank

    @property
    def laps(self) -> int:
        """The forwards of a group's first stages before a microbatch comes to its last one."""
        return (len(self.stages) - 1) * self.round


def rounds(groups: int, microbatches: int) -> int:
    """Return the number of rounds in which microbatches go through the stages of a group."""
    return max(1, microbatches // groups)


Row = list[Action]
#: A row in which some actions are paired.
Paired = list[Action | Overlap]


def _forward(g: ScheduleGroup) -> Row:
    return g.all("F", g.stages)


def _gpipe(g: ScheduleGroup) -> Row:
    return _forward(g) + g.all("B", g.stages[::-1])


def _1f1b(g: ScheduleGroup) -> Row:
    return _in_turn(g.all("F", g.stages), g.all("B", g.stages), g.behind)


def _interleaved(g: ScheduleGroup) -> Row:
    warmup = g.laps + 2 * g.behind
    return _in_turn(g.in_rounds("F", g.stages), g.in_rounds("B", g.stages[::-1]), warmup)


def _zb1p(g: ScheduleGroup) -> Row:
    forwards, back = g.in_rounds("F", g.stages), g.stages[::-1]
    weights = iter(g.in_rounds("W", back))
    row: Row = []
    begun = 0
    for action in _in_turn(forwards, g.in_rounds("I", back), g.laps + g.behind):
        row.append(action)
        begun += action.phase == "I"
        if action.phase == "I" and begun > g.rank:
            row.append(next(weights))
    return [*row, *weights]


def _in_turn(forwards: Row, backwards: Row, warmup: int) -> Row:
    """Return some forwards, then one forward and one backward in turn, then the rest."""
    pairs = zip_longest(forwards[warmup:], backwards)
    return forwards[:warmup] + [a for pair in pairs for a in pair if a is not None]


class _Words:
    """A row written in words: `F0 B1` is the next forward of stage 0, and backward of stage 1.

    Stages are counted within the group. `W` belongs to the oldest `I` without one, of any stage; a
    word with a plus is an overlap.
    """

    def __init__(self, group: ScheduleGroup) -> None:
        self.stages = group.stages
        self.row: Paired = []
        self.counts: Counter[tuple[int, bool]] = Counter()
        self.owed: Row = []

    def __call__(self, text: str, times: int = 1) -> None:
        for word in text.split() * times:
            actions = map(self._next, word.split("+"))
            self.row.append(Overlap(*actions) if "+" in word else next(actions))

    def _next(self, word: str) -> Action:
        """Return the next action of a word; one without a number is of any stage."""
        phase = cast(Phase, word[0])
        stages = {self.stages[int(word[1])]} if word[1:] else {*self.stages}
        if phase == "W":
            begun = next(a for a in self.owed if a.stage in stages)
            self.owed.remove(begun)
            return Action(begun.stage, "W", begun.microbatch)
        (stage,) = stages
        action = Action(stage, phase, self.counts[stage, phase == "F"])
        self.counts[stage, phase == "F"] += 1
        self.owed += [action] * (phase == "I")
        return action


def _zbv(g: ScheduleGroup) -> Paired:
    write, r, after = _Words(g), g.rank, g.behind
    full = max(2 * g.groups - 1, g.microbatches)  # the fewest that fill it; others are left out
    write("F0", 2 * after + 1)
    write("F1 F0", r)
    write("F1 I1 W1", after + 1)
    write("F0 I0 W0 F1 I1 W1", full - 2 * g.groups + 1 + r)
    write("I0 W0 F1 I1 W1", after)
    write("I0 I1", r)
    write("I0 W0", after + 1)
    write("W1", r)
    write("W0", r)
    return [cell for cell in write.row if all(a.microbatch < g.microbatches for a in of(cell))]


def _dualpipev(g: ScheduleGroup) -> Paired:
    write, r, after = _Words(g), g.rank, g.behind
    write("F0", 2 * after)
    write("F0 F1", r + 1)
    write("I1 W F1", after)
    write("F0+B1 F1+B0" if after else "F0 B1 F1+B0")
    write("F0+B1 F1+B0", g.microbatches - 2 * g.groups + r)
    write("B1 F1+B0", after)
    write(" ".join(f"{'B' if n <= r else 'I'}{1 - n % 2}" for n in range(2 * (r + 1))))
    write("W I0", after)
    write("W", r + 1)
    return write.row


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSchedule:
    """A schedule with a name.

    Attributes:
        row: returns the actions of a rank group.
        rule: which stages and microbatches it can have, in words.
        can: whether it can have so many stages, groups and microbatches.
        turns: the stages go down the groups and up again, not round and round.
        anywhere: a stage may lie on any group, and read any stages before it.
        goes_back: there are backwards.
    """

    row: Callable[[ScheduleGroup], Sequence[Action | Overlap]]
    rule: str
    can: Callable[[int, int, int], bool]
    turns: bool = False
    anywhere: bool = False
    goes_back: bool = True


_ROUND = (
    "each group has as many stages, and microbatches come in rounds: n times "
    "max(1, microbatches // groups)"
)


def _goes_round(stages: int, groups: int, microbatches: int) -> bool:
    return stages % groups == 0 and microbatches % rounds(groups, microbatches) == 0


#: All names, with their rules.
NAMED = {
    "forward": NamedSchedule(
        row=_forward,
        rule="it has any stages",
        can=lambda p, g, m: True,
        anywhere=True,
        goes_back=False,
    ),
    "gpipe": NamedSchedule(
        row=_gpipe, rule="it has any stages", can=lambda p, g, m: True, anywhere=True
    ),
    "1f1b": NamedSchedule(
        row=_1f1b, rule="it has one stage on each rank group", can=lambda p, g, m: p == g
    ),
    "interleaved": NamedSchedule(row=_interleaved, rule=_ROUND, can=_goes_round),
    "zb1p": NamedSchedule(row=_zb1p, rule=_ROUND, can=_goes_round),
    "zbv": NamedSchedule(
        row=_zbv,
        rule="it has two stages on each rank group, down the groups and up again",
        can=lambda p, g, m: p == 2 * g,
        turns=True,
    ),
    "dualpipev": NamedSchedule(
        row=_dualpipev,
        rule="it has two stages on each rank group, down the groups and up again, and no fewer "
        "microbatches than stages",
        can=lambda p, g, m: p == 2 * g <= m,
        turns=True,
    ),
}


def placed(stages: int, groups: int, turns: bool) -> tuple[int, ...]:
    """Return the group of each stage: 0 1 0 1, or 0 1 1 0 where they turn.

    >>> placed(4, 2, turns=True)
    (0, 1, 1, 0)
    """
    laps = ((s // groups, s % groups) for s in range(stages))
    return tuple(groups - 1 - n if turns and lap % 2 else n for lap, n in laps)
