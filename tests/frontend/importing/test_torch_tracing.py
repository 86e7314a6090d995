"""What an export notes of each operation is that of torch's own way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from mdfuse.frontend.importing import capture, torch_tracing


class Layers(nn.Module):
    """Composite operations on operands of the same forms, in states that change their results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.RMSNorm(8)
        self.c.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute them."""
        y = self.a(x)
        y += self.b(x)  # into a result that torch did not compute
        z = torch.ops.aten.linear.default(x, self.a.weight, self.a.bias)
        with torch.no_grad():
            frozen = self.b(x)
        with torch.autocast("cpu", torch.bfloat16):
            low = self.a(x) + self.b(x)
        heads = [w.unflatten(-1, (2, 4)).transpose(1, 2) for w in (y, z, self.c(x))]
        both = [F.scaled_dot_product_attention(*heads, is_causal=way) for way in (True, True)]
        rows = [w.transpose(1, 2).reshape(2, 3, 8) for w in both]  # a copy
        views = [y.reshape(6, 8), z.reshape(6, 8)]  # none
        views[0].mul_(2)
        kept = [F.dropout(w, 0.5, training=way) for w in (y, z) for way in (False, True)]
        asked = [w.requires_grad for w in (y, self.b(x), frozen, low, self.c(x), both[1])]
        assert asked == [True, True, False, True, False, True]
        return low, *rows, *views, *kept, self.norm(y), self.norm(z), frozen


def noted(module: nn.Module, x: Tensor) -> list[Any]:
    """The nodes of a capture, with what is noted of each."""
    graph = capture.capture(module, (x,)).graph.graph
    values = [(node, node.meta.get("val")) for node in graph.nodes]
    forms = [(v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else v for _, v in values]
    return [(n.format_node(), f) for (n, _), f in zip(values, forms, strict=True)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_forms_are_those_of_torchs_own_way(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Layers().to(device), torch.zeros(2, 3, 8, device=device)
    once = noted(module, x)
    monkeypatch.setattr(capture, "forms_once", nullcontext)
    assert str(once) == str(noted(module, x))
    assert sum("linear.default" in str(line) for line in once) == 7


def test_a_form_is_computed_once_for_operands_of_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, is_new = list[Any](), torch_tracing._is_new

    def counted(x: Any, operands: Any) -> bool:
        asked.append(x)
        return is_new(x, operands)

    monkeypatch.setattr(torch_tracing, "_is_new", counted)
    capture.capture(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))), (torch.zeros(3, 4),))
    few = len(asked)
    capture.capture(nn.Sequential(*(nn.Linear(4, 4) for _ in range(9))), (torch.zeros(3, 4),))
    assert few > 0 and len(asked) == 2 * few


def test_an_operation_that_fails_says_so_each_time() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return F.linear(x, x)
            except RuntimeError:
                return F.linear(x, x)

    with pytest.raises(Exception, match="cannot be exported"):
        capture.capture(Wrong(), (torch.zeros(2, 3, 4, 5),))
    assert torch_tracing.OpOverload.__call__.__name__ == "__call__"


def test_forms_of_each_fake_mode_are_its_own() -> None:
    """Another thread may trace meanwhile, or the module itself."""

    def is_own() -> bool:
        with FakeTensorMode() as mode:
            x, w, b = torch.empty(2, 3, 4), torch.empty(4, 4), torch.empty(4)
            return torch.ops.aten.linear.default(x, w, b).fake_mode is mode

    with torch_tracing.forms_once(), ThreadPoolExecutor(1) as pool:
        others = [pool.submit(is_own) for _ in range(2)]
        assert [is_own(), is_own(), *(x.result() for x in others)] == [True] * 4


def test_exports_of_several_threads_take_turns() -> None:
    plain = torch_tracing.OpOverload.__call__, torch_tracing.proxy.CapturedTraceback
    modules = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        lines = list(pool.map(lambda m: str(noted(m, torch.zeros(3, 4))), modules))
    assert lines == lines[:1] * 4
    assert plain == (torch_tracing.OpOverload.__call__, torch_tracing.proxy.CapturedTraceback)
