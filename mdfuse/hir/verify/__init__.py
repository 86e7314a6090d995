"""Is a host program right? Checked before it first runs, and after every pass in tests."""

from __future__ import annotations

from mdfuse.hir.verify.check import verify

__all__ = ["verify"]
