"""Waits for sends alone are moved down in a projection, and with them the frees of what is sent."""

from __future__ import annotations

from helpers.host_checks import accepted, parse

from mdfuse.hir.rank.pipelines import project

#: Two names of one memory are sent to another mesh, and the second send is waited for first.
TWO_SENDS = (
    "input %x: f32[4] m0(x=R); %p: f32[4] m0(x=R) = set(%x); %q: f32[4] m0(x=R) = set(%x); "
    "%b: f32[4] m1(x=R) = alloc; %c0 = post sendrecv(%p) -> %b f32[4] m0(x=R) => m1(x=R); "
    "%d: f32[4] m1(x=R) = alloc; %c1 = post sendrecv(%q) -> %d f32[4] m0(x=R) => m1(x=R); "
    "wait %c1; wait %c0; free %p, %q; return %b, %d"
)


def test_what_is_sent_twice_is_freed_behind_both_waits() -> None:
    program = parse(TWO_SENDS, "m0=mesh(x=1), m1=mesh(x=1: 1)")
    ops = [i.op for i in project(program, 0)]
    assert ops == ["set", "set", "post", "post", "wait", "wait", "free", "return"]
    accepted(program)
