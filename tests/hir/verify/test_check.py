"""The verifier of host programs: for each rule the smallest program that breaks it, and one that
does not."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from helpers.host_checks import accepted, everywhere, full, parse, per_rank, refused
from helpers.two_stage import CASES, Case

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Shard
from mdfuse.errors import Source
from mdfuse.hir.program import HostProgram
from mdfuse.hir.verify import view_regions
from mdfuse.hir.verify.check import verify


def without(program: HostProgram, at: int) -> HostProgram:
    """The program without one of its instructions."""
    code = program.instructions
    return replace(program, instructions=(*code[:at], *code[at + 1 :]))


def swapped(program: HostProgram, at: int) -> HostProgram:
    """The program with an instruction and the next one the other way round."""
    code = list(program.instructions)
    code[at], code[at + 1] = code[at + 1], code[at]
    return replace(program, instructions=tuple(code))


@dataclass(frozen=True)
class Rule:
    """What is refused, as a change of the smallest program that is not.

    Attributes:
        name: of the rule.
        good: a program that keeps it.
        old: what is changed there.
        new: what stands there in a program that breaks it.
        words: parts of the message, in order: what, where, why, what to do.
    """

    name: str
    good: str
    old: str
    new: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def bad(self) -> str:
        assert self.good.count(self.old) == 1, (self.old, self.good)
        return self.good.replace(self.old, self.new)


_PLUS = "input %x: T; %h: T = add(%x, 1.0); %y: T = add(%h, 1.0); "
_FREED = _PLUS + "free %h; return %y"
_UPDATE = "input %x: T; alias %y = %x; %y = add(%x, 1.0); return %y"

NAMES = [
    Rule("read before it is there", _PLUS + "return %y",
         "%h: T = add(%x, 1.0); %y: T = add(%h, 1.0)", "%y: T = add(%h, 1.0); %h: T = add(%x, 1.0)",
         ("add -> y reads %h, which nothing computed", "add(%h, 1.0)", "empty table",
         "compute it")),
    Rule("an output that nothing computes", "input %x: T; %y: T = add(%x, 1.0); return %y",
         "%y: T = add(%x, 1.0); return %y", "return %y: T",
         ("return of %y, which nothing computed",)),
    Rule("a buffer without contents is read",
         "input %x: T; %a: T = alloc; %a = add(%x, 1.0); %y: T = add(%x, %a); return %y",
         "%a = add(%x, 1.0); ", "",
         ("reads %a, of which nothing has written 4 elements", "no contents", "write all of %a")),
    Rule("an output without contents", "input %x: T; %y: T = alloc; %y = mul(%x, 2.0); return %y",
         "%y = mul(%x, 2.0); ", "", ("nothing has written 4 elements", "rank 0   return %y")),
    Rule("read after it was freed", _FREED, "%y: T = add(%h, 1.0); free %h",
         "free %h; %y: T = add(%h, 1.0)",
         ("reads %h, which was freed before", "= add(%h, 1.0)", "free %h", "after its last use")),
    Rule("a chunk that nothing takes",
         "input %x: T; for %i in 0..2 { %a: CHUNK = chunk(%x); %b: CHUNK = add(%a, 1.0); } "
         "return %x", "%a: CHUNK = chunk(%x); ", "",
         ("add -> b reads %a, which nothing computed", "= add(%a, 1.0)")),
    Rule("made in the branch that is not taken",
         "input %x: T; if 1 == 1 { %h: T = add(%x, 1.0); } %y: T = add(%h, 1.0); return %y",
         "1 == 1", "1 == 2", ("add -> y reads %h, which nothing computed",)),
    Rule("freed twice", _FREED, "free %h", "free %h; free %h",
         ("free of %h, which was freed before",)),
    Rule("freed before it is there", _FREED, "%h: T = add(%x, 1.0)",
         "free %h; %h: T = add(%x, 1.0)", ("free of %h, which nothing computed",)),
    Rule("an input is freed", _FREED, "free %h", "free %h, %x",
         ("free of %x, which is an input", "the caller's", "leave it out")),
    Rule("an output is freed", _FREED, "free %h", "free %h, %y", ("%y, which is an output",)),
    Rule("an alias of an input is freed", _UPDATE, "; return", "; free %y; return", ("an input",)),
    Rule("a handle is freed",
         "input %p: P; %b: T = alloc; %c = post allreduce[sum](%p) -> %b SUM; wait %c; return %b",
         "wait %c", "wait %c; free %c", ("free of %c, which is no buffer",)),
    Rule("a buffer is left over",
         "input %x: T; %h: T = add(%x, 1.0); %k: T = add(%h, 1.0); %y: T = add(%k, 1.0); "
         "free %h, %k; return %y", "free %h, %k", "free %h",
         ("%k is never freed", "%k: f32[4] (x=R) = add(%h, 1.0)", "free %k after its last use")),
    Rule(
        "a view is left over",
        "input %x: M; %h: M = add(%x, 1.0); %t: M = permute(%h, dims=[1,0]); %y: M = add(%t, 1.0); "
        "free %h, %t; return %y",
        "free %h, %t",
        "free %h",
        ("%t is never freed",),
    ),
    Rule(
        "a buffer of an iteration is left over",
        "input %x: T; %y: T = alloc; for %i in 0..2 { %h: CHUNK = chunk(%x); %b: CHUNK = chunk(%y);"
        " %b = add(%h, 1.0); free %b, %h; } return %y",
        "free %b, %h",
        "free %b",
        ("%h@1 is never freed",),
    ),
    Rule("allocated twice", "input %x: T; %y: T = alloc; %y = add(%x, 1.0); return %y", "alloc;",
         "alloc; %y = alloc;", ("%y is allocated twice", "each buffer is allocated once")),
    Rule("allocated in both branches and before",
         "input %x: T; if 1 == 1 { %y: T = alloc; } else { %y = alloc; } %y = add(%x, 1.0); "
         "return %y", "if 1", "%y: T = alloc; if 1", ("%y is allocated twice",)),
]  # fmt: skip

WRITES = [
    Rule("a view is written",
         "input %x: T; %h: T = add(%x, 1.0); %v: T = alloc; %v = set(%h); %v = add(%x, 2.0); "
         "%y: T = add(%h, %v); return %y", "alloc; %v = set(%h)", "set(%h)",
         ("writes into %v, which is a view of %h", "overwrite another value", "alloc %v")),
    Rule(
        "a permuted view is written",
        "input %x: M; %h: M = alloc; %v: M = permute(%h, dims=[1,0]); %h = add(%x, 2.0); return %h",
        "%h = add(%x, 2.0)",
        "%v = add(%x, 2.0)",
        ("writes into %v, which is a view of %h",),
    ),
    Rule(
        "half of a buffer is written",
        "input %x: T; %y: T = alloc; for %i in 0..2 { %a: CHUNK = chunk(%x); %b: CHUNK = chunk(%y);"
        " %b = add(%a, 1.0); } return %y",
        "0..2",
        "0..1",
        ("reads %y, of which nothing has written 2 elements",),
    ),
    Rule("the same half is written twice",
         "input %x: M; %y: f32[2,4] (x=R) = alloc; %a: T = select(%y, dim=0, index=0); "
         "%b: T = select(%y, dim=0, index=1); %r: T = select(%x, dim=0, index=0); "
         "%a = add(%r, 1.0); %b = add(%r, 2.0); return %y", "index=1", "index=-2",
         ("nothing has written 4 elements",)),
    Rule("an input is written", _UPDATE, "alias %y = %x; %y = add(%x, 1.0)",
         "%y: T = add(%x, 1.0); %x = add(%x, 1.0)",
         ("writes into %x, which is an input", "only an alias", "alias %new = %x")),
    Rule("a part of an input is written",
         "input %x: M; alias %y = %x; %y = alloc; %a: T = select(%y, dim=0, index=0); "
         "%b: T = select(%x, dim=0, index=1); %a = add(%b, 1.0); return %x",
         "alias %y = %x; %y = alloc; %a: T = select(%y", "%a: T = select(%x",
         ("writes into %a, which is memory of input %x",)),
    Rule("a communication delivers into an input",
         "input %p: P; input %b: T; alias %y = %b; %y = alloc; "
         "%c = post allreduce[sum](%p) -> %y SUM; wait %c; return %b",
         "alias %y = %b; %y = alloc; %c = post allreduce[sum](%p) -> %y",
         "%c = post allreduce[sum](%p) -> %b", ("post -> c writes into %b, which is an input",)),
    Rule("what an output shows is overwritten",
         "input %x: T; %h: T = add(%x, 1.0); %y: T = set(%h); %z: T = add(%h, 1.0); return %y, %z",
         "%z: T", "%h = add(%x, 2.0); %z: T",
         ("writes into %h, of which output %y is a view", "compute %y after the last write")),
]  # fmt: skip

_UNIT = "input %x: T; input %w: T; launch seg(%x, %w) -> %z { %h: T = add(%x, 1.0); "
_UNIT += "%z: T = add(%h, %w); } %y: T = add(%z, 1.0); return %y"
_GROUP = "input %x: T; %b: T = alloc; group_start; %s = send(%x, to=coord(x), axis=x); "
_GROUP += "%r = recv(%b, from=coord(x), axis=x); group_end; wait %s; wait %r; return %b"

BLOCKS = [
    Rule("a unit reads what is no input of it", _UNIT, "seg(%x, %w)", "seg(%x)",
         ("reads %w, which is no input of launch seg", "add %w to the inputs")),
    Rule("a unit reads what it defines later", _UNIT, "%h: T = add(%x, 1.0); %z: T = add(%h, %w)",
         "%z: T = add(%h, %w); %h: T = add(%x, 1.0)",
         ("reads %h, which is no input of launch seg",)),
    Rule("what is inside a unit is read outside", _UNIT, "add(%z, 1.0)", "add(%z, %h)",
         ("reads %h, which nothing computed",)),
    Rule("a unit allocates", _UNIT, "%z: T = add", "%z: T = alloc; %z = add",
         ("alloc inside launch seg", "local ops only")),
    Rule("an instruction after the return", "input %x: T; %y: T = add(%x, 1.0); return %x",
         "%y: T = add(%x, 1.0); return %x", "return %x; %y: T = add(%x, 1.0)",
         ("return before the end", "return %x", "last instruction")),
    Rule("a return in a branch", "input %x: T; if 1 == 1 { %y: T = add(%x, 1.0); } return %x",
         "%y: T = add(%x, 1.0);", "return %x;", ("return before the end",)),
    Rule("a group that does not end", _GROUP, "group_end; ", "",
         ("wait inside a group", "a group holds only post, send, recv", "move it out")),
    Rule("a group that does not begin", _GROUP, "group_start; ", "",
         ("group_end without a group_start",)),
    Rule("a group that ends in another block",
         _GROUP.replace("group_start", "if 1 == 1 { group_start").replace("_end;", "_end; }"),
         "group_end; }", "} group_end;", ("group_start without a group_end in the same block",)),
]  # fmt: skip

ALIASES = [
    Rule("an input is an alias", _UPDATE, "alias %y = %x",
         "input %z: T; alias %x = %z; %y: T = add(%x, 1.0)",
         ("input %x is an alias of %z", "inputs cannot be aliased", "alias %z = %x instead")),
    Rule("aliases in a cycle",
         "input %x: T; alias %a: T = %b; alias %b = %x; %b = add(%x, 1.0); %a = add(%b, 1.0); "
         "return %a", "%b = %x", "%b = %a", ("%a = %b = %a form a cycle",)),
    Rule("an alias of another type", _UPDATE, "alias %y =", "alias %y: f32[8] (x=R) =",
         ("%y is an alias of %x, but has another type", "f32[8] (x=R) is not f32[4] (x=R)")),
]  # fmt: skip

_HALVES = "input %x: T; %y: T = alloc; for %i in 0..2 { %a: CHUNK = chunk(%x); "
_HALVES += "%b: CHUNK = chunk(%y); %b = add(%a, %a); } return %y"
_REDUCED = "input %p: P; %b: T = alloc; %c = post allreduce[sum](%p) -> %b SUM; wait %c; return %b"

TYPES = [
    Rule("another shape", "input %x: f32[4,8] (x=R); %y: f32[4,8] (x=R) = add(%x, 1.0); return %y",
         "%y: f32[4,8]", "%y: f32[8,4]",
         ("declared f32[8,4] (x=R), but add of [4, 8]", "is f32[4, 8]", "%x: f32[4,8] (x=R)")),
    Rule("a buffer made of numbers",
         "input %x: T; for %i in 0..2 { %y: T = set(%x); free %y; } return %x", "set(%x)",
         "set(%i)", ("is declared f32[4] (x=R), but set of numbers is a number",)),
    Rule("what is made of numbers, of a buffer",
         "input %x: T; %y: f32[4] (x=R) = full(1.0, shape=[4], dtype=f32); free %y; return %x",
         "full(1.0", "full(%x", ("is declared f32[4] (x=R), but full takes numbers, not buffers",)),
    Rule("a number made of a buffer",
         "input %x: T; input %s: f32 scalar; %y: f32 scalar = add(%s, 1.0); return %x", "add(%s",
         "add(%x", ("f32 scalar, but a buffer does not become a number",)),
    Rule("another dtype", "input %x: T; %y: bool[4] (x=R) = eq(%x, 1.0); return %y",
         "bool[4] (x=R)", "T", ("eq of [4], [] is bool[4]",)),
    Rule("operands that do not fit",
         "input %x: M; input %w: f32[4,2] (x=R); %y: f32[4,2] (x=R) = matmul(%x, %w); return %y",
         "%w: f32[4,2]", "%w: f32[3,2]", ("means nothing: torch says",)),
    Rule("operands whose parts do not fit",
         "input %x: S; input %w: f32[1] (x=R); %y: S = add(%x, %w); return %y", "f32[1] (x=R)", "T",
         ("but dim 0 of operand 1 is not split as the others' of add", "with %y", "%w: f32[4]")),
    Rule("a contraction of a part with the whole",
         "input %x: f32[4,2] of [4,4] (x=S1); input %w: f32[2,4] of [4,4] (x=S0); "
         "%y: f32[4,4] (x=P(sum)) = matmul(%x, %w); return %y", "f32[2,4] of [4,4] (x=S0)", "M",
         ("dim 0 of operand 1 is not split as the others' of matmul",)),
    Rule("dims that are no permutation", "input %x: M; %y: M = permute(%x, dims=[1,-2]); return %y",
         "[1,-2]", "[1,-1]",
         ("permute with dims=[1,-1]", "line 3: %y", "names each dim once", "-2 to 1")),
    Rule("an order that is no permutation",
         "input %x: M; %y: M = add(%x, 1.0) order=[1,0]; return %y", "[1,0]", "[1,2]",
         ("order=[1,2] is no permutation", "line 3: %y")),
    Rule("a dim that does not exist is selected",
         "input %x: M; %y: T = select(%x, dim=-2, index=0); return %y", "dim=-2", "dim=2",
         ("select with dim=2", "select(%x, dim=2, index=0)", "dims go from -2 to 1")),
    Rule("an index that does not exist is selected",
         "input %x: f32[1,4] (x=R); %y: T = select(%x, dim=0, index=2); return %y",
         "f32[1,4] (x=R)", "f32[2,4] (x=R)",
         ("select(%x, dim=0, index=2): index 2 is out of range for dim 0", "from 0 to 1")),
    Rule("an index that does not exist in the last iteration",
         "input %x: M; for %i in 0..4 { %y: T = select(%x, dim=0, index=%i); } return %x", "0..4",
         "0..5", ("index 4 is out of range for dim 0", "%y@5")),
    Rule("select keeps the dim", "input %x: M; %y: T = select(%x, dim=0, index=0); return %y",
         "%y: T", "%y: f32[1,4] (x=R)", ("select drops dim 0 of [4, 4]",)),
    Rule("chunks of one iteration too many", _HALVES, "0..2", "0..3",
         ("%a@3", "there is no chunk 2 of dim 0: it has 2")),
    Rule("chunks of another size",
         _HALVES.replace("%a: CHUNK", "%a: f32[2] of [4] (x=R, chunk(0,2,1 - (1 - %i)))"),
         "f32[2] of [4] (x=R, chunk(0,2,1 - (1 - %i)))", "f32[3] of [4] (x=R, chunk(0,[1,3],%i))",
         ("but add of these makes (x=R, chunk(0,[1,3],%i))",)),
    Rule("a part that the rank does not have", "input %x: T; %y: S = narrow(%x); return %y",
         "%x: T; %y: S", "%x: S; %y: T", ("rank 0 has [0:2], not [0:4]",)),
    Rule("rows of two runs as a view",
         "input %x: T; for %i in 0..2 { %y: f32[2] of [4] (x=R, chunk(S0/zigzag,2,%i)) = chunk(%x) "
         "contiguous; free %y; } return %x",
         " contiguous", "", ("several runs of rows are copied side by side", "no `contiguous`")),
    Rule("memory that there is not",
         "input %x: T; %y: T = alloc(memory=pinned); %y = add(%x, 1.0); return %y", "pinned", "far",
         ("alloc with memory=far", "one of device, host, pinned, symmetric")),
    Rule("a layout about a dim that there is not", "input %x: S; %y: S = add(%x, 1.0); return %y",
         "input %x: S", "input %x: f32[4] (x=S1)", ("has 1 dim, but its type is about dim 1",)),
    Rule("a buffer of another dtype is posted", _REDUCED, "%p: P", "%p: f64[4] (x=P(sum))",
         ("of f32 with %p, which is f64[4]", "one dtype", "cast")),
    Rule("a buffer of another size is posted", _REDUCED, "%p: P", "%p: f32[2] (x=R)",
         ("post Allreduce[sum] axis=x of %p, but it is to be [4] (x=P(sum))", "%p: f32[2] (x=R)")),
    Rule("uneven parts are gathered",
         "input %a: f32[3] of [5] (x=S0); "
         "%p: f32[3] of [5] (x=S0) pad=block(dim=0,parts=2,axis=x) = pad(%a, dim=0); "
         "%b: f32[6] of [5] (x=R) pad=team(dim=0,parts=2) = alloc; "
         "%c = post allgather(%p) -> %b f32[5] (x=S0) => (x=R) axis=x dim=0; wait %c; "
         "%y: f32[5] (x=R) = narrow(%b); return %y", "allgather(%p)", "allgather(%a)",
         ("rank 1 posts Allgather axis=x dim=0 with 2 elements of %a, expected 3", "pad it")),
]  # fmt: skip

_SENT = "input %x: P; %p: P = add(%x, %x); %b: T = alloc; "
_SENT += "%c = post allreduce[sum](%p) -> %b SUM; %q: P = add(%p, %x); wait %c; return %b"
_PIECES = "input %p: P; %b: T = alloc; %c = post allreduce[sum](%p) -> %b SUM pieces=2; "
_PIECES += "wait %c[0]; %h: f32[2] of [4] (x=R, chunk(0,2,0)) = chunk(%b); "
_PIECES += "%y: f32[2] of [4] (x=R, chunk(0,2,0)) = add(%h, 1.0); wait %c[1]; return %y"

WAITS = [
    Rule("read while it is received",
         _REDUCED.replace("return %b", "%y: T = add(%b, 1.0); return %y"),
         "wait %c; %y: T = add(%b, 1.0)", "%y: T = add(%b, 1.0); wait %c",
         ("reads %b, which post %c is still using", "= add(%b, 1.0)", "post allreduce", "wait %c")),
    Rule("written while it is received",
         _REDUCED.replace("wait %c", "wait %c; %b = uniform(1, shape=[4], dtype=f32, stream=0)"),
         "wait %c; %b = uniform(1, shape=[4], dtype=f32, stream=0)",
         "%b = uniform(1, shape=[4], dtype=f32, stream=0); wait %c",
         ("writes %b, which post %c is still using",)),
    Rule("written while it is sent", _SENT, "%q: P", "%p",
         ("writes %p, which post %c is still using",)),
    Rule("a view of it is written while it is sent",
         "input %x: f32[2,4] (x=P(sum)); %p: f32[2,4] (x=P(sum)) = add(%x, %x); "
         "%v: P = select(%p, dim=0, index=1); %w: P = select(%p, dim=0, index=0); %b: T = alloc; "
         "%c = post allreduce[sum](%v) -> %b SUM; %w = add(%w, %w); wait %c; return %b",
         "%w = add(%w, %w)", "%v = add(%w, %w)", ("writes %v, which post %c is still using",)),
    Rule("freed while it is sent", _SENT.replace("wait %c", "wait %c; free %p, %q"),
         "wait %c; free %p", "free %p; wait %c; free %q; wait %c; free %p",
         ("free of %p, which post %c is still using", "free it after wait %c")),
    Rule("the buffer of what is sent is freed",
         "input %x: P; %p: P = add(%x, %x); %v: P = set(%p); %b: T = alloc; "
         "%c = post allreduce[sum](%v) -> %b SUM; wait %c; free %p, %v; return %b",
         "wait %c; free %p, %v", "free %p; wait %c; free %v",
         ("free of %p, which post %c is still using",)),
    Rule("never waited for", _REDUCED.replace("return %b", "return %p"), "wait %c; ", "",
         ("post %c is never waited for", "%c = post allreduce[sum](%p) -> %b", "wait %c before")),
    Rule("waited for twice", _REDUCED, "wait %c", "wait %c; wait %c",
         ("wait %c, which was waited for before", "leave it out")),
    Rule("waited for before the post", _REDUCED.replace("return %b", "return %p"),
         "%c = post allreduce[sum](%p) -> %b SUM; wait %c",
         "wait %c; %c = post allreduce[sum](%p) -> %b SUM",
         ("wait %c, which nothing posted before", "move it behind the post")),
    Rule("two under one name",
         "input %p: P; %a: T = alloc; %b: T = alloc; %c = post allreduce[sum](%p) -> %a SUM; "
         "wait %c; %c = post allreduce[sum](%p) -> %b SUM; wait %c; return %a", "wait %c; %c", "%c",
         ("post %c, while another %c is under way",)),
    Rule("one piece is not waited for", _PIECES, "wait %c[1]; ", "",
         ("post %c is never waited for: piece 1",)),
    Rule("another piece is read", _PIECES, "wait %c[0]; %h", "wait %c[1]; %h",
         ("reads %h, which post %c is still using",)),
    Rule("a piece that there is not", _PIECES, "wait %c[1]", "wait %c[2]",
         ("wait %c[2]: there is no such piece", "pieces 0 to 1")),
    Rule("a kind that delivers at once",
         "input %a: S; %b: T = alloc; %c = post allgather(%a) -> %b GATHER; wait %c; return %b",
         "GATHER", "GATHER pieces=2",
         ("Allgather in 2 pieces", "only Reduce, Allreduce, Broadcast")),
]  # fmt: skip

_CHAIN = "input %x: T; %s = get_stream; set_stream 0; sync %s; %h: T = add(%x, 1.0); set_stream 1; "
_CHAIN += "sync 0; %y: T = add(%h, 1.0); set_stream %s; sync 1; return %y"
_OVERWRITE = "input %x: T; %s = get_stream; %h: T = add(%x, 1.0); set_stream 0; sync %s; "
_OVERWRITE += "%y: T = add(%h, 1.0); set_stream 1; sync 0; sync %s; %h = add(%x, 2.0); "
_OVERWRITE += "set_stream %s; sync 0; sync 1; return %y"
_TURNS = "input %x: T; %s = get_stream; %h: f32[2] (x=R) = alloc; %y: T = alloc; "
_TURNS += "for %i in 0..2 { %a: CHUNK = chunk(%x); %b: CHUNK = chunk(%y); "
_TURNS += "%v: f32[2] (x=R) = set(%a); set_stream 0; sync %s; "
_TURNS += "sync 1; %h = add(%v, 1.0); set_stream 1; sync %s; sync 0; %w: CHUNK = set(%h); "
_TURNS += "%b = add(%w, 1.0); } "
_TURNS += "set_stream %s; sync 1; return %y"

STREAMS = [
    Rule("a stream reads what another one writes", _CHAIN, "set_stream 1; sync 0",
         "set_stream 1; sync %s",
         ("reads %h on stream 1 while stream 0 may still be writing it",
         "%y: f32[4] (x=R) = add(%h, 1.0)", "%h: f32[4] (x=R) = add(%x, 1.0)",
         "by one stream, or by syncs and waits", "sync 0 on stream 1 before")),
    Rule("a sync before the work that it should wait for", _CHAIN,
         "%h: T = add(%x, 1.0); set_stream 1; sync 0",
         "set_stream 1; sync 0; set_stream 0; %h: T = add(%x, 1.0); set_stream 1",
         ("reads %h on stream 1 while stream 0",)),
    Rule("a stream writes what another one reads", _OVERWRITE, "set_stream 1; sync 0",
         "set_stream 1",
         ("writes %h on stream 1 while stream 0 may still be reading it", "sync 0 on stream 1")),
    Rule("two streams write one buffer",
         "input %x: M; %s = get_stream; %y: M = alloc; set_stream 0; sync %s; %y = add(%x, 1.0); "
         "set_stream 1; sync 0; %y = add(%x, 2.0); set_stream %s; sync 1; return %y", "sync 0",
         "sync %s", ("writes %y on stream 1 while stream 0 may still be writing it",)),
    Rule("two streams write one part of a buffer",
         "input %x: M; %s = get_stream; %y: f32[2,4] (x=R) = alloc; %r: T = select(%x, dim=0, "
         "index=0); %a: T = select(%y, dim=0, index=0); %b: T = select(%y, dim=0, index=1); "
         "set_stream 0; sync %s; %a = add(%r, 1.0); %b = add(%r, 1.0); set_stream %s; sync 0; "
         "set_stream 1; sync %s; %b = add(%r, 2.0); set_stream 0; %a = add(%r, 2.0); "
         "set_stream %s; sync 0; sync 1; return %y", "set_stream 0; %a",
         "set_stream 0; %b = add(%r, 3.0); %a",
         ("writes %b on stream 0 while stream 1 may still be writing it",)),
    Rule("a stream that has not waited for the caller's reads an input", _CHAIN,
         "set_stream 0; sync %s", "set_stream 0",
         ("reads %x on stream 0, which has not waited for the caller's stream", "get_stream")),
    Rule("a stream that has not waited for the caller's writes an output",
         "%s = get_stream; set_stream 0; sync %s; %y: T = uniform(1, shape=[4], dtype=f32, "
         "stream=0); set_stream %s; sync 0; return %y", "set_stream 0; sync %s", "set_stream 0",
         ("writes %y on stream 0, which has not waited for the caller's stream",)),
    Rule("an output is not joined", _CHAIN, "set_stream %s; sync 1", "set_stream %s; sync 0",
         ("on the caller's stream while stream 1 may still be writing", "sync 1")),
    Rule("joined on another stream than the caller's", _CHAIN, "set_stream %s; sync 1",
         "set_stream 2; sync 1; set_stream %s", ("while stream 1 may still be writing",)),
    Rule("the reads of an input are not joined", _OVERWRITE, "sync 0; sync 1; return",
         "sync 0; return",
         ("return while stream 1 may still be reading %x", "sync 1 on the caller's stream")),
    Rule("a post before the data is there",
         "input %x: P; %s = get_stream; %b: T = alloc; set_stream 0; sync %s; %p: P = add(%x, %x); "
         "set_stream %s; sync 0; %c = post allreduce[sum](%p) -> %b SUM; wait %c; return %b",
         "set_stream %s; sync 0", "set_stream %s",
         ("post -> c reads %p on the caller's stream while stream 0",)),
    Rule("waited for on another stream",
         "input %p: P; %s = get_stream; %b: T = alloc; %c = post allreduce[sum](%p) -> %b SUM; "
         "set_stream 0; wait %c; set_stream %s; sync 0; %y: T = add(%b, 1.0); return %y",
         "sync 0; ", "",
         ("reads %b on the caller's stream while stream 0 may still be writing it",)),
    Rule("a buffer is filled again while the last iteration reads it", _TURNS, "sync 1; %h", "%h",
         ("writes %h on stream 0 while stream 1 may still be reading it", "sync 1 on stream 0")),
    Rule("a stream that get_stream did not give",
         "input %x: T; %s = get_stream; set_stream %s; return %x", "%s = get_stream; ", "",
         ("set_stream", "%s")),
    Rule("a negative stream", "input %x: T; sync 1 - 1; return %x", "1 - 1", "0 - 1",
         ("sync -1", "numbered from 0")),
    Rule("a reshape that may copy",
         "input %x: f32[2,2] (x=R); %s = get_stream; set_stream 1; sync %s; "
         "%r: f32[4] (x=R) = reshape(%x, shape=[4]); set_stream 0; sync 1; "
         "%y: f32[4] (x=R) = add(%r, 1.0); set_stream %s; sync 0; return %y",
         "set_stream 0; sync 1", "set_stream 0; sync %s",
         ("reads %r on stream 0 while stream 1", "a reshape that merges dims may copy")),
]  # fmt: skip


@pytest.mark.parametrize(
    "rule", [*NAMES, *WRITES, *BLOCKS, *ALIASES, *TYPES, *WAITS, *STREAMS], ids=str
)
def test_rule(rule: Rule) -> None:
    accepted(parse(rule.good))
    message = refused(rule.bad, *rule.words)
    assert "@p" in message or re.search(r"^  line \d+: ", message, re.MULTILINE)


RIGHT = {
    "iteration after iteration": "input %x: T; alias %y = %x; for %i in 0..3 { %y = add(%y, %i); } "
    "return %y",
    "an output that aliases an input is allocated": "input %x: T; alias %y = %x; %y = alloc; "
    "%y = add(%x, 1.0); return %y",
    "a chain of aliases": "input %x: T; alias %c = %b; alias %b = %x; %c = add(%x, 1.0); "
    "%b = add(%c, 1.0); return %c",
    "an all-reduce in place": "input %x: P; %v: V = set(%x); %p: V = add(%v, %v); "
    "%c = post allreduce[sum](%p) -> %p SUM; wait %c; %y: T = set(%p); return %y",
    "only numbers": "input %s: f32 scalar; %t: f32 scalar = add(%s, 1.0); return %t",
    "an input is returned": "input %x: T; return %x",
    "nothing is freed": _PLUS + "return %y",
    "numbers": "input %x: T; input %s: f32 scalar; %t: f32 scalar = mul(%s, 2.0); "
    "%y: T = mul(%x, %t); return %y",
    "a buffer for each iteration": _HALVES.replace("%b = add", "%h: CHUNK = alloc; %h = add(%a, "
    "1.0); %b = add(%h, %a); free %a, %h, %b } return %y #").split("#")[0],
    "empty buffers are never written": "input %x: f32[0] (x=R); %y: f32[0] (x=R) = alloc; "
    "return %y",
    "a split dim": "input %x: f32[2,2] (x=R); %s = get_stream; set_stream 1; sync %s; "
    "%r: f32[2,1,2] (x=R) = reshape(%x, shape=[2,1,2]); set_stream 0; sync %s; "
    "%y: f32[2,1,2] (x=R) = add(%r, 1.0); set_stream %s; sync 0; return %y",
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    accepted(parse(RIGHT[name]))


def test_a_value_of_another_mesh() -> None:
    text = "input %x: f32[4] m0(x=R); %y: f32[4] m1(x=R) = add(%x, 1.0); return %y"
    accepted(parse(text, "m0=mesh(x=3), m1=mesh(x=2: 0 2)"))
    outside = parse(text, "m0=mesh(x=2), m1=mesh(x=2: 0 2)")
    refused(outside, "rank 2 has no part of an operand on mesh(x=2)")


def test_unknown_instructions() -> None:
    program = parse(_REDUCED)
    code = (replace(program.instructions[0], op="allocate"), *program.instructions[1:])
    refused(
        replace(program, instructions=code),
        "there is no instruction 'allocate'",
        "near it are alloc",
    )


def test_a_name_without_a_type() -> None:
    program = parse(_PLUS + "return %y")
    types = {name: kind for name, kind in program.types.items() if name != "h"}
    refused(replace(program, types=types), "%h has no type")


def test_the_last_instruction_returns_the_outputs() -> None:
    program = parse(_REDUCED)
    refused(without(program, -1 % len(program)), "does not return the outputs")
    refused(replace(program, outputs=("p",)), "does not return the outputs", "are %p")


# -- across ranks --------------------------------------------------------------------------------

TWO = (
    "input %p: P; %a: T = alloc; %b: T = alloc; %c0 = post allreduce[sum](%p) -> %a SUM; "
    "%c1 = post allreduce[sum](%p) -> %b SUM; wait %c0; wait %c1; return %a, %b"
)


def test_equal_posts_in_another_order() -> None:
    """Two all-reduces of one size would mix up their data, and nobody would notice."""
    programs = per_rank(TWO, TWO)
    verify(programs)
    refused(
        {0: programs[0], 1: swapped(programs[1], 2)},
        "team (0 1), communication 0: rank 0 posts %c0, rank 1 posts %c1",
        "rank 0   %c0 = post allreduce[sum](%p) -> %a",
        "rank 1   %c1 = post allreduce[sum](%p) -> %b",
        "the same communications in the same order",
    )


def test_one_buffer_for_another() -> None:
    other = TWO.replace("-> %a", "-> %z").replace("-> %b", "-> %a").replace("-> %z", "-> %b")
    refused(per_rank(TWO, other), "rank 0 posts buffer %a, rank 1 posts %b")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "allreduce[sum](%p) -> %b f32[4] (x=P(sum))",
            "allreduce[max](%p) -> %b f32[4] (x=P(max))",
            "reduce op sum, rank 1 posts max",
        ),
        ("f32", "f64", "dtype f32, rank 1 posts f64"),
        ("[4]", "[8]", "blocks of 4 elements on rank 0, of 8 on rank 1"),
        ("axis=x", "axis=x pieces=2", "pieces None, rank 1 posts 2"),
        (
            "reduce[sum](%p) -> %b f32[4] (x=P(sum)) => (x=R) axis=x",
            "gather(%q) -> %b f32[4] (x=S0) => (x=R) axis=x dim=0",
            "kind Allreduce, rank 1 posts Allgather",
        ),
    ],
)
def test_members_agree(old: str, new: str, words: str) -> None:
    text = full("input %q: S; " + _REDUCED.replace("%p: P", "%p: V"))
    verify(per_rank(text, text))
    other = text.replace(old, new).replace("[2] of [8]", "[4] of [8]")
    refused(per_rank(text, other), "team (0 1), communication 0", words)


def test_another_root() -> None:
    """The team is the same, but what it is given comes from another rank."""
    text = (
        "input %x: f32[2,2] of [4,2] (x=S0); %b: f32[2,2] of [4,2] (x=R, chunk(0,2,INDEX)) = alloc;"
        " %c = post broadcast(%x) -> %b f32[4,2] (x=S0) => (x=R, chunk(0,2,INDEX)) axis=x; "
        "wait %c; return %b"
    )
    first, second = (text.replace("INDEX", n) for n in "01")
    accepted(parse(first))
    accepted(parse(second))
    refused(per_rank(first, second), "rank 0 posts root 0, rank 1 posts 1")


def test_a_missing_post() -> None:
    silent = "input %p: P; %b: T = uniform(1, shape=[4], dtype=f32, stream=0); return %b"
    refused(
        per_rank(_REDUCED, silent),
        "team (0 1), communication 0: rank 1 never posts %c, which rank 0 does",
        "rank 0   %c = post allreduce",
        "rank 1   host @p",
        "post it on every rank",
    )


def test_what_a_rank_posts_instead() -> None:
    """It meets other ranks in a team of its own."""
    text = (
        "input %p: f32[4] (tp=P(sum)); %b: f32[4] (tp=R) = alloc; "
        "%c = post allreduce[sum](%p) -> %b f32[4] (tp=P(sum)) => (tp=R) axis=tp; wait %c; "
        "return %b"
    )
    programs = per_rank(*[text] * 4, on="mesh(dp=2, tp=2)")
    verify(programs)
    programs[1] = parse(text.replace("tp", "dp"), "mesh(dp=2, tp=2)", 1)
    refused(
        programs,
        "team (0 1), communication 0: rank 1 never posts %c, which rank 0 does",
        "instead it posts %c with team (1 3)",
        "rank 1   %c = post allreduce[sum](%p) -> %b f32[4] (dp=P(sum), tp=R) => (dp=R, tp=R)",
    )


def test_ranks_and_programs() -> None:
    programs = everywhere(parse(_REDUCED))
    refused({0: programs[0]}, "rank 1 never posts %c", "it has no program")
    refused({0: programs[0], 1: programs[0]}, "program for rank 1 is the projection of 0")


def test_a_comparison_with_nothing() -> None:
    """Torch's answer is a bool, not a tensor."""
    text = "input %x: bool[3] (x=R); %y: bool[3] (x=R) = eq(%x, None); return %y"
    refused(text, "eq does not take these operands", "%y: bool[3] (x=R) = eq(%x, None)")


def test_windows_of_parts() -> None:
    """Each rank says where a window lies in its part; together that is the window of the whole."""
    for n, step in product(range(6), (1, 2, 3)):
        for start, end in product(range(n + 1), repeat=2):
            taken = len(range(start, end, step))
            if end < start or (step == 1 and taken == n):  # all of it stays split
                continue
            window = f"starts=[{start}], ends=[{end}], steps=[{step}]"
            accepted(
                parse(
                    f"input %x: f32[{-(-n // 3)}] of [{n}] (x=S0); "
                    f"%y: f32[{taken}] (x=P(sum)) = window(%x, reduce=sum, {window}); return %y",
                    "mesh(x=3)",
                )
            )


@pytest.mark.parametrize(
    ("attr", "value"),
    [
        ("starts", (1,)),
        ("ends", (1,)),
        ("places", ((0, 2),)),
        ("places", ((1, 2),)),
        ("shape", (4,)),
    ],
)
def test_a_window_elsewhere(attr: str, value: Any) -> None:
    text = "input %x: f32[2] of [6] (x=S0); "
    text += "%y: f32[3] (x=P(sum)) = window(%x, reduce=sum, starts=[3], ends=[6], steps=[1]); "
    local = everywhere(parse(text + "return %y", "mesh(x=3)"))[2]
    row, end = local.instructions
    assert row.kwargs["starts"] == (0,) and row.kwargs["places"] == ((1, 3),)
    row = replace(row, attrs=tuple({**row.kwargs, attr: value}.items()))
    refused(replace(local, instructions=(row, end)), "window")


def test_parts_of_an_all_to_all() -> None:
    text = (
        "input %a: f32[2,4] of [4,4] (x=S0); "
        "%s: f32[8] of [4,4] (x=S0) flat = pack(%a, dim=0, to_dim=1, axis=x); "
        "%b: f32[4,2] of [4,4] (x=S1) = alloc; "
        "%c = post alltoall(%s) -> %b f32[4,4] (x=S0) => (x=S1) axis=x dim=0 to_dim=1; wait %c; "
        "return %b"
    )
    wide = text.replace("[2,4]", "[2,6]").replace("[4,4]", "[4,6]").replace("[4,2]", "[4,3]")
    wide = wide.replace("f32[8]", "f32[12]")
    accepted(parse(text))
    accepted(parse(wide))
    refused(per_rank(text, wide), "blocks of 4 elements on rank 0, of 6 on rank 1")


# -- sends and receives --------------------------------------------------------------------------

RING = (
    "input %x: f32[2] of [8] (x=S0); %b: f32[2] of [8] (x=S0) = alloc; group_start; "
    "%s = send(%x, to=(coord(x) + 1) mod 4, axis=x); "
    "%r = recv(%b, from=(coord(x) - 1) mod 4, axis=x); group_end; wait %s; wait %r; return %b"
)
UNGROUPED = RING.replace("group_start; ", "").replace("group_end; ", "")


def test_a_ring() -> None:
    accepted(parse(RING, "mesh(x=4)"))
    accepted(parse(RING, "mesh(dp=2, x=4)"))
    refused(
        parse(RING.replace("from=(coord(x) - 1)", "from=(coord(x) + 1)"), "mesh(x=4)"),
        "%s: rank 0 sends to rank 1, which does not receive it",
        "rank 0   %s = send(%x, to=1)",
        "each send meets one receive",
        "add the receive on rank 1",
    )
    to_itself = parse(RING.replace("to=(coord(x) + 1) mod 4", "to=coord(x)"), "mesh(x=4)")
    refused(to_itself, "%s: rank 0 sends to rank 0")
    beyond = parse(RING.replace("to=(coord(x) + 1) mod 4", "to=coord(x) + 1"), "mesh(x=4)")
    refused(beyond, "send %x has to=4 along x", "modulo")


def test_a_ring_that_waits_before_it_sends() -> None:
    """Nobody begins to send: the error shows the wait and the send of each rank."""
    stuck = swapped(swapped(swapped(parse(UNGROUPED, "mesh(x=4)"), 1), 3), 2)
    assert [i.op for i in stuck] == ["alloc", "recv", "wait", "send", "wait", "return"]
    message = refused(stuck, "wait for each other", "wait %r", "= send(%x, to=", "its own wait")
    for rank in range(4):
        assert f"rank {rank}   wait %r" in message
        assert f"rank {rank}   %s = send" in message


def test_what_is_received_is_what_is_sent() -> None:
    other = RING.replace("%b: f32[2]", "%b: f64[2]")
    refused(parse(other, "mesh(x=4)"), "transfer 0 from rank", "2 x f32 are sent where 2 x f64")
    other = RING.replace("%b: f32[2] of [8] (x=S0)", "%b: f32[8] (x=R)")
    refused(parse(other, "mesh(x=4)"), "2 x f32 are sent where 8 x f32 are received")


SEND = "input %x: T; %s = send(%x, to=1); wait %s; return %x"
RECEIVE = "input %x: T; %b: T = alloc; %r = recv(%b, from=0); wait %r; return %b"


def test_a_send_and_its_receive() -> None:
    verify(per_rank(SEND, RECEIVE))
    refused(per_rank(SEND, SEND), "%s: rank 0 sends to rank 1, which does not receive it")
    refused(per_rank("input %x: T; return %x", RECEIVE), "%r: rank 1 receives from rank 0")
    refused(per_rank(SEND.replace("to=1", "to=5"), RECEIVE), "send of %x with rank 5", "0, 1")
    wider = RECEIVE.replace("%b: T", "%b: f64[4] (x=R)")
    refused(per_rank(SEND, wider), "4 x f32 are sent where 4 x f64 are received")


def test_a_send_meets_the_same_receive_everywhere() -> None:
    text = (
        "input %x: T; %a: T = alloc; %b: T = alloc; group_start; "
        "%s0 = send(%x, to=(coord(x) + 1) mod 3, axis=x); "
        "%s1 = send(%x, to=(coord(x) + 1) mod 3, axis=x); "
        "%r0 = recv(%a, from=(coord(x) - 1) mod 3, axis=x); "
        "%r1 = recv(%b, from=(coord(x) - 1) mod 3, axis=x); group_end; "
        "wait %s0; wait %s1; wait %r0; wait %r1; return %a, %b"
    )
    program = parse(text, "mesh(x=3)")
    accepted(program)
    programs = everywhere(program)
    refused({**programs, 2: swapped(programs[2], 5)}, "%s0 meets %r1 here, but %r0 on rank")


def test_to_oneself() -> None:
    """A rank receives from itself what it has sent before, or sends at once."""
    text = _GROUP.replace("group_start; ", "").replace("group_end; ", "")
    accepted(parse(text))
    refused(swapped(parse(text), 1), "a rank receives from itself before it sends")
    accepted(swapped(parse(_GROUP), 2))
    crossed = text.replace("from=coord(x)", "from=1 - coord(x)")
    refused(parse(crossed), "which does not receive it")


def test_exchanges_swapped_on_one_rank() -> None:
    """Point-to-point posts are told apart by their names, too."""
    text = (
        "input %x: f32[2] of [4] m0(x=S0); %a: f32[2] of [4] m1(x=S0) = alloc; "
        "%b: f32[2] of [4] m1(x=S0) = alloc; "
        "%c0 = post exchange(%x) -> %a f32[4] m0(x=S0) => m1(x=S0); "
        "%c1 = post exchange(%x) -> %b f32[4] m0(x=S0) => m1(x=S0); "
        "wait %c0; wait %c1; return %a, %b"
    )
    program = parse(text, "m0=mesh(x=2), m1=mesh(x=2: 1 0)")
    accepted(program)
    programs = everywhere(program)
    refused({**programs, 1: swapped(programs[1], 2)}, "transfer 0 from rank", "%c0 meets %c1")


# -- progress ------------------------------------------------------------------------------------

MESHES = "m0=mesh(x=2), m1=mesh(y=2: 1 0)"
BOTH = (
    "input %p: f32[4] m0(x=P(sum)); input %q: f32[4] m1(y=P(sum)); "
    "%a: f32[4] m0(x=R) = alloc; %b: f32[4] m1(y=R) = alloc; "
    "%c = post allreduce[sum](%p) -> %a f32[4] m0(x=P(sum)) => m0(x=R) axis=x; wait %c; "
    "%d = post allreduce[sum](%q) -> %b f32[4] m1(y=P(sum)) => m1(y=R) axis=y; wait %d; "
    "return %a, %b"
)


def test_two_ranks_wait_for_each_other() -> None:
    one, other = per_rank(BOTH, BOTH, on=MESHES).values()
    verify({0: one, 1: other})
    opposite = swapped(swapped(swapped(swapped(other, 3), 2), 4), 3)
    assert [i.op for i in opposite] == [i.op for i in other]
    code = tuple(replace(i, source=Source("mlp.py", 7)) for i in one)
    located = replace(one, instructions=code)
    message = refused({0: located, 1: opposite}, "wait for each other", "only after its own wait")
    for line in (
        "rank 0   wait %c",
        "rank 0   %d = post",
        "rank 1   wait %d",
        "rank 1   %c = post",
    ):
        assert line in message
    assert "mlp.py:7" in message
    # Where both post before they wait, the order does not matter.
    verify({0: swapped(one, 3), 1: swapped(swapped(swapped(other, 3), 2), 4)})


def test_three_ranks_in_a_cycle() -> None:
    text = "input %x: T; %b: T = alloc; %r = recv(%b, from=FROM); wait %r; %s = send(%x, to=TO); "
    text += "wait %s; return %b"
    texts = [
        text.replace("FROM", str((r - 1) % 3)).replace("TO", str((r + 1) % 3)) for r in range(3)
    ]
    programs = per_rank(*texts)
    refused(programs, "wait for each other")
    verify({**programs, 0: swapped(swapped(swapped(swapped(programs[0], 2), 1), 3), 2)})


def test_barriers() -> None:
    text = _REDUCED.replace("wait %c", "barrier (x=R); wait %c")
    accepted(parse(text))
    programs = everywhere(parse(text))
    late = swapped(programs[1], 1)
    refused({0: programs[0], 1: late}, "communication 0: rank 0 posts %c, rank 1 posts barrier")


# -- control flow --------------------------------------------------------------------------------


def test_a_branch_on_the_rank() -> None:
    """Where ranks go different ways, they are compared rank by rank."""
    post = "%c = post allreduce[sum](%p) -> %b SUM; wait %c;"
    text = "input %p: V; %b: T = alloc; if coord(x) == 0 { " + post + " } else { " + post
    accepted(parse(text + " } return %b"))
    other = text[:-60] + full(text[-60:]).replace("[sum]", "[max]").replace("P(sum)", "P(max)")
    refused(parse(other + " } return %b"), "rank 0 posts reduce op sum, rank 1 posts max")
    refused(parse(text.split("else")[0] + " return %p"), "rank 1 never posts %c")


def test_a_loop_over_the_rank() -> None:
    text = "input %p: P; %b: T = alloc; for %i in 0..LAST { "
    text += "%c = post allreduce[sum](%p) -> %b SUM; wait %c; } return %p"
    accepted(parse(text.replace("LAST", "3")))
    refused(parse(text.replace("LAST", "rank")), "communication 0: rank 0 never posts %c@1")


def test_sends_by_rank() -> None:
    text = "input %x: T; %b: V = alloc; if rank == 0 { %s = send(%x, to=1); wait %s; } "
    text += "else { %r = recv(%b, from=0); wait %r; } return %x"
    accepted(parse(text))
    refused(parse(text.replace("from=0", "from=1")), "%s: rank 0 sends to rank 1")


def test_steps_through_a_ring() -> None:
    """Peers that depend on the loop and on the rank."""
    text = (
        "input %x: f32[2] of [8] (x=S0); %y: f32[8] (x=R) = alloc; for %i in 0..4 { "
        "%a: f32[2] of [8] (x=R, chunk(0,4,(%i + coord(x)) mod 4)) = chunk(%y); group_start; "
        "%s = send(%x, to=(coord(x) - %i) mod 4, axis=x); "
        "%r = recv(%a, from=(coord(x) + %i) mod 4, axis=x); group_end; wait %s; wait %r; } "
        "return %y"
    )
    accepted(parse(text, "mesh(x=4)"))
    skewed = text.replace("from=(coord(x) + %i)", "from=(coord(x) + %i + 1)")
    refused(parse(skewed, "mesh(x=4)"), "[0:2] of [8] is sent for [6:8] of [8]")
    twice = text.replace("(%i + coord(x)) mod 4", "%i // 2")
    refused(parse(twice, "mesh(x=4)"), "nothing has written 4 elements")


# -- lowered programs ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES[::29], ids=str)
def test_two_stages(case: Case) -> None:
    accepted(case.program().host)


def mlp() -> HostProgram:
    mesh = DeviceMesh.arange(tp=2)
    with mf.FusionDefinition("mlp") as fd:
        x = fd.define_tensor([4, 6], mesh=mesh, layout={"tp": Shard(0)})
        w = fd.define_tensor([6, 6], mesh=mesh, layout={"tp": Shard(1)})
        h = fd.ops.relu(fd.ops.set(x).on(mesh, {}) @ w)
        fd.add_output(fd.ops.set(h @ w.permute(1, 0)).on(mesh, {"tp": Shard(0)}) + x)
        fd.add_output(fd.ops.set(fd.ops.sum(h, dims=[1])).on(mesh, {}))
    return mf.compile(fd).host


def test_cost_does_not_grow_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of ranks are looked at as often on 4096 ranks as on 4."""
    asked = {}
    original = Layout.box_at
    for n in (4, 4096):
        mesh = DeviceMesh.arange(tp=n)
        with mf.FusionDefinition("wide") as fd:
            x = fd.define_tensor([n, 2], mesh=mesh, layout={"tp": Shard(0)})
            fd.add_output(fd.ops.set(fd.ops.sum(x, dims=[0])).on(mesh, {}))
        host, count = mf.compile(fd).host, [0]

        def counted(*args: Any, count: list[int] = count) -> object:
            count[0] += 1
            return original(*args)

        monkeypatch.setattr(Layout, "box_at", counted)
        view_regions.whole.cache_clear()
        verify(host)
        monkeypatch.undo()
        asked[n] = count[0]
    assert asked[4] == asked[4096] > 0


@pytest.mark.parametrize(
    "parts", [((2, 0), (4, 0), (4, 1)), ((2, 0), (2, 1)), ((4, 3), (2, 0), (3, 2))]
)
def test_what_is_written_twice_counts_once(parts: tuple[tuple[int, int], ...]) -> None:
    """Chunks may overlap; what none of them has is not written."""
    lines, rows = [], set()
    for n, (chunks, index) in enumerate(parts):
        part = torch.arange(12).chunk(chunks)[index]
        rows.update(part.tolist())
        kind = f"f32[{len(part)},2] of [12,2] (x=R, chunk(0,{chunks},{index}))"
        lines += [
            f"%x{n}: {kind} = chunk(%x)",
            f"%y{n}: {kind} = chunk(%y)",
            f"%y{n} = neg(%x{n})",
            f"free %x{n}, %y{n}",
        ]
    head = ["input %x: f32[12,2] (x=R)", "%y: f32[12,2] (x=R) = alloc"]
    program = parse("\n".join([*head, *lines, "return %y"]), "mesh(x=1)")
    if len(rows) == 12:
        verify(program)
    else:
        with pytest.raises(mf.ProgramError, match=f"{(12 - len(rows)) * 2} "):
            verify(program)
