"""Tests in a browser: left out, with the reason, where there is none."""

from __future__ import annotations

import shutil

from helpers.left_out import hooks

pytest_collection_modifyitems, pytest_terminal_summary = hooks(
    "browser",
    lambda: shutil.which("chromium"),
    "tests in a browser are left out: no chromium: "
    "apt-get install --no-install-recommends chromium",
)
