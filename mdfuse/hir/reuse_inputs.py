"""Write outputs that reuse an input into the input's buffer, after every read of the old value.

    %y: f32[4] (tp=R) = add(%x, 1.0)                alias %y: f32[4] (tp=R) = %x
    %z: f32[4] (tp=R) = mul(%x, 2.0)                %y.new: f32[4] (tp=R) = add(%x, 1.0)
    return %y, %z                       ->          %z: f32[4] (tp=R) = mul(%x, 2.0)
                                                    %y = set(%y.new)
                                                    return %y, %z

Where nothing reads the old value after it, the instruction that computes %y writes there directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mdfuse.hir.program import BufferType, HostProgram, Instruction
from mdfuse.hir.sharing import storage
from mdfuse.ir.graph import fresh_name
from mdfuse.ir.ops import TABLE


def run(program: HostProgram, reuse: Mapping[str, str]) -> HostProgram:
    """Return the program with an alias and a write for each output that reuses an input."""
    if not reuse:
        return program
    types, code = dict(program.types), list(program.instructions[:-1])
    shared = storage(program)
    old = {shared.get(x, x) for x in reuse.values()}
    writes: list[Instruction] = []
    for output in program.outputs:
        if output in reuse:
            writes.append(_write(code, types, shared, old, output, reuse[output]))
        elif output not in program.inputs and shared.get(output) in old:
            code = _copied(code, types, output)
    for write in list(writes):
        (new,), (output,) = write.reads, write.outputs
        if _in_place(code, write, shared.get(reuse[output], reuse[output]), shared):
            code = [_renamed(i, new, output) for i in code]
            writes.remove(write)
            del types[new]
    return replace(
        program,
        types=types,
        instructions=(*code, *writes, program.instructions[-1]),
        aliases={**program.aliases, **reuse},
    )


def _write(
    code: list[Instruction],
    types: dict[str, BufferType],
    shared: dict[str, str],
    old: set[str],
    output: str,
    buffer: str,
) -> Instruction:
    """Compute an output under another name; the write of it into the buffer."""
    source = next((i.source for i in code if output in i.outputs), None)
    new = fresh_name(types, f"{output}.new")
    types[new] = types[output]
    code[:] = [_renamed(i, output, new) for i in code]
    shared[new] = shared.get(output, output)
    if shared[new] in old and shared[new] != shared.get(buffer):
        # A view of an input that is overwritten too: what it is now is kept.
        kept = fresh_name(types, f"{output}.old")
        types[kept] = types[output]
        code += _copy(kept, new)
        new = kept
    return Instruction(op="set", fn="set", inputs=(new,), outputs=(output,), source=source)


def _copy(name: str, of: str) -> list[Instruction]:
    return [
        Instruction(op="alloc", outputs=(name,)),
        Instruction(op="set", fn="set", inputs=(of,), outputs=(name,)),
    ]


def _copied(
    code: list[Instruction], types: dict[str, BufferType], output: str
) -> list[Instruction]:
    """An output that is a view of an input which is overwritten becomes a copy."""
    view = fresh_name(types, f"{output}.view")
    types[view] = types[output]
    return [*(_renamed(i, output, view) for i in code), *_copy(output, view)]


def _renamed(i: Instruction, old: str, new: str) -> Instruction:
    return replace(
        i,
        inputs=tuple(new if x == old else x for x in i.inputs),
        outputs=tuple(new if x == old else x for x in i.outputs),
        body=tuple(_renamed(j, old, new) for j in i.body),
        orelse=tuple(_renamed(j, old, new) for j in i.orelse),
    )


def _in_place(
    code: list[Instruction], write: Instruction, buffer: str, shared: Mapping[str, str]
) -> bool:
    """The instruction that computes an output may write it where the input is."""
    (new,) = write.reads
    makers = [at for at, i in enumerate(code) if new in i.outputs]
    if len(makers) != 1 or shared.get(new) != new:
        return False
    (at,) = makers
    row = TABLE.get(code[at].fn) if code[at].op != "launch" else None
    if row is None or row.is_view:
        return False
    read = [x for i in code[at + 1 :] for j in i.walk() for x in j.reads]
    return not any(buffer == shared.get(x, x) for x in (*read, *_posted(code, at)))


def _posted(code: list[Instruction], at: int) -> Iterable[str]:
    """The buffers of posts that are not waited for at a place of the program."""
    waited = {x for i in code[:at] if i.op == "wait" for x in i.reads}
    for i in code[:at]:
        if i.op == "post" and i.outputs[0] not in waited:
            yield from i.reads
