"""Posts and waits of a listing lead to each other."""

from __future__ import annotations

from mdfuse import hir
from mdfuse.seeing.report.listing import rows


def test_each_post_leads_to_its_wait_and_back() -> None:
    program = hir.parse("""
host @two on mesh(tp=2) {
  input %x: f32[4] (tp=P(sum))
  %y: f32[4] (tp=R) = alloc
  %z: f32[4] (tp=R) = alloc
  %c0 = post allreduce[sum](%x) -> %y f32[4] (tp=P(sum)) => (tp=R) axis=tp
  %c1 = post allreduce[sum](%x) -> %z f32[4] (tp=P(sum)) => (tp=R) axis=tp
  wait %c1
  wait %c0
  return %y, %z
}""")
    found = rows(program)
    assert "\n".join(r.text for r in found) == str(program)
    by_anchor = {r.anchor: r for r in found if r.anchor}
    links = {
        r.text.strip().split(" (")[0].split("(")[0]: by_anchor[r.target].text.strip().split("(")[0]
        for r in found
        if r.target
    }
    assert links == {
        "%c0 = post allreduce[sum]": "wait %c0",
        "%c1 = post allreduce[sum]": "wait %c1",
        "wait %c0": "%c0 = post allreduce[sum]",
        "wait %c1": "%c1 = post allreduce[sum]",
    }
    assert [r.kind for r in found].count("post") == [r.kind for r in found].count("wait") == 2


def test_pieces_and_transfers_are_posts_and_waits_too() -> None:
    program = hir.parse("""
host @ring on mesh(tp=3) {
  input %x: f32[1] of [3] (tp=S0)
  %y: f32[1] of [3] (tp=S0) = alloc
  group_start
  %c0 = send(%x, to=(coord(tp) + 1) mod 3, axis=tp)
  %c1 = recv(%y, from=(coord(tp) - 1) mod 3, axis=tp)
  group_end
  wait %c0
  wait %c1
  return %y
}""")
    assert [r.kind for r in rows(program) if r.kind] == ["post", "post", "wait", "wait"]
