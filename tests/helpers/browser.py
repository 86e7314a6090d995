"""Pages in a headless Chromium: what it measures of them, and what its console says."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

#: Nothing but the page: no GPU, no network, no files of a user.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--enable-logging=stderr", "--virtual-time-budget=20000",
)  # fmt: skip

#: Asks each frame for its measures, once all are there, and writes them where the dump has them.
_PROBE = """
const found = {};
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument, view = frame.contentWindow;
  found[frame.name] = measure(page, view);
}
document.getElementById("found").textContent = JSON.stringify(found);
"""


@dataclass(frozen=True)
class Opened:
    """What a browser found.

    Attributes:
        measures: name of a frame -> what the script measured there.
        console: lines of its console.
    """

    measures: dict[str, Any]
    console: list[str]


def opened(folder: Path, pages: dict[str, tuple[str, int]], measure: str, is_dark: bool) -> Opened:
    """Open pages in frames of their own and measure each of them.

    Args:
        folder: is empty.
        pages: name -> the page and the width of its window, in pixels.
        measure: a function `measure(page, view)` of a document and its window, in JavaScript.
        is_dark: the colours that the user wants.
    """
    frames = "".join(
        f'<iframe name="{name}" width="{width}" height="800" srcdoc="{escape(page)}"></iframe>'
        for name, (page, width) in pages.items()
    )
    harness = folder / "harness.html"
    harness.write_text(
        '<!doctype html><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<pre id="found"></pre>{frames}<script>{measure}'
        f'window.addEventListener("load", () => {{ {_PROBE} }});</script>',
        encoding="utf-8",
    )
    settings = (f"--user-data-dir={folder / 'user'}", "--window-size=1600,900")
    colours = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    done = subprocess.run(
        ["chromium", *FLAGS, *settings, colours, "--dump-dom", harness.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    shown = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert shown is not None and shown[1], f"no measures\n{done.stderr}"
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Opened(json.loads(unescape(shown[1])), console)
