"""On which addresses this process listens, as the kernel tells."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path

_LISTENS = "0A"


def listening() -> set[tuple[str, int]]:
    """Addresses and ports of this process's TCP sockets that listen."""
    links = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
    own = {found.group(1) for link in links if (found := re.match(r"socket:\[(\d+)\]", link))}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]
    ]
    return {_address(row[1]) for row in rows if row[3] == _LISTENS and row[9] in own}


def _address(text: str) -> tuple[str, int]:
    """The kernel prints words of four bytes, each in this machine's order."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[n : n + 8])[::-1] for n in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)
