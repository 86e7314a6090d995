"""Rotary frequencies that follow the length of a text: they stay as they are for short texts.

Some models turn positions otherwise in texts that are longer than those they were trained on
("longrope", "dynamic"), and look at the longest text of a batch. Requests would then change each
other's tokens. An engine serves texts up to that length, with the frequencies of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

from mdfuse.errors import DefinitionError, counted


def longest(module: nn.Module) -> int | None:
    """Return how long texts may be before frequencies change; None: they do not."""
    limits = [limit for m in module.modules() for _, _, limit in _following(m)]
    return min(limits, default=None)


def check_context(module: nn.Module, context: int) -> None:
    """Raise DefinitionError for a context in which frequencies would change."""
    limit = longest(module)
    if limit is not None and context > limit:
        raise DefinitionError(
            f"a context of {counted(context, 'token')}",
            because=f"{type(module).__name__} turns all positions otherwise in texts of more than "
            f"{limit:,}, those that are in caches, too",
            hint=f"generate(..., context={limit})",
        )


@contextmanager
def fixed(module: nn.Module) -> Iterator[None]:
    """Let frequencies meanwhile be those of short texts, whatever the model has computed before."""
    with ExitStack() as stack:
        for m in module.modules():
            following = [*_following(m)]
            if not following:
                continue
            kinds: Any = m.rope_type
            plain = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
            stack.enter_context(patch.object(m, "rope_type", plain))
            for prefix, _, _ in following:
                original = getattr(m, f"{prefix}original_inv_freq")
                stack.enter_context(patch.dict(m._buffers, {f"{prefix}inv_freq": original}))
        yield


def _following(m: Any) -> Iterator[tuple[str, str, int]]:
    """Yield the prefix of attributes, the type, and the longest text, of each set that follows."""
    kinds = getattr(m, "rope_type", None)
    sets = kinds if isinstance(kinds, dict) else {None: kinds}
    for layers, kind in sets.items():
        prefix = f"{layers}_" if layers else ""
        if kind == "longrope":
            said = m.config.rope_parameters
            limit = (said[layers] if layers else said)["original_max_position_embeddings"]
            yield prefix, kind, int(limit)
        elif isinstance(kind, str) and "dynamic" in kind:
            yield prefix, kind, int(m.original_max_seq_len)
