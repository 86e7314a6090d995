"""NCCL's own functions through nccl4py, or why this process lacks them.

nccl4py takes the libnccl that is loaded already, and torch loads its own at import. So both use one
library, and a process holds one NCCL, whatever else is installed.
"""

from __future__ import annotations

from typing import Any

import torch

from mdfuse.backends.work import first_line


def why_not() -> tuple[str, str] | None:
    """Return why this process has no fast lane, and the remedy; None where it has one."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device", "the fast lane is for backend nccl on NVIDIA GPUs"
    try:
        load().get_version()
    except ImportError as error:
        return f"nccl4py cannot be imported ({first_line(error)})", "pip install mdfuse[nccl]"
    except Exception as error:  # nccl4py's own errors have no common base
        return (
            f"nccl4py finds no NCCL ({first_line(error)})",
            "pip install nccl4py for the CUDA version of torch, which brings libnccl.so.2",
        )
    return None


def load() -> Any:
    """Return NCCL's functions; torch is imported before, so that its libnccl is the one in use."""
    from nccl.bindings import nccl

    return nccl


def library() -> str:
    """Return the version of the NCCL that lanes use, and its file if nccl4py knows it."""
    binding = load()
    major, below = divmod(binding.get_version(), 10_000)
    minor, patch = divmod(below, 100)
    path = getattr(binding, "get_library_path", lambda: "")()
    return f"NCCL {major}.{minor}.{patch} {path}".rstrip()
