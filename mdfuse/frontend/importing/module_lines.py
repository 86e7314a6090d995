"""Call a function as if a line of the module called it, so that its line and names are noted."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch.fx import Node

from mdfuse.errors import OWN, PACKAGE, Source
from mdfuse.names import is_name

_MARK = re.compile(r"^checkpoint (\d+)$", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in ', re.MULTILINE)


def line_of(stack: str | None) -> Source | None:
    """Return the line of the model in a stack trace: the innermost one that is not torch's own.

    If all frames are torch's, as for `torch.nn.TransformerEncoder`, return the innermost of these.
    Code that torch generates, as the branches of `torch.cond`, has no line.
    """
    lines = _FRAME.findall(stack or "")
    located = [(file, int(line)) for file, line in lines if not file.startswith("<eval_with_key>")]
    frames = [(file, line) for file, line in located if not file.startswith(PACKAGE)]
    users = [(file, line) for file, line in frames if not file.startswith(OWN)] or frames
    return Source(_in_path(users[-1][0]), users[-1][1]) if users else None


def mark(node: Node, number: int) -> None:
    """Note in a node's stack trace, which passes of torch leave alone, a checkpoint around it."""
    node.meta["stack_trace"] = f"checkpoint {number}\n{node.meta.get('stack_trace') or ''}"


def mark_of(node: Node) -> int | None:
    """Return the number of the outermost checkpoint around a node."""
    outermost = _MARK.search(node.meta.get("stack_trace") or "")
    return int(outermost[1]) if outermost else None


@lru_cache(maxsize=1024)
def _in_path(file: str) -> str:
    """Return the name of a library's file as imports find it: its lines are the model's."""
    folders = (f"{folder}/" for folder in sys.path if Path(folder).name == "site-packages")
    inside = next((folder for folder in folders if file.startswith(folder)), "")
    return file.removeprefix(inside)


def called_at(source: Source | None, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls from a line, where the result is assigned to a name."""
    if source is None:
        return call
    line = _line(source.file, source.line, name if is_name(name) and name.isidentifier() else "t")
    return lambda *args, **kwargs: line(call, args, kwargs)


@lru_cache(maxsize=1 << 14)
def _line(file: str, line: int, name: str) -> Callable[..., Any]:
    """Return a function of one line, which stands at that line of that file."""
    *given, _ = _CODE.co_varnames
    code = _CODE.replace(co_filename=file, co_firstlineno=line, co_varnames=(*given, name))
    return FunctionType(code, {})


_TEXT = "def line(call, args, kwargs): t = call(*args, **kwargs); return t"
_CODE: CodeType = compile(_TEXT, "", "exec").co_consts[0]
