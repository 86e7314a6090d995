"""The verifier, which refuses wrong host programs before they run: see `check.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mdfuse.hir.verify.check import verify

__all__ = ["verify"]


def __getattr__(name: str) -> Any:
    """Import `verify` where it is asked for: passes over a rank's program use parts of this."""
    if name != "verify":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mdfuse.hir.verify.check import verify

    return verify
