"""Imported modules: their definition, their weights, their arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdfuse.compiled.advice import uneven_shares
from mdfuse.compiled.all_or_none import check_communicator, save_together, together
from mdfuse.compiled.program import Program, compile
from mdfuse.compiled.training import TrainingStep
from mdfuse.config import Options
from mdfuse.errors import ProgramError
from mdfuse.files import as_path
from mdfuse.frontend import given
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.handle import Handle
from mdfuse.frontend.importing import load as loading
from mdfuse.frontend.importing import save as saving
from mdfuse.frontend.importing.called import called
from mdfuse.frontend.importing.gathers import warnings_of
from mdfuse.frontend.importing.import_report import of_rows, report
from mdfuse.frontend.importing.place import Patterns, nearest
from mdfuse.frontend.importing.record_graph import Model, record
from mdfuse.frontend.importing.step_batches import microbatches_of
from mdfuse.frontend.importing.train import Optimizer, define_step
from mdfuse.frontend.spec import TensorSpec
from mdfuse.ir.graph import Fusion
from mdfuse.layouts.layout import Layout
from mdfuse.names import as_name
from mdfuse.pipelines.schedules import Schedule
from mdfuse.plan.progress_bar import progress
from mdfuse.runtime.communicator import Communicator
from mdfuse.trees import flattened, unflattened


class ImportedModel:
    """A module as a definition; `mf.from_torch` returns it.

    A run of its program takes parameters and constants, as `load` returns them, then the tensors of
    the arguments, as `inputs` returns them. Shapes are global here; what one rank passes and gets
    is its part of each. Dtypes are those of the module and of the arguments of the import.

    Attributes:
        definition: the forward. Its inputs are the parameters that are read, in their order and
            under their names (tied ones once), constants, and the tensors of the arguments. Its
            outputs are buffers that the module writes, then the tensors that it returns.

    >>> import torch, mdfuse as mf
    >>> module, x = torch.nn.Linear(4, 6), torch.randn(3, 4)
    >>> model = mf.from_torch(module, (x,), mesh=mf.DeviceMesh.arange(tp=2),
    ...                       layouts={"*": {"tp": mf.Shard(0)}})
    >>> [*model.fusion.inputs]
    ['weight', 'bias', 'input']
    >>> [tuple(w.shape) for w in model.load(rank=1)]  # half of the rows of [6, 4] and of [6]
    [(3, 4), (3,)]
    >>> result = mf.simulate(model.compile(), [*model.load(), *model.inputs(x)])
    >>> y = model.outputs(result.outputs)
    >>> y.shape, y.dtype
    (torch.Size([3, 6]), torch.float32)
    >>> torch.testing.assert_close(y, module(x).detach())
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
        """The forward as an immutable fusion: values with layouts, each with the module's line."""
        return self.definition.fusion

    def __str__(self) -> str:
        """The text of the definition: each value with its dtype, its shape and its layout."""
        return str(self.definition)

    def report(self) -> str:
        """Return a report of each pattern's tensors, and of replicated, tied and unused ones.

        And where a value that is split is brought together, which costs a communication in the
        middle of the module: with the line, and the pattern that split it.

        Returns:
            A text of several lines; after a `load`, also with what the checkpoint had besides.

        Raises:
            LoweringError: the forward cannot be compiled, as `mf.compile` says.

        >>> import torch, mdfuse as mf
        >>> model = mf.from_torch(torch.nn.Linear(4, 6), (torch.zeros(3, 4),),
        ...     mesh=mf.DeviceMesh.arange(tp=2), layouts={"weight": {"tp": mf.Shard(0)}})
        >>> print(model.report())
        Linear on mesh(tp=2): 2 parameters, 0 constants, 1 input, 1 output
          weight        tp=S0       1: weight
          (no pattern)  replicated  2: bias, input:input
        """
        lowered = self.compile().fusion
        warnings = [*warnings_of(self.model, self.fusion, lowered), *uneven_shares(lowered)]
        warnings += [*lowered.notes, *of_rows(self.model.capacity, lowered)]
        return report(self.model, self._patterns, self._skipped, self._unexpected, warnings)

    def layout(self, name: str) -> Layout:
        """Return the layout of a parameter, a constant or an argument: for `mf.shard_tensor`.

        Args:
            name: of an input of the definition, as `fusion.inputs` has it.

        Raises:
            ProgramError: no input has this name.

        >>> import torch, mdfuse as mf
        >>> mesh, x = mf.DeviceMesh.arange(fsdp=2, tp=2), torch.zeros(3, 4)
        >>> model = mf.from_torch(torch.nn.Linear(4, 8), (x,), mesh=mesh, gather="fsdp",
        ...     layouts={"weight": {"fsdp": mf.Shard(0), "tp": mf.Shard(0)}})
        >>> print(model.layout("weight"))  # a rank gathers its rows of tp along fsdp
        (fsdp=S0, tp=S0, order 0:tp>fsdp)
        """
        if name not in self.fusion.inputs:
            raise ProgramError(
                f"layout of {name!r} of {self.model.captured.name}",
                because="the definition has no such input",
                hint="near it are " + ", ".join(nearest(str(name), self.fusion.inputs)),
            )
        return self.fusion.layout(name)

    def compile(self, options: Options | None = None) -> Program:
        """Return the program of the forward, as `mf.compile` does.

        Args:
            options: by default those of the environment.

        Returns:
            A program whose `run` takes this rank's parts of `load` and `inputs`, and returns its
            parts of the outputs.

        Raises:
            LoweringError: no program for these layouts, with the module's line.

        >>> import torch, mdfuse as mf
        >>> model = mf.from_torch(torch.nn.Linear(4, 6), (torch.zeros(1, 4),),
        ...     mesh=mf.DeviceMesh.arange(tp=2), layouts={"weight": {"tp": mf.Shard(1)}})
        >>> [c.kind for c in model.compile().communications]
        ['Allreduce']
        """
        return compile(self.definition, options)

    def record(self, *args: Any, name: str = "", **kwargs: Any) -> tuple[Any, dict[str, Handle]]:
        """Record the module in the open definition, on values of it: as a stage, for example.

        Parameters and constants become inputs of that definition, on the module's mesh, and
        buffers that the module writes outputs of it. Rows do not go to the ranks of their experts,
        as they do in `compile`: a pipeline has no counts of all its rows.

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
        skip_nonfinite: bool = False,
        microbatches: int = 1,
        batch: Mapping[str, int] | None = None,
        schedule: str | Schedule | None = None,
        state_layouts: Mapping[str, Any] | None = None,
    ) -> TrainingStep:
        """Define a step of training: forward, loss, backward and update are one program.

        Args:
            loss: a function of the module's tensors, in their order, and of the extra inputs by
                name; it returns the loss, or a tuple of the loss and other values to return. By
                default the `loss` that the module returns, or its only result. Parameters on which
                it does not depend are not updated, and have no state.
            optimizer: `mf.optim.adamw` or the like: a function (w, dw, *state, **numbers) that
                returns (w, *state). Numbers are bound by `functools.partial`; those that are
                needed and not bound, as `lr`, are inputs of each run. `step` is counted.
            extra: name -> spec of each further argument of the loss.
            frozen: patterns of parameters that are not trained; nor are those that do not require
                gradients. By default none; beside adapters, all but these.
            clip: scales all gradients so that their norm together is at most this.
            master: keeps parameters of 16 bits in f32 besides.
            skip_nonfinite: where a gradient has an inf or NaN on some rank, parameters, state and
                the count of steps stay as they are; whether they did is returned last, a bool.
            microbatches: in how many equal parts each rank takes its rows of the batch.
            batch: input -> its dim that is the batch's; by default the first of the first argument.
            schedule: of microbatches through the stages of the import, as `mf.pipeline` takes it.
            state_layouts: pattern of parameters -> axis -> placement, of masters, moments and
                gradients where parameters have others: `{"*": {"dp": mf.Shard(0)}}` is ZeRO.

        Returns:
            The step, not yet compiled; its loss has no dims. `TrainingStep` has an example.

        Raises:
            DefinitionError: a loss that is none, nothing to train, no parameter on which the loss
                depends, an op without a gradient; a batch that is not so many equal parts.
            LayoutError: a pattern that matches nothing, or does not fit.
        """
        step = define_step(
            self.model,
            loss,
            extra,
            Optimizer.of(optimizer),
            frozen=frozen,
            clip=clip,
            master=master,
            skip_nonfinite=skip_nonfinite,
            name=f"{self.definition.name}.step",
            state_layouts=state_layouts,
        )
        cut = microbatches_of(self.model, step, microbatches, batch, schedule)
        return TrainingStep(step, self.model.weight_names(), cut)

    # -- arguments and results -------------------------------------------------------------------

    def inputs(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Return the tensors of the module's arguments, in the order of the program's inputs.

        Args:
            args, kwargs: as for the module's forward: wholes for `mf.simulate`, this rank's parts
                for a run. Shapes and dtypes are looked at by the run, not here.

        Returns:
            The tensors, as they are; what is no tensor is left out.

        Raises:
            ProgramError: arguments of another structure than those of the import.

        >>> import torch, mdfuse as mf
        >>> x = torch.zeros(3, 4)
        >>> model = mf.from_torch(torch.nn.Linear(4, 6), (x,), mesh=mf.DeviceMesh.arange(tp=2))
        >>> [tuple(t.shape) for t in model.inputs(torch.ones(3, 4))]
        [(3, 4)]
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
            results: of `program.run`, or `.outputs` of `mf.simulate`: one tensor for each output of
                the definition, of its shape (on a rank: of its part) and dtype.

        Returns:
            A tensor, tuple, dict or dataclass, as the module returns it. None stands where this
            rank is outside of the mesh; what the module wrote into buffers is left out.

        Raises:
            ProgramError: another number of results.

        >>> import torch, mdfuse as mf
        >>> class Pair(torch.nn.Module):
        ...     def forward(self, x):
        ...         return {"twice": x * 2, "sum": x.sum()}
        >>> x = torch.ones(3)
        >>> model = mf.from_torch(Pair(), (x,), mesh=mf.DeviceMesh.arange(tp=2))
        >>> model.outputs(mf.simulate(model.compile(), [x]).outputs)
        {'twice': tensor([2., 2., 2.]), 'sum': tensor(3.)}
        """
        written = len(self.model.captured.mutated)
        call, count = f"outputs of {self.model.captured.name}", written + len(self._places)
        results = given.results(call, "results", results, count)
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
            A tensor for each, in the order of the program's inputs, in the dtype of the module's
            parameter and, with a rank, in the shape of its part; None where the rank has none.

        Raises:
            ProgramError: tensors that are missing, all at once, or have other shapes; a file that
                cannot be read.

        >>> import torch, mdfuse as mf
        >>> module = torch.nn.Linear(4, 6, dtype=torch.bfloat16)
        >>> model = mf.from_torch(module, (torch.zeros(3, 4, dtype=torch.bfloat16),),
        ...     mesh=mf.DeviceMesh.arange(tp=4), layouts={"weight": {"tp": mf.Shard(0)}})
        >>> numbers = {"weight": torch.ones(6, 4), "bias": torch.zeros(6)}
        >>> [(tuple(w.shape), w.dtype) for w in model.load(numbers, rank=0)]
        [((2, 4), torch.bfloat16), ((6,), torch.bfloat16)]
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

        Returns:
            The folder.

        Raises:
            ProgramError: the folder has a checkpoint, or cannot be written; other weights.

        >>> import tempfile, torch, mdfuse as mf
        >>> module = torch.nn.Linear(4, 6)
        >>> model = mf.from_torch(module, (torch.zeros(3, 4),), mesh=mf.DeviceMesh.arange(tp=2))
        >>> folder = model.save(tempfile.mkdtemp(), model.load())
        >>> torch.equal(model.load(folder, rank=1)[0], module.weight)
        True
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
        captured = self.model.captured
        rank = None if rank is None else given.rank_of(call, rank)
        device = None if device is None else given.device_of(call, device)
        called = loading.names_of(call, rename)
        checkpoint = loading.opened(self._parameters if source is None else source)
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
                read = partial(loading.read, checkpoint, name, value.dtype, device=device)
                for boxes in self.model.boxes(node, rank):
                    parts.append(None if boxes is None else loading.joined(boxes, read))
                advance()
        return [*parts, *self._constants(rank, device)]

    def constants(
        self, rank: int | None = None, device: torch.device | str | None = None
    ) -> dict[str, Tensor | None]:
        """Return the inputs that `load` returns behind the parameters, by name.

        Args:
            rank: takes this rank's boxes; without one, the wholes.
            device: where to put them; the CPU by default.

        Returns:
            name of an input of the definition -> a tensor; None where the rank has none.

        Raises:
            ProgramError: the rank is no number of one.

        >>> import torch, mdfuse as mf
        >>> model = mf.from_torch(torch.nn.Linear(4, 6), (torch.zeros(1, 4),),
        ...     mesh=mf.DeviceMesh.arange(tp=2))
        >>> model.constants(rank=0)
        {}
        """
        rank = None if rank is None else given.rank_of("constants", rank)
        before = sum(len([*self.model.boxes(n, rank)]) for n in self.model.parameters)
        names = [*self.fusion.inputs][before:]
        return dict(zip(names, self._constants(rank, device), strict=False))

    def _constants(self, rank: int | None, device: Any) -> list[Tensor | None]:
        parts: list[Tensor | None] = []
        for node in self.model.constants:
            cut = partial(loading.part_of, self.model.folded[node])
            for boxes in self.model.boxes(node, rank):
                parts.append(None if boxes is None else loading.joined(boxes, cut).to(device))
        return parts

    def _starts(self, called: Callable[[str], str]) -> dict[str, Tensor]:
        """The initial values of adapters and of given buffers, which a checkpoint may lack."""
        of = (self.model.captured.parameters[n] for n in self.model.parameters)
        starts = {p.name: p.adapter.start for p in of if p.adapter is not None}
        return {called(n): x for n, x in (starts | dict(self.model.folded.buffers)).items()}

    @cached_property
    def _parameters(self) -> dict[str, Tensor]:
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
