"""The words of the errors in the flow of one rank's program: a row each, functions for some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mdfuse.errors import ProgramError
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.verify.accesses import CALLER, PENDING, Access
from mdfuse.hir.verify.error_report import ErrorText, wrong

_IN_USE = "what a communication reads and writes is in use until its wait"
_SYNC_CALLER = "`%s = get_stream` at the start, and `sync %s` on this stream before"


NOT_TO_FREE = ErrorText(
    "free of %{name}, which is {role}", "inputs and outputs are the caller's", "leave it out"
)
LEAK = ErrorText(
    "%{name} is never freed",
    "where a program frees buffers, it frees all but inputs and outputs",
    "free %{name} after its last use",
)
FREED_IN_USE = ErrorText(
    "free of %{name}, which {post.op} %{post.outputs[0]} is still using",
    _IN_USE,
    "free it after wait %{post.outputs[0]}",
)
UNWRITTEN = ErrorText(
    "{i} reads %{name}, of which nothing has written {lacking} elements",
    "a buffer that was only allocated has no contents",
    "write all of %{buffer} before",
)
INCOMPLETE = ErrorText(
    "{i} uses %{name}, to which only the parts of {count} chunks are added",
    "it is what all chunks add up to",
    "use %{name} behind the loop that adds them up, over all chunks",
)
ADDED_TWICE = ErrorText(
    "{i} adds the part of chunk {chunk} to %{name}, which has it, or is no whole buffer",
    "each chunk counts once",
    "let the loop run once over the chunks",
)
ADDED_TO_FREED = ErrorText(
    "{i} adds a part to %{name}, which was freed before",
    "the parts of all chunks are added up in one buffer",
    "move `free %{name}` behind the last use of the sum",
)
DOUBLED = ErrorText(
    "{i} adds the term of {ranks} to %{name}, which has it",
    "each term of a sum counts once",
    "receive the terms of other ranks, or begin another sum in another buffer",
)
OTHER_TERMS = ErrorText(
    "{i} receives a term of {sent} where one of {received} belongs",
    "terms are joined by the op that the layout names",
    "let both buffers have one layout",
)
OTHER_MESH = ErrorText(
    "{i} receives a term of {sent} where {received} belongs",
    "it is a part of a sum on another mesh",
    "let the buffer vary, or reduce the value before",
)
NOT_MOVED = ErrorText(
    "{i} receives into %{name} a term that two ranks have then, and no rank that of another",
    "a Partial value has the term of each rank once",
    "let each rank that sends its term receive another one",
)
OVERWRITES_VIEW = ErrorText(
    "{i} writes into %{name}, which is a view of %{view.reads[0]}",
    "that would overwrite another value",
    "alloc %{name} before it is first computed",
)
OVERWRITES_INPUT = ErrorText(
    "{i} writes into %{name}, which is memory of input %{buffer}",
    "inputs are the caller's; only an alias of one updates it in place",
    "give the result another name, or declare `alias %new = %{buffer}`",
)
OVERWRITES_OUTPUT = ErrorText(
    "{i} writes into %{name}, of which output %{output} is a view",
    "the output would change with it, but not where the caller passed a buffer for it",
    "compute %{output} after the last write",
)
POSTED_TWICE = ErrorText(
    "{i.op} %{i.outputs[0]}, while another %{i.outputs[0]} is under way",
    "a handle names one communication until its wait",
    "wait for the first one before, or name this one otherwise",
)


def _stream_text(stream: int) -> str:
    return "the caller's stream" if stream == CALLER else f"stream {stream}"


def _doing(access: Access) -> str:
    return "writing" if access.is_write else "reading"


# -- names ---------------------------------------------------------------------------------------


def unbound(
    program: HostProgram, name: str, i: Instruction, freed: Instruction | None
) -> ProgramError:
    """Return the error for reading, returning or freeing a name that has no buffer."""
    what = f"{i.op} of %{name}" if i.op in ("free", "return") else f"{i} reads %{name}"
    if freed is not None:
        return wrong(
            program,
            i,
            f"{what}, which was freed before",
            because="a buffer is freed once, after its last use",
            hint=f"move `free %{name}` down, or leave one out",
            also=[freed],
        )
    kind = program.types.get(name)
    because = "each run starts with an empty table of values"
    layout, rank = kind.layout if kind is not None else None, program.rank
    if rank is not None and layout is not None and rank not in layout.mesh:
        because = f"%{name} lives on {layout.mesh}, which rank {rank} is not in"
    hint = "compute it, or alloc and receive it, before; an input must be in the header"
    return wrong(program, i, f"{what}, which nothing computed", because=because, hint=hint)


def wanting(
    program: HostProgram, name: str, i: Instruction, lacking: Sequence[int], surplus: Sequence[int]
) -> ProgramError:
    """Return the error for a use of a buffer that lacks terms, or has too many."""
    layout, fault = program.types[name].layout, "has more than its own term of it"
    if lacking:
        fault = f"has no terms of {ranks_text(lacking)}"
        fault += f", but of {ranks_text(surplus)}" if surplus else ""
    return wrong(
        program,
        i,
        f"{i} uses %{name}, which {fault}",
        because="ranks send terms of a sum, one each; a buffer holds the sum once it has all of "
        f"them, each once: %{name} is {layout}",
        hint="receive and add up what the others have, or let the buffer vary",
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks as an error shows them, eight at most."""
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


# -- order ---------------------------------------------------------------------------------------


def race(
    program: HostProgram,
    name: str,
    i: Instruction,
    is_write: bool,
    stream: int,
    other: Access,
) -> ProgramError:
    """Return the error for an access on a stream while another access may not be over."""
    does, stream_text, there = "writes" if is_write else "reads", _stream_text(stream), other.who
    also = [other.by] if other.by is not None else []
    because = "accesses to one buffer are ordered by one stream, or by syncs and waits"
    hint = f"sync {there} on {stream_text} before" if there != CALLER else _SYNC_CALLER
    if there == PENDING:
        assert other.by is not None
        handle = other.by.outputs[0]
        what = f"{i} {does} %{name}, which {other.by.op} %{handle} is still using"
        because, hint = _IN_USE, f"wait %{handle} before"
    elif other.by is None:
        what = f"{i} {does} %{name} on {stream_text}, which has not waited for the caller's stream"
        because = "the caller's buffers are ready on the caller's stream"
    else:
        what = f"{i} {does} %{name} on {stream_text} while {_stream_text(there)} may still be "
        what += f"{_doing(other)} it"
        if other.by.fn == "reshape":
            because = "a reshape that merges dims may copy, on the stream that is current there"
    return wrong(program, i, what, because=because, hint=hint, also=also)


def not_joined(
    program: HostProgram, name: str, i: Instruction | None, other: Access
) -> ProgramError:
    """Return the error for handing a buffer back to the caller while a stream may still use it."""
    return wrong(
        program,
        i,
        f"return while {_stream_text(other.who)} may still be {_doing(other)} %{name}",
        because="inputs and outputs are the caller's again after the return, on its stream",
        hint=f"sync {other.who} on the caller's stream before the return",
        also=[other.by],
    )


def no_stream(program: HostProgram, i: Instruction, value: object) -> ProgramError:
    is_number = isinstance(value, int)
    return wrong(
        program,
        i,
        f"{i.op} %{value}" if isinstance(value, str) else f"{i.op} {value}",
        because="streams are numbered from 0" if is_number else "get_stream did not give it",
        hint="name a stream by a number, or by a value of get_stream",
    )


# -- communications ------------------------------------------------------------------------------


def nothing_to_wait_for(
    program: HostProgram, i: Instruction, before: Instruction | None
) -> ProgramError:
    handle = i.reads[0]
    return wrong(
        program,
        i,
        f"wait %{handle}, " + ("which was waited for before" if before else "which is no post"),
        because="each wait names an earlier post that nothing has waited for yet",
        hint="leave it out" if before else f"move it behind the post of %{handle}",
        also=[before] if before else [],
    )


def no_piece(
    program: HostProgram, i: Instruction, piece: object, post: Instruction
) -> ProgramError:
    handle, count = post.outputs[0], post.kwargs.get("pieces")
    because = f"%{handle} arrives in one piece"
    if count is not None:
        because = f"it has the pieces 0 to {count - 1}, and each is waited for once"
    return wrong(
        program,
        i,
        f"wait %{handle}[{piece}]: there is no such piece to wait for",
        because=because,
        hint=f"wait %{handle}, or post it with pieces=",
        also=[post],
    )


def never_waited(
    program: HostProgram, post: Instruction, left: Iterable[int | None]
) -> ProgramError:
    pieces = ", ".join(str(n) for n in left if n is not None)
    return wrong(
        program,
        post,
        f"{post.op} %{post.outputs[0]} is never waited for"
        + (f": piece {pieces}" if pieces else ""),
        because="its buffers are in use until then",
        hint=f"wait %{post.outputs[0]} before the return",
    )
