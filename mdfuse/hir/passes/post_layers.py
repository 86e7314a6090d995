"""Post together what the parameters of a layer need (`bucket_bytes="layer"`).

    %c1 = post allgather(%l.0.q) -> %q              group_start
    wait %c1                                        %c1 = post allgather(%l.0.q) -> %q
    %a = linear(%h, %q)                             %c2 = post allgather(%l.0.k) -> %k
    %c2 = post allgather(%l.0.k) -> %k       ->     group_end
    wait %c2                                        wait %c1
    %b = linear(%h, %k)                             wait %c2
                                                    %a = linear(%h, %q)
                                                    %b = linear(%h, %k)

A group is one post of a library that can do so: each parameter has a buffer of its own, which is
free behind its last reader, and nothing is packed before or unpacked behind. Reductions to the
gradients of a layer are one group as well, where the last of them is posted. They are waited for
before those of the next layer are posted: what is sent, the gradients of a layer in wide floats, is
in memory until then.

The layer of a parameter is its name up to the first number, as `layers.0`; where the name ends with
the number, as `q.0`, the layer is that number. Parameters outside of all layers form layers where
they follow each other. A parameter that one of the last two layers gathered is not gathered again:
it would be gathered ahead of its place, and be in memory, at that time anyway (`hoist_posts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from mdfuse.config import Options
from mdfuse.hir.analysis.dataflow import dataflow
from mdfuse.hir.edits import Edits
from mdfuse.hir.passes.hoist_posts import Raised, candidates, parameter
from mdfuse.hir.program import HostProgram, Instruction

name = "post_layers"

_START, _END = Instruction(op="group_start"), Instruction(op="group_end")


@dataclass(eq=False)
class _Run:
    """Posts that become one.

    Attributes:
        layer: of their parameters; "": these are outside of all layers.
        along: the axes of the team, and the backend.
        members: the posts, in order, by what they send, or receive.
        bytes: of what is received.
    """

    layer: str
    along: object
    members: dict[str, Raised] = field(default_factory=dict)
    bytes: int = 0

    @property
    def places(self) -> list[int]:
        return [r.at for r in self.members.values()]


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with posts in groups."""
    if not options.bucket_bytes:
        return program
    gathers, again = _gathers(program, options)
    if not gathers:
        return program
    edits = Edits(program.instructions)
    for group in gathers:
        _gather_together(program, edits, group)
    if options.bucket_bytes == "layer":
        _scatter_together(program, edits, [*_scatters(program, gathers)])
    return _without(program, edits, again)


# -- gathers ---------------------------------------------------------------------------------------


def layer_of(x: str) -> str:
    """Return the layer of a parameter; "": it is in none.

    >>> [layer_of(x) for x in ("layers.0.q.weight", "q.0", "head.weight")]
    ['layers.0', '.0', '']
    """
    words = x.split(".")
    at = next((n for n, word in enumerate(words) if word.isdigit()), -1)
    return ".".join(words[: at + 1]) if at < len(words) - 1 else f".{words[at]}"


def _layers(program: HostProgram) -> dict[str, str]:
    """Return parameter -> its layer; without any layers each module is one."""
    layers = {x: layer_of(x) for x in program.inputs}
    if any(layers.values()):
        return layers
    return {x: x.rpartition(".")[0] for x in program.inputs}


def _gathers(program: HostProgram, options: Options) -> tuple[list[_Run], dict[Raised, Raised]]:
    """Return the gathers of each layer, and those of what an earlier one has gathered -> that."""
    layers, runs, again = _layers(program), list[_Run](), dict[Raised, Raised]()
    for raised in candidates(program, of_parameters=True):
        post = program.instructions[raised.at]
        x = parameter(program, post)
        if x is None or len(raised.posts) > 1:
            continue
        near = [r for r in runs[-2:][::-1] if raised.since <= r.places[0]]
        known = next((r.members[x] for r in near if x in r.members), None)
        if known is not None and _is_same(program, known, raised):
            again[raised] = known
            continue
        group = next((r for r in near if _goes_with(options, runs, r, layers[x], raised)), None)
        if group is None or group.along != _along(post) or x in group.members:
            group = _Run(layers[x], _along(post))
            runs.append(group)
        group.members[x] = raised
        group.bytes += raised.bytes
    return runs, again


def _along(post: Instruction) -> object:
    assert post.comm is not None
    return post.comm.axes, post.comm.backend


def _goes_with(
    options: Options, runs: Sequence[_Run], run: _Run, layer: str, raised: Raised
) -> bool:
    """Return whether a gather goes with earlier ones."""
    if isinstance(options.bucket_bytes, int):
        return run is runs[-1] and run.bytes + raised.bytes <= options.bucket_bytes
    return run.layer == layer and (run is runs[-1] or not runs[-1].layer)


def _is_same(program: HostProgram, known: Raised, raised: Raised) -> bool:
    """Return whether a post gathers what an earlier one has gathered."""
    a, b = (program.instructions[r.at] for r in (known, raised))
    into = b.reads[-1]
    is_free = into not in program.outputs and into not in program.aliases
    return is_free and a.comm == b.comm and program.types[a.reads[-1]] == program.types[into]


def _gather_together(program: HostProgram, edits: Edits, group: _Run) -> None:
    """Post gathers where the first of them stands, and wait for all where the first is needed."""
    first, *others = group.members.values()
    if not others:
        return
    there = {*first.carried}
    for n in dict.fromkeys(n for r in others for n in r.carried[:-1] if n not in there):
        edits.move(n, first.at)
    _in_group(program, edits, group.places, first.at)
    waits = [_wait(program, n) for n in group.places]
    for n in waits:
        if n != min(waits):
            edits.move(n, min(waits))


def _in_group(program: HostProgram, edits: Edits, posts: Sequence[int], at: int) -> None:
    edits.drop(*posts)
    edits.instead[at] = [_START, *(program.instructions[n] for n in posts), _END]


def _wait(program: HostProgram, post: int) -> int:
    flow = dataflow(program)
    return flow.readers(flow.code[post].outputs[0])[0]


def _without(program: HostProgram, edits: Edits, again: dict[Raised, Raised]) -> HostProgram:
    """Return the program without gathers of what is there: the earlier buffer is read."""
    flow, instead = dataflow(program), dict[str, str]()
    for raised, known in again.items():
        into, carried = flow.code[raised.at].reads[-1], {*raised.carried}
        edits.drop(raised.at, flow.bound_at(into), _wait(program, raised.at))
        for n in raised.carried[:-1]:
            if all(carried.issuperset(flow.readers(x)) for x in flow.code[n].outputs):
                edits.drop(n)
        instead[into] = flow.code[known.at].reads[-1]
    code = edits.result()
    for old, new in instead.items():
        code = tuple(i.renamed({old: new}) for i in code)
    types = {n: kind for n, kind in program.types.items() if n not in instead}
    return replace(program, instructions=code, types=types)


# -- reductions ------------------------------------------------------------------------------------


def _scatters(program: HostProgram, gathers: Sequence[_Run]) -> Iterator[list[int]]:
    """Yield the places of the posts that reduce the gradients of each layer, in order.

    The gradients of a layer come behind its gather; what has the name of a parameter tells.
    """
    layers, of = _layers(program), {r.along for r in gathers}
    begins = {min(r.places): r for r in gathers}
    layer, group = "", list[int]()
    for n, i in enumerate(program.instructions):
        now = begins[n].layer if n in begins else layer
        is_one = i.op == "post" and i.comm is not None and i.comm.kind == "ReduceScatter"
        if is_one and _along(i) in of:
            now = layers.get(i.reads[-1].split(".grad")[0], now)
        if now != layer or (group and any(_wait(program, g) == n for g in group)):
            if group:
                yield group
            layer, group = now, []
        if is_one and _along(i) in of:
            group.append(n)
    if group:
        yield group


def _scatter_together(program: HostProgram, edits: Edits, groups: Sequence[list[int]]) -> None:
    """Post reductions where the last of each group stands, behind the waits for those before."""
    before: list[int] = []
    for group in groups:
        for n in before:
            if _wait(program, n) > group[-1]:
                edits.move(_wait(program, n), group[-1])
        if len(group) > 1:
            flow = dataflow(program)
            for n in group[:-1]:
                edits.move(flow.bound_at(flow.code[n].reads[-1]), group[-1])
            _in_group(program, edits, group, group[-1])
        before = group
