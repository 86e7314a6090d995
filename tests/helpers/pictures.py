"""The pictures of the README, made of its examples.

`python tests/helpers/pictures.py` writes them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mdfuse as mf
from mdfuse import DeviceMesh, Layout, Shard
from mdfuse.seeing import UNIT

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "images"


def timeline() -> str:
    """The pipeline on four ranks, each piece of work and each communication a second."""
    from helpers.example_files import example

    definition, _ = example("two_stages").build(DeviceMesh.arange(tp=4))
    return mf.compile(definition).timeline(UNIT).svg()


def layout() -> str:
    """A matrix, rows along dp, columns along tp."""
    mesh = DeviceMesh.arange(dp=2, tp=4)
    return Layout(mesh, {"dp": Shard(0), "tp": Shard(1)}).picture([96, 256]).svg()


PICTURES = {"timeline.svg": timeline, "layout.svg": layout}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    for name, made in PICTURES.items():
        (FOLDER / name).write_text(made() + "\n", encoding="utf-8")
