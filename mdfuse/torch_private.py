"""The private parts of torch that mdfuse uses: torch does not promise to keep them.

All stand here, except for kernels of attention (`ir/attention_kernels.py`), the compiler
(`plan/inductor.py`) and the export (`frontend/importing/torch_tracing.py`). The tests of this
module pass with torch 2.11 to 2.14. The public way, if there is one, costs more than the call
itself (the current stream), or does not do the same (process groups whose teams have an order of
their own).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

# torch.distributed offers these without exporting them explicitly
from torch._C._distributed_c10d import (
    AllgatherOptions,
    FakeProcessGroup,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    Work,
)
from torch._C._dynamo import eval_frame, guards
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_current_level
from torch._subclasses import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "AllgatherOptions",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
    "Work",
    "all_gather_of",
    "argument_names",
    "asynchronous_type",
    "begin_group",
    "cache_folder",
    "checkpoint_metadata",
    "current_gpu",
    "current_raw_stream",
    "default_store",
    "empty_on_gpu",
    "end_group",
    "fake_group",
    "forward_level",
    "gloo_options",
    "is_capturing",
    "is_transformed",
    "is_zero_tensor",
    "keep_busy",
    "likeness",
    "local_of",
    "nccl_options",
    "pytree",
    "reduce_scatter_of",
    "shard_order",
    "spec_of",
    "table_grad",
    "transform_level",
    "untraced",
    "untransformed",
    "writes",
]
Function = TypeVar("Function", bound=Any)

#: A process group of one library, as its own class: torch's stubs lack most of its methods.
Group = Any

# -- streams ---------------------------------------------------------------------------------------


def _no_cuda(*_: Any) -> Any:
    raise RuntimeError("this torch was built without CUDA")


#: The handle of a device's current stream, by its number: `torch.cuda.current_stream` without an
#: object. Like the next one it is torch's function itself, without a wrapper: every run calls it.
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)

#: Whether that stream is being captured: `torch.cuda.is_current_stream_capturing` less a call.
is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", _no_cuda)


#: The number of the current GPU: `torch.cuda.current_device` less a call.
current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_cuda)

#: Keeps the current stream of the current GPU busy for so many cycles.
keep_busy: Callable[[int], None] = getattr(torch._C, "_cuda_sleep", _no_cuda)

# -- tensors ---------------------------------------------------------------------------------------


#: A new tensor of a shape, strides and a dtype on the current GPU: `torch.empty_strided` without
#: the dispatcher, in a third of its time.
empty_on_gpu: Callable[..., Tensor] = getattr(guards, "_empty_strided_cuda", _no_cuda)


#: Takes values; returns their addresses if they are tensors like some others, else None.
Likeness = Callable[[Sequence[Any]], "tuple[int, ...] | None"]


def likeness(tensors: Sequence[Tensor]) -> Likeness:
    """Return a function of the addresses of tensors like these; it takes 0.25 µs per tensor.

    Tensors are alike if they agree in type, dispatch keys (so also in layout, device type and lazy
    bits), dtype, device, shape, strides, `requires_grad`, and in the modes of torch that change its
    calls: autocast, inference mode, transforms of torch.func. None are alike during forward-mode
    differentiation, or if one tensor is given twice.
    """
    count, address, forward = len(tensors), Tensor.data_ptr, forward_ad
    # a tree of guards (`RootGuardManager`) would refuse nested tensors by itself, but is slower
    # once its many small objects have left the caches, as they do between replays
    check: Callable[..., bool] = guards.TensorGuards(
        *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
    ).check

    def where(given: Sequence[Any]) -> tuple[int, ...] | None:
        if len(given) != count or forward._current_level >= 0:
            return None
        try:
            for x in given:
                if x.is_nested:  # torch would end the process over its strides
                    return None
        except AttributeError:  # no tensor
            return None
        return tuple(map(address, given)) if check(*given) else None

    return where


# -- process groups --------------------------------------------------------------------------------

#: The methods that gather into, and scatter from, one flat tensor.
all_gather_of = attrgetter("_allgather_base")
reduce_scatter_of = attrgetter("_reduce_scatter_base")


def begin_group(group: Group) -> None:
    """Begin posts that NCCL starts together."""
    group._start_coalescing()


def end_group(group: Group) -> Work:
    """Start the posts since `begin_group`."""
    done: Work = group._end_coalescing()
    return done


def fake_group(index: int, size: int) -> Group:
    """A process group whose collectives stay in this process."""
    # newer torch keeps the constructor private
    return getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)(index, size)


def default_store() -> Store:
    """The store of torch's default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def gloo_options(devices: Sequence[Any], threads: int, timeout: timedelta) -> Any:
    """Options of a gloo group that shares its network devices with others."""
    gloo: Any = dist.ProcessGroupGloo
    options = (getattr(gloo, "_Options", None) or gloo.Options)()
    options._devices, options._threads, options._timeout = devices, threads, timeout
    return options


def nccl_options(timeout: timedelta) -> Any:
    """Options of an NCCL group."""
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


# -- tensors under transforms ----------------------------------------------------------------------

#: The level of torch.func's innermost transform around this line; None outside of all.
transform_level = maybe_current_level

#: Whether a tensor is wrapped by a transform of torch.func.
is_transformed = is_functorch_wrapped_tensor

#: The level of forward-mode differentiation; -1 outside of it.
forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")

#: Whether a tensor is zeros without memory.
is_zero_tensor: Callable[[Tensor], bool] = methodcaller("_is_zerotensor")


# -- DTensors --------------------------------------------------------------------------------------

#: A DTensor's mesh, placements, shape, strides and dtype: compared at once.
spec_of = attrgetter("_spec")

#: This rank's part of a DTensor, without a place in autograd.
local_of = attrgetter("_local_tensor")


def strided_blocks(placement: Any) -> int | None:
    """Return the number of blocks of a `_StridedShard`'s dim; None for other placements."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if type(placement) is _StridedShard else None


def strided_shard(dim: int, blocks: Any) -> Any:
    """Return torch's placement that splits each of some equal blocks of a dim."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=blocks)


def shard_order(x: DTensor) -> Sequence[tuple[int, Sequence[int]]]:
    """The dims that several mesh dims split, each with these mesh dims, outermost first."""
    return getattr(spec_of(x), "shard_order", None) or ()


def asynchronous_type() -> type[Any]:
    """The type of results of functional collectives under way: they have a `wait`."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor


_ATEN: Any = torch.ops.aten


# -- functions -------------------------------------------------------------------------------------

#: The function that `torch.meshgrid` calls with a list; it is asked for handles instead.
MESHGRID = torch._VF.meshgrid  # type: ignore[attr-defined]
#: The operation that `torch.nn.functional.grouped_mm` calls.
GROUPED_MM = torch._grouped_mm


_OPS = torch.library.Library("mdfuse", "DEF")  # lives as long as the process
_OPS.define(
    "grouped_mm(Tensor rows, Tensor matrices, Tensor ends) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)
_OPS.impl("grouped_mm", GROUPED_MM, "CompositeExplicitAutograd")
torch.library.register_fake("mdfuse::grouped_mm", GROUPED_MM, lib=_OPS)


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Call `GROUPED_MM` on operands whose strides a compiler keeps.

    The kernel needs groups that begin at whole 16 bytes; groups of any size do, if the elements of
    a row are adjacent. Torch's compiler promises its own `_grouped_mm` no strides: it passes
    transposed rows as a copy in the order of their dims, and the kernel then stops the device.
    """
    result: Tensor = torch.ops.mdfuse.grouped_mm(rows, matrices, ends)
    return result


def has_grouped_kernel(rows: Sequence[Tensor], matrices: Sequence[Tensor] = ()) -> bool:
    """Return whether `grouped_mm` multiplies these by a kernel that reads groups on the device.

    It does so in bf16, where rows of memory begin at whole 16 bytes; else it loops on the host.

    Args:
        rows: operands that are in new memory, or come from `aligned_rows`: strides do not count.
        matrices: operands that are passed with their strides.
    """
    return (
        all(x.is_cuda and x.dtype == torch.bfloat16 for x in (*rows, *matrices))
        and all(x.shape[-1] % 8 == 0 for x in rows)
        and all(map(_is_aligned, matrices))
    )


def aligned_rows(x: Tensor) -> Tensor:
    """Return rows [t,k] as `grouped_mm` takes them: in new memory where theirs is otherwise."""
    return (
        x if _is_aligned(x) and x.stride(1) == 1 else x.clone(memory_format=torch.contiguous_format)
    )


def _is_aligned(x: Tensor) -> bool:
    near, far = sorted(x.stride()[-2:])
    begins = all(
        step % 8 == 0 for step, n in zip(x.stride()[:-2], x.shape[:-2], strict=True) if n > 1
    )
    is_dense = near == 1 and far % 8 == 0 and far >= min(x.shape[-2:])
    return is_dense and begins and x.data_ptr() % 16 == 0


# -- tables ----------------------------------------------------------------------------------------


def table_grad(ct: Tensor, indices: Tensor, rows: int) -> Tensor:
    """Return the gradient of a table of embeddings, deterministic on GPUs, too."""
    grad: Tensor = _ATEN.embedding_dense_backward(ct, indices, rows, -1, False)
    return grad


# -- operations ------------------------------------------------------------------------------------


def writes(target: Any) -> bool:
    """Return whether an operation of a graph writes into an operand; in-place detach does not."""
    schema = getattr(target, "_schema", None)
    is_detach = target is _ATEN.detach_.default
    return schema is not None and bool(schema.is_mutable) and not is_detach


def argument_names(overload: Any) -> list[str]:
    """The names of the arguments of one of torch's operations, as `torch.ops.aten.add.Tensor`."""
    return [x.name for x in overload._schema.arguments]


# -- tracing by torch.compile ----------------------------------------------------------------------


def untraced(function: Function) -> Function:
    """Keep `torch.compile` out of a function and all that it calls: the graph breaks there."""
    skip = eval_frame._FrameExecStrategy(*[eval_frame._FrameAction.SKIP] * 2)
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "mdfuse has prepared what it calls"
    return function


# -- files -----------------------------------------------------------------------------------------


def checkpoint_metadata(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int], Sequence[tuple[Any, Any]]]],
    places: Mapping[tuple[str, Any], tuple[str, int, int]],
    save_id: str,
) -> Any:
    """Return the metadata of a folder of `torch.distributed.checkpoint`.

    Args:
        tensors: name -> dtype, shape, and (first element, extents) of each box.
        places: name and first element of a box -> file, and start and length of its bytes there.
        save_id: a text that identifies the checkpoint.
    """
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint import metadata as of

    size = torch.Size
    return of.Metadata(
        state_dict_metadata={
            name: of.TensorStorageMetadata(
                properties=of.TensorProperties(dtype=dtype),
                size=size(shape),
                chunks=[of.ChunkStorageMetadata(size(a), size(n)) for a, n in boxes],
            )
            for name, (dtype, shape, boxes) in tensors.items()
        },
        storage_data={
            of.MetadataIndex(name, size(first)): filesystem._StorageInfo(*place)
            for (name, first), place in places.items()
        },
        storage_meta=of.StorageMeta(save_id=save_id),
        version=filesystem.CURRENT_DCP_VERSION,
    )


def untransformed(stream: Any, transforms: Sequence[str]) -> Any:
    """Return the uncompressed stream of a checkpoint.

    Raises:
        ValueError: torch does not know one of the transforms, or cannot undo it here.
    """
    from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

    for extension in ExtensionRegistry().from_descriptor_list(transforms):
        if isinstance(extension, StreamTransformExtension):
            stream = extension.transform_from(stream)
    return stream


def cache_folder() -> Path:
    """Return the folder in which torch caches compiled code for later processes of this user."""
    return Path(_cache_dir_utils().cache_dir())


@cache
def _cache_dir_utils() -> Any:
    """Return torch's module of that folder, by its file: its package imports the compiler."""
    path = Path(torch.__file__).parent / "_inductor" / "runtime" / "cache_dir_utils.py"
    spec = importlib.util.spec_from_file_location("torch_cache_dir_utils", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
