"""Let equal types of a program be one object, and so their layouts.

    %a: f32[2] of [4] (x=S0)  --  an object              %a  --\\
    %b: f32[2] of [4] (x=S0)  --  another one      ->            one object
                                                         %b  --/

The program says the same. Whoever asks about its types looks them up by their id, and hashes few.
"""

from __future__ import annotations

from dataclasses import replace

from mdfuse.config import Options
from mdfuse.hir.program import BufferType, HostProgram
from mdfuse.layouts.layout import Layout

name = "share_types"


def run(program: HostProgram, options: Options) -> HostProgram:
    """Return the program with one object for types that are equal."""
    if any(type(n) is not int for kind in program.types.values() for n in kind.shape):
        return program  # to compare lengths that are not known yet would decide about them
    kinds: dict[BufferType, BufferType] = {}
    layouts: dict[Layout, Layout] = {}
    for kind in program.types.values():
        if kind not in kinds:
            layout = kind.layout
            one = layouts.setdefault(layout, layout) if layout is not None else None
            kinds[kind] = kind if one is layout else replace(kind, layout=one)
    return replace(program, types={n: kinds[kind] for n, kind in program.types.items()})
