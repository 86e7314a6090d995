"""Lines of the module in what is recorded, and in errors."""

from __future__ import annotations

import linecache
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.errors import DefinitionError, Source, user_source
from mdfuse.frontend.importing import capture
from mdfuse.frontend.importing.module_lines import called_at, line_of

HERE = Path(__file__)


def test_a_call_comes_from_the_line() -> None:
    line = next(n for n, text in enumerate(HERE.read_text().splitlines(), 1) if "MARK" in text)
    source = called_at(Source(str(HERE), line), "y", user_source)()
    assert source == Source(str(HERE), line)
    with mf.FusionDefinition("lines") as fd:
        x = fd.define_tensor([4])
        total = called_at(Source(str(HERE), line), "total", mf.ops.sum)(x)
        fd.add_output(total)
    (expr,) = fd.fusion.exprs
    assert expr.output == "total" and expr.source == Source(str(HERE), line)
    assert linecache.getline(str(HERE), line).strip() in Source(str(HERE), line).quote()


def test_an_error_quotes_the_line() -> None:
    first = HERE.read_text().splitlines()[0]
    with mf.FusionDefinition("lines") as fd:
        x = fd.define_tensor([4], name="x")
        with pytest.raises(DefinitionError) as error:
            called_at(Source(str(HERE), 1), "t", mf.ops.unsqueeze)(x, 7)
        fd.add_output(x)
    assert error.value.where == (f"test_module_lines.py:1   {first}",)


def test_the_innermost_line_that_is_not_torch_s() -> None:
    torch_line = f'  File "{torch.__file__}", line 7, in f\n    text\n'
    own = f'  File "{mf.__file__}", line 3, in f\n'
    stack = f'  File "/home/model.py", line 5, in forward\n    self.linear(x)\n{torch_line}'
    assert line_of(own + stack) == Source("/home/model.py", 5)
    found = line_of(own + torch_line)  # of a module of torch's own
    assert found == Source("torch/__init__.py", 7)
    assert line_of(own) is None and line_of(None) is None and line_of("") is None


def test_lines_of_torch_s_own_modules_can_be_read() -> None:
    model = mf.from_torch(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        (torch.zeros(2, 3, 8),), mesh=DeviceMesh.arange(tp=2),
    )  # fmt: skip
    sources = [e.source for e in model.fusion.exprs]
    assert all(s is not None and s.file.startswith("torch/nn/modules/") for s in sources)
    assert any(s is not None and "self._ff_block(x)" in s.quote() for s in sources)


# MARK


def test_lines_that_torch_notes_are_those_of_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def traces() -> list[str | None]:
        nodes = capture.capture(module, (torch.zeros(2, 3, 4),)).graph.graph.nodes
        return [node.meta.get("stack_trace") for node in nodes]

    once = traces()
    monkeypatch.setattr(capture, "frames_once", nullcontext)
    assert once == traces() and any("return F.linear(" in (text or "") for text in once)
