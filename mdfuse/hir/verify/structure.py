"""Check a host program without following it: aliases, blocks, units, groups, handles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mdfuse.errors import ProgramError
from mdfuse.hir.index_terms import index_names, names_in
from mdfuse.hir.instructions import POSTS, is_local
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.verify.call_order import check_calls
from mdfuse.hir.verify.counts import check_counts
from mdfuse.hir.verify.error_report import ErrorText
from mdfuse.hir.verify.refusals import unbound
from mdfuse.layouts.kinds import IN_PIECES

#: How many pieces a post may deliver.
MOST_PIECES = 4096

NO_INDEX = ErrorText(
    "{i}: %{name} is no index",
    "an index is a number of the host that a loop or a block counts",
    "name the index of the loop or block around it",
)
UNPOSTED = ErrorText(
    "wait %{i.reads[0]}, which nothing posted before",
    "each wait names an earlier post",
    "move it behind the post, or leave it out",
)
WRITTEN_INPUT = ErrorText(
    "{i} writes into %{name}, which is an input",
    "inputs are the caller's; only an alias of one updates it in place",
    "declare `alias %new = %{name}` and write %new",
)
LOOP_OVER_BUFFER = ErrorText(
    "{over} %{i.outputs[0]}, which is a buffer",
    "an index is a number of the host",
    "name it otherwise",
)
MISPLACED = ErrorText(
    "next outside of a loop",
    "it divides the body of a `for`, not that of a branch or block inside",
    "move it into the body of the loop, or leave it out",
)
EARLY = ErrorText(
    "return before the end",
    "a program has one return, which is its last instruction",
    "move it to the end",
)
NOT_RETURNED = ErrorText(
    "the last instruction does not return the outputs",
    "the outputs are {outputs}",
    "end the program with return and its outputs",
)
UNBALANCED = ErrorText(
    "{i.op} without a {other} in the same block",
    "a group is what stands between the two",
    "add the {other}, or leave this one out",
)
IN_GROUP = ErrorText(
    "{i.op} inside a group",
    "a group holds only " + ", ".join(POSTS),
    "move it out of the group",
)
NOT_LOCAL = ErrorText(
    "{i.op} inside launch {unit.fn}",
    "a host unit holds local ops only",
    "move it out of the unit",
)
UNDEFINED_OUTPUT = ErrorText(
    "launch {i.fn} does not define its output %{name}",
    "the outputs of a host unit are made inside it",
    "compute %{name} in the unit, or drop it from the outputs",
)
FOREIGN = ErrorText(
    "{i} reads %{name}, which is no input of launch {unit.fn}",
    "a host unit reads its inputs and what was defined in it before",
    "add %{name} to the inputs of the unit",
)
ALLOCATED_TWICE = ErrorText(
    "%{name} is allocated twice",
    "each buffer is allocated once",
    "leave one out, or name it otherwise",
)
POST_OF_NUMBER = ErrorText("{i.op} of %{name}, which is a number")
NOT_IN_PIECES = ErrorText(
    "{i.comm.kind} in {count} pieces",
    f"only {', '.join(IN_PIECES)} deliver in pieces, of the outermost dim",
    "leave pieces= out, or post it in a loop over chunks",
)
MANY_PIECES = ErrorText(
    "{i.comm.kind} in {count} pieces",
    f"a post has {MOST_PIECES} at most, each a call of its own",
    "fewer pieces, or a loop over chunks",
)
NO_BUFFER = ErrorText(
    "free of %{name}, which is no buffer",
    hint="free names of buffers; a handle ends with its wait",
)


def check_structure(program: HostProgram, allocates_once: bool = True) -> None:
    """Raise ProgramError for a fault in the structure of a program.

    Args:
        program: for all ranks, or for one.
        allocates_once: whether a second `alloc` of a buffer, which has no effect, is refused too.
    """
    program = program.checked
    if program.aliases:
        check_aliases(program)
    check = _Structure(program, allocates_once)
    check.block(program.instructions)
    check.check_return()
    check_calls(program)
    check_counts(program)


def check_defined(program: HostProgram) -> None:
    """Raise ProgramError where a name is read that no earlier instruction binds, on any path.

    A program with loops is written out before its flow is checked, and that needs the types of all
    operands.
    """
    root = program.root
    ends = [program.types[n].layout for n in (*program.inputs, *program.outputs)]
    for name in sorted(names_in(ends)):
        raise NO_INDEX(program, program.instructions[-1], name=name)
    _check_block(
        program, program.instructions, {root(n) for n in (*program.inputs, *program.outputs)}
    )


def _check_block(program: HostProgram, block: tuple[Instruction, ...], known: set[str]) -> None:
    """Check the names that a block reads; an index is known within its loop alone."""
    root, types = program.root, program.types
    for i in block:
        for name in i.inputs:
            if type(name) is str and name not in known and root(name) not in known:
                if i.op in ("wait", "return"):
                    continue
                raise unbound(program, name, i, None)
        for name in index_names(i, types):
            kind = types.get(name)
            if name not in known or (kind is not None and kind.layout is not None):
                raise NO_INDEX(program, i, name=name)
        bound = {*(map(root, i.outputs) if program.aliases else i.outputs)} - known
        known |= bound
        for inner in (i.body, i.orelse):
            _check_block(program, inner, known)
        if i.op in ("for", "block"):
            known -= bound


def check_aliases(program: HostProgram) -> None:
    """Raise ProgramError where an alias cannot stand for the buffer that it names."""
    for name, of in program.aliases.items():
        root = program.root(name)
        if name in program.inputs:
            raise ProgramError(
                f"@{program.name}: input %{name} is an alias of %{of}",
                where=f"alias %{name} = %{of}",
                because="inputs cannot be aliased: their buffers are the caller's",
                hint=f"alias %{of} = %{name} instead: %{of} then acts on the caller's buffer",
            )
        kind, other = program.types.get(name), program.types.get(root)
        if kind is not None and other is not None and kind != other:
            raise ProgramError(
                f"@{program.name}: %{name} is an alias of %{root}, but has another type",
                where=f"alias %{name} = %{of}",
                because="names that share a buffer have one type: "
                f"{kind.text()} {kind.layout} is not {other.text()} {other.layout}",
                hint="leave the alias out, or change the type",
            )


@dataclass(slots=True)
class _Structure:
    program: HostProgram
    allocates_once: bool
    allocated: dict[str, Instruction] = field(default_factory=dict)
    handles: set[str] = field(default_factory=set)
    group: Instruction | None = None
    inputs: frozenset[str] = field(init=False)
    updated: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = frozenset(self.program.inputs)
        self.updated = frozenset(map(self.program.root, self.program.aliases))

    def block(self, block: tuple[Instruction, ...]) -> None:
        rules, inputs = _RULES, self.inputs
        for i in block:
            if self.group is not None and i.op not in (*POSTS, "group_end"):
                raise IN_GROUP(self.program, i, self.group)
            rule = rules.get(i.op)
            if rule is not None:
                rule(self, i)
            if not inputs.isdisjoint(i.outputs):
                self.check_writes(i, i.outputs)
        if self.group is not None:
            group, self.group = self.group, None
            raise self.unbalanced(group)

    def check_writes(self, i: Instruction, names: tuple[str, ...]) -> None:
        """Raise ProgramError for a write into an input, unless an alias says that it is updated."""
        for name in names:
            if name in self.inputs and name not in self.updated:
                raise WRITTEN_INPUT(self.program, i, name=name)

    # -- blocks ----------------------------------------------------------------------------------

    def loop(self, i: Instruction) -> None:
        self.check_no_return(i)
        kind = self.program.types.get(i.outputs[0])
        if kind is not None and kind.layout is not None:
            raise LOOP_OVER_BUFFER(self.program, i, over=_OVER[i.op])
        for part in i.parts if i.op == "for" else (i.body,):
            self.block(part)

    def misplaced(self, i: Instruction) -> None:
        raise MISPLACED(self.program, i)

    def branch(self, i: Instruction) -> None:
        """Check both blocks of an `if`, each as if only that one runs."""
        self.check_no_return(i)
        before = dict(self.allocated)
        self.block(i.body)
        after, self.allocated = self.allocated, before
        self.block(i.orelse)
        self.allocated.update(after)

    def check_no_return(self, i: Instruction) -> None:
        for inner in (*i.body, *i.orelse):
            if inner.op == "return":
                raise EARLY(self.program, inner)

    def check_return(self) -> None:
        program = self.program
        for i in program.instructions[:-1]:
            if i.op == "return":
                raise EARLY(program, i)
        last = program.instructions[-1] if program.instructions else None
        returned = last.inputs if last is not None and last.op == "return" else ()
        if returned != program.outputs:
            outputs = ", ".join(f"%{n}" for n in program.outputs) or "none"
            raise NOT_RETURNED(program, last, outputs=outputs)

    def group_start(self, i: Instruction) -> None:
        self.group = i

    def group_end(self, i: Instruction) -> None:
        if self.group is None:
            raise self.unbalanced(i)
        self.group = None

    def unbalanced(self, i: Instruction) -> ProgramError:
        other = "group_end" if i.op == "group_start" else "group_start"
        return UNBALANCED(self.program, i, other=other)

    # -- instructions ----------------------------------------------------------------------------

    def launch(self, i: Instruction) -> None:
        """Check that a unit reads only its inputs and what it defines, and defines its outputs."""
        known, results = set(i.inputs), {n for j in i.body for n in j.outputs}
        for inner in i.body:
            if not is_local(inner):
                raise NOT_LOCAL(self.program, inner, i, unit=i)
            for name in inner.reads:
                if name not in known:
                    raise FOREIGN(self.program, inner, i, name=name, unit=i)
            known.update(inner.outputs)
            self.check_writes(inner, inner.outputs)
        for name in i.outputs:
            if name not in results:
                raise UNDEFINED_OUTPUT(self.program, i, name=name)

    def alloc(self, i: Instruction) -> None:
        (name,) = i.outputs
        if self.allocates_once and name in self.allocated:
            raise ALLOCATED_TWICE(self.program, i, self.allocated[name], name=name)
        self.allocated[name] = i

    def post(self, i: Instruction) -> None:
        self.handles.update(i.outputs)
        for name in i.reads:
            kind = self.program.types.get(name)
            if kind is None:
                raise unbound(self.program, name, i, None)
            if kind.layout is None:
                raise POST_OF_NUMBER(self.program, i, name=name)
        if i.op != "send":
            written = i.inputs[1] if i.op == "post" else i.inputs[0]
            self.check_writes(i, (written,) if isinstance(written, str) else ())
        comm, count = i.comm, i.kwargs.get("pieces") if i.op == "post" else None
        if comm is None or count is None:
            return
        if comm.kind not in IN_PIECES or (count > 1 and not comm.shape):
            raise NOT_IN_PIECES(self.program, i, count=count)
        if count > MOST_PIECES:
            raise MANY_PIECES(self.program, i, count=count)

    def wait(self, i: Instruction) -> None:
        if i.reads[0] not in self.handles:
            raise UNPOSTED(self.program, i)

    def free(self, i: Instruction) -> None:
        for name in i.inputs:
            if isinstance(name, str) and name not in self.program.types:
                raise NO_BUFFER(self.program, i, name=name)


_OVER = {"for": "a loop over", "block": "a block of index"}

#: op -> the check of its instructions, besides their form.
_RULES: dict[str, Callable[[_Structure, Instruction], None]] = {
    "for": _Structure.loop,
    "block": _Structure.loop,
    "next": _Structure.misplaced,
    "if": _Structure.branch,
    "group_start": _Structure.group_start,
    "group_end": _Structure.group_end,
    "launch": _Structure.launch,
    "alloc": _Structure.alloc,
    "post": _Structure.post,
    "send": _Structure.post,
    "recv": _Structure.post,
    "wait": _Structure.wait,
    "free": _Structure.free,
}
