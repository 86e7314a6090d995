"""Plans as CUDA graphs: calls are captured once, region by region, and replayed from then on.

    eager     v5 = scale(...)               reads a number of this run
    captured  v7 = allgather(...) … mm(...)    copy inputs in, replay, hand results out

A graph repeats the same kernels on the same addresses. An argument that lay at one address in the
first two runs (weights, say) is read where it lies, as long as it stays there; others are copied
into buffers of the graph. Outputs are new in each run, and torch's allocator gives their memory as
it gives any other: in a loop it is soon the same few addresses, and there is a graph for each of
them. Where there are too many, one graph fills buffers of its own, which are copied out; addresses
that come again and again get a graph all the same, in the place of the oldest. Small outputs of
long work, as the loss of a training step, are always copied out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise, zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mdfuse.plan.build import Plan
from mdfuse.plan.captures import GraphRecorder, give_up, undisturbed
from mdfuse.plan.context import CALLER_SLOT
from mdfuse.plan.lines import Function, Line, write
from mdfuse.plan.replays import AddressMisses, Captured, Quick, Ready, quick, ready, unwatched
from mdfuse.plan.tensor_meta import Form, all_new, empty, form_of

if TYPE_CHECKING:
    from mdfuse.runtime.fast_lane import Replays

#: With graph="auto", bytes of arguments that a region may copy in each run. A GPU with 4 TB/s takes
#: some 30 us for that, about what three posts cost the host.
COPY_LIMIT = 64 << 20

#: Graphs of one region, each for other addresses of the outputs. A caller who keeps the last output
#: until the next one is there needs two.
GRAPHS = 3

#: Outputs of up to so many bytes are copied out of a region of at least so many lines: a copy takes
#: the device some 3 us, and a capture, once for each address, as long as a run without a graph.
SMALL, LONG = 4096, 128

#: After so many runs in a row with outputs at the same other addresses these get a graph.
TIMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Lines [start, stop) of a run, all captured, or all eager for a reason."""

    start: int
    stop: int
    eager: str | None


def regions(plan: Plan) -> list[Region]:
    """Cut a plan into regions, in order.

    Between a post and its wait there is no border: a library may not know that a communication was
    captured. A plan that switches streams has no border at all: captured streams must join again.
    """
    lines = plan.owned.lines
    by_line = [step.eager for step in plan.steps for _ in step.lines]
    reasons = [by_line[n] for n in plan.owned.numbers]
    borders = [0, len(lines)] if plan.switches else [*_quiet(plan), len(lines)]
    cut: list[Region] = []
    for start, stop in pairwise(borders):
        why = next((r for r in reasons[start:stop] if r is not None), None)
        if cut and (cut[-1].eager is None) == (why is None):
            cut[-1] = Region(start=cut[-1].start, stop=stop, eager=cut[-1].eager)
        elif start < stop:
            cut.append(Region(start=start, stop=stop, eager=why))
    return cut


def _quiet(plan: Plan) -> list[int]:
    """Return the lines before which no communication is under way."""
    handles = {slot for step in plan.steps if step.op == "post" for slot in step.outputs}
    lines = plan.owned.lines
    last = {s: n for n, line in enumerate(lines) for s in (*line.refs, *line.targets)}
    busy_until, quiet = -1, []
    for n, line in enumerate(lines):
        if n > busy_until:
            quiet.append(n)
        posted = [last[slot] for slot in line.targets if slot in handles and line.run is not None]
        busy_until = max([busy_until, *posted])
    return quiet


# -- replaying -----------------------------------------------------------------------------------


_address = Tensor.data_ptr


@dataclass(eq=False)
class GraphPlan:
    """A plan whose regions are captured; runs like a `Plan`.

    Args:
        plan: built for the stream of captures, with buffers given for the outputs in `fresh`.
        build_eager: builds the same plan for the caller's stream; its lines run in eager regions.
        recorder: captures the regions.
        stays: slot -> address, for parameters that lay at one address so far.
        fresh: for each output the form to allocate in each run; None: the caller gives it, or the
            plan makes it.
        may_overlap: whether the caller's tensors that are written may overlap others.
        watch: notes captures and replays.
        limit: a region that would copy more bytes of arguments in each run is not captured; None:
            there is no limit.
    """

    plan: Plan
    build_eager: Callable[[], Plan]
    recorder: GraphRecorder
    stays: dict[int, int]
    fresh: Sequence[Form | None] = ()
    may_overlap: bool = False
    watch: Replays | None = None
    limit: int | None = None
    _captured: dict[int, dict[tuple[int, ...], Captured]] = field(default_factory=dict)
    _functions: dict[tuple[bool, int], Function] = field(default_factory=dict)
    #: runs for new outputs where a graph expects them, or returns None; None: no graph does it all
    quick: Quick | None = field(init=False, default=None)
    #: addresses of new outputs -> the run by one graph; the second: for any addresses
    _ready: dict[tuple[int, ...], Ready] = field(default_factory=dict)
    _copying: Ready | None = None
    #: region -> outputs that lie where no graph expects them
    _turns: dict[int, AddressMisses] = field(
        default_factory=lambda: defaultdict(partial(AddressMisses, TIMES))
    )

    def __post_init__(self) -> None:
        self.regions = regions(self.plan)
        self.numbers, self.records = self.plan.numbers, self.plan.records
        self._parameters = self.plan.parameters
        self._written = {*self.plan.written, *self._parameters[len(self.plan.inputs) :]}
        self._uses = [self._use(region) for region in self.regions]
        self._views = _views(self.plan, self._parameters)
        given = dict(zip(range(len(self.plan.outputs)), self.plan.given, strict=False))
        self._new = {
            slot: form
            for slot, form in zip(self.plan.given, self.fresh, strict=False)
            if slot is not None and form is not None
        }
        self._fresh = all_new([*self._new.values()])
        self._new_of = [[s for s in self._new if s in taken] for taken, _ in self._uses]
        self._copied_out = {n for n in range(len(self.regions)) if self._is_copied_out(n)}
        numbers: dict[int | None, int] = {slot: n for n, slot in enumerate(self._parameters)}
        by_line = [step.op for step in self.plan.steps for _ in step.lines]
        ops = [by_line[number] for number in self.plan.owned.numbers]
        #: regions to run eagerly once: compiled work chooses among its kernels in its first run,
        #: and graphs that are captured in the order of a run share memory
        self._cold = {*range(len(self.regions))} if "launch" in ops else set()
        #: for each output the number of the parameter that it is, if it is one
        self._places = [
            numbers.get(slot if given.get(n) is None else given[n])
            for n, slot in enumerate(self.plan.outputs)
        ]
        self._new_places = [n for n, slot in enumerate(self._parameters) if slot in self._new]
        self._taken = _picked(self._places)
        pairs = zip(self._places, self.plan.outputs, strict=True)
        self._is_simple = not self.numbers and not any(
            place is None and slot is not None for place, slot in pairs
        )
        is_all_new = (*self.plan.outputs,) == (*self._new,)
        if self._is_simple:
            self.quick = quick(self._ready, self._fresh, self._taken, is_all_new=is_all_new)

    @cached_property
    def eager(self) -> Plan:
        """The plan whose lines run in eager regions."""
        return self.build_eager()

    # -- a run -----------------------------------------------------------------------------------

    def run(
        self,
        arguments: Sequence[Any],
        out: Sequence[Any] | None = None,
        at: tuple[int, ...] | None = None,
    ) -> list[Any]:
        """Run once, as `Plan.run`; regions that are not captured yet are captured.

        Args:
            arguments: as `Plan.run` takes them.
            out: likewise.
            at: the addresses of the tensors among the arguments, where they are known.
        """
        if out is None and at is not None and self.quick is not None:
            results = self.quick(arguments, at)
            if results is not None:
                return results
        buffers = self._fresh() if out is None else self._buffers(out)
        values = [*arguments, *buffers]
        if not self._is_simple:
            return self._run(values)
        if at is None or out is not None:
            at = self._given_at(values)
        new = tuple([values[n].data_ptr() for n in self._new_places])
        one = self._ready.get(new, self._copying)
        if one is None or not one.fits(at):
            return self._run(values)
        is_odd = one is self._copying and 0 not in self._copied_out
        if is_odd and self._turns[0].is_due(new):
            return self._run(values)
        one.run(values)
        return self._taken(values)

    def _given_at(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Return the addresses of the caller's tensors."""
        pairs = zip(self._parameters, values, strict=True)
        return tuple([x.data_ptr() for slot, x in pairs if x is not None and slot not in self._new])

    def _buffers(self, out: Sequence[Any]) -> list[Any]:
        """Return the caller's buffers for outputs, and new ones for the others."""
        pairs = zip_longest(self.fresh, out)
        return self.plan.taken([x if form is None else empty(form) for form, x in pairs])

    def _run(self, values: Sequence[Any]) -> list[Any]:
        """Run once, region by region; where one graph does it all, make it ready for more."""
        with torch.no_grad():
            given = dict(zip(self._parameters, values, strict=True))
            slots = dict(given)
            for n in range(len(self.regions)):
                captured = self._graph(n, slots)
                if captured is None:
                    self._run_eagerly(n, slots)
                else:
                    captured.replay(slots)
            results = [self._result(n, slots, given) for n in range(len(self.plan.outputs))]
        if self._is_simple and len(self.regions) == 1:
            graphs = self._captured.get(0, {})
            parameters, new = self._parameters, self._new
            replays = {at: ready(c, parameters, values, new) for at, c in graphs.items()}
            self._copying = replays.pop((), None) if new else None
            self._ready.clear()
            self._ready.update(replays)
        return results

    def _graph(self, n: int, slots: dict[int, Any]) -> Captured | None:
        """Return the graph of a region for these arguments; None where it runs eagerly."""
        if self.regions[n].eager is not None:
            return None
        if n in self._cold:
            self._cold.discard(n)
            return None
        graphs = self._captured.setdefault(n, {})
        new = () if n in self._copied_out else self._new_of[n]
        key = tuple(slots[s].data_ptr() for s in new)
        if key not in graphs and len(graphs) >= GRAPHS:
            key = self._other(n, key)
        captured = graphs.get(key)
        if captured is not None and captured.fits(slots):
            return captured
        if captured is not None:
            self._give_up(n)
        taken, _ = self._uses[n]
        moving = [s for s in taken if s not in self._new and self._address(s, slots) is None]
        size = sum(slots[s].nbytes for s in moving if isinstance(slots[s], Tensor))
        if self.limit is not None and size > self.limit:
            self._give_up(n)
            why = f"{size >> 20} MiB of its arguments lie elsewhere in each run"
            self.regions[n] = replace(self.regions[n], eager=why)
            return None
        graphs[key] = self._capture(n, slots, is_new_bound=bool(key))
        return graphs[key]

    def _other(self, n: int, at: tuple[int, ...]) -> tuple[int, ...]:
        """Return the key of the graph for outputs at addresses that no graph expects.

        Addresses that come again and again get a key of their own, in the place of the oldest.
        """
        if not self._turns[n].is_due(at):
            return ()
        graphs = self._captured[n]
        give_up(graphs.pop(next(key for key in graphs if key)).recording)
        self._turns[n].note_capture()
        return at

    def _give_up(self, n: int) -> None:
        """Give up the graphs of a region."""
        graphs = self._captured.get(n, {})
        for captured in graphs.values():
            give_up(captured.recording)
        graphs.clear()
        self._ready.clear()
        self._copying = None

    def _result(self, n: int, slots: dict[int, Any], given: dict[int, Any]) -> Any:
        """Return an output: a given buffer, or one that no later run writes into."""
        slot, place = self.plan.outputs[n], self._places[n]
        if place is not None or slot is None:
            return None if place is None else given[self._parameters[place]]
        if slot in self._views:
            return self._views[slot](given)
        output = slots[slot]
        graphs = (
            captured for by_place in self._captured.values() for captured in by_place.values()
        )
        if any(slot in captured.results for captured in graphs):
            return output.clone()
        return output

    def __str__(self) -> str:
        """The regions as text, each eager one with its reason."""
        lines = self.plan.function.source.splitlines()
        text = [lines[0]]
        for region in self.regions:
            what = "captured" if region.eager is None else f"eager, because {region.eager}"
            text.append(f"    # -- {what}")
            text += lines[1 + region.start : 1 + region.stop]
        return "\n".join([*text, *lines[1 + len(self.plan.owned.lines) :]])

    def replays(self) -> list[Ready]:
        """The runs by one graph: the one for any addresses, those for addresses seen so far."""
        return [*filter(None, [self._copying]), *self._ready.values()]

    def reset(self) -> None:
        """Give up the graphs; to be called before their communicators are destroyed."""
        for n in [*self._captured]:
            self._give_up(n)

    def release(self) -> None:
        """Give up graphs and buffers."""
        self.reset()
        self._functions.clear()
        self.plan.release()

    # -- regions ---------------------------------------------------------------------------------

    def _use(self, region: Region) -> tuple[list[int], list[int]]:
        """Return the slots that a region takes from outside, and its results in use later."""
        lines, owned = self.plan.owned.lines, self.plan.owned.buffers
        inside = lines[region.start : region.stop]
        targets = {s for line in inside if line.run is not None for s in line.targets}
        read = {s for line in inside for s in line.refs}
        later = {s for line in lines[region.stop :] for s in line.refs}
        later.update(s for s in self.plan.outputs if s is not None)
        taken = sorted(s for s in read - targets if s not in owned and s != CALLER_SLOT)
        return taken, sorted(s for s in targets & later if s not in owned)

    def _is_copied_out(self, n: int) -> bool:
        """Return whether a region's outputs are always copied out of its graph."""
        region, forms = self.regions[n], [self._new[s] for s in self._new_of[n]]
        size = sum(math.prod(shape) * dtype.itemsize for shape, _, dtype, _ in forms)
        return size <= SMALL and region.stop - region.start >= LONG

    def _call(self, plan: Plan, n: int, caller: Any, values: Sequence[Any]) -> list[Any]:
        """Make a region's calls, and return those of its results that are used later."""
        region, (taken, targets) = self.regions[n], self._uses[n]
        key = (plan is self.eager, n)
        if key not in self._functions:
            numbers = self.plan.owned.numbers[region.start : region.stop]
            owned = self.plan.owned.buffers
            lines = [plan.lines[number].without({*targets, *owned}) for number in numbers]
            labels = [plan.labels[number] for number in numbers]
            self._functions[key] = write(
                plan.name, lines, [CALLER_SLOT, *taken], targets, owned, plan.names, labels
            )
        function = self._functions[key]
        try:
            return function.call(caller, *values)
        except Exception as error:
            raise self.plan.explained(error, function, region.start) from error.__cause__

    def _run_eagerly(self, n: int, slots: dict[int, Any]) -> None:
        taken, targets = self._uses[n]
        values = [slots[s] for s in taken]
        if not self.plan.switches:
            slots.update(zip(targets, self._call(self.eager, n, None, values), strict=True))
            return
        caller = torch.cuda.current_stream(self.plan.device)
        try:
            slots.update(zip(targets, self._call(self.eager, n, caller, values), strict=True))
        finally:
            torch.cuda.set_stream(caller)

    def _capture(self, n: int, slots: dict[int, Any], *, is_new_bound: bool) -> Captured:
        """Capture a region: parameters that stay in place are read there, others are copied.

        New outputs are filled at their present addresses, or in buffers that are copied.
        """
        taken, targets = self._uses[n]
        bound = {s: at for s in taken if (at := self._address(s, slots)) is not None}
        if is_new_bound:
            bound |= {s: slots[s].data_ptr() for s in self._new_of[n]}
        tensors = [s for s in taken if isinstance(slots[s], Tensor)]
        copied = {s: empty(form_of(slots[s])) for s in tensors if s not in bound}
        values = [copied.get(s, slots[s]) for s in taken]
        run = partial(self._call, self.plan, n, self.recorder.stream, values)
        if self.watch is not None:
            self.watch.begin()
        with undisturbed():
            results, recording = self.recorder.record(run, n)
        return Captured(
            bound=bound,
            copied=copied,
            filled=frozenset(self._new_of[n]),
            results=dict(zip(targets, results, strict=True)),
            written=tuple(s for s in copied if s in self._written),
            recording=recording,
            notes=self.watch.end(n) if self.watch is not None else (unwatched, unwatched),
        )

    def _address(self, slot: int, slots: Mapping[int, Any]) -> int | None:
        """Return the address of a value in the arena, or one that stayed so far; None for others.

        Other ranks copy a post's source in the arena from this address.
        """
        x = slots[slot]
        if not isinstance(x, Tensor):
            return None
        if _lies_in(x, self.plan.arena):
            return x.data_ptr()
        if slot not in self.stays:
            return None
        if self.stays[slot] != x.data_ptr():
            del self.stays[slot]  # from now on it is copied
            return None
        return x.data_ptr()


def _lies_in(x: Tensor, whole: Tensor | None) -> bool:
    return whole is not None and 0 <= x.data_ptr() - whole.data_ptr() < whole.nbytes


def _views(plan: Plan, parameters: Sequence[int]) -> dict[int, Callable[[Mapping[int, Any]], Any]]:
    """Find the outputs that are views of the caller's tensors; each run makes them anew.

    Returns:
        slot of the output -> the function that makes it of the parameters.
    """
    makers: dict[int, Line] = {}
    known = set(parameters)
    for line in plan.owned.lines:
        if line.is_view and known.issuperset(line.refs):
            makers[line.targets[0]] = line
            known.update(line.targets)
    chains: dict[int, list[Line]] = {}
    for slot, line in makers.items():
        chains[slot] = [*(chains.get(line.refs[0], ())), line]
    outputs = {s for s in plan.outputs if s is not None}
    return {s: _maker(chain, s) for s, chain in chains.items() if s in outputs}


def _maker(chain: Sequence[Line], slot: int) -> Callable[[Mapping[int, Any]], Any]:
    def make(given: Mapping[int, Any]) -> Any:
        slots = dict(given)
        for line in chain:
            line(slots)
        return slots[slot]

    return make


def _picked(places: Sequence[int | None]) -> Callable[[Sequence[Any]], list[Any]]:
    """Return the function that takes the values at some places, and None where it is None."""
    if len(places) == 1 and (place := places[0]) is not None:
        return lambda values: [values[place]]
    if None in places or not places:
        return lambda values: [None if n is None else values[n] for n in places]
    taken = itemgetter(*places)
    return lambda values: [*taken(values)]
