"""The verifier, which refuses wrong host programs before they run, and in tests after each pass."""

from __future__ import annotations

from mdfuse.hir.verify.check import verify

__all__ = ["verify"]
