"""Inductor itself, in processes of their own: it compiles once; what it needs may be missing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mdfuse import torch_private
from mdfuse.ir import routes
from mdfuse.plan import inductor
from mdfuse.plan.compiled_functions import AsTold, emptying

#: Runs a program of one launch; prints what it counted, and the calls that made libraries.
PROGRAM = """
import json, sys

calls = []
def note(event, arguments):
    if event == "subprocess.Popen" and "-shared" in arguments[1]:
        calls.append(arguments[1])
sys.addaudithook(note)

import torch
import torch._inductor.config
import mdfuse as mf
torch._inductor.config.cpp_cache_precompile_headers = False  # they pay with the second kernel
mesh = mf.DeviceMesh.arange(t=1)
with mf.FusionDefinition("norm") as fd:
    x, w = (fd.define_tensor(shape, mesh=mesh, layout={}) for shape in ([8, 64], [64]))
    fd.add_output(fd.ops.rms_norm(x, [64], w, 1e-6) + x)
program = mf.compile(fd, options=mf.Options(compile="always"))
x, w = torch.arange(512.0).view(8, 64) / 100, torch.arange(64.0) / 10
try:
    (got,) = program.run(x, w)
except mf.ProgramError as error:
    print(json.dumps(str(error)))
else:
    wide = x.double()
    want = wide / (wide * wide).mean(-1, keepdim=True).add(1e-6).sqrt() * w.double() + wide
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    print(json.dumps([vars(program._usual.fuser.tally), len(calls)]))
"""

#: What is counted where nothing is compiled.
NOTHING: dict[str, Any] = {"compiled": 0, "helped": 0, "in_files": 0, "shared": 0}
NOTHING |= {"unsaved": {}, "unreadable": {}, "unhelped": {}}


def run(folder: Path, **variables: str) -> Any:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), **variables}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=500, check=True
    )
    return json.loads(done.stdout)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    counts, calls = run(tmp_path)
    assert counts == {**NOTHING, "compiled": 1} and calls > 0
    counts, calls = run(tmp_path)
    assert counts == {**NOTHING, "in_files": 1} and calls == 0


def test_no_compiler(tmp_path: Path) -> None:
    told = run(tmp_path, CXX=str(tmp_path / "none"))
    assert told.startswith("launch fused0 of @norm cannot be compiled: "), told


def test_a_compiler_that_is_killed(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "g++ 12.2.0" && exit\nkill -9 $$\n'
    )
    compiler.chmod(0o755)
    told = run(tmp_path / "kept", CXX=str(compiler))
    assert told.startswith("launch fused0 of @norm cannot be compiled: "), told
    assert list((tmp_path / "kept").glob("mdfuse/*.bin")) == []


def test_fingerprints_tell_settings_apart() -> None:
    from torch._inductor import config

    plain = inductor.fingerprint(torch.device("cpu"))
    assert plain == inductor.fingerprint(torch.device("cpu"))
    with config.patch(max_autotune=not config.max_autotune):
        assert inductor.fingerprint(torch.device("cpu")) != plain


@pytest.mark.parametrize(("rows", "is_timed"), [(1 << 16, True), (1 << 17, False)])
def test_kernels_that_write_into_large_tensors_are_not_timed(rows: int, is_timed: bool) -> None:
    def step(x: torch.Tensor, by: torch.Tensor) -> list[torch.Tensor]:
        x.add_(by)
        return [by.sum()]

    forms: Any = [((n, 512), (512, 1), torch.float32, torch.device("cpu")) for n in (rows, 1)]
    found = inductor.traced(step, forms)
    assert ("triton.autotune_pointwise" not in inductor.settings_for(found)) is is_timed
    forms = [forms[1], forms[0]]  # it reads the large one alone
    assert not inductor.settings_for(inductor.traced(lambda x, by: [x.add_(1.0), by + 1.0], forms))


@pytest.mark.parametrize("form", ["linear", "batched", "column"])
@pytest.mark.parametrize("rows", [0, 1, 2, 16, 17])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_products_of_few_rows_are_tuned(form: str, rows: int, device: str) -> None:
    def shaped(*shape: int) -> Any:
        return shape, tuple(math.prod(shape[n + 1 :]) for n in range(len(shape))), torch.bfloat16

    shapes = {
        "linear": (shaped(1, rows, 8), shaped(40, 8)),
        "batched": (shaped(3, rows, 8), shaped(3, 40, 8)),
        "column": (shaped(40, 8), shaped(rows, 8)),
    }[form]
    forms: Any = [(*x, torch.device(device)) for x in shapes]
    graph = inductor.traced(lambda a, b: [a @ b.mT], forms)
    settings = inductor.settings_for(graph)
    is_combined = device == "cuda" and 1 <= rows <= 16
    tuned = {"coordinate_descent_tuning", "max_autotune_pointwise"} if rows == 1 else set()
    combined = {"combo_kernels", "combo_kernel_per_subkernel_blocks"}
    assert settings == dict.fromkeys(tuned | combined if is_combined else (), True)
    with inductor._configs()[0].patch(settings):
        pass  # torch has these settings


def test_no_folder_where_files_are_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert inductor.folder() == tmp_path
    with config.patch(force_disable_caches=True):
        assert inductor.folder() is None


def test_what_a_function_frees_while_it_runs(tmp_path: Path) -> None:
    """Torch's own convention, beneath what takes operands one by one: fresh, and out of a file."""
    form = (8, 8), (8, 1), torch.float32, torch.device("cpu")
    found = inductor.traced(lambda a, b: [(a * 2).sin() @ b, a + 1], [form, form])
    made = inductor.compiled(found)
    inductor.save(made, tmp_path / "made")
    for function in (made, inductor.load(tmp_path / "made")):
        taking = emptying(function)
        assert taking is not None
        a, b = torch.randn(2, 8, 8).unbind()
        given, seen, want = [a.clone(), b], [], [(a * 2).sin() @ b, a + 1]
        seen.append(weakref.ref(given[0]))
        got = taking(given)
        assert given == [] and seen[0]() is None
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y)
    assert emptying(torch.add) is None


def test_results_have_the_strides_that_they_were_told() -> None:
    x = torch.randn(2, 5)
    rows = [x[:, :3], x.t()[:1], x[:0, :3], x]
    told = (3, 1), (7, 5), (3, 1), (1, 2)
    found = AsTold(lambda: rows, told, (torch.float32,) * 4)()
    for n, (got, want) in enumerate(zip(found, rows, strict=True)):
        torch.testing.assert_close(got, want)
        assert (got is want) is (n in (1, 2))  # one row or none, so that nothing lies elsewhere
    assert [found[0].stride(), found[3].stride()] == [(3, 1), (1, 2)]


def test_results_have_the_dtypes_that_they_were_told() -> None:
    """Whether any number of uint8 is not 0 Inductor says in bool."""
    x, told = torch.tensor([[0, 3], [0, 0]], dtype=torch.uint8), (torch.uint8, torch.int64)
    results = [x.bool().any(0), torch.ones(3, dtype=torch.int64)]
    found = AsTold(lambda: results, ((1,), (1,)), told)()
    assert [y.dtype for y in found] == [*told] and torch.equal(found[0], x.any(0))
    assert found[1] is results[1]


def test_what_frees_its_operands_lays_out_its_results_too() -> None:
    form = (4, 4), (4, 1), torch.float32, torch.device("cpu")
    made = inductor.compiled(inductor.traced(lambda a, b: [a.sin() @ b, a + 1], [form, form]))
    taking = emptying(AsTold(made, ((1, 4), (4, 1)), (torch.float32,) * 2))
    assert taking is not None
    a, b = torch.randn(2, 4, 4).unbind()
    given, want = [a.clone(), b], [a.sin() @ b, a + 1]
    got = taking(given)
    assert given == [] and got[0].stride() == (1, 4)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)
    assert emptying(AsTold(torch.add, ((1,),), (torch.float32,))) is None


def test_what_is_times_zero_may_be_no_number() -> None:
    """An integer 0 would be what the compiler makes of it; of integers it may stay."""
    forms = [((3,), (1,), dtype, torch.device("cpu")) for dtype in (torch.float32, torch.int64)]

    def function(x: Any, i: Any) -> list[Any]:
        return [(x + 1) * 0, 0 * (x + 1), (x + 1) * False, i * 0]

    found = inductor.traced(function, forms).graph.graph
    products = found.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    assert [repr(node.args[1]) for node in products] == ["0.0", "0.0", "0.0", "0"]


class Grouped(TorchDispatchMode):
    """Notes the strides of rows and matrices that each grouped product takes."""

    def __init__(self) -> None:
        super().__init__()
        self.strides: list[list[tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mdfuse.grouped_mm.default:
            self.strides.append([x.stride() for x in args[:2]])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["rows", "matrices"])
def test_grouped_products_take_operands_as_they_were_traced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of a GPU stops the device where groups of transposed rows begin anywhere."""
    monkeypatch.setattr(torch_private, "has_grouped_kernel", lambda *_: True)
    t, k, n, e = 24, 16, 8, 4
    x = torch.randn(t, k).bfloat16()
    y = torch.randn(1, t, n).bfloat16()
    weight = torch.randn(1, e, n, k).bfloat16()
    ids = torch.randint(0, e, (t,))

    def rows(x: Any, y: Any, weight: Any, ids: Any) -> list[Any]:
        return [routes.multiply_grad(x, y.sigmoid() * y, ids, shape=(1, e, k, n))]

    def matrices(x: Any, y: Any, weight: Any, ids: Any) -> list[Any]:
        return [routes.multiply(x.sin(), (weight * 2).transpose(2, 3), ids)]

    function, given = {"rows": rows, "matrices": matrices}[name], (x, y, weight, ids)
    forms = [((*v.shape,), v.stride(), v.dtype, v.device) for v in given]
    compiled = inductor.compiled(inductor.traced(function, forms))
    with Grouped() as want:
        wanted = function(*given)
    with Grouped() as got:
        results = compiled(*given)
    # a compiled function rounds y.sigmoid() * y once, torch twice
    torch.testing.assert_close(results, wanted, rtol=2e-2, atol=1e-1)
    assert got.strides == want.strides and len(got.strides) == 1
