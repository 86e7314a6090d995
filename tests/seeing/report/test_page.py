"""The page of a report is whole, needs nothing else, and says what the program says."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser

import pytest
from helpers.example_files import SMALL, example

import mdfuse as mf
from mdfuse import DeviceMesh, hir
from mdfuse.hir.program import HostProgram
from mdfuse.seeing import UNIT, Event
from mdfuse.seeing.rank_classes import rank_classes
from mdfuse.seeing.report.page import Subject, communications, html, values_of

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Reads a page; every tag is closed where it belongs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.links: set[str] = set()
        self.loads: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.update([given["id"]] if given.get("id") else [])
        if tag == "a":
            self.links.add(given["href"] or "")
        self.loads += [f"{tag} {k}" for k in given if k in ("src", "data", "srcset", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def subject(program: mf.Program, definition: str = "", **more: object) -> Subject:
    given = {
        "host": program.host,
        "definition": definition,
        "segments": [str(s) for s in program.segments],
        "explained": program.explain(),
        "values": values_of(program.fusion),
        "costs": UNIT,
    }
    return Subject(**{**given, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SMALL)
def test_the_page_is_whole_and_needs_nothing_else(name: str) -> None:
    fd, _ = SMALL[name][0](DeviceMesh.arange(tp=4))
    program = mf.compile(fd)
    text = html(subject(program, str(fd)))
    page = Page(text)
    assert set(page.ids.values()) == {1}, "anchors are unique"
    assert page.links and all(x.startswith("#") and x[1:] in page.ids for x in page.links)
    assert page.loads == []
    addresses = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in text and "url(" not in text
    shown = "".join(page.texts)
    assert str(fd) in shown and program.explain() in shown
    for i in program.host.walk():
        if i.comm is not None:
            assert i.comm.kind in shown


def test_what_is_seen_first_is_how_much_there_is() -> None:
    fd, _ = SMALL["tp_mlp"][0](DeviceMesh.arange(tp=4))
    program = mf.compile(fd)
    text = html(subject(program))
    facts = re.findall("<div><b>(.*?)</b><span>(.*?)</span></div>", text)
    assert facts[:3] == [
        ("4", "ranks"),
        (f"{len(program.host)}", f"instructions, {len(program.segments)} segments"),
        ("1", "communication per run"),
    ]
    of = ["received per rank, at most", "peak memory of a rank", f"predicted: {UNIT.name}"]
    assert [x for _, x in facts[3:]] == of


def test_a_step_of_training_is_a_page_below_a_megabyte() -> None:
    fd, _ = example("train_llama").build(DeviceMesh.arange(dp=2, tp=2))
    text = html(subject(mf.compile(fd), str(fd)))
    Page(text)
    assert len(text.encode()) < 1_500_000


def test_texts_are_escaped() -> None:
    fd, _ = SMALL["hello_mesh"][0](DeviceMesh.arange(tp=2))
    measured = [Event(0, "host", "<script>alert(1)</script>", 0, 1000)]
    text = html(subject(mf.compile(fd), "<b>&", explained="a < b", measured=measured))
    page = Page(text)
    assert "<b>&" in "".join(page.texts) and text.count("<script>") == 1
    assert "&lt;script&gt;alert(1)" in text and ">measured<" in text


def test_without_communication_it_says_so() -> None:
    with mf.FusionDefinition("alone") as fd:
        fd.add_output(fd.define_tensor([4], mesh=DeviceMesh([0])) * 2)
    assert "None: every operand is where it is needed." in html(subject(mf.compile(fd)))


# -- the table of communications -------------------------------------------------------------------


def table(program: HostProgram) -> list[tuple[str, str, int, int, int | None, str]]:
    found = communications(program, rank_classes(program))
    return [(t.kind, t.where, t.count, t.nbytes, t.least, t.ratio) for t in found]


def test_bytes_beside_the_bound() -> None:
    """An uneven all-gather pads: 3 + 3 rows for the rank that has 1, where 6 of 7 are lacking."""
    program = hir.parse("""
host @table on mesh(tp=4) {
  input %x: f32[8] (tp=P(sum))
  %a: f32[8] (tp=R) = alloc
  %c0 = post allreduce[sum](%x) -> %a f32[8] (tp=P(sum)) => (tp=R) axis=tp
  wait %c0
  %c1 = post allreduce[sum](%x) -> %a f32[8] (tp=P(sum)) => (tp=R) axis=tp
  wait %c1
  return %a
}""")
    assert table(program) == [("Allreduce (sum)", "tp", 2, 48, 48, "1.00")]
    mesh = DeviceMesh.arange(tp=3)
    with mf.FusionDefinition("uneven") as fd:
        x = fd.define_tensor([7], mesh=mesh, layout={"tp": mf.Shard(0)})
        fd.add_output(fd.ops.set(x).on(mesh, {}))
    assert table(mf.compile(fd).host) == [("Allgather", "tp", 1, 24, 24, "1.00")]
    with mf.FusionDefinition("short") as fd:
        x = fd.define_tensor([4], mesh=mesh, layout={"tp": mf.Shard(0)})
        fd.add_output(fd.ops.set(x).on(mesh, {}))
    assert table(mf.compile(fd).host) == [("Allgather", "tp", 1, 16, 16, "1.00")]


def test_chunks_count_one_by_one_and_have_no_bound() -> None:
    fd, _ = SMALL["overlap"][0](DeviceMesh.arange(tp=4))
    program = mf.compile(fd)
    rows = table(program.host)
    found = communications(program.host, rank_classes(program.host))
    assert sum(t.total for t in found) == max(program.bytes_received(r) for r in range(4))
    assert all(least is None and ratio == "–" for *_, least, ratio in rows)


def test_a_pipeline_shows_its_schedule_and_what_each_rank_group_holds() -> None:
    fd, _ = SMALL["two_stages"][0](DeviceMesh.arange(tp=4))
    program = mf.compile(fd)
    made = mf.Schedule.named("forward", stages=2, microbatches=4)
    schedule = mf.Schedule(made.rows, name="forward", meshes=("m0", "m1"))
    page = Page(html(subject(program, schedule=schedule)))
    assert page.ids["schedule"] == 1 and "#schedule" in page.links
    shown = " ".join(page.texts)
    assert schedule.timed().svg().count("<rect") == html(subject(program, schedule=schedule)).count(
        'class="mf-slot"'
    )
    assert "1F3: forward of stage 1 for microbatch 3, 4 to 5" in shown
    assert "schedule" not in Page(html(subject(program))).ids
