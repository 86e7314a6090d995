"""Torch modules as programs: `from_torch`, and the imported module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from mdfuse.compiled.program import Program, compile
from mdfuse.compiled.together import check_communicator, save_together, together
from mdfuse.compiled.training import TrainingStep
from mdfuse.config import Options
from mdfuse.errors import DefinitionError, LayoutError, ProgramError, counted
from mdfuse.files import as_path
from mdfuse.frontend import given
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing import load as loading
from mdfuse.frontend.importing import save as saving
from mdfuse.frontend.importing.blocks import blocks_of
from mdfuse.frontend.importing.buffers import numbers_of
from mdfuse.frontend.importing.build import Model, check_known, constants_of, record
from mdfuse.frontend.importing.called import called
from mdfuse.frontend.importing.capture import Captured, capture
from mdfuse.frontend.importing.fold import Folded, live_nodes
from mdfuse.frontend.importing.gathers import warnings_of
from mdfuse.frontend.importing.place import Patterns, Placed
from mdfuse.frontend.importing.report import report
from mdfuse.frontend.importing.train import Optimizer, define_step
from mdfuse.frontend.spec import TensorSpec
from mdfuse.ir.graph import Fusion
from mdfuse.mesh import DeviceMesh, as_mesh
from mdfuse.names import as_name
from mdfuse.plan.progress import progress
from mdfuse.runtime.communicator import Communicator
from mdfuse.trees import flattened, unflattened


def from_torch(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Any,
    layouts: Mapping[str, Any] | None = None,
    blocks: Mapping[str, Any] | None = None,
    gather: Sequence[str] = (),
    adapters: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    buffers: Mapping[str, Tensor] | None = None,
    skipped: Sequence[str] = (),
) -> ImportedModel:
    """Import a module: the operations of its forward, for arguments of these shapes and dtypes.

    Args:
        module: on any device; on "meta" its parameters have no numbers, and need none.
        args, kwargs: arguments of `forward`; only shapes and dtypes of tensors (or `TensorSpec`s)
            count, everything else is a constant of the program.
        mesh: where all of it lives.
        layouts: pattern -> axis -> placement, for names of parameters, for inputs
            (`"input:ids"`, or `"input:0"`) and for outputs (`"output:logits"`, or `"output:0"`).
            If several match, the one without wildcards counts, then the one with the longest
            literal part. Tensors that no pattern matches are replicated; the layouts of
            such outputs are inferred.
        blocks: pattern -> how many blocks of one size stand along the dim that the parameter is
            split by, or their extents: `{"*.c_attn.*": 3}` for queries, keys and values in one
            matrix. Each is an input, and split, by itself; `{dim: 3}` says the dim.
        gather: axes of the mesh along which parameters are brought together just before they are
            read, as FSDP does; the backward gathers them again.
        adapters: pattern of names of linear layers -> the rank of an adapter beside it, or
            (rank, alpha): then steps of training train the adapters alone.
        dynamic_shapes: name of an argument -> dim -> a name: extents that each run chooses; or as
            `torch.export.export` takes them.
        buffers: name -> numbers, for buffers of a module on "meta" that are in no checkpoint.
        skipped: paths of a plan that lead nowhere, of `from_plan`, which `report()` lists.

    Raises:
        DefinitionError: the module cannot be exported; it calls operations that cannot be imported:
            all of them, with lines of the module.
        LayoutError: a pattern that matches nothing, or does not fit; some that contradict.

    >>> import torch, mdfuse as mf
    >>> from mdfuse import DeviceMesh, Shard
    >>> module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> x = torch.randn(3, 4)
    >>> model = mf.from_torch(module, (x,), mesh=DeviceMesh.arange(tp=2), layouts={
    ...     "0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}})
    >>> program = model.compile()
    >>> [c.kind for c in program.communications]
    ['Allreduce']
    >>> (y,) = mf.simulate(program, [*model.load(), x]).outputs
    >>> torch.testing.assert_close(y, module(x).detach())
    """
    _check_dicts(layouts, kwargs, blocks, adapters, buffers)
    patterns = Patterns(layouts or {}, mesh := as_mesh(mesh))
    model = _model(capture(module, args, kwargs, dynamic_shapes, adapters), patterns, buffers or {})
    model = replace(model, blocks=blocks_of(model, blocks or {}), gather=_axes(gather, mesh))
    return ImportedModel(model, patterns, given.names("from_torch", "skipped", skipped))


#: Arguments that are mappings by name, with the errors for other types.
_DICTS = {
    "layouts": LayoutError, "kwargs": DefinitionError, "blocks": DefinitionError,
    "adapters": DefinitionError, "buffers": DefinitionError,
}  # fmt: skip


def _check_dicts(*values: object) -> None:
    for value, (name, kind) in zip(values, _DICTS.items(), strict=True):
        given.by_name("from_torch", name, value, kind)


def _model(captured: Captured, patterns: Patterns, buffers: Mapping[str, Tensor]) -> Model:
    live = live_nodes(captured)
    check_known(captured, live)
    folded = Folded(captured, live, numbers_of(captured, buffers))
    placed, outputs = _places(captured, patterns)
    constants = constants_of(live, folded)
    first = dict.fromkeys(constants.values())
    return Model(
        captured=captured,
        live=live,
        folded=folded,
        mesh=patterns.mesh,
        placed=placed,
        outputs=outputs,
        constants={n: captured.origins.get(n, f"constant.{n.name}") for n in first},
        same={n: same for n, same in constants.items() if n is not same},
    )


def _axes(gather: Sequence[str], mesh: DeviceMesh) -> tuple[str, ...]:
    axes = given.names("from_torch", "gather", gather)
    for axis in axes:
        mesh.axis_index(axis)
    return axes


def _places(captured: Captured, patterns: Patterns) -> tuple[dict[Node, Placed], dict[int, Placed]]:
    """Return the placements that patterns give parameters and inputs, and outputs by position."""
    placed: dict[Any, Placed] = {}
    asked = [(n, p.names, n) for n, p in captured.parameters.items()]
    asked += [
        (n, (f"input:{name}", f"input:{i}"), n)
        for i, (n, name) in enumerate(captured.inputs.items())
    ]
    results = captured.results
    asked_outputs = [
        (o.place, (f"output:{o.path}", f"output:{o.place}"), results[o.place])
        for o in captured.outputs
        if o.place is not None
    ]
    for key, names, node in (*asked, *asked_outputs):
        place = patterns.find(names, node.meta["val"].ndim)
        if place is not None:
            placed[key] = place
    patterns.check_used([name for _, names, _ in (*asked, *asked_outputs) for name in names])
    _place_adapters(captured, patterns, placed)
    outputs = {key: place for key, place in placed.items() if isinstance(key, int)}
    return {key: place for key, place in placed.items() if isinstance(key, Node)}, outputs


def _place_adapters(captured: Captured, patterns: Patterns, placed: dict[Any, Placed]) -> None:
    """Place adapters as their matrices, unless a pattern matches `lora_` itself."""
    nodes = {name: n for n, p in captured.parameters.items() for name in p.names}
    for node, p in captured.parameters.items():
        said = placed.pop(node, None) if p.adapter is not None else None
        if p.adapter is None or (said is not None and "lora_" in said.pattern):
            placed |= {node: said} if said is not None else {}
            continue
        matrix = placed.get(nodes[p.adapter.of])
        if matrix is not None:
            layout = p.adapter.layout(p.name, matrix.layout)
            placed[node] = Placed(pattern=matrix.pattern, layout=layout)


class ImportedModel:
    """A module as a definition; `from_torch` makes it.

    Attributes:
        definition: the forward. Its inputs are the parameters that are read, in their order and
            under their names (tied ones once), constants, and the tensors of the arguments.
    """

    def __init__(self, model: Model, patterns: Patterns, skipped: Sequence[str] = ()) -> None:
        self.model = model
        self._patterns, self._skipped = patterns, tuple(skipped)
        self._unexpected: list[str] | None = None
        captured = model.captured
        with FusionDefinition(as_name(captured.name, "model")) as fd:
            self._results = record(model, model.define_inputs(fd))
            self._places: list[int] = []
            for x in self._results:
                if isinstance(x, Handle) and x.id not in self._places:
                    fd.add_output(x)
                    self._places.append(x.id)
        self.definition = fd

    @property
    def fusion(self) -> Fusion:
        """The forward as an immutable fusion, each line of it from the module."""
        return self.definition.fusion

    def __str__(self) -> str:
        return str(self.definition)

    def report(self) -> str:
        """Return a report of each pattern's tensors, and of replicated, tied and unused ones.

        It also lists values left out or skipped, and split values that are gathered in the middle
        of the module, which costs a communication: with the line, and the pattern that split it.
        """
        warnings = warnings_of(self.model, self.fusion, self.compile().fusion)
        return report(self.model, self._patterns, self._skipped, self._unexpected, warnings)

    def compile(self, options: Options | None = None) -> Program:
        """Return the program of the forward, as `mf.compile` does."""
        return compile(self.definition, options)

    def record(self, *args: Any, name: str = "", **kwargs: Any) -> tuple[Any, dict[str, Handle]]:
        """Record the module in the open definition, on values of it: as a stage, for example.

        Parameters and constants become inputs of that definition, on the module's mesh, and
        buffers that the module writes outputs of it.

        Args:
            args, kwargs: as the module was imported with them, with a value for each tensor.
            name: prefix of the names of parameters, without the dot, where a definition has
                several modules.

        Returns:
            The module's result, of values; and name -> value of each parameter and constant, in
            the order of `load`.

        Raises:
            DefinitionError: arguments of another structure, shape or dtype.

        >>> import torch, mdfuse as mf
        >>> first, second = mf.DeviceMesh([0]), mf.DeviceMesh([1])
        >>> modules, x = [torch.nn.Linear(4, 4) for _ in range(2)], torch.randn(6, 4)
        >>> one, two = (mf.from_torch(m, (x,), mesh=p) for m, p in zip(modules, (first, second)))
        >>> with mf.FusionDefinition("stages") as fd:
        ...     h, weights = one.record(fd.define_tensor([6, 4], mesh=first, name="x"), name="one")
        ...     y, more = two.record(fd.ops.set(h).on(second, {}), name="two")
        ...     fd.add_output(y)
        >>> [*weights, *more]
        ['one.weight', 'one.bias', 'two.weight', 'two.bias']
        >>> program = mf.pipeline(fd, microbatches=3, batch={"x": 0})
        >>> (y,) = mf.simulate(program, [x, *one.load(), *two.load()]).outputs
        >>> torch.testing.assert_close(y, modules[1](modules[0](x)).detach())
        """
        return called(self.model, args, kwargs, name)

    def training_step(
        self,
        loss: Callable[..., Any] | None = None,
        *,
        optimizer: Callable[..., Any],
        extra: Mapping[str, TensorSpec] | None = None,
        frozen: Sequence[str] | None = None,
        clip: float | None = None,
        master: bool = False,
    ) -> TrainingStep:
        """Define a step of training: forward, loss, backward and update are one program.

        Parameters on which the loss does not depend are not updated, and have no state.

        Args:
            loss: a function of the module's tensors, in their order, and of the extra inputs by
                name; it returns the loss, or a tuple of the loss and other values to return. By
                default the `loss` that the module returns, or its only result.
            optimizer: `mf.optim.adamw` or the like: a function (w, dw, *state, **numbers) that
                returns (w, *state). Numbers are bound by `functools.partial`; those that are
                needed and not bound, as `lr`, are inputs of each run. `step` is counted.
            extra: name -> spec of each further argument of the loss.
            frozen: patterns of parameters that are not trained; nor are those that do not require
                gradients. By default none; beside adapters, all but these.
            clip: scales all gradients so that their norm together is at most this.
            master: keeps parameters of 16 bits in f32 besides.

        Raises:
            DefinitionError: a loss that is none, nothing to train, no parameter on which the loss
                depends, an op without a gradient.
            LayoutError: a pattern that matches nothing.

        >>> import functools, torch, mdfuse as mf
        >>> module, mesh = torch.nn.Linear(4, 2), mf.DeviceMesh.arange(dp=2)
        >>> split = {"dp": mf.Shard(0)}
        >>> model = mf.from_torch(module, (torch.zeros(6, 4),), mesh=mesh,
        ...                       layouts={"input:0": split})
        >>> step = model.training_step(
        ...     lambda y, target: mf.ops.mse_loss(y, target),
        ...     extra={"target": mf.TensorSpec((6, 2), layout=split)},
        ...     optimizer=functools.partial(mf.optim.sgd, momentum=0.9))
        >>> step.inputs
        ('input', 'target', 'lr')
        """
        call = f"training_step of {self.model.captured.name}"
        given.flag(call, "master", master, DefinitionError)
        if loss is not None:
            given.function(call, "loss", loss, "of the module's tensors, in their order")
        weights = self.model.weight_names()
        step = define_step(
            self.model,
            loss,
            given.by_name(call, "extra", extra),
            Optimizer.of(optimizer),
            frozen=frozen,
            clip=clip,
            master=master,
            name=f"{self.definition.name}.step",
        )
        return TrainingStep(step, weights)

    # -- arguments and results -------------------------------------------------------------------

    def inputs(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Return the tensors of the module's arguments, in the order of the program's inputs.

        Raises:
            ProgramError: arguments of another structure than those of the import.
        """
        paths, structure = flattened((tuple(args), dict(kwargs)))
        wanted = self.model.captured.structure[0]
        if structure != wanted:
            raise ProgramError(
                f"arguments {structure} of {self.model.captured.name}",
                because=f"it was imported with {wanted}",
                hint="pass arguments of the same structure, with the same names",
            )
        return [x for _, x in paths if isinstance(x, Tensor)]

    def outputs(self, results: Sequence[Any]) -> Any:
        """Return the results of a run in the structure that the module returns.

        Args:
            results: of `program.run`, or `.outputs` of `mf.simulate`.
        """
        written = len(self.model.captured.mutated)
        count = written + len(self._places)
        if not isinstance(results, list | tuple) or len(results) != count:
            raise given.refused(
                f"outputs of {self.model.captured.name}",
                "results",
                results,
                because=f"a run returns a list of {counted(count, 'result')}",
                hint="pass what program.run(...) returned, or mf.simulate(...).outputs",
                kind=ProgramError,
            )
        there = dict(zip(self._places, results[written:], strict=True))
        tensors = [there[x.id] if isinstance(x, Handle) else x for x in self._results]
        captured = self.model.captured
        leaves = [o.constant if o.place is None else tensors[o.place] for o in captured.outputs]
        return unflattened(leaves, captured.structure[1])

    # -- weights ---------------------------------------------------------------------------------

    def load(
        self,
        source: Any = None,
        *,
        rank: int | None = None,
        comm: Communicator | None = None,
        device: torch.device | str | None = None,
        rename: Callable[[str], str] | None = None,
    ) -> list[Tensor | None]:
        """Read parameters and constants: the inputs of a program before the module's arguments.

        Args:
            source: a file of safetensors, an index of several, a folder with either, a folder of
                `torch.distributed.checkpoint`, or tensors by name; without one, the module's own
                parameters.
            rank: reads this rank's boxes, and nothing else; without one, the wholes.
            comm: takes its rank and device; where one rank fails, all raise.
            device: where to put them; that of comm by default, else the CPU.
            rename: name of a parameter -> its name in the checkpoint.

        Returns:
            A tensor for each, in the order of the program's inputs; None where the rank has none.

        Raises:
            ProgramError: tensors that are missing, all at once, or have other shapes; a file that
                cannot be read.
        """
        call = f"load of {self.model.captured.name}"
        check_communicator(call, comm)
        if comm is not None:
            rank, device = comm.rank, comm.device if device is None else device
        load = partial(self._load, call, source, rank, device, rename)
        return together(comm, f"load {self.model.captured.name}", load)

    def save(
        self,
        folder: str | Path,
        weights: Sequence[Tensor | None],
        *,
        comm: Communicator | None = None,
    ) -> Path:
        """Write parameters under the module's names, as `torch.distributed.checkpoint` does.

        `load` reads them into a model with any layouts, and so does torch's own loader into a
        module. Each box is written by the first rank that has it.

        Args:
            folder: that all ranks share; without a checkpoint.
            weights: as `load` returned them, or `RunningStep.weights`; wholes without comm, with it
                this rank's parts.
            comm: all ranks save together; where one fails, all raise.

        Raises:
            ProgramError: the folder has a checkpoint, or cannot be written; other weights.
        """
        what = f"save {self.model.captured.name}"
        check_communicator(f"save of {self.model.captured.name}", comm)
        folder = together(comm, what, partial(as_path, folder))
        rank = None if comm is None else comm.rank
        write = partial(saving.write, folder, self.model, weights, rank)
        finish = partial(saving.finish, folder, self.model, None if comm is None else comm.size)
        save_together(comm, what, folder, write, finish)
        return folder

    def _load(
        self,
        call: str,
        source: Any,
        rank: int | None,
        device: Any,
        rename: Callable[[str], str] | None,
    ) -> list[Tensor | None]:
        captured, folded = self.model.captured, self.model.folded
        rank = None if rank is None else given.rank_of(call, rank)
        device = None if device is None else given.device_of(call, device)
        called = loading.names_of(call, rename)
        checkpoint = loading.opened(self._own if source is None else source)
        wanted = [tuple(map(called, captured.parameters[n].names)) for n in self.model.parameters]
        checkpoint = loading.with_starts(checkpoint, self._starts(called))
        others = [called(name) for p in captured.unused for name in p.names]
        self._unexpected = loading.check_names(
            checkpoint, wanted, [*others, *captured.origins.values()]
        )
        there = {*checkpoint.names}
        parts: list[Tensor | None] = []
        with progress("loading", len(wanted), shows=not rank) as advance:
            for node, names in zip(self.model.parameters, wanted, strict=True):
                name, value = next(n for n in names if n in there), node.meta["val"]
                loading.check_shape(checkpoint, name, value.shape)
                read = partial(loading.read, checkpoint, name, value.dtype)
                for boxes in self.model.boxes(node, rank):
                    part = None if boxes is None else loading.joined(boxes, read)
                    parts.append(part if part is None else part.to(device))
                advance()
        for node in self.model.constants:
            cut = partial(loading.part_of, folded[node])
            for boxes in self.model.boxes(node, rank):
                parts.append(None if boxes is None else loading.joined(boxes, cut).to(device))
        return parts

    def _starts(self, called: Callable[[str], str]) -> dict[str, Tensor]:
        """The initial values of adapters, by name: a checkpoint may lack them."""
        of = (self.model.captured.parameters[n] for n in self.model.parameters)
        return {called(p.name): p.adapter.start for p in of if p.adapter is not None}

    @cached_property
    def _own(self) -> dict[str, Tensor]:
        """The module's own parameters, by all of their names."""
        parameters = self.model.captured.parameters.values()
        empty = [p.name for p in parameters if p.tensor.is_meta]
        if empty:
            raise ProgramError(
                f"load() of {self.model.captured.name}, whose {empty[0]} is on the meta device",
                because=f"{len(empty)} of {len([*parameters])} parameters have no numbers",
                hint="load(path, rank=comm.rank) reads them from a checkpoint",
            )
        return {name: p.tensor for p in parameters for name in p.names}
