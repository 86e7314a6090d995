"""Waits for sends alone are moved up in what is written out, with frees of what is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.calls import ordered
from helpers.stream_cases import CASES

from mdfuse import hir
from mdfuse.hir.rank import early_waits
from mdfuse.hir.rank.pipelines import project
from mdfuse.hir.rank.unrolled import written_out


def rank_that_sends(*calls: str) -> list[str]:
    """What the sender does, without its chunks: `mul` makes what the next post sends."""
    local = written_out(project(hir.parse(ordered(*calls)), 0))
    return [f"{i.op} {i.reads[0]}" if i.op in ("wait", "free") else i.fn or i.op for i in local]


def test_a_sender_keeps_one_buffer_beside_the_one_it_makes() -> None:
    """The receiver reads what arrives behind the last post: F1 waits, on both ranks."""
    calls = [f"call {b}({k})" for k in range(3) for b in ("F0", "T01")]
    found = rank_that_sends(*calls, *(f"call F1({k})" for k in range(3)))
    each = ["chunk", "mul", "free x.i@{0}"]
    wanted = [
        *(x.format(0) for x in each), "post",
        *(x.format(1) for x in each), "wait c0@0", "free h@0", "post",
        *(x.format(2) for x in each), "wait c0@1", "free h@1", "post",
        "wait c0@2", "free h@2",
    ]  # fmt: skip
    assert [x for x in found if x != "return"] == wanted


def test_sends_one_right_behind_the_other_do_not_wait() -> None:
    calls = [f"call {b}({k})" for b in ("F0", "T01", "F1") for k in range(3)]
    found = rank_that_sends(*calls)
    posts = [n for n, x in enumerate(found) if x == "post"]
    assert posts == list(range(posts[0], posts[0] + 3))


def test_what_is_sent_is_freed_behind_the_wait_for_it() -> None:
    """Also the last of chunks that share memory, whose wait stays where it is."""
    local = written_out(project(CASES["gather_from_a_mesh"].compile(2).host, 0))
    done = set()
    sent = {i.outputs[0]: i.reads[0] for i in local.instructions if i.op == "post"}
    for i in local.instructions:
        done |= {sent[i.reads[0]]} if i.op == "wait" else set()
        if i.op == "free":
            assert done.issuperset({*sent.values()}.intersection(i.reads))
    assert len(done) == 3


def test_a_wait_does_not_move_into_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next send stands in one: the wait stays behind it."""
    monkeypatch.setattr(early_waits, "only_sends", lambda i: i.op == "post")

    def line(op: str, of: str = "", out: str = "") -> Any:
        return SimpleNamespace(op=op, reads=(of,), outputs=(out,) * bool(out), attrs={})

    before = [line("post", "a@0", "c@0"), line("mul", "x", "y")]
    grouped = [line("group_start"), line("post", "a@1", "c@1"), line("group_end")]
    places = {
        len(code): [s.to for s in early_waits._sends([*code, line("wait", "c@0")])]
        for code in (before + grouped, before + grouped[1:2])
    }
    assert places == {5: [5], 3: [2]}
