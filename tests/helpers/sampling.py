"""How much of a sweep runs whose cases repeat each other: a sample of them, with --whole all."""

from __future__ import annotations

_is_whole = False


def take_all(is_whole: bool) -> None:
    """Say, before tests are collected, whether sweeps are run as a whole."""
    global _is_whole
    _is_whole = is_whole


def is_whole() -> bool:
    return _is_whole


def of(whole: int, sample: int) -> int:
    """How many cases are run: all, or a sample."""
    return whole if _is_whole else sample
