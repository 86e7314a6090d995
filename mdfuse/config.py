"""Options of a compilation and a run, and every environment variable that sets one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from mdfuse.errors import ProgramError, shown

#: The version of this package.
VERSION = "0.2.0"

#: The name in `Options.backend`, among axes, for communications from one mesh to another.
BETWEEN_MESHES = "meshes"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backends that `Options.backend` names, and the communications that each carries.

    Attributes:
        usual: the backend of all other communications, or "auto".
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

    @property
    def carriers(self) -> tuple[tuple[str, str], ...]:
        """(axis, backend) of the axes that another backend than the usual one carries."""
        rows = sorted(self.by_axis.items())
        return tuple(row for row in rows if row[0] != BETWEEN_MESHES and row[1] != self.usual)


def backend_choice(text: str) -> BackendChoice:
    """Parse the text of `Options.backend`.

    Raises:
        ProgramError: it is not of the form "backend, axis=backend, ...".

    >>> backend_choice("gloo, dp=ucx")
    BackendChoice(usual='gloo', by_axis={'dp': 'ucx'})
    """
    usual, by_axis = [], dict[str, str]()
    if not isinstance(text, str):
        raise ProgramError(f"backend={shown(text, _SHOWN)}", hint='the name of one: "gloo"')
    for entry in text.split(","):
        axis, sign, name = (part.strip() for part in entry.rpartition("="))
        if not name or bool(sign) != bool(axis) or axis in by_axis or (axis and name == "auto"):
            raise ProgramError(
                f"backend={shown(text, _SHOWN)}",
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
            f"backend={shown(text, _SHOWN)}",
            because=f"{' and '.join(usual)} cannot both be the usual one",
            hint="write axis=backend for all others",
        )
    return BackendChoice(usual[0] if usual else "auto", by_axis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of lowering and running programs, in four groups; docs/options.md has examples.

    Compile:
        graph: "auto", "always" or "never": whether runs are captured as CUDA graphs.
        compile: "auto", "always" or "never": whether local work between communications is compiled
            into fewer kernels; "auto" does so on GPUs. "always" is an error where some cannot be.
        overlap: "auto": what communicates is computed in chunks together with the products beside
            it, where that takes less time by `costs`; "measure": the first runs, whose values
            are the same but for rounding, take turns, and all ranks keep the quicker program;
            "never": values are computed in chunks where a `Stream` says so. No program with such a
            stream is changed, nor one on a machine of which there is no table ("auto").
        costs: the table for it: "here" (what `mdfuse calibrate` measured, or a table that ships for
            this device), "h100", "unit", or the path of a JSON file.
        bucket_bytes: "layer": where parameters of a module are gathered, those of a layer are
            gathered by one group of posts, and their gradients are reduced by another, without
            copies. A number of bytes on each rank: gathers that follow each other go in groups of
            so many; values that are reduced alike, and of which none is read before the last is
            there, are reduced together, in buckets of so many: fewer posts, and a copy of each
            value. 0: each by itself.
        prefetch_bytes: communications of what is there already, such as a parameter that a later
            layer gathers, are posted ahead, as long as what they receive before its place, and
            what they copy to send it, takes at most so many bytes on each rank. "layer": gathers of
            a module's parameters, those of one layer ahead. 0: each where the program has it.
        same_bits: results do not depend on how many ranks split a dim, from 1 to 8 along each axis,
            to the bit: each rank computes some of 8 leaves along each axis, one by one, and sums of
            theirs are added in one tree, f16 and bf16 in f32. Without overlap, CUDA graphs and
            compiled units; docs/options.md says the cost, and programs that are refused.
        logits_bytes: a head whose logits take more bytes than this in f32 on a rank is computed in
            chunks of rows that do not, together with the losses and their gradients. 0: at once.
        context: attention whose positions are split: "gather" gathers keys and values, "heads"
            exchanges positions for heads and back, where there are as many heads as ranks; "ring"
            sends them around while ranks compute; "auto" takes, for each of them, the form with
            the least bytes and work of the busiest rank.
        counts: "host" fetches how many rows go to experts, so that buffers and posts have as many
            rows as there are; "device" leaves the counts where they are: ranks exchange as many
            rows as there may be, no host waits, and runs are captured as a whole.
        reduce_dtype: torch.float32 or torch.float64: sums of narrower floats that ranks hold parts
            of are cast to it before they are reduced, along every axis, and back after; not where
            ranks hold parts of the result, too. None: they are reduced as they are.
        sums: "auto": by `symmetric`, on GPUs, a small sum over ranks and the norm of rows behind it
            are one kernel; "apart": they are computed one after the other.
        streams: how many streams a lowering with streams uses.
        stream_policy: which stream an instruction of a streamed loop goes to. "round_robin": each
            iteration on the next stream; "copy_compute": transfers on one stream, the rest on
            another; "auto": copy_compute where the loop communicates.
        plans: how many plans an evaluator keeps; each owns the buffers of its intermediates.
        sizes: symbolic extent, as extents= names it -> sizes, {"ids.0": (1, 2, 4, 8)}: a run takes
            the plan of the next larger one, which is there before the first run. Rows that fill up
            write into no state. None: each extent has a plan of its own.

    Checks:
        verify: check a host program before its first run. If False, a rank checks only that its own
            program can run: names, handles, groups and streams.
        poison: fill every new buffer with NaN (the largest value for integers, True for bool), so
            that an element that nothing wrote shows.
        check_indices: look at all indices into tensors, as those of `embedding`: one that is out
            of range is an IndexRangeError on all ranks, which meet at the end of each run for it.
            Else the result is undefined: an error of torch, zeros, or on GPUs the end of the
            process.

    World:
        backend: "auto" (nccl where this rank drives a GPU, gloo elsewhere), or a backend's name;
            then, after commas, other ones for communications along some mesh axes, "meshes" for
            those from one mesh to another: "nccl, dp=mpi, meshes=ucc".
        timeout_s: seconds after which a communication that does not finish is an error.
        fast_lane: whether posts on NVIDIA GPUs go through nccl4py instead of torch.distributed:
            "auto" where all ranks can use it, "never", or "always", which is an error where a rank
            cannot.
        reports: the folder for reports of communications that broke or hang, a file each; None:
            mdfuse-UID in the folder for temporary files, where UID is the user's number.

    Profile:
        trace: a folder: each rank writes into a file of it when which instruction began and ended.
            Nothing is captured as CUDA graphs then. None: runs are not traced, and pay nothing.
        ranges: "torch" or "nvtx": each step of a run is a range with the user's line, for
            torch.profiler (`record_function`) or for Nsight; nothing is captured as CUDA graphs
            then. "none": there are none, and runs pay nothing.

    Raises:
        ProgramError: a value that its option cannot have; options that exclude each other.

    >>> Options(graph="never", timeout_s=60).graph
    'never'
    """

    # compile
    graph: Literal["auto", "always", "never"] = "auto"
    compile: Literal["auto", "always", "never"] = "auto"
    overlap: Literal["never", "auto", "measure"] = "auto"
    costs: str = "here"
    bucket_bytes: int | Literal["layer"] = "layer"
    prefetch_bytes: int | Literal["layer"] = "layer"
    same_bits: bool = False
    logits_bytes: int = 1 << 28
    context: Literal["auto", "gather", "heads", "ring"] = "auto"
    counts: Literal["host", "device"] = "host"
    reduce_dtype: Any = None
    sums: Literal["auto", "apart"] = "auto"
    streams: int = 4
    stream_policy: Literal["auto", "round_robin", "copy_compute"] = "auto"
    plans: int = 32
    sizes: Any = None
    # checks
    verify: bool = True
    poison: bool = False
    check_indices: bool = False
    # world
    backend: str = "auto"
    timeout_s: float = 600.0
    fast_lane: Literal["auto", "never", "always"] = "auto"
    reports: str | None = None
    # profile
    trace: str | None = None
    ranges: Literal["none", "torch", "nvtx"] = "none"

    def __post_init__(self) -> None:
        if isinstance(self.sizes, Mapping):  # options are keys
            sizes = ((k, tuple(n) if isinstance(n, list) else n) for k, n in self.sizes.items())
            object.__setattr__(self, "sizes", tuple(sizes))
        for name, (is_right, rule) in _RULES.items():
            value = getattr(self, name)
            if not is_right(value):
                default = type(self).__dataclass_fields__[name].default
                raise ProgramError(
                    f"{name}={shown(value, _SHOWN)}",
                    because=rule,
                    hint=f"the default is {default!r}",
                )
        backend_choice(self.backend)
        for option, chosen, rule, rows in _EXCLUDED:
            for name, values, why in rows if getattr(self, option) == chosen else ():
                value = getattr(self, name)
                if value not in values:
                    beside = f'"{chosen}"' if isinstance(chosen, str) else chosen
                    raise ProgramError(
                        f"{name}={shown(value, _SHOWN)} with {option}={beside}",
                        because=f"{rule}: {why}",
                        hint=f"{name}={values[0]!r}",
                    )


#: Option, its value, the reason why it excludes others, and for each of these: its name, the values
#: that it may have, and the reason.
_EXCLUDED: tuple[tuple[str, Any, str, tuple[tuple[str, tuple[Any, ...], str], ...]], ...] = (
    (
        "graph", "always", "no CUDA graph can hold work of the host",
        (
            ("trace", (None,), "it notes the times"),
            ("ranges", ("none",), "it begins and ends them"),
            ("check_indices", (False,), "it looks at the indices"),
        ),
    ),
    (
        "same_bits", True, "a rank computes its leaves step by step",
        (
            ("graph", ("auto", "never"), "no CUDA graph is made"),
            ("compile", ("auto", "never"), "a compiled unit may add up in another order"),
            ("overlap", ("never", "auto"), "nothing is computed in chunks to hide communication"),
            ("sizes", (None,), "its parts have numbers of rows, which a run does not choose"),
            ("trace", (None,), "the times of leaves are not noted"),
            ("ranges", ("none",), "the steps of leaves are not noted"),
        ),
    ),
)  # fmt: skip

#: As many bytes as a layer has.
LAYER = "layer"

#: How many characters of a wrong value a message shows.
_SHOWN = 80


def _is_count(most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 < value <= most


def _is_one_of(*words: str) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda value: isinstance(value, str) and value in words,
        f"it is one of {', '.join(words)}",
    )


def _is_bytes(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_size(value: Any) -> bool:
    """True for bytes, and for the word that stands for those of a layer."""
    return value == LAYER if isinstance(value, str) else _is_bytes(value)


def _is_wide(value: Any) -> bool:
    """True for torch's dtypes of 32 bits or more; torch is not imported for the question."""
    is_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    return is_dtype and str(value) in ("torch.float32", "torch.float64")


def _are_sizes(value: Any) -> bool:
    """True for extents with sizes that rise, from 1 on."""
    if value is None:
        return True
    return isinstance(value, tuple) and all(
        isinstance(name, str)
        and isinstance(sizes, tuple)
        and bool(sizes)
        and all(type(n) is int and n > 0 for n in sizes)
        and [*sizes] == sorted({*sizes})
        for name, sizes in value
    )


_FLAG = (lambda value: isinstance(value, bool)), "it is True or False"
_PLACE = (lambda value: value is None or isinstance(value, str)), "it is a path, as text, or None"

#: Option -> whether a value is right, and the rule.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "backend": (lambda value: isinstance(value, str), "it is text that names backends"),
    "streams": (_is_count(1024), "a lowering uses from 1 to 1024 streams"),
    "stream_policy": _is_one_of("auto", "round_robin", "copy_compute"),
    "graph": _is_one_of("auto", "always", "never"),
    "compile": _is_one_of("auto", "always", "never"),
    "verify": _FLAG,
    "fast_lane": _is_one_of("auto", "never", "always"),
    "timeout_s": (
        lambda value: type(value) in (int, float) and 1e-3 <= value <= 1e9,
        "a timeout is from a millisecond to 30 years, in seconds",
    ),
    "poison": _FLAG,
    "same_bits": _FLAG,
    "check_indices": _FLAG,
    "reduce_dtype": (
        lambda value: value is None or _is_wide(value),
        "sums are reduced in torch.float32, in torch.float64, or as they are",
    ),
    "bucket_bytes": (_is_size, 'a bucket has a number of bytes, 0 for none, or is a "layer"'),
    "prefetch_bytes": (
        _is_size,
        'what is received ahead has a number of bytes, 0 for none, or is a "layer"',
    ),
    "logits_bytes": (_is_bytes, "a chunk of logits has a number of bytes, 0 for all at once"),
    "context": _is_one_of("auto", "gather", "heads", "ring"),
    "counts": _is_one_of("host", "device"),
    "sums": _is_one_of("auto", "apart"),
    "overlap": _is_one_of("never", "auto", "measure"),
    "costs": (
        lambda value: isinstance(value, str) and bool(value),
        "it is here, h100, unit, or the path of a JSON file",
    ),
    "plans": (_is_count(1 << 31), "an evaluator keeps at least one plan: a run needs it"),
    "sizes": (_are_sizes, 'each name of an extent has sizes that rise: {"x.0": (1, 2, 4)}'),
    "reports": _PLACE,
    "trace": _PLACE,
    "ranges": _is_one_of("none", "torch", "nvtx"),
}


def _count(text: str) -> int:
    """Parse a number of ASCII digits; `int` would take other scripts and underscores, too."""
    if not (text.strip().isascii() and text.strip().isdigit()):
        raise ValueError("no number")
    return int(text)


def _size(text: str) -> int | str:
    return LAYER if text.strip() == LAYER else _count(text)


def _seconds(text: str) -> float:
    if not text.isascii() or "_" in text:
        raise ValueError("no number")
    return float(text)


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("neither 0 nor 1")
    return text == "1"


#: Option that a variable sets -> parser, help.
_READ: dict[str, tuple[Any, str]] = {
    "backend": (
        str,
        "backend to use: auto, gloo, nccl, ucc, mpi, ucx, symmetric, null; then axis=backend",
    ),
    "streams": (_count, "number of streams of a streamed lowering"),
    "stream_policy": (str, "auto, round_robin or copy_compute"),
    "graph": (str, "CUDA graphs: auto, always or never"),
    "compile": (str, "compiled local work: auto, always or never"),
    "bucket_bytes": (
        _size,
        "bytes of values that are gathered or reduced together; layer is the default",
    ),
    "prefetch_bytes": (_size, "bytes that are received ahead of their place; layer is the default"),
    "same_bits": (_flag, "1: results have the same bits on 1 to 8 ranks along each axis, else 0"),
    "logits_bytes": (
        _count,
        "bytes of logits that are computed together; 268435456 is the default, 0 for all",
    ),
    "context": (str, "attention whose positions are split: auto, gather, heads or ring"),
    "sums": (str, "sums over ranks and norms behind them: auto, in one kernel, or apart"),
    "counts": (str, "who knows how many rows go to experts: host or device"),
    "overlap": (
        str,
        "whether products and communications overlap by themselves: never, auto or measure",
    ),
    "costs": (str, "table of costs for it: here, h100, unit, or a JSON file"),
    "plans": (_count, "how many plans an evaluator keeps"),
    "fast_lane": (str, "posts through nccl4py: auto, never or always"),
    "verify": (_flag, "0: a rank checks its own program only; 1 is the default"),
    "timeout_s": (_seconds, "deadline of a communication, seconds"),
    "poison": (_flag, "1 fills new buffers with NaN, 0 is the default"),
    "check_indices": (_flag, "1 checks the indices of embedding, else 0"),
    "trace": (str, "folder into which each rank writes when it did what"),
    "ranges": (str, "ranges for profilers: none, torch or nvtx"),
    "reports": (str, "folder for reports of communications that broke or hang"),
}

#: Every variable that mdfuse reads: name -> (option, parser, help).
VARIABLES: dict[str, tuple[str, Any, str]] = {
    f"MDFUSE_{option.upper()}": (option, *row) for option, row in _READ.items()
}

#: The variable of no option: one number for all programs of a process. It is read where a first
#: program of some length is lowered, or compiled.
HELPERS = "MDFUSE_HELPERS"

#: More processes are taken for a mistake.
_MOST_HELPERS = 256


def helpers_from_environment() -> int | None:
    """Return how many helper processes compile for this one; None: as many as pay.

    Raises:
        ProgramError: the variable cannot be read.
    """
    text = os.environ.get(HELPERS)
    if not text:
        return None
    try:
        count = _count(text)
    except ValueError:
        count = _MOST_HELPERS + 1
    if count > _MOST_HELPERS:
        raise ProgramError(
            f"{HELPERS}={shown(text, _SHOWN)}",
            because=f"it is a number of processes, from 0 (none) to {_MOST_HELPERS}",
            hint="unset it: there are as many as cores and work allow",
        )
    return count


def compiles(options: Options) -> bool:
    """Return whether a program with these options, none left to the environment, has launches."""
    return options.compile == "always" or (options.compile == "auto" and options.graph != "never")


def environment() -> tuple[str | None, ...]:
    """Return the values of the variables, in the order of `VARIABLES`; None where not set."""
    return tuple([os.environ.get(name) for name in VARIABLES])


def options_from_environment(
    base: Options | None = None, variables: Mapping[str, str] | None = None
) -> Options:
    """Return `base` if given, else the defaults overridden by the `MDFUSE_*` variables.

    Args:
        base: options that no variable changes.
        variables: by default those of this process; an empty one counts as not set.

    Raises:
        ProgramError: a variable cannot be read, or has a value that its option cannot have; `base`
            is something else.
    """
    if isinstance(base, Options):
        return base
    if (problem := not_options(base)) is not None:
        raise problem
    return _options(environment()) if variables is None else _options_from(variables)


def not_options(given: object) -> ProgramError | None:
    """Return an error where something else is given for options; none is well."""
    if isinstance(given, Options | None):
        return None
    return ProgramError(f"options={shown(given, _SHOWN)}", hint="mdfuse.Options(...), or none")


@lru_cache(maxsize=64)
def _options(values: tuple[str | None, ...]) -> Options:
    """Return the options for values of the variables, in their order; every run asks for them."""
    given = zip(VARIABLES, values, strict=True)
    return _options_from({name: text for name, text in given if text})


def _options_from(variables: Mapping[str, str]) -> Options:
    options = Options()
    for variable, (option, parse, what) in VARIABLES.items():
        text = variables.get(variable)
        if not text:
            continue
        name = f"{variable}={shown(text, _SHOWN)}"
        try:
            options = replace(options, **{option: parse(text)})
        except ValueError as error:
            hint = f"unset it: the default is {getattr(Options(), option)!r}"
            raise ProgramError(f"{name} cannot be read", because=what, hint=hint) from error
        except ProgramError as error:
            raise ProgramError(name, because=error.because, hint=error.hint) from error
    return options
