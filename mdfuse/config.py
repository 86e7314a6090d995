"""Options of a compilation and a run, and every environment variable that sets one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from mdfuse.errors import ProgramError

#: Of this package.
VERSION = "0.1.0"

#: Stands among the axes of `Options.backend` for what goes from one mesh to another.
BETWEEN_MESHES = "meshes"


@dataclass(frozen=True, slots=True)
class Carriers:
    """What `Options.backend` says: who carries which communications.

    Attributes:
        usual: the backend of all that is not said otherwise, or "auto".
        by_axis: mesh axis -> the backend of communications along it.
    """

    usual: str
    by_axis: Mapping[str, str]

    @property
    def others(self) -> tuple[str, ...]:
        """The backends besides the usual one, each once, in the order in which they are named."""
        return tuple(dict.fromkeys(self.by_axis.values()))

    @property
    def names(self) -> tuple[str, ...]:
        return (self.usual, *self.others)


def carriers_of(text: str) -> Carriers:
    """Read `Options.backend`.

    Raises:
        ProgramError: it is not of the form "backend, axis=backend, ...".

    >>> carriers_of("gloo, dp=ucx")
    Carriers(usual='gloo', by_axis={'dp': 'ucx'})
    """
    usual, by_axis = [], dict[str, str]()
    for entry in text.split(","):
        axis, sign, name = (part.strip() for part in entry.rpartition("="))
        if not name or bool(sign) != bool(axis) or axis in by_axis or (axis and name == "auto"):
            raise ProgramError(
                f"backend={text!r}",
                because='it is a backend, or several: "gloo, dp=ucx" is ucx along mesh axes of the '
                "name dp, and gloo elsewhere",
                hint="name each axis once, and its backend; mdfuse doctor lists the backends",
            )
        if axis:
            by_axis[axis] = name
        else:
            usual.append(name)
    if len(usual) > 1:
        raise ProgramError(
            f"backend={text!r}",
            because=f"{' and '.join(usual)} cannot both be the usual one",
            hint="write axis=backend for all others",
        )
    return Carriers(usual[0] if usual else "auto", by_axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How programs are lowered and run.

    Attributes:
        backend: "auto" (nccl where this rank drives a GPU, gloo elsewhere), or a backend's name;
            then, after commas, other ones for communications along some mesh axes, "meshes" for
            those from one mesh to another: "nccl, dp=mpi, meshes=ucc".
        streams: how many streams a lowering with streams uses.
        stream_policy: which stream an instruction of a streamed loop goes to. "round_robin": each
            iteration on the next stream; "copy_compute": transfers on one stream, the rest on
            another; "auto": copy_compute where the loop communicates.
        graph: "auto", "always" or "never": whether runs are captured as CUDA graphs.
        verify: check a host program before its first run.
        fast_lane: whether posts on NVIDIA GPUs go through nccl4py instead of torch.distributed:
            "auto" where all ranks have it, "never", or "always": else an error.
        timeout_s: seconds after which a communication that does not finish is an error.
        poison: fill every new buffer with NaN (the largest value for integers, True for bool), so
            that an element that nothing wrote shows.
        plans: how many plans an evaluator keeps; each owns the buffers of its intermediates.
        trace: a file to write a trace of each run to, or None.
    """

    backend: str = "auto"
    streams: int = 4
    stream_policy: Literal["auto", "round_robin", "copy_compute"] = "auto"
    graph: Literal["auto", "always", "never"] = "auto"
    verify: bool = True
    fast_lane: Literal["auto", "never", "always"] = "auto"
    timeout_s: float = 600.0
    poison: bool = False
    plans: int = 32
    trace: str | None = None

    def __post_init__(self) -> None:
        carriers_of(self.backend)
        if self.streams < 1:
            raise ProgramError(
                f"streams={self.streams}", because="at least one is needed", hint="the default is 4"
            )
        if self.plans < 1:
            raise ProgramError(
                f"plans={self.plans}", because="a run needs one", hint="the default is 32"
            )
        if self.timeout_s <= 0:
            raise ProgramError(
                f"timeout_s={self.timeout_s}",
                because="a timeout is positive",
                hint="seconds; the default is 600",
            )
        if self.stream_policy not in ("auto", "round_robin", "copy_compute"):
            raise ProgramError(
                f"stream_policy={self.stream_policy!r}",
                hint='"auto", "round_robin" or "copy_compute"',
            )
        if self.graph not in ("auto", "always", "never"):
            raise ProgramError(f"graph={self.graph!r}", hint='"auto", "always" or "never"')
        if self.fast_lane not in ("auto", "never", "always"):
            raise ProgramError(f"fast_lane={self.fast_lane!r}", hint='"auto", "never" or "always"')


#: Every variable that mdfuse reads: name -> (option, parser, help).
VARIABLES: dict[str, tuple[str, Any, str]] = {
    "MDFUSE_BACKEND": (
        "backend",
        str,
        "backend to use: auto, gloo, nccl, ucc, mpi, ucx, null; then axis=backend",
    ),
    "MDFUSE_STREAMS": ("streams", int, "number of streams of a streamed lowering"),
    "MDFUSE_STREAM_POLICY": ("stream_policy", str, "auto, round_robin or copy_compute"),
    "MDFUSE_GRAPH": ("graph", str, "CUDA graphs: auto, always or never"),
    "MDFUSE_PLANS": ("plans", int, "how many plans an evaluator keeps"),
    "MDFUSE_FAST_LANE": ("fast_lane", str, "posts through nccl4py: auto, never or always"),
    "MDFUSE_VERIFY": ("verify", lambda s: s != "0", "0 turns verification off"),
    "MDFUSE_TIMEOUT_S": ("timeout_s", float, "deadline of a communication, seconds"),
    "MDFUSE_POISON": ("poison", lambda s: s == "1", "1 fills new buffers with NaN"),
    "MDFUSE_TRACE": ("trace", str, "file to write a trace to"),
}


def environment() -> tuple[str | None, ...]:
    """What the variables say, in the order of `VARIABLES`."""
    return tuple([os.environ.get(name) for name in VARIABLES])


def options_from_environment(base: Options | None = None) -> Options:
    """`base` where given, else the defaults overridden by the `MDFUSE_*` variables that are set."""
    if base is not None:
        return base
    changes: dict[str, Any] = {}
    for variable, (option, parse, what) in VARIABLES.items():
        text = os.environ.get(variable)
        if text is None:
            continue
        try:
            changes[option] = parse(text)
        except ValueError as error:
            raise ProgramError(f"{variable}={text!r} cannot be read", because=what) from error
    assert changes.keys() <= {f.name for f in fields(Options)}
    return replace(Options(), **changes)
