"""Numbers as text for people."""

from __future__ import annotations


def size_text(n: int) -> str:
    """Return a number of bytes as text for people: `1536` -> "1.5 KiB".

    >>> size_text(1000), size_text(1536), size_text(1020 << 10), size_text(5 << 30)
    ('1000 B', '1.5 KiB', '0.996 MiB', '5 GiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(n.bit_length() - 1, 0) // 10, len(units) - 1)
    if 0 < power < len(units) - 1 and n >= 999.5 * 1024**power:
        power += 1
    return f"{n} B" if power == 0 else f"{n / 1024**power:.3g} {units[power]}"


def time_text(seconds: float) -> str:
    """Return seconds as text for people: `0.0015` -> "1.5 ms".

    >>> time_text(2), time_text(1003), time_text(0.0015), time_text(2e-5), time_text(2.54e-6)
    ('2.00 s', '1003 s', '1.5 ms', '20 µs', '2.5 µs')
    >>> time_text(2.2e-8)
    '22 ns'
    """
    if not seconds:
        return "0 s"
    if seconds >= 1:
        return f"{seconds:.{2 if seconds < 100 else 0}f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 1e-7:
        return f"{seconds * 1e9:.2g} ns"
    return f"{round(seconds * 1e6, 1 if seconds < 1e-5 else None):g} µs"
