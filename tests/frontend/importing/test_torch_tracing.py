"""What an export notes of each operation is that of torch's own way."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from mdfuse.frontend.importing import capture, torch_tracing
from mdfuse.frontend.importing.module_lines import line_of


class Layers(nn.Module):
    """Composite operations on operands of the same forms, in states that change their results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.RMSNorm(8)
        self.running = nn.BatchNorm1d(3)
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
        scaled = [w * n for w in (y, z) for n in (0.0, -0.0, 1, True, 1.0)]
        products = [v * w for v, w in ((y, z), (z, z), (z, y), (y, y))]
        cut = [w[:, 1:n] for w in (y, z) for n in (2, 3)]  # views, which are written
        cut[0].add_(1)
        parts = [part for w in (y, z, y.float()) for part in w.chunk(2, -1)]
        even = [self.running(w) for w in (y, z)]
        normed = self.norm(y), self.norm(z), *(self.norm(x).unsqueeze_(0) for _ in range(2))
        return low, *rows, *views, *kept, *scaled, *products, *cut, *parts, *even, *normed, frozen


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
    monkeypatch.setattr(capture, "CallsOnce", nullcontext)
    assert str(once) == str(noted(module, x))
    assert sum("linear.default" in str(line) for line in once) == 7


def test_a_call_is_traced_once_for_operands_of_one_form(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, traced = list[Any](), torch_tracing._traced

    def counted(*args: Any) -> Any:
        asked.append(args)
        return traced(*args)

    monkeypatch.setattr(torch_tracing, "_traced", counted)
    capture.capture(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))), (torch.zeros(3, 4),))
    few = len(asked)
    capture.capture(nn.Sequential(*(nn.Linear(4, 4) for _ in range(9))), (torch.zeros(3, 4),))
    assert few > 0 and len(asked) == 2 * few


def test_copies_of_nodes_are_of_their_own_module_and_line() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    graph = capture.capture(module, (torch.zeros(3, 4),)).graph.graph
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    owners = [[*n.meta["nn_module_stack"].values()][-1][0] for n in nodes]
    assert owners == [f"module.{n}.{part}" for n in range(3) for part in range(2)]
    lines = [str(line_of(n.meta["stack_trace"])) for n in nodes]
    assert lines == lines[:2] * 3


def test_a_function_of_the_users_is_traced_each_time() -> None:
    """What it does may depend on more than its operands."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def scale(self, x: Tensor) -> Tensor:
            if has_torch_function_unary(x):
                y: Tensor = handle_torch_function(self.scale, (x,), x)
                return y
            self.calls += 1
            return x * self.calls

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(self.scale(self.scale(x)))

    graph = capture.capture(Counting(), (torch.zeros(3, 4),)).graph.graph
    factors = [n.args[1] for n in graph.nodes if n.op == "call_function"]
    assert factors == [1, 2, 3]


def test_an_operation_that_fails_says_so_each_time() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return F.linear(x, x)
            except RuntimeError:
                return F.linear(x, x)

    with pytest.raises(Exception, match="cannot be exported"):
        capture.capture(Wrong(), (torch.zeros(2, 3, 4, 5),))


def test_exports_of_several_threads_take_turns() -> None:
    plain = torch_tracing.proxy.CapturedTraceback
    modules = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        lines = list(pool.map(lambda m: str(noted(m, torch.zeros(3, 4))), modules))
    assert lines == lines[:1] * 4
    assert plain is torch_tracing.proxy.CapturedTraceback
