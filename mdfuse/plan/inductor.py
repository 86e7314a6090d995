"""All uses of Torch's compiler, Inductor, whose interfaces torch does not promise to keep."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import inf
from pathlib import Path
from pkgutil import iter_modules
from typing import Any
from unittest.mock import patch

import torch
from torch._ops import OpOverload as OpOverload

from mdfuse.files import check_private
from mdfuse.plan.compiled_functions import Function as Function
from mdfuse.plan.compiled_functions import WithConstants
from mdfuse.plan.kernel_times import milliseconds
from mdfuse.plan.lifted_constants import lifted, without_elements
from mdfuse.plan.tensor_meta import Form, form_of
from mdfuse.torch_private import cache_folder


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """A function of tensors as a graph of torch's ops.

    Attributes:
        graph: the graph.
        arguments: tensors without elements, of the forms that it was traced for.
        results: the forms of its results; with symbolic sizes, where it has such.
        sizes: the symbolic sizes of its arguments.
        settings: of the compiler, for it; None: they are read off the graph.
    """

    graph: torch.fx.GraphModule
    arguments: tuple[Any, ...]
    results: list[Form]
    sizes: tuple[torch.SymInt, ...] = ()
    settings: Mapping[str, Any] | None = None

    def holds(self, sizes: Sequence[int]) -> bool:
        """Return whether all assumptions on symbolic sizes hold for these sizes."""
        env = self.sizes[0].node.shape_env
        assumed = env.produce_guards_expression(list(self.sizes))
        return assumed is None or bool(env.evaluate_guards_expression(assumed, sizes))

    def results_at(self, sizes: Sequence[int]) -> list[Form]:
        """Return the forms of the results for some sizes."""
        known = {symbol.node.expr: n for symbol, n in zip(self.sizes, sizes, strict=True)}

        def number(x: Any) -> int:
            return int(x.node.expr.xreplace(known)) if isinstance(x, torch.SymInt) else x

        return [
            (tuple(map(number, shape)), tuple(map(number, strides)), dtype, device)
            for shape, strides, dtype, device in self.results
        ]


def traced(function: Function, forms: Sequence[Form]) -> TracedGraph:
    """Trace a function of tensors, which returns a list of tensors and may write into arguments.

    Args:
        function: made of torch calls; none of them depends on an element.
        forms: of its arguments.

    Raises:
        Exception: whatever an op raises that cannot be traced.
    """
    return _traced(function, lambda _: forms, ())


def traced_with_sizes(
    function: Function, forms: Callable[[Sequence[Any]], Sequence[Form]], hints: Sequence[int]
) -> TracedGraph:
    """Trace a function of tensors for any sizes.

    Args:
        function: as `traced` takes it; it reads sizes off its arguments.
        forms: gives the forms of the arguments for some sizes.
        hints: an example of each size, from 2 on; all assumptions on sizes hold for these.

    Raises:
        Exception: whatever an op raises that cannot be traced.
    """
    return _traced(function, forms, hints)


def _traced(
    function: Function, forms: Callable[[Sequence[Any]], Sequence[Form]], hints: Sequence[int]
) -> TracedGraph:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.convert_frame import compile_lock
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv(duck_shape=False)  # sizes that are equal by chance stay apart
    sizes = tuple(_size(env, n, hint) for n, hint in enumerate(hints))
    with compile_lock, torch.no_grad(), FakeTensorMode(shape_env=env):
        arguments = _without_elements(forms(sizes))
        with enable_python_dispatcher():  # as in torch.compile: it knows more strides as dense
            graph = make_fx(function, tracing_mode="symbolic" if sizes else "fake")(*arguments)
        results = [form_of(x) for x in function(*arguments)]
    _keep_nan(graph.graph)
    return TracedGraph(graph, tuple(arguments), results, sizes)


def _without_elements(forms: Sequence[Form]) -> list[Any]:
    """Return tensors of some forms; within a mode of torch they have no elements."""
    return [
        torch.empty_strided(shape, strides, dtype=dtype, device=device)
        for shape, strides, dtype, device in forms
    ]


def rebuilt(
    graph: torch.fx.GraphModule,
    forms: Sequence[Form],
    results: list[Form],
    settings: Mapping[str, Any],
) -> TracedGraph:
    """Return a traced function by its parts."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv(duck_shape=False)):  # as it was traced
        return TracedGraph(graph, tuple(_without_elements(forms)), results, (), settings)


def _keep_nan(graph: torch.fx.Graph) -> None:
    """Make an integer 0 by which fractions are multiplied 0.0.

    The compiler takes x * 0 for 0 for any x; a NaN or an infinity times 0.0 is NaN.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        dtype = node.meta["val"].dtype
        if dtype.is_floating_point or dtype.is_complex:
            node.args = tuple(0.0 if type(x) in (int, bool) and x == 0 else x for x in node.args)


def _size(env: Any, n: int, hint: int) -> torch.SymInt:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source, how = ConstantSource(f"n{n}"), DimDynamic.DYNAMIC
    symbol = env.create_symbol(hint, source=source, dynamic_dim=how, constraint_dim=None)
    size: torch.SymInt = env.create_symintnode(symbol, hint=hint, source=source)
    return size


def writes_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the values that a call of a traced graph writes into."""
    return _sharing(node, is_write=True)


def shared_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the values whose memory the result of a call of a traced graph shares."""
    return _sharing(node, is_write=False) or writes_of(node)


def _sharing(node: torch.fx.Node, *, is_write: bool) -> list[torch.fx.Node]:
    if not isinstance(node.target, OpOverload):
        return []
    aliases = []
    for n, x in enumerate(node.target._schema.arguments):
        given = node.kwargs.get(x.name, node.args[n] if n < len(node.args) else None)
        if x.alias_info is not None and x.alias_info.is_write is is_write:
            aliases += [given] if isinstance(given, torch.fx.Node) else []
    return aliases


def start_workers() -> None:
    """Start the processes that compile kernels; a process without a GPU has none.

    They take seconds to be ready, and until then the compiler does their work by itself.
    """
    if torch.cuda.is_initialized():
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.use_process_pool()


#: Bytes of a tensor from which on a kernel that writes into it is not timed; see `settings_for`.
_TOO_LARGE_TO_TIME = 1 << 28

#: Settings with which the compiler runs independent kernels that fit each other as one.
_COMBINED = "combo_kernels", "combo_kernel_per_subkernel_blocks"

#: Most rows of a product beside which kernels are so small that each costs its launch.
_FEW_ROWS = 16

#: Settings with which the compiler makes a product of one row a sum, and searches the form of its
#: kernel from many forms on. From its first guess alone the search stops up to 1.6 x later.
_TUNED = "coordinate_descent_tuning", "max_autotune_pointwise"


def compiled(traced: TracedGraph) -> Function:
    """Compile a traced function; the result takes tensors of the forms of its arguments.

    One thread compiles at a time, also among users of `torch.compile`: the compiler keeps its state
    in globals, and fails where two threads are in it.

    Raises:
        Exception: whatever the compiler raises where it cannot.
    """
    from torch._dynamo.convert_frame import compile_lock
    from torch._guards import TracingContext, tracing
    from torch._inductor import config, standalone_compile

    settings = settings_for(traced) if traced.settings is None else dict(traced.settings)
    graph, constants = lifted(traced.graph, traced.arguments)
    arguments = [*traced.arguments, *(without_elements(x, traced.arguments) for x in constants)]
    with compile_lock, config.patch(settings), _timed_alone(arguments):
        if not traced.sizes:
            function = standalone_compile(graph, arguments)
        else:
            mode = arguments[0].fake_mode
            with tracing(TracingContext(mode)):
                function = standalone_compile(
                    graph, arguments, dynamic_shapes="from_tracing_context"
                )
    return WithConstants(function, tuple(constants)) if constants else function


def settings_for(traced: TracedGraph) -> dict[str, Any]:
    """Return settings of the compiler for a function.

    Before a step has run once, the compiler takes the device as full: it moves a tensor that a
    kernel writes into to the host and back for each time that it runs the kernel to choose among
    its forms. For a table of 1 GB this takes seconds, and the times are those of the copies.

    A product of one row reads a matrix once: the compiler makes it a sum in a kernel of its own,
    with the operations around it, where it may tune that kernel. The library reads slower. Beside
    products of few rows, those of one row among them, kernels run together.
    """
    if traced.sizes:
        return {}
    nodes = traced.graph.graph.nodes
    written = (x.meta["val"] for node in nodes for x in writes_of(node))
    if any(x.numel() * x.element_size() >= _TOO_LARGE_TO_TIME for x in written):
        return {"triton.autotune_pointwise": False}
    rows = min(map(_rows, nodes), default=inf)
    names = (_TUNED if rows == 1 else ()) + (_COMBINED if rows <= _FEW_ROWS else ())
    return dict.fromkeys(names, True)


def _rows(node: torch.fx.Node) -> float:
    """Return the rows, or columns if fewer, of a product on a GPU; of none, infinitely many."""
    if node.target not in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        return inf
    x = node.meta["val"]
    return min(x.shape[-2:]) if x.device.type == "cuda" and x.numel() else inf


#: Seconds for which a process waits until no other one times a kernel.
_TIMING_S = 10.0


@contextmanager
def _timed_alone(arguments: Sequence[torch.Tensor]) -> Iterator[None]:
    """In this context, time a kernel on a GPU while no other process of this user times one there.

    Processes that compile side by side would else take each other's time for the kernel's.
    """
    device = next((x.device for x in arguments if x.device.type == "cuda"), None)
    if device is None:
        yield
        return
    from torch._inductor.runtime.benchmarking import benchmarker

    properties, where = torch.cuda.get_device_properties(device), folder()

    def timed(launch: Callable[[], object], **_: object) -> float:
        with _alone_on(str(getattr(properties, "uuid", device)), where):
            return milliseconds(launch, properties.L2_cache_size)

    with patch.object(benchmarker, "benchmark_gpu", timed):
        yield


@contextmanager
def _alone_on(device: str, where: Path | None) -> Iterator[None]:
    """In this context, hold the lock of a device, for at most `_TIMING_S` seconds of waiting.

    Without a folder there is no lock, and without a lock a kernel is timed all the same.
    """
    if where is None:
        yield
        return
    from filelock import FileLock

    lock = FileLock(where / "mdfuse" / f"{device}.lock")
    with suppress(OSError, NotImplementedError):
        check_private(where / "mdfuse")
        lock.acquire(timeout=_TIMING_S, poll_interval=0.01)
    try:
        yield
    finally:
        lock.release()


# -- compilers in other processes ------------------------------------------------------------------


#: Variables that name the compiler's folders.
_FOLDERS = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"

#: Settings of a process's compilers of kernels, which decide no code.
_WORKERS = "compile_threads", "worker_start_method"

#: A function that returns torch's setting on which compiled code depends -> the one that sets it.
_FLAGS: dict[Callable[[], Any], Callable[[Any], Any]] = {
    torch.get_num_threads: torch.set_num_threads,
    torch.get_default_dtype: torch.set_default_dtype,
    torch.get_float32_matmul_precision: torch.set_float32_matmul_precision,
    torch.get_deterministic_debug_mode: torch.set_deterministic_debug_mode,
}


def _configs() -> tuple[Any, Any]:
    from torch._functorch import config as of_functions
    from torch._inductor import config

    return config, of_functions


def settings_of(devices: Iterable[torch.device]) -> Any:
    """Return the settings of this process on which compiled code for some devices depends."""
    folders = {name: os.environ[name] for name in _FOLDERS if name in os.environ}
    configs = [config.get_config_copy() for config in _configs()]
    flags = [read() for read in _FLAGS]
    return folders, configs, flags, {x: fingerprint(x) for x in dict.fromkeys(devices)}


def assume(settings: Any) -> None:
    """Make `settings_of` another process this one's, but for its compilers of kernels.

    Raises:
        RuntimeError: code that this process compiles would be other code all the same.
    """
    folders, configs, flags, fingerprints = settings
    os.environ.update(folders)
    config_of_compilers = _configs()[0]
    workers = {name: getattr(config_of_compilers, name) for name in _WORKERS}
    for config, copied in zip(_configs(), configs, strict=True):
        config.load_config(copied)
    for write, value in zip(_FLAGS.values(), flags, strict=True):
        write(value)
    for device, text in fingerprints.items():
        if device.type == "cuda":
            torch.cuda.set_device(device)  # so that nothing takes memory of another GPU
        if fingerprint(device) != text:
            raise RuntimeError(f"it has {fingerprint(device)}, and not {text}")
    for name, value in workers.items():
        setattr(config_of_compilers, name, value)


#: Modules of the compiler that it imports only when it is called, and those that read functions.
_COMPILING = (
    "compile_fx", "standalone_compile", "codegen.cuda_combined_scheduling", "fx_passes.joint_graph",
    "fx_passes.post_grad", "fx_passes.pad_mm", "fx_passes.fuse_attention",
)  # fmt: skip
_READING = "compile_fx", "standalone_compile"

#: Functions of the compiler that read many files, and keep what they return: its own code's key,
#: and Triton's.
_READ_ONCE = ("codecache", "torch_key"), ("runtime.triton_compat", "triton_key")


def get_ready_to_compile() -> None:
    """Import what compiles, and read what names its files; this uses no GPU."""
    _import(_COMPILING)
    with suppress(ImportError):
        patterns: Any = import_module("torch._inductor.fx_passes.serialized_patterns")
        _import(f"fx_passes.serialized_patterns.{x.name}" for x in iter_modules(patterns.__path__))
    for module, name in _READ_ONCE:
        with suppress(ImportError, AttributeError, RuntimeError):  # there is no Triton
            getattr(import_module(f"torch._inductor.{module}"), name)()


def is_lost_to_gpus() -> bool:
    """Return whether this process was forked by one that had asked for GPUs, and can use none."""
    return bool(torch.cuda._is_in_bad_fork())


def fork_workers() -> None:
    """Start the processes that compile kernels, where there is a GPU, as copies of this one.

    They are ready at once, and import nothing. This process has one thread.
    """
    if torch.cuda.is_available():
        from torch._inductor.async_compile import AsyncCompile

        _configs()[0].worker_start_method = "fork"
        AsyncCompile.use_process_pool()


def compile_example(device: torch.device) -> None:
    """Compile a small function, so that the compiler has made its tables, and a GPU its context.

    Raises:
        Exception: whatever the compiler raises where it cannot.
    """
    form = (4, 4), (4, 1), torch.float32, device
    is_gpu = device.type == "cuda"  # on a CPU a sum would take a compiler of C++
    compiled(traced(lambda x, y: [(x @ y).add(1) if is_gpu else x @ y, x @ y @ y], [form, form]))


def get_ready_to_read() -> None:
    """Import what reads compiled functions."""
    _import(_READING)


def _import(names: Iterable[str]) -> None:
    """Import those modules of the compiler that this version of torch has."""
    for name in names:
        with suppress(ImportError):
            import_module(f"torch._inductor.{name}")


# -- compiled functions in files -------------------------------------------------------------------


def save(function: Function, path: Path) -> None:
    """Write a compiled function into a file.

    Raises:
        Exception: it cannot be written, or the compiler cannot list its parts.
    """
    function.save(path=str(path), format="binary")  # type: ignore[attr-defined]


def load(path: Path) -> Function:
    """Read a compiled function that `save` wrote.

    Raises:
        Exception: whatever the compiler raises where it cannot.
    """
    from torch._dynamo.convert_frame import compile_lock
    from torch._inductor.standalone_compile import CompiledArtifact

    with compile_lock:
        return CompiledArtifact.load(path=str(path), format="binary")


def folder() -> Path | None:
    """Return the compiler's folder of files for later processes; None: it is set to keep none."""
    from torch._inductor import config

    return None if config.force_disable_caches else cache_folder()


def fingerprint(device: torch.device) -> str:
    """Return the versions, machine and settings on which a compiled function depends."""
    from torch._functorch import config as of_functions
    from torch._inductor import config

    settings = config.get_hash().hex(), of_functions.get_hash().hex()
    return " ".join((*_machine(), _gpu(device) if device.type == "cuda" else "", *settings))


@cache
def _machine() -> tuple[str, ...]:
    version = torch.version
    versions = torch.__version__, version.git_version, version.cuda, version.hip
    cpu = platform.machine(), torch.backends.cpu.get_cpu_capability()
    return *map(str, versions), str(sys.implementation.cache_tag), *cpu


@cache
def _gpu(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    version = f"{properties.major}.{properties.minor}"
    return f"{properties.name} {version} {properties.multi_processor_count}"
