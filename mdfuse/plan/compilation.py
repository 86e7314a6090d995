"""Compiled functions of host units: each is made once in this process, and once on its host.

A function is looked up in memory, then in files; otherwise it is traced, and compiled with all
others that a plan needs, by helper processes where they pay. Processes of one host that need the
same ones share the work: each compiles what no other has begun, and waits for the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from mdfuse.caching import Cache
from mdfuse.errors import reason
from mdfuse.plan import helper_pool, inductor
from mdfuse.plan.artefacts import Artefacts, UnreadableError, artefacts
from mdfuse.plan.helper_pool import HelperJob
from mdfuse.plan.inductor import Function, TracedGraph
from mdfuse.plan.many_lengths import SymbolicCalls
from mdfuse.plan.overwrites import is_tangled
from mdfuse.plan.progress_bar import progress
from mdfuse.plan.tensor_meta import Form
from mdfuse.plan.unit_keys import name_of
from mdfuse.runtime.deadline import Deadline


@dataclass(eq=False)
class Made:
    """The compiled function of one or more host units.

    Attributes:
        results: the forms of its results.
        name: of its files; None: it has none.
        traced: the trace to compile; None once it is compiled.
        otherwise: traces it for its own sizes, where the function for many sizes cannot be
            compiled.
        serves: tells whether the function serves some sizes; None: it serves its own alone.
        function: compiled.
        refused: why it cannot be compiled.
        was_late: another process has not compiled it in time; nobody waits again.
        job: what helper processes do about it; None: nothing.
    """

    results: list[Form]
    name: str | None = None
    traced: TracedGraph | None = None
    otherwise: Callable[[], TracedGraph] | None = None
    serves: Callable[[Sequence[int]], bool] | None = None
    function: Function | None = None
    refused: str | None = None
    was_late: bool = False
    job: HelperJob | None = None

    @property
    def is_done(self) -> bool:
        """True once it is compiled or refused."""
        return self.traced is None


@dataclass
class Tally:
    """Counts of the functions of a program by their origin.

    Attributes:
        compiled: how many this process compiled.
        helped: how many its helper processes compiled.
        in_files: how many it found in files, of earlier runs or of other processes.
        shared: how many were compiled for other lengths.
        unsaved: why a compiled one was not saved -> how many.
        unreadable: why files were of no use -> how many.
        unhelped: why helper processes left some to this process -> how many.
    """

    compiled: int = 0
    helped: int = 0
    in_files: int = 0
    shared: int = 0
    unsaved: Counter[str] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)
    unhelped: Counter[str] = field(default_factory=Counter)

    def report_lines(self) -> Iterator[str]:
        """Yield the lines of a report."""
        counts = {
            "compiled": self.compiled,
            "compiled in helper processes": self.helped,
            "found in files": self.in_files,
            "shared with other lengths": self.shared,
        }
        if any(counts.values()):
            yield ", ".join(f"{n} {what}" for what, n in counts.items() if n)
        for why, n in self.unsaved.items():
            yield f"{n} not saved for later runs: {why}"
        for why, n in self.unreadable.items():
            yield f"{n} compiled again, since their files are of no use: {why}"
        for why, n in self.unhelped.items():
            yield f"{n} left to this process by a helper process: {why}"


#: Key of the unit and forms of its arguments -> the function. Equal layers have equal units, in one
#: program or in several.
_MADE: Cache[Made] = Cache(1024)


def known(key: Hashable, forms: Sequence[Form], tally: Tally) -> Made | None:
    """Return a function that is in memory or in files.

    Args:
        key: of the unit; see `mdfuse.plan.unit_keys`.
        forms: of the arguments.
        tally: counts.
    """
    function = _MADE.get((key, *forms))
    if function is None and (name := _name(key, forms)) is not None:
        function = _read(name, tally)
        if function is not None:
            _MADE.put((key, *forms), function)
    return function


def traced(key: Hashable, forms: Sequence[Form], function: Function) -> Made:
    """Return a function that is to be compiled; see `known`."""
    try:
        trace = inductor.traced(function, forms)
        if is_tangled(trace.graph.graph):
            compiled = Made([], refused="a value is read elsewhere than where it is written over")
        else:
            compiled = Made(trace.results, _name(key, forms), trace)
            _hand_over(compiled)  # helpers begin, if there are any, while this process traces
    except Exception as error:  # ops raise errors of any type; the eager calls are right
        compiled = Made([], refused=reason(error))
    _MADE.put((key, *forms), compiled)
    return compiled


def traced_with_sizes(
    key: Hashable,
    forms: Sequence[Form],
    function: Function,
    many: SymbolicCalls,
) -> tuple[Made, TracedGraph] | None:
    """Return a function for many lengths that is to be compiled, and its trace.

    Args:
        key: see `known`.
        forms: likewise.
        function: the calls for these forms alone.
        many: the calls for any length.

    Returns:
        None where there can be none.
    """
    try:
        trace = inductor.traced_with_sizes(many.run, many.forms_at, many.hints)
        if is_tangled(trace.graph.graph):
            return None
        results = trace.results_at(many.hints)
    except Exception:  # an op that takes no symbolic size; there is a function for each length
        return None
    compiled = Made(results, None, trace, otherwise=partial(inductor.traced, function, forms))
    _MADE.put((key, *forms), compiled)
    return compiled, trace


def serve(key: Hashable, forms: Sequence[Form], unit: Made, results: list[Form]) -> Made:
    """Return a function for many lengths as one for arguments of these forms."""
    served = Made(results, function=unit.function)
    _MADE.put((key, *forms), served)
    return served


def complete(
    functions: Iterable[Made], timeout_s: float, shows: bool, tally: Tally, instructions: int = 0
) -> list[Made]:
    """Compile functions, or wait for the processes that do.

    Args:
        functions: those that a plan needs.
        timeout_s: how long to wait for other processes, once there is nothing else to do.
        shows: show on a terminal how many are done.
        tally: counts.
        instructions: of the program whose functions they are.

    Returns:
        Those for which other processes took too long.
    """
    todo = [x for x in dict.fromkeys(functions) if not x.is_done]
    if not todo:
        helper_pool.end_idle(instructions)
        return []
    # processes that share the work end together if none begins a long function last
    todo.sort(key=_length, reverse=True)
    _let_help(todo)
    with progress("compiling launches", len(todo), shows) as advance:
        others = []
        for function in _in_turn(todo, timeout_s):
            if _completed(function, 0.0, tally):
                advance()
            else:
                others.append(function)
        deadline, late = Deadline.after(timeout_s), []
        for function in others:
            if not function.was_late and _completed(function, deadline.left(), tally):
                advance()
            else:
                function.was_late = True
                late.append(function)
    helper_pool.end_idle()
    return late


def _let_help(todo: Sequence[Made]) -> None:
    """Hand all functions that can leave this process over to helpers, if these pay."""
    named = [x for x in todo if x.name is not None]
    helper_pool.start_if_needed(len(named))
    for function in named:
        if function.job is None:
            _hand_over(function)
    if any(x.job is not None for x in named):
        inductor.get_ready_to_read()


def _hand_over(function: Made) -> None:
    if function.name is not None and function.traced is not None:
        function.job = helper_pool.hand_over(function.name, function.traced)


def _in_turn(todo: Sequence[Made], timeout_s: float) -> Iterator[Made]:
    """Yield functions: those without a helper, those that helpers are done with, and the rest."""
    jobs = {x.job: x for x in todo if x.job is not None}
    yield from (x for x in todo if x.job is None)
    while jobs:
        yield jobs.pop(helper_pool.settled(jobs, timeout_s))


def _length(function: Made) -> int:
    """Return the length of the trace of a function that is to be compiled."""
    return 0 if function.traced is None else len(function.traced.graph.graph.nodes)


def _name(key: Hashable, forms: Sequence[Form]) -> str | None:
    """Return the name of a function's files; None where there can be none."""
    if inductor.folder() is None:
        return None
    devices = dict.fromkeys(form[3] for form in forms)
    return name_of((key, *forms, *map(inductor.fingerprint, devices)))


def _read(name: str, tally: Tally) -> Made | None:
    folder = artefacts()
    try:
        stored = folder.load(name) if folder is not None else None
    except UnreadableError as error:
        tally.unreadable[str(error)] += 1
        return None
    if stored is None:
        return None
    tally.in_files += 1
    return Made(stored[1], name, function=stored[0])


def _completed(unit: Made, timeout_s: float, tally: Tally) -> bool:
    """Compile a function unless another process does; tell whether it is done."""
    folder = artefacts()
    if folder is None or unit.name is None:
        _compile(unit, tally)
        return True
    try:
        with folder.lock(unit.name, timeout_s) as is_mine:
            if is_mine and not unit.is_done:  # another thread may have been there
                _find_or_compile(unit, unit.name, folder, tally)
            return is_mine
    except OSError as error:
        if not unit.is_done:
            _compile(unit, tally)
            tally.unsaved[reason(error)] += 1
        return True


def _find_or_compile(unit: Made, name: str, folder: Artefacts, tally: Tally) -> None:
    again = Tally()  # files of no use were counted when they were looked for
    stored, is_helped = _read(name, again), unit.job is not None and unit.job.is_made
    if stored is not None:
        tally.helped += is_helped
        tally.in_files += not is_helped
        unit.function, unit.traced = stored.function, None
        return
    if unit.job is not None:
        why = next(iter(again.unreadable), "its files are gone") if is_helped else unit.job.why
        tally.unhelped.update([why] if why is not None else [])
    _compile(unit, tally)
    if unit.function is not None:
        why = folder.save(name, unit.function, unit.results)
        tally.unsaved.update([why] if why is not None else [])


def _compile(unit: Made, tally: Tally) -> None:
    assert unit.traced is not None
    try:
        unit.function = _compiled(unit, unit.traced)
        tally.compiled += 1
    except Exception as error:  # the compiler raises errors of any type; the eager calls are right
        unit.refused = reason(error)
    unit.traced = unit.otherwise = None


def _compiled(unit: Made, graph: TracedGraph) -> Function:
    if unit.otherwise is None:
        return inductor.compiled(graph)
    try:
        function = inductor.compiled(graph)
    except Exception:  # likewise
        return inductor.compiled(unit.otherwise())
    unit.serves = graph.holds
    return function
