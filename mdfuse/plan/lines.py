"""Lines: prepared calls, and the Python function that makes all of them in turn.

A line is a call with nothing left to decide: a function, constants, and slots. A slot stands
for one value of one run. The simulator makes the calls one by one, on a list of slots; a plan
writes them down as one Python function without branches, whose local variables are the slots, so
that a run costs what the same calls cost when written by hand:

    def run(v0, v1, v2):  # v0 = caller's stream, v1 = %x, v2 = %w
        v3 = allgather_base(b0, v1, c0)  # v3 = %c, b0 = %g  # mlp.py:14
        v3.wait()  # mlp.py:14
        v3 = None
        mm(b0, v2, out=b1)  # b1 = %y  # mlp.py:15
        return [b1]

Variables are numbered: users' names need not be Python identifiers, and Python takes some that
differ for the same one. The names stand in comments, where a variable is used first.
"""

from __future__ import annotations

import keyword
import linecache
import re
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import CodeType, TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from mdfuse.errors import printable
from mdfuse.ir.ops import itself

Slots = list[Any]
Form = Literal["tensor", "flat", "pointer"]


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A reference to the value of a slot.

    Attributes:
        slot: the slot.
        form: the form in which a call gets it: the value itself, a flat view of it, or its address.
    """

    slot: int
    form: Form = "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBuffer:
    """The form of a new buffer; strides count elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes from the start of the first element to the end of the last one."""
        if 0 in self.shape:
            return 0
        span = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1
        return span * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One prepared call.

    Attributes:
        run: the function to call; a text names a method of the first argument; None: nothing is
            called, and the slots of `into` are emptied.
        args: constants, `SlotRef`s, and lists of these.
        kwargs: likewise, by name.
        into: the slot that the result is bound to; a tuple of slots for a tuple of results.
        shares: slots whose memory the result may refer to, or keep in use.
        ends: slots whose memory is in use until this line, though no argument refers to it.
        new: the form of the result, where that is a new buffer with nothing in it.
        makes: bytes of the result, where the call itself allocates it.
        is_view: the result may be a view of the first argument, and depends on no number.
        in_place: the buffer that is written may take the place of an operand of the same form
            whose last use this is.
        explain: turns an error of the library into one that names the post.
    """

    run: Callable[..., Any] | str | None
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    into: int | tuple[int, ...] | None = None
    shares: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    new: NewBuffer | None = None
    makes: int = 0
    is_view: bool = False
    in_place: bool = False
    explain: Callable[[Exception], Exception] | None = None

    @property
    def targets(self) -> tuple[int, ...]:
        """The slots that the call binds or empties."""
        if self.into is None:
            return ()
        return self.into if isinstance(self.into, tuple) else (self.into,)

    @property
    def refs(self) -> tuple[int, ...]:
        """The slots whose values the call reads, or writes into."""
        values = (*self.args, *(x for _, x in self.kwargs))
        return tuple(dict.fromkeys(r.slot for x in values for r in _refs(x)))

    def without(self, slots: Container[int]) -> Line:
        """Return the line, or where it empties slots, one that spares the kept ones."""
        if self.run is not None:
            return self
        return Line(run=None, into=tuple(s for s in self.targets if s not in slots))

    def __call__(self, slots: Slots | dict[int, Any]) -> None:
        """Make the call on a list of slots."""
        if self.run is None:
            for slot in self.targets:
                slots[slot] = None
            return
        args = [_value(x, slots) for x in self.args]
        kwargs = {name: _value(x, slots) for name, x in self.kwargs}
        if isinstance(self.run, str):
            result = getattr(args[0], self.run)(*args[1:], **kwargs)
        else:
            result = self.run(*args, **kwargs)
        if isinstance(self.into, tuple):
            for slot, x in zip(self.into, result, strict=True):
                slots[slot] = x
        elif self.into is not None:
            slots[self.into] = result


def drop(*slots: int) -> Line:
    """Return the line that empties some slots."""
    return Line(run=None, into=slots)


def _refs(x: Any) -> Iterator[SlotRef]:
    if isinstance(x, SlotRef):
        yield x
    elif isinstance(x, list):
        for y in x:
            yield from _refs(y)


def _value(x: Any, slots: Sequence[Any] | Mapping[int, Any]) -> Any:
    if isinstance(x, SlotRef):
        return in_form(slots[x.slot], x.form)
    return [_value(y, slots) for y in x] if isinstance(x, list) else x


def in_form(x: Any, form: Form) -> Any:
    """Return a buffer in the form in which a call takes it."""
    if form == "tensor":
        return x
    return x.view(-1) if form == "flat" else x.data_ptr()


# -- the function --------------------------------------------------------------------------------

_FORMS: dict[Form, str] = {"tensor": "{}", "flat": "{}.view(-1)", "pointer": "{}.data_ptr()"}
_serials = count()


@dataclass
class _Writer:
    """Writes lines as Python text; constants get names among the function's globals."""

    owned: Mapping[int, Any]
    names: Mapping[int, str]
    #: the globals of the function
    scope: dict[str, Any] = field(default_factory=dict)
    #: slot -> its variable; id of a constant -> its name
    slots: dict[int, str] = field(default_factory=dict)
    constants: dict[int, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=lambda: {"run", *keyword.kwlist})
    #: values of arguments that refer to buffers that stay, so that each is made once
    owned_values: dict[Any, Any] = field(default_factory=dict)
    #: names of the variables that the current line uses first
    notes: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def numbered(self, letter: str, slot: int | None = None) -> str:
        """Return the next variable of a kind: v0, v1, …; note the name of its slot."""
        name = letter
        while name == letter or name in self.taken:
            name = f"{letter}{self.counts[letter]}"
            self.counts[letter] += 1
        self.taken.add(name)
        if slot is not None and slot in self.names:
            self.notes.append(f"{name} = {self.names[slot]}")
        return name

    def called(self, function: Callable[..., Any]) -> str:
        """Return an unused name for a function, like its own."""
        like = re.sub(r"\W", "_", getattr(function, "__name__", "f"), flags=re.ASCII).strip("_")
        base = like if like.isidentifier() else f"f{like}"
        name, n = base, 0
        while name in self.taken:
            n += 1
            name = f"{base}_{n}"
        self.taken.add(name)
        return name

    def constant(self, x: Any, slot: int | None = None) -> str:
        if x is None or type(x) in (bool, int, str):
            return repr(x)
        if id(x) not in self.constants:
            is_function = slot is None and callable(x)
            name = self.called(x) if is_function else self.numbered("bc"[slot is None], slot)
            self.constants[id(x)] = name
            self.scope[name] = x
        return self.constants[id(x)]

    def slot(self, slot: int) -> str:
        if slot in self.owned:
            return self.constant(self.owned[slot], slot)
        if slot not in self.slots:
            self.slots[slot] = self.numbered("v", slot)
        return self.slots[slot]

    def operand(self, x: Any) -> str:
        if isinstance(x, SlotRef):
            if x.slot not in self.owned:
                return _FORMS[x.form].format(self.slot(x.slot))
            return self.constant(self.owned_constant(x), x.slot)
        if isinstance(x, list):
            if all(r.slot in self.owned for r in _refs(x)):
                return self.constant(self.owned_constant(x))
            return f"[{', '.join(map(self.operand, x))}]"
        return self.constant(x)

    def owned_constant(self, x: Any) -> Any:
        """Return the value of an argument that refers to owned buffers only, made once."""
        key = x if isinstance(x, SlotRef) else id(x)
        if key not in self.owned_values:
            self.owned_values[key] = _value(x, self.owned)
        return self.owned_values[key]

    def line(self, line: Line) -> str:
        if line.run is None:
            return " = ".join([*map(self.slot, line.targets), "None"])
        args = [self.operand(x) for x in line.args]
        args += [_keyword(name, self.operand(x)) for name, x in line.kwargs]
        if line.run is itself:
            (call,) = args
        elif isinstance(line.run, str):
            call = f"{args[0]}.{line.run}({', '.join(args[1:])})"
        else:
            call = f"{self.constant(line.run)}({', '.join(args)})"
        targets = ", ".join(self.slot(slot) for slot in line.targets)
        if isinstance(line.into, tuple):
            targets += ","
        return f"{targets} = {call}" if line.into is not None else call

    def commented(self, line: str, label: str = "") -> str:
        """Add comments to a text: the names of new variables, and the label of its step."""
        notes, self.notes = self.notes, []
        comments = [", ".join(notes), label]
        return line + "".join(f"  # {printable(comment)}" for comment in comments if comment)


def _keyword(name: str, value: str) -> str:
    """Return the text of an argument by name, for any name."""
    is_plain = name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    return f"{name}={value}" if is_plain else f"**{{{name!r}: {value}}}"


@dataclass(frozen=True)
class Function:
    """Lines that were compiled into one function.

    Attributes:
        call: takes the values of the parameters, gives a list of results.
        source: its text.
        code: its code, which tells its frame from others in a traceback.
    """

    call: Callable[..., list[Any]]
    source: str
    code: CodeType

    def line_of(self, trace: TracebackType | None) -> int | None:
        """Return which of the lines raised, counted from 0; None where none of them did."""
        while trace is not None:
            if trace.tb_frame.f_code is self.code:
                return trace.tb_lineno - 2
            trace = trace.tb_next
        return None


@dataclass(frozen=True, slots=True)
class Stamping:
    """Calls that a function makes between its lines.

    Attributes:
        before: number of a line -> the function called in front of it.
        behind: likewise behind it.
    """

    before: Mapping[int, Callable[[], object]]
    behind: Mapping[int, Callable[[], object]]

    def around(self, inner: Stamping | None) -> Stamping:
        """Return the stamping that calls both, this one farther from each line."""
        if inner is None:
            return self
        return Stamping(_joined(self.before, inner.before), _joined(inner.behind, self.behind))


_Calls = Mapping[int, Callable[[], object]]


def _joined(first: _Calls, then: _Calls) -> _Calls:
    def both(n: int) -> Callable[[], object]:
        a, b = first[n], then[n]
        return lambda: (a(), b())

    return {
        n: both(n) if n in first and n in then else {**first, **then}[n] for n in {**first, **then}
    }


def write(
    name: str,
    lines: Sequence[Line],
    parameters: Sequence[int],
    results: Sequence[int | None],
    owned: Mapping[int, Any],
    names: Mapping[int, str] | None = None,
    labels: Sequence[str] | None = None,
    stamping: Stamping | None = None,
) -> Function:
    """Compile lines into one function.

    Args:
        name: of the program, for tracebacks.
        lines: its calls, in order.
        parameters: the slots that the caller fills.
        results: the slots that it returns; None for values that this rank lacks.
        owned: slots whose value is the same in all runs.
        names: slot -> its name, for readers.
        labels: the label of each line's step, as comments.
        stamping: further calls between the lines; None: there are none, at no cost.
    """
    writer = _Writer(owned, names or {})
    text = [writer.commented(f"def run({', '.join(map(writer.slot, parameters))}):")]
    for n, line in enumerate(lines):
        label = labels[n] if labels is not None and line.run is not None else ""
        calls = [writer.line(line)]
        if stamping is not None and n in stamping.before:
            calls.insert(0, f"{writer.constant(stamping.before[n])}()")
        if stamping is not None and n in stamping.behind:
            calls.append(f"{writer.constant(stamping.behind[n])}()")
        text.append(writer.commented(f"    {'; '.join(calls)}", label))
    returned = ["None" if slot is None else writer.slot(slot) for slot in results]
    text.append(writer.commented(f"    return [{', '.join(returned)}]"))
    source = "\n".join(text) + "\n"
    file = f"<plan {next(_serials)} of @{printable(name)}>"
    exec(compile(source, file, "exec"), writer.scope)
    run = writer.scope.pop("run")  # otherwise it refers to itself, and its buffers outlive it
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    weakref.finalize(run, linecache.cache.pop, file, None)
    return Function(run, source, run.__code__)


def is_dense(x: Tensor | None) -> bool:
    """Tell whether a buffer is known to be contiguous."""
    return x is not None and x.is_contiguous()
