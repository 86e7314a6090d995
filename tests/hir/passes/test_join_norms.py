"""Norms behind small sums over ranks are cut off, where one kernel may compute both."""

from __future__ import annotations

import pytest
import torch

import mdfuse as mf
from mdfuse import hir
from mdfuse.config import Options
from mdfuse.hir.passes import join_norms
from mdfuse.hir.program import HostProgram
from mdfuse.hir.verify.check import verify

OPTIONS = Options(backend="gloo, tp=symmetric", compile="always")

TEXT = """
host @layer on mesh(tp=2) {
  input %x: bf16[4,8] (tp=P(sum))
  input %r: bf16[4,8] (tp=R)
  input %w: bf16[8] (tp=R)
  input %v: bf16[3,8] of [6,8] (tp=S0)
  %s: bf16[4,8] (tp=R) = alloc
  %c = post allreduce[sum](%x) -> %s bf16[4,8] (tp=P(sum)) => (tp=R) axis=tp backend=symmetric
  wait %c
  launch fused0(%s, %r, %w, %v) -> %t, %q {
    %f: bf16[8] (tp=R) = mul(%w, 2.0)
    %t: bf16[4,8] (tp=R) = add(%s, %r)
    %y: bf16[4,8] (tp=R) = rms_norm(%t, %w, normalized_shape=[8], eps=1e-06)
    %z: bf16[4,8] (tp=R) = mul(%y, %f)
    %q: bf16[4,3] of [4,6] (tp=S1) = linear(%z, %v)
  }
  launch fused1(%q, %t) -> %o, %u {
    %o: bf16[4,3] of [4,6] (tp=S1) = exp(%q)
    %u: bf16[4,8] (tp=R) = exp(%t)
  }
  return %o, %u
}
"""


def passed(text: str, options: Options = OPTIONS) -> HostProgram:
    program = hir.parse(text)
    verify(program)
    done = join_norms.run(program, options)
    verify(done)
    assert hir.parse(str(done)) == done
    return done


def units(host: HostProgram) -> list[tuple[str, list[str], tuple[str, ...]]]:
    return [(i.fn, [j.fn for j in i.body], i.outputs) for i in host.walk() if i.op == "launch"]


def test_the_norm_is_cut_off() -> None:
    host = passed(TEXT)
    (post,) = (i for i in host if i.op == "post")
    assert post.kwargs == {"then": "row_norm"}
    assert units(host) == [
        ("fused0", ["add", "rms_norm"], ("t", "y")),
        ("fused1", ["mul", "mul", "linear"], ("q",)),
        ("fused2", ["exp", "exp"], ("o", "u")),
    ]
    assert [i.op for i in host][:5] == ["alloc", "post", "wait", "launch", "launch"]


#: What changes in the text, and options, where nothing is cut.
STAYS: dict[str, tuple[tuple[str, str], ...]] = {
    "another sum": (("allreduce[sum]", "allreduce[max]"), ("P(sum)", "P(max)")),
    "another backend": ((" backend=symmetric", ""),),
    "a weight from inside": (("rms_norm(%t, %w,", "rms_norm(%t, %f,"),),
    "work in between": (("  wait %c\n", "  wait %c\n  %k: bf16[8] (tp=R) = exp(%w)\n"),),
    "the sum is read": (("= mul(%y, %f)", "= mul(%y, %s)"),),
    "rows in f64": (("bf16", "f64"),),
    "too many rows": (("4,", "512,"),),
    "an order": (("add(%s, %r)", "add(%s, %r) order=[1,0]"),),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name: str) -> None:
    text = TEXT
    for old, new in STAYS[name]:
        assert old in text
        text = text.replace(old, new)
    host = passed(text)
    assert host == hir.parse(text) and "then=" not in str(host)


def test_buffers_that_the_kernel_writes_are_made_before_the_post() -> None:
    """An arena has room for them from there on; what else is made behind the post stays there."""
    text = TEXT.replace(
        "  wait %c\n",
        "  %t: bf16[4,8] (tp=R) = alloc(memory=symmetric)\n  wait %c\n"
        "  %k: bf16[4,8] (tp=R) = alloc\n",
    ).replace("    %t: bf16[4,8] (tp=R) = add", "    %t = add")
    code = [(i.op, i.outputs) for i in passed(text)][:6]
    made = [("alloc", ("s",)), ("alloc", ("t",)), ("post", ("c",)), ("wait", ())]
    assert code == [*made, ("alloc", ("k",)), ("launch", ("t", "y"))]


def test_a_name_that_is_freed_in_between_stays_another_value() -> None:
    text = TEXT.replace(
        "  %s: bf16[4,8] (tp=R) = alloc\n",
        "  %t: bf16[4,8] (tp=R) = exp(%r)\n  %s: bf16[4,8] (tp=R) = alloc\n",
    ).replace("  wait %c\n", "  wait %c\n  free %t\n  %t = alloc\n")
    program = hir.parse(text.replace("    %t: bf16[4,8] (tp=R) = add", "    %t = add"))
    assert join_norms.run(program, OPTIONS) == program


def test_options_that_leave_it() -> None:
    apart = Options(backend=OPTIONS.backend, compile="always", sums="apart")
    for options in (apart, Options(backend=OPTIONS.backend), Options(compile="always")):
        assert passed(TEXT, options) == hir.parse(TEXT)
    usual = Options(backend="symmetric", compile="always")
    assert "then=row_norm" in str(passed(TEXT.replace(" backend=symmetric", ""), usual))


def test_what_the_norm_reads_is_not_written_before_it() -> None:
    """The residual is written over in the unit, before the norm reads it: the order stays."""
    text = TEXT.replace(
        "  %s: bf16[4,8] (tp=R) = alloc\n",
        "  alias %k: bf16[4,8] (tp=R) = %r\n  %s: bf16[4,8] (tp=R) = alloc\n",
    )
    written = text.replace("%f: bf16[8] (tp=R) = mul(%w, 2.0)", "%k = mul(%r, 2.0)")
    written = written.replace("mul(%y, %f)", "mul(%y, 3.0)").replace(
        "-> %t, %q {", "-> %t, %q, %k {"
    )
    host = passed(written)
    assert "then=" not in str(host)


def test_a_width_that_runs_choose_stays() -> None:
    with mf.FusionDefinition("open") as fd:
        mesh = mf.DeviceMesh.arange(tp=2)
        x = fd.define_tensor([4, -1], torch.float32, mesh, {"tp": mf.Partial("sum")})
        r = fd.define_tensor([4, -1], torch.float32, mesh)
        total = fd.ops.set(x).on(mesh, {}) + r
        fd.add_output(total * (total.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt())
    assert "then=" not in str(mf.compile(fd, OPTIONS).host)
