"""Causal models of transformers: modules, or folders with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn


def opened(module: nn.Module | str | Path) -> tuple[Any, Any]:
    """Return the model, and the source of its parameters: None for its own."""
    if isinstance(module, nn.Module):
        return module, None
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(module)), None
