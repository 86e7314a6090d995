"""Plans of `parallelize_module`, and plans of transformers' models, as layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mdfuse.errors import LayoutError
from mdfuse.frontend.given import by_name, check_module, refused
from mdfuse.frontend.importing.place import nearest
from mdfuse.frontend.importing.submodules import word_by_word
from mdfuse.layouts.layout import Shard

#: Styles whose matrices are split by outputs, by inputs, or not at all.
_COLUMNS = {
    "ColwiseParallel", "colwise", "colwise_rep", "colwise_gather_output", "embedding_colwise",
    "packed_colwise",
}  # fmt: skip
_ROWS = {
    "RowwiseParallel", "rowwise", "rowwise_rep", "rowwise_split_input", "embedding_rowwise",
    "packed_rowwise",
}  # fmt: skip
_WHOLE = {
    "SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput",
    "sequence_parallel", "replicate", "all_reduce", "replicated_with_grad_allreduce",
    "moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj", "local_params",
}  # fmt: skip


def from_plan(
    module: nn.Module, plan: Mapping[str, Any] | None = None, axis: str = "tp"
) -> dict[str, Any]:
    """Return what `from_torch` takes for a plan of tensor parallelism.

    Only a style's parameters count: layouts of activations follow from them.

    Args:
        module: that the plan is for.
        plan: path of submodules (or parameters), `*` for any word, -> a style of
            `torch.distributed.tensor.parallel`, or its name in transformers; by default
            `module.tp_plan`, which models of transformers have.
        axis: of the mesh.

    Returns:
        `layouts` by names of parameters, `blocks` where a matrix is packed of two, and `skipped`,
        paths that lead nowhere, because plans name modules of other configurations.

    Raises:
        LayoutError: no plan, a style that is not known, or no path that leads anywhere.

    >>> import torch, mdfuse as mf
    >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    >>> module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> said = mf.from_plan(module, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    >>> for name, layout in said["layouts"].items():
    ...     print(name, layout)
    0.weight {'tp': Shard(dim=0)}
    0.bias {'tp': Shard(dim=0)}
    2.weight {'tp': Shard(dim=1)}
    """
    check_module("from_plan", module)
    if not isinstance(axis, str):
        raise refused("from_plan", "axis", axis, because="it names an axis", hint='axis="tp"')
    plan = getattr(module, "tp_plan", None) if plan is None else plan
    said = by_name("from_plan", "plan", plan, LayoutError)
    if not said:
        raise LayoutError(
            f"{type(module).__name__} has no plan",
            because="a plan says of submodules how they are split",
            hint='from_plan(module, {"*.q_proj": ColwiseParallel(), ...}), or layouts= by hand',
        )
    layouts: dict[str, dict[str, Shard]] = {}
    blocks: dict[str, dict[int, int]] = {}
    skipped: list[str] = []
    for path, style in said.items():
        name, parameters = _style(path, style), _parameters(module, path)
        if parameters is None:
            skipped.append(path)
        for key, tensor, is_table in parameters or ():
            dim = _dim(name, tensor, is_table or name.startswith("embedding"))
            if dim is None:
                continue
            layouts[key] = {axis: Shard(dim)}
            if name.startswith("packed"):
                blocks[key] = {dim: 2}
    if len(skipped) == len(said):
        raise _nowhere(module, skipped[0])
    return {"layouts": layouts, "blocks": blocks, "skipped": skipped}


def _style(path: str, style: Any) -> str:
    """Return the name of a style; LayoutError where it is not known."""
    name = style if isinstance(style, str) else type(style).__name__
    if name not in _COLUMNS | _ROWS | _WHOLE:
        raise LayoutError(
            f"the style {name} of {path!r}",
            because="of a style it must be known which dim of its parameters is split",
            hint="leave it out of the plan, and say layouts= for its parameters",
        )
    return name


def _parameters(module: nn.Module, path: str) -> list[tuple[str, Tensor, bool]] | None:
    """Return (name, parameter, is_table) for a path; None if it matches nothing."""
    parameters = []
    inner = [
        (n, m) for n, m in module.named_modules(remove_duplicate=False) if word_by_word(n, path)
    ]
    for name, part in inner:
        is_table = isinstance(part, nn.Embedding)
        direct = part.named_parameters(recurse=False)
        parameters += [(f"{name}.{key}" if name else key, x, is_table) for key, x in direct]
    all_ = module.named_parameters(remove_duplicate=False)
    parameters += [(name, x, False) for name, x in all_ if word_by_word(name, path)]
    return parameters if parameters or inner else None


def _nowhere(module: nn.Module, path: str) -> LayoutError:
    names = [name for name, _ in (*module.named_modules(), *module.named_parameters()) if name]
    return LayoutError(
        f"the plan's path {path!r} leads nowhere, and so do all others",
        because="it names submodules or parameters, word by word",
        hint="near it are " + ", ".join(nearest(path, names)),
    )


def _dim(style: str, x: Tensor, is_table: bool) -> int | None:
    """Return the dim of a parameter that a style splits: a linear's weight is [outputs, inputs]."""
    if style in _WHOLE:
        return None
    if is_table:
        return 0 if style in _ROWS else 1
    if x.ndim < 2:  # a bias
        return 0 if style in _COLUMNS else None
    return x.ndim - 2 if style in _COLUMNS else x.ndim - 1
