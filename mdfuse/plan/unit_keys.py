"""Keys of a host unit's computation, within this process and as names in all processes.

A key is a nested tuple of plain values. Functions stand in it with their code and their bound
values, so that units of equal layers, whose functions are different objects, have equal keys.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from mdfuse.errors import PACKAGE
from mdfuse.hir.analysis.normal_form import Numbers
from mdfuse.plan.lines import Line, SlotRef

#: The type of torch's own ops, as `torch.ops.aten.add.out`.
_Op = type(torch.ops.aten.add.out)

#: Packages whose functions do the same in every process that has the same versions.
_KNOWN = ("mdfuse", "torch", "_operator", "operator", "builtins", "math")


def unit_key(lines: Sequence[Line], takes: Sequence[int], makes: Sequence[int]) -> Hashable:
    """Return the key of some calls, with their slots numbered in order of use.

    Args:
        lines: the calls.
        takes: slots that have values before.
        makes: slots whose values are wanted.
    """
    numbers = Numbers[int]()
    number = numbers.__getitem__
    for slot in takes:
        number(slot)
    calls: list[Hashable] = []
    for line in lines:
        args = tuple(_value(x, number) for x in line.args)
        kwargs = tuple((k, _value(x, number)) for k, x in line.kwargs)
        calls.append((_value(line.run, number), args, kwargs, tuple(map(number, line.targets))))
    return *calls, tuple(map(number, makes)), settings()


def settings() -> tuple[Hashable, ...]:
    """Return torch's settings that decide the trace of calls."""
    backends = torch.backends.cuda
    return (
        str(torch.get_default_dtype()),
        torch.are_deterministic_algorithms_enabled(),
        backends.matmul.fp32_precision,
        backends.flash_sdp_enabled(),
        backends.mem_efficient_sdp_enabled(),
        backends.math_sdp_enabled(),
        backends.cudnn_sdp_enabled(),
    )


def name_of(key: Hashable) -> str | None:
    """Return a name for a key that is the same in all processes, and no other key's.

    None: something in the key is known to this process alone.
    """
    try:
        text = "".join(_texts(key))
    except _OnlyHereError:
        return None
    return hashlib.sha256(f"{own_code()} {text}".encode()).hexdigest()


class _OnlyHereError(Exception):
    """A part of a key that equals only itself."""


def _texts(x: Any) -> list[str]:
    if isinstance(x, tuple):
        return ["(", *(text for y in x for text in _texts(y)), ")"]
    if isinstance(x, torch.dtype | torch.device):
        return [f"{x};"]
    if x is None or isinstance(x, bool | int | str):
        return [f"{type(x).__name__} {x!r};"]
    raise _OnlyHereError


@cache
def own_code() -> str:
    """Return a digest of mdfuse's modules, since keys hold no code of the functions called."""
    return _code_in(Path(PACKAGE))


def _code_in(package: Path) -> str:
    """Return a digest of the modules in a folder, or of the archive of which it is a part."""
    digest = hashlib.sha256()
    archive = next((path for path in package.parents if path.is_file()), None)
    for path in [archive] if archive else sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(path.parent if archive else package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


# -- values ----------------------------------------------------------------------------------------


def value_key(x: Any) -> Hashable:
    """Return a key that is equal for equal arguments, with numbered slots."""
    return _value(x, int)


def _value(x: Any, number: Callable[[int], int]) -> Hashable:
    """Return a key that is equal for equal arguments, and for functions that do the same."""
    match x:
        case SlotRef():
            return "slot", number(x.slot), x.form
        case list() | tuple():
            return type(x).__name__, *(_value(y, number) for y in x)
        case dict():
            return "dict", *((k, _value(y, number)) for k, y in x.items())
        case float():
            return "float", x.hex()
        case bool() | int() | str() | None:
            return type(x).__name__, x
        case torch.dtype() | torch.device() | torch.memory_format() | torch.layout():
            return type(x).__name__, str(x)
        case _Op():
            return "op", str(x)
        case partial():
            inner = x.func, x.args, x.keywords
            return "partial", *(_value(y, number) for y in inner)
        case types.FunctionType():
            cells = [cell.cell_contents for cell in x.__closure__ or ()]
            held = cells, x.__defaults__, x.__kwdefaults__
            return *_code(x), *(_value(y, number) for y in held)
        case types.BuiltinFunctionType() | types.MethodDescriptorType() if _is_known(x):
            return "function", _module_of(x), x.__qualname__
        case _:
            return _Same(x)


def _is_known(x: Any) -> bool:
    """Return whether the name of a function of C identifies it."""
    of = getattr(x, "__self__", None)  # the object of a bound method
    return (of is None or isinstance(of, type | types.ModuleType)) and bool(_module_of(x))


def _module_of(x: Any) -> str:
    module = x.__module__ if isinstance(x, types.BuiltinFunctionType) else x.__objclass__.__module__
    return module if module and module.split(".")[0] in _KNOWN else ""


def _code(function: types.FunctionType) -> tuple[Hashable, ...]:
    """Return a key of a Python function without its bound values."""
    module = function.__module__ or ""
    if module.split(".")[0] in _KNOWN:
        return "function", module, function.__qualname__, _code_text(function.__code__)
    return "function", module, _Same(function.__code__)


@lru_cache(4096)
def _code_text(code: types.CodeType) -> str:
    """Return a digest of a code object that tells apart two of one name in one module."""
    parts = [str(code.co_firstlineno), code.co_code.hex(), code.co_linetable.hex(), *code.co_names]
    for constant in code.co_consts:
        inner = isinstance(constant, types.CodeType)
        parts.append(_code_text(constant) if inner else _constant_text(constant))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _constant_text(x: Any) -> str:
    if isinstance(x, frozenset):  # each process shows it in another order
        return "{" + ", ".join(sorted(map(_constant_text, x))) + "}"
    return f"{type(x).__name__} {x!r}"


@dataclass(frozen=True, slots=True)
class _Same:
    """An object that equals only itself; code equals equal code."""

    of: Any

    def __hash__(self) -> int:
        return hash(self.of) if isinstance(self.of, Hashable) else id(self.of)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return NotImplemented
        is_code = isinstance(self.of, types.CodeType)
        return self.of is other.of or (is_code and self.of == other.of)
