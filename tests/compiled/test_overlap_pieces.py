"""What a ring sends is computed in pieces where a table says that it gains, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.overlaps import CASES, in_forms, prepared, program

import mdfuse as mf
from mdfuse import DeviceMesh, Options, Shard, hir_lowering
from mdfuse.compiled.overlap import find
from mdfuse.passes import overlap
from mdfuse.seeing import Costs, Link
from mdfuse.seeing.timeline import timeline

PAIR = DeviceMesh.arange(tp=2)
AUTO = Options(overlap="auto", backend="symmetric", costs="h100")
PIECES = "what is sent computed in"


def gathered(work: str, columns: int, *, rows: int = 8192, second: bool = False) -> mf.Program:
    """A product of what is computed and gathered, as costs of an H100 choose to compute it."""
    with mf.FusionDefinition("gathered") as fd:
        x = fd.define_tensor([rows, 8192], torch.bfloat16, PAIR, {"tp": Shard(0)}, name="x")
        w = fd.define_tensor([8192, columns], torch.bfloat16, PAIR, {"tp": Shard(1)}, name="w")
        match work:
            case "halved":
                t = x * 0.5
            case "normed":
                t = F.rms_norm(x, (8192,))
            case "added":
                t = F.gelu(x + 1.0) * 2.0
            case "none":
                t = x
        fd.add_output((t @ w).on(PAIR, {"tp": Shard(1)}))
        if second:
            fd.add_output(t)
    return mf.compile(fd, AUTO)


def told(found: mf.Program) -> str:
    return next(x for x in found.explain().splitlines() if "overlap: %" in x)


@pytest.mark.parametrize("work", ["halved", "normed", "added"])
def test_narrow_products_wait_for_the_first_piece_alone(work: str) -> None:
    """Short products behind a long transfer, which begins with the first piece."""
    found = gathered(work, 2560)
    first, *_ = (i for i in found.host if i.op == "for")
    pieces = first.kwargs["stop"]
    assert f"{2 * pieces} chunks, a ring along tp, {PIECES} {pieces} pieces" in told(found)
    assert pieces > 1 and not any(j.op == "set_stream" for j in first.body)
    assert f"streams: {pieces} chunks" in found.explain()
    assert "on the caller's stream" in found.explain()


@pytest.mark.parametrize(
    ("work", "columns", "more"),
    [
        ("halved", 14336, {}),  # the products take longer than what moves
        ("none", 2560, {}),  # the caller's
        ("halved", 2560, {"rows": 8190}),  # pieces would be of two lengths
        ("halved", 2560, {"second": True}),  # an output lies in no symmetric memory
    ],
)
def test_what_is_computed_at_once(work: str, columns: int, more: dict[str, int]) -> None:
    found = gathered(work, columns, **more)  # type: ignore[arg-type]
    assert PIECES not in told(found) and "chunks" in told(found)


def test_only_out_of_symmetric_memory() -> None:
    """Elsewhere the first post would wait for all the others."""
    with mf.FusionDefinition("gathered") as fd:
        x = fd.define_tensor([8192, 8192], torch.bfloat16, PAIR, {"tp": Shard(0)})
        w = fd.define_tensor([8192, 2560], torch.bfloat16, PAIR, {"tp": Shard(1)})
        fd.add_output(((x * 0.5) @ w).on(PAIR, {"tp": Shard(1)}))
    assert PIECES not in told(mf.compile(fd, replace(AUTO, backend="nccl")))


#: Launches that take nothing, or longer than all else; links that are slower than work, or not.
TABLES = ((0.0, 0.0, 1e4), (0.0, 1e-5, 1e5), (1e-6, 1e-5, 1e4), (1e-6, 0.0, 1e6), (1e-3, 0.0, 1e5))


def test_the_choice_is_the_best_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all forms of a program, each of which some table chooses."""
    fusion = prepared(CASES["computed"], PAIR, 16)
    forms = [(form, program(x, AUTO).host) for _, form, x in in_forms(fusion)]
    plain = hir_lowering.lower(CASES["computed"].definition(PAIR, 16).fusion, options=AUTO)
    chosen = set()
    for launch, latency, bandwidth in TABLES:
        links = {"*": Link(latency, bandwidth)}
        costs = Costs(launch_s=launch, flops=3e5, bandwidth=1e5, links=links)
        monkeypatch.setattr("mdfuse.compiled.overlap._table", lambda _, c=costs: (c, 0.0, []))
        lowered, found = find(plain, None, AUTO)
        seconds, *others = (timeline(x, costs).seconds for x in (lowered[-1], plain[-1]))
        assert seconds <= others[0]
        assert seconds <= 1.02 * min(timeline(x, costs).seconds for _, x in forms)
        chosen.add(PIECES in " ".join(found.told))
    assert chosen == {True, False}


def test_forms_say_what_is_cut() -> None:
    """The norm's operand is read by others, too: it stays as it is; a weight is read as a whole."""
    with mf.FusionDefinition("two") as fd:
        x = fd.define_tensor([32, 6], mesh=PAIR, layout={"tp": Shard(0)}, name="x")
        g = fd.define_tensor([6], mesh=PAIR, name="g")
        w = fd.define_tensor([6, 8], mesh=PAIR, layout={"tp": Shard(1)}, name="w")
        h = x + 1.0
        y = F.rms_norm(h, (6,), g * 2.0) * 3.0
        fd.add_output((y @ w).on(PAIR, {"tp": Shard(1)}))
        fd.add_output(h * 2.0)
    fusion = hir_lowering.prepare(fd.fusion)
    (window,) = overlap.windows(fusion)
    found = [overlap.in_pieces(fusion, window, form) for form in overlap.forms(fusion, window)]
    made = [x for x in found if x is not None]
    assert [(form.chunks, form.before) for form, _ in made] == [(4, 2), (8, 4)]
    for _, whole in made:
        assert [e.op for e in whole.exprs] == ["rms_norm", "mul", "set", "matmul"]
