"""Checks of arguments by type: each returns the argument, or raises an error that says the call.

`call` names the call in messages, as "load of Linear"; `name` is the argument's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mdfuse.errors import DefinitionError, MdfuseError, ProgramError, counted, reason
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.plain import brief


def refused(
    call: str,
    name: str,
    value: object,
    *,
    because: str,
    hint: str,
    kind: type[MdfuseError] = DefinitionError,
) -> MdfuseError:
    """Return the error for an argument of the wrong type."""
    return kind(f"{call} with {name}={brief(value)}", because=because, hint=hint)


def by_name(
    call: str, name: str, value: Any, kind: type[MdfuseError] = DefinitionError
) -> Mapping[str, Any]:
    """Return a mapping by names; None is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        because, hint = "it says something of names", "a dict, or none"
        raise refused(call, name, value, because=because, hint=hint, kind=kind)
    for key in value:
        if not isinstance(key, str):
            raise kind(
                f"{call} with {name}[{brief(key)}]",
                because="it says something of names, which are text",
                hint="a dict by names",
            )
    return value


def check_module(call: str, value: Any) -> None:
    """Raise DefinitionError unless x is a torch module."""
    if not isinstance(value, nn.Module):
        raise DefinitionError(
            f"{call} of {type(value).__name__}",
            because="a module of torch is imported: its forward, under the names of its parameters",
            hint="@mf.fusion makes a fusion of a function",
        )


def check_definition(call: str, value: Any) -> None:
    """Raise DefinitionError unless x is a definition."""
    if not isinstance(value, FusionDefinition):
        raise DefinitionError(
            f"{call} takes a FusionDefinition, not {type(value).__name__}",
            hint=f"for a traced function: mf.{call}(f.define(...))",
        )


def names(call: str, name: str, value: Any) -> tuple[str, ...]:
    """Return a tuple of names, from several, a single one, or None."""
    listed = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(listed, list | tuple | set | frozenset) or not all(
        isinstance(x, str) for x in listed
    ):
        because, hint = "it is a name, or several", f'{name}=["first", "second"]'
        raise refused(call, name, value, because=because, hint=hint)
    return tuple(listed)


def flag(call: str, name: str, value: Any, kind: type[MdfuseError] = ProgramError) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        because, hint = "it is True or False", f"{name}=True"
        raise refused(call, name, value, because=because, hint=hint, kind=kind)
    return value


def function(call: str, name: str, value: Any, hint: str) -> Callable[..., Any]:
    """Return a callable argument."""
    if not callable(value):
        raise refused(call, name, value, because="it is a function", hint=hint)
    callee: Callable[..., Any] = value
    return callee


def rank_of(call: str, value: Any) -> int:
    """Return a rank."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        because, hint = "a rank is an integer that counts from 0", "rank=comm.rank"
        raise refused(call, "rank", value, because=because, hint=hint, kind=ProgramError)
    return value


def device_of(call: str, value: Any, kind: type[MdfuseError] = ProgramError) -> torch.device:
    """Return a device that can hold tensors."""
    because = "a device is text, or a torch.device"
    try:
        if isinstance(value, str | torch.device):
            return torch.empty(0, device=value).device
    except (RuntimeError, AssertionError, ValueError, ImportError) as error:
        because = f"torch says: {reason(error)}"
    hint = 'device="cpu", or "cuda:0"'
    raise refused(call, "device", value, because=because, hint=hint, kind=kind)


def why_no_numbers(x: Any) -> str | None:
    """Return why x is not a tensor with readable numbers; None if it is one."""
    if not isinstance(x, Tensor):
        return f"it is {brief(x)}, and no tensor"
    if x.is_nested or x.layout != torch.strided:
        return f"it is a tensor of the layout {'nested' if x.is_nested else x.layout}"
    return "it is on the meta device, and has no numbers" if x.is_meta else None


def results(call: str, name: str, value: Any, count: int) -> Sequence[Any]:
    """Return what a run returned, which has so many entries; raise ProgramError otherwise."""
    if not isinstance(value, list | tuple) or len(value) != count:
        because = f"a run returns a list of {counted(count, name.removesuffix('s'))}"
        hint = "pass what program.run(...) returned, or mf.simulate(...).outputs"
        raise refused(call, name, value, because=because, hint=hint, kind=ProgramError)
    return value


def parts(call: str, name: str, value: Any, hint: str) -> Sequence[Tensor | None]:
    """Return a sequence of tensors; None stands for a part that this rank lacks."""
    if not isinstance(value, list | tuple):
        because = "they are a list of tensors"
        raise refused(call, name, value, because=because, hint=hint, kind=ProgramError)
    for n, x in enumerate(value):
        if x is not None and (why := why_no_numbers(x)) is not None:
            raise ProgramError(f"{call} with {name}[{n}]", because=why, hint=hint)
    return value
