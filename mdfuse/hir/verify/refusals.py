"""The errors for what is refused in the flow of one rank's program, in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from mdfuse.errors import ProgramError
from mdfuse.hir.program import HostProgram, Instruction
from mdfuse.hir.verify.memory import CALLER, PENDING, Access, Storage
from mdfuse.hir.verify.report import wrong

_IN_USE = "what a communication reads and writes is in use until its wait"
_SYNC_CALLER = "`%s = get_stream` at the start, and `sync %s` on this stream before"


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


def not_to_free(program: HostProgram, name: str, i: Instruction) -> ProgramError:
    role = "an input" if name in program.inputs else "an output"
    return wrong(
        program,
        i,
        f"free of %{name}, which is {role}",
        because="inputs and outputs are the caller's",
        hint="leave it out",
    )


def leak(program: HostProgram, name: str) -> ProgramError:
    made = next((i for i in program.instructions if name in i.outputs), None)
    return wrong(
        program,
        made,
        f"%{name} is never freed",
        because="where a program frees buffers, it frees all but inputs and outputs",
        hint=f"free %{name} after its last use",
    )


# -- contents ------------------------------------------------------------------------------------


def unwritten(
    program: HostProgram, name: str, i: Instruction, storage: Storage, lacking: int
) -> ProgramError:
    return wrong(
        program,
        i,
        f"{i} reads %{name}, of which nothing has written {lacking} elements",
        because="a buffer that was only allocated has no contents",
        hint=f"write all of %{storage.name} before",
    )


def incomplete(
    program: HostProgram, name: str, i: Instruction, parts: Collection[int]
) -> ProgramError:
    return wrong(
        program,
        i,
        f"{i} uses %{name}, to which only the parts of {len(parts)} chunks are added",
        because="it is what all chunks add up to",
        hint=f"use %{name} behind the loop that adds them up, over all chunks",
    )


def added_twice(program: HostProgram, name: str, i: Instruction, chunk: int) -> ProgramError:
    return wrong(
        program,
        i,
        f"{i} adds the part of chunk {chunk} to %{name}, which has it, or is no whole buffer",
        because="each chunk counts once",
        hint="let the loop run once over the chunks",
    )


def wanting(
    program: HostProgram, name: str, i: Instruction, lacking: Sequence[int], more: Sequence[int]
) -> ProgramError:
    layout = program.types[name].layout
    told = f"has no terms of {_ranks(lacking)}" if lacking else "has more than its own term of it"
    told += f", but {_ranks(more)}" if lacking and more else ""
    return wrong(
        program,
        i,
        f"{i} uses %{name}, which {told.replace(', but', ', but of')}",
        because="ranks send terms of a sum, one each; a buffer holds the sum once it has all of "
        f"them, each once: %{name} is {layout}",
        hint="receive and add up what the others have, or let the buffer vary",
    )


def doubled(program: HostProgram, name: str, i: Instruction, ranks: Sequence[int]) -> ProgramError:
    return wrong(
        program,
        i,
        f"{i} adds the term of {_ranks(ranks)} to %{name}, which has it",
        because="each term of a sum counts once",
        hint="receive the terms of other ranks, or begin another sum in another buffer",
    )


def other_terms(program: HostProgram, i: Instruction, sent: str, received: str) -> ProgramError:
    return wrong(
        program,
        i,
        f"{i} receives a term of {sent} where one of {received} belongs",
        because="terms are joined by the op that the layout names",
        hint="let both buffers have one layout",
    )


def other_mesh(program: HostProgram, i: Instruction, sent: str, received: str) -> ProgramError:
    return wrong(
        program,
        i,
        f"{i} receives a term of {sent} where {received} belongs",
        because="it is a part of a sum on another mesh",
        hint="let the buffer vary, or reduce the value before",
    )


def not_moved(program: HostProgram, name: str, i: Instruction) -> ProgramError:
    return wrong(
        program,
        i,
        f"{i} receives into %{name} a term that two ranks have then, and no rank that of another",
        because="a Partial value has the term of each rank once",
        hint="let each rank that sends its term receive another one",
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def added_to_freed(
    program: HostProgram, name: str, i: Instruction, freed: Instruction
) -> ProgramError:
    return wrong(
        program,
        i,
        f"{i} adds a part to %{name}, which was freed before",
        because="the parts of all chunks are added up in one buffer",
        hint=f"move `free %{name}` behind the last use of the sum",
        also=[freed],
    )


def overwrites_view(
    program: HostProgram, name: str, i: Instruction, made_by: Instruction
) -> ProgramError:
    return wrong(
        program,
        i,
        f"{i} writes into %{name}, which is a view of %{made_by.reads[0]}",
        because="that would overwrite another value",
        hint=f"alloc %{name} before it is first computed",
        also=[made_by],
    )


def overwrites_input(
    program: HostProgram, name: str, i: Instruction, storage: Storage
) -> ProgramError:
    return wrong(
        program,
        i,
        f"{i} writes into %{name}, which is memory of input %{storage.name}",
        because="inputs are the caller's; only an alias of one updates it in place",
        hint=f"give the result another name, or declare `alias %new = %{storage.name}`",
    )


def overwrites_output(
    program: HostProgram, name: str, i: Instruction, frozen_by: Instruction
) -> ProgramError:
    output = frozen_by.outputs[0]
    return wrong(
        program,
        i,
        f"{i} writes into %{name}, of which output %{output} is a view",
        because="the output would change with it, but not where the caller passed a buffer for it",
        hint=f"compute %{output} after the last write",
        also=[frozen_by],
    )


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
    does, here, there = "writes" if is_write else "reads", _stream_text(stream), other.who
    also = [other.by] if other.by is not None else []
    because = "accesses to one buffer are ordered by one stream, or by syncs and waits"
    hint = f"sync {there} on {here} before" if there != CALLER else _SYNC_CALLER
    if there == PENDING:
        assert other.by is not None
        handle = other.by.outputs[0]
        what = f"{i} {does} %{name}, which {other.by.op} %{handle} is still using"
        because, hint = _IN_USE, f"wait %{handle} before"
    elif other.by is None:
        what = f"{i} {does} %{name} on {here}, which has not waited for the caller's stream"
        because = "the caller's buffers are ready on the caller's stream"
    else:
        what = f"{i} {does} %{name} on {here} while {_stream_text(there)} may still be "
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


def freed_in_use(
    program: HostProgram, name: str, i: Instruction, post: Instruction
) -> ProgramError:
    return wrong(
        program,
        i,
        f"free of %{name}, which {post.op} %{post.outputs[0]} is still using",
        because=_IN_USE,
        hint=f"free it after wait %{post.outputs[0]}",
        also=[post],
    )


def posted_twice(program: HostProgram, i: Instruction, first: Instruction) -> ProgramError:
    return wrong(
        program,
        i,
        f"{i.op} %{i.outputs[0]}, while another %{i.outputs[0]} is under way",
        because="a handle names one communication until its wait",
        hint="wait for the first one before, or name this one otherwise",
        also=[first],
    )


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
