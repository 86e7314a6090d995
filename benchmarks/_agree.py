"""Contenders are compared only where they do the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from _ranks import Ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: What counts as work. Fake posts show as the copies that torch's fake process group makes.
_WORK = frozenset({"mm", "addmm", "add", "tanh", "gelu", "copy_", "clone", "cat"})


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that do work, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = op.overloadpacket.__name__
        if name in _WORK:
            self.found[name] += 1
        return op(*args, **(kwargs or {}))


def check(
    what: str,
    ranks: Ranks,
    contenders: Sequence[Callable[[], Tensor]],
    want: Tensor,
    counts: bool = True,
) -> None:
    """Run each contender twice and compare; the second run takes the prepared way.

    Args:
        what: for the message.
        ranks: without others (backend null), shapes and, with `counts`, the operators that ran
            are compared instead of values.
        contenders: each returns this rank's part of the result.
        want: what it should be, computed by plain torch in float64, on the CPU.
        counts: whether the contenders make the same calls.

    Raises:
        AssertionError: they do not do the same.
    """
    counts = counts and ranks.is_null
    counted_results = [(contender(), *_counted(contender, counts)) for contender in contenders]
    for first, second, _ in counted_results:
        for got in (first, second):
            _same_tensor(what, ranks, got, want)
    if len({str(sorted(count.items())) for _, _, count in counted_results}) > 1:
        raise AssertionError(f"{what}: calls differ: {[count for _, _, count in counted_results]}")


def _counted(contender: Callable[[], Tensor], counts: bool) -> tuple[Tensor, Counter[str]]:
    if not counts:
        return contender(), Counter()
    with _Count() as count:
        result = contender()
    return result, count.found


def _same_tensor(what: str, ranks: Ranks, got: Tensor, want: Tensor) -> None:
    if got.shape != want.shape:
        raise AssertionError(f"{what}: {tuple(got.shape)}, expected {tuple(want.shape)}")
    if ranks.is_null:
        return
    torch.testing.assert_close(
        got.cpu().double(), want, rtol=1e-4, atol=1e-4, msg=lambda text: f"{what}: {text}"
    )
