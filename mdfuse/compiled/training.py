"""Steps of training of imported modules: compiled, and run with the state that they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdfuse.compiled.pipeline import pipeline
from mdfuse.compiled.program import Program, compile
from mdfuse.compiled.step import Step, moved, resumed
from mdfuse.compiled.step_parts import part_of_batch, part_of_state
from mdfuse.compiled.step_stats import StepMeter, StepStats, flops_of
from mdfuse.config import Options
from mdfuse.errors import ProgramError, counted, listed
from mdfuse.frontend import given
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.importing.import_report import named
from mdfuse.frontend.importing.step_batches import BatchCut, inputs_of
from mdfuse.frontend.importing.train import COUNT, StepDefinition
from mdfuse.ir.graph import Fusion
from mdfuse.runtime.communicator import init


class TrainingStep:
    """Forward, loss, backward and update as one definition; `ImportedModel.training_step` makes it.

    `start` trains on ranks; `state`, `arguments` and `updated` do by hand what it does, for
    `mf.simulate`. Shapes are global here; what one rank passes and gets is its part of each.
    Parameters, their gradients and their updates have the module's dtypes; numbers of the
    optimizer are floats of no dims; the loss has the dtype that the loss function gives it.

    Attributes:
        definition: its inputs are those of the model, what the loss takes besides, numbers of the
            optimizer that a run chooses, and its state. It returns the loss, what else the loss
            function returned, and with clip= the norm of all gradients.

    >>> import torch, mdfuse as mf
    >>> split = {"dp": mf.Shard(0)}
    >>> x, target = torch.ones(6, 4), torch.zeros(6, 2)
    >>> model = mf.from_torch(torch.nn.Linear(4, 2), (x,), mesh=mf.DeviceMesh.arange(dp=2),
    ...                       layouts={"input:0": split})
    >>> step = model.training_step(
    ...     lambda y, target: mf.ops.mse_loss(y, target), optimizer=mf.optim.sgd,
    ...     extra={"target": mf.TensorSpec((6, 2), layout=split)})
    >>> step.trained, step.inputs
    (('weight', 'bias'), ('input', 'target', 'lr'))
    >>> weights, program, losses = model.load(), step.compile(), []
    >>> state = step.state(weights)
    >>> for _ in range(3):
    ...     given = step.arguments(weights, state, x, target, torch.tensor(0.1))
    ...     outputs = mf.simulate(program, given).outputs
    ...     state = step.updated(outputs)
    ...     losses.append(float(outputs[0]))
    >>> losses[0] > losses[1] > losses[2]
    True
    """

    def __init__(
        self, step: StepDefinition, weights: Sequence[str], microbatches: BatchCut | None = None
    ) -> None:
        self._step, self._microbatches = step, microbatches
        self._weights = tuple(weights)
        self.definition: FusionDefinition = step.definition

    @property
    def fusion(self) -> Fusion:
        """The step as an immutable fusion: values with layouts, the backward among them."""
        return self.definition.fusion

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of the parameters that are updated, in the order of the model."""
        return self._step.trained

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of what a run takes, in order: all but weights, constants and state.

        Tensors of the module's arguments come first, then what the loss takes besides, then numbers
        of the optimizer, as `lr`, which are tensors of no dims.
        """
        return inputs_of(self.fusion, self._weights)

    @property
    def _is_split(self) -> bool:
        """True if some state has another layout than its parameter, or stages have parameters."""
        if len({self.fusion.layout(name).mesh for name in self._weights}) > 1:
            return True
        pairs = {**self._step.owners, **self._step.masters}.items()
        return any(self.fusion.layout(a) != self.fusion.layout(b) for a, b in pairs)

    @property
    def skips_nonfinite(self) -> bool:
        """True if it changes nothing where gradients are not finite, and returns last whether."""
        return self._step.skips

    @property
    def _state_names(self) -> list[str]:
        return [*self.fusion.reuse.values()]

    def compile(self, options: Options | None = None) -> Program:
        """Return the program of the step, as `mf.compile` does, or `mf.pipeline` in microbatches.

        Args:
            options: by default those of the environment.

        Returns:
            A program that takes what `arguments` returns, and writes the new state over the old.

        Raises:
            LoweringError: no program for these layouts, with the line.
        """
        cut = self._microbatches
        if cut is None:
            return compile(self.definition, options)
        return pipeline(
            self.definition,
            microbatches=cut.count,
            batch=cut.batch,
            schedule=cut.schedule,
            options=options,
        )

    def report(self) -> str:
        """Return a report of what is trained, in how many microbatches, and where states are.

        `compile().explain()` says what that costs.

        >>> import torch, mdfuse as mf
        >>> split = {"dp": mf.Shard(0)}
        >>> model = mf.from_torch(torch.nn.Linear(4, 2), (torch.ones(8, 4),),
        ...                       mesh=mf.DeviceMesh.arange(dp=2), layouts={"input:0": split})
        >>> step = model.training_step(lambda y: (y * y).mean(), optimizer=mf.optim.adamw,
        ...                            microbatches=2, state_layouts={"*": split})
        >>> print(step.report())
        @Linear.step: 2 of 2 parameters and constants are trained
          microbatches: 2, along dim 0 of input
          state_layouts: * splits the state of 2: weight, bias
        """
        lines = [
            f"@{self.fusion.name}: {len(self.trained)} of "
            f"{counted(len(self._weights), 'parameter')} and constants are trained"
        ]
        if (cut := self._microbatches) is not None:
            along = (f"dim {dim} of {name}" for name, dim in cut.batch.items())
            schedule = f", schedule {cut.schedule}" if isinstance(cut.schedule, str) else ""
            lines.append(f"microbatches: {cut.count}, along {listed([*along])}{schedule}")
        for pattern, names in self._step.patterns.items():
            lines.append(f"state_layouts: {pattern} splits the state of {named(names) or 'none'}")
        return "\n  ".join(lines)

    def state(
        self, weights: Sequence[Tensor | None], *, rank: int | None = None
    ) -> dict[str, Tensor | None]:
        """Return the initial state by name: the parameters, and the optimizer's state as zeros.

        Args:
            weights: as `model.load` returned them, wholes or a rank's parts; they are copied.
            rank: whose parts they are; needed where `state_layouts=` split the state further.

        Returns:
            name -> tensor, of the shape of what is passed for the parameter, or with a rank of its
            part of the state; None where this rank has none of it. The count of steps is one number
            of f64; masters are f32.

        Raises:
            ProgramError: another number of them; parts of a rank that is not said.
        """
        known = self._named(weights).values()
        device = next((x.device for x in known if x is not None), None)
        return self._initial(weights, rank, device)

    def _initial(
        self, weights: Sequence[Tensor | None], rank: int | None, device: torch.device | None
    ) -> dict[str, Tensor | None]:
        """Return the initial state; see `state`."""
        known = self._named(weights)
        state: dict[str, Tensor | None] = {}
        step, values = self._step, self.fusion.values
        for name in self._state_names:
            if name == COUNT and step.counts:
                zero = torch.zeros((), dtype=torch.float64, device=device)
                mesh = self.fusion.layout(COUNT).mesh
                is_outside = device is None if rank is None else rank not in mesh
                state[name] = None if is_outside else zero
                continue
            of = step.owners.get(name) or step.masters.get(name) or name
            x = known[of]
            x = None if x is None else part_of_state(self.fusion, name, of, x, rank)
            if x is None:
                state[name] = None
            elif name in step.owners:
                state[name] = torch.zeros_like(x, dtype=values[name].dtype)
            else:
                state[name] = x.to(values[name].dtype, copy=True)
        return state

    def arguments(
        self, weights: Sequence[Tensor | None], state: Mapping[str, Any], *inputs: Any
    ) -> list[Any]:
        """Return all inputs of the program in their order, for `mf.simulate` or `program.run`.

        Args:
            weights: what `model.load` returned.
            state: what `state` returned, or what has become of it.
            inputs: what a run takes, in the order of `self.inputs`.

        Returns:
            A tensor, or None, for each input of the definition; they are not copied.

        Raises:
            ProgramError: another number of weights or inputs.
        """
        if len(inputs) != len(self.inputs):
            raise ProgramError(
                f"@{self.fusion.name} with {counted(len(inputs), 'input')}",
                because=f"besides weights and state it has {len(self.inputs)}",
                hint=f"pass, in this order: {listed(self.inputs)}",
            )
        call = f"arguments of @{self.fusion.name}"
        known = given.by_name(call, "state", state, ProgramError)
        if {*known} != {*self._state_names}:
            raise ProgramError(
                f"{call} with the state {listed(known) or '(none)'}",
                because=f"its state is {listed(self._state_names)}",
                hint="pass what state(weights) returned, or updated(outputs)",
            )
        all_ = self._named(weights) | dict(zip(self.inputs, inputs, strict=True)) | {**known}
        return [all_[name] for name in self.fusion.inputs]

    def updated(self, outputs: Sequence[Any]) -> dict[str, Any]:
        """Return the state among the outputs of a run, by name.

        Args:
            outputs: of `program.run`, or `.outputs` of `mf.simulate`: one for each output of the
                definition. The loss is the first.

        Returns:
            name -> tensor, as `arguments` takes it in the next step.

        Raises:
            ProgramError: another number of outputs.
        """
        reuse, count = self.fusion.reuse, len(self.fusion.outputs)
        outputs = given.results(f"updated of @{self.fusion.name}", "outputs", outputs, count)
        pairs = zip(self.fusion.outputs, outputs, strict=True)
        return {reuse[name]: x for name, x in pairs if name in reuse}

    def start(
        self,
        weights: Sequence[Tensor | None],
        options: Options | None = None,
        *,
        double_buffer: bool = False,
    ) -> RunningStep:
        """Compile the step, and begin to train on this rank.

        Args:
            weights: as `model.load(..., comm=comm)` returned them.
            options: of the program.
            double_buffer: see `mdfuse.Step`.

        Returns:
            The step with this rank's state: a call of it makes a step, and returns the loss.

        Raises:
            ProgramError: another number of weights.
            LoweringError: no program for these layouts.

        >>> import torch, mdfuse as mf
        >>> x = torch.ones(3, 4)
        >>> model = mf.from_torch(torch.nn.Linear(4, 2), (x,), mesh=mf.DeviceMesh.arange(dp=1))
        >>> step = model.training_step(lambda y: (y * y).mean(), optimizer=mf.optim.sgd)
        >>> running = step.start(model.load())
        >>> losses = [running(x, torch.tensor(0.1)) for _ in range(3)]
        >>> bool(losses[0] > losses[1] > losses[2]), losses[0].shape, losses[0].dtype
        (True, torch.Size([]), torch.float32)
        """
        known = self._named(weights)
        fixed = {n: x for n, x in known.items() if n not in {*self._state_names}}
        if self._is_split:
            comm = init(options)
            state = self._initial(weights, comm.rank, comm.device)
        else:
            state = self.state(weights)
        step = Step(self.compile(options), state, double_buffer=double_buffer)
        return RunningStep(step, fixed, self._weights, self)

    def joined(
        self, or_from: str | Path | None = None, before: RunningStep | None = None
    ) -> RunningStep:
        """Return a step that goes on as other ranks do; `mdfuse.recover` calls it.

        Args:
            or_from: a portable checkpoint, for what no rank holds.
            before: the step of this rank; None: this process is new.

        Raises:
            ProgramError: parts of the state that nobody holds, or another state; on all ranks.
        """
        step = None if before is None else before.step
        holding = None if before is None else before.step.holding(before.fixed)
        program = self.compile(None if step is None else step.program.options)
        names = [n for n in program.fusion.inputs if n in {*self._state_names}]
        fixed = [n for n in self._weights if n not in names]
        parts, choice, recovery = moved(program, [*names, *fixed], holding, or_from)
        state = {name: parts[name] for name in names}
        after = resumed(program, state, choice, recovery, step is not None and step.is_double)
        return RunningStep(after, {name: parts[name] for name in fixed}, self._weights, self)

    def shard(self, *batch: Any, rank: int) -> list[Any]:
        """Return a rank's parts of a batch: of wholes views, and parts as they are.

        Args:
            batch: in the order of `self.inputs`, all or the first of them: tensors as they are in
                the whole batch, or their parts on this rank; numbers, as a seed, stay.
            rank: whose parts.

        Returns:
            As many; None where the rank has nothing of one.

        Raises:
            ProgramError: too many tensors, or none; a shape that is neither.

        >>> import torch, mdfuse as mf
        >>> x, split = torch.arange(12.0).reshape(6, 2), {"dp": mf.Shard(0)}
        >>> model = mf.from_torch(torch.nn.Linear(2, 2), (x,), mesh=mf.DeviceMesh.arange(dp=2),
        ...                       layouts={"input:0": split})
        >>> step = model.training_step(lambda y: (y * y).mean(), optimizer=mf.optim.sgd)
        >>> (part,) = step.shard(x, rank=1)
        >>> part.tolist(), step.shard(part, rank=1)[0] is part
        ([[6.0, 7.0], [8.0, 9.0], [10.0, 11.0]], True)
        """
        if not batch or len(batch) > len(self.inputs):
            raise ProgramError(
                f"shard of {counted(len(batch), 'tensor')} for @{self.fusion.name}",
                because=f"a run takes {listed(self.inputs)}",
                hint="pass them in this order, all or the first of them",
            )
        pairs = zip(self.inputs, batch, strict=False)
        return [part_of_batch(self.fusion, name, x, rank) for name, x in pairs]

    def _named(self, weights: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        hint = "pass what model.load() returned"
        weights = given.parts(f"@{self.fusion.name}", "weights", weights, hint)
        if len(weights) != len(self._weights):
            raise ProgramError(
                f"@{self.fusion.name} with {counted(len(weights), 'weight')}",
                because=f"the model has {len(self._weights)} parameters and constants",
                hint=hint,
            )
        return dict(zip(self._weights, weights, strict=True))


class RunningStep:
    """A step of training with its weights and its state on this rank: a call is a step.

    `TrainingStep.start` makes it, and has an example.

    Attributes:
        step: the `mf.Step`.
        fixed: this rank's parts of parameters and constants that are not trained, by name.
    """

    def __init__(
        self,
        step: Step,
        fixed: Mapping[str, Tensor | None],
        names: Sequence[str],
        training: TrainingStep,
    ) -> None:
        self.step, self._training = step, training
        held = (x.device for x in (*step.state.values(), *fixed.values()) if x is not None)
        self._device = next(held, None)
        self._meter = StepMeter(self._device)
        self.fixed, self._names = fixed, names
        self._fixed = tuple(fixed.values())

    @property
    def state(self) -> dict[str, Tensor | None]:
        """This rank's parts of parameters and of the optimizer's state, as they are now."""
        return self.step.state

    @property
    def weights(self) -> list[Tensor | None]:
        """Parameters and constants as they are now, in the order of `ImportedModel.load`."""
        known = {**self.fixed, **self.step.state}
        return [known[name] for name in self._names]

    def __call__(self, *inputs: Any) -> Any:
        """Make a step, on all ranks alike.

        Args:
            inputs: this rank's parts of `TrainingStep.inputs`.

        Returns:
            The loss, or a tuple of the loss and what else is returned.

        Raises:
            ProgramError: another number of inputs; what is passed does not fit the program.
        """
        results = self.step(*self._fixed, *inputs)
        self._meter.count(results[-1] if self._training.skips_nonfinite else None)
        return results

    def shard(self, *batch: Any) -> list[Any]:
        """Return this rank's parts of a batch, on its device; see `TrainingStep.shard`."""
        parts = self._training.shard(*batch, rank=init(self.step.program.options).rank)
        to = self._device
        return [x.to(to, non_blocking=True) if isinstance(x, Tensor) else x for x in parts]

    def recovered(self, program: Any, or_from: str | Path | None = None) -> RunningStep:
        """Return the step of the same training, made for other ranks, as `mdfuse.recover` does.

        Raises:
            ProgramError: parts of the state that nobody holds, or another state; on all ranks.
        """
        if not isinstance(program, TrainingStep):
            what = f"recovered of @{self.step.program.fusion.name} with a {type(program).__name__}"
            raise ProgramError(what, hint="recovered(build(mesh).training_step(...))")
        return program.joined(or_from, self)

    @property
    def averages(self) -> list[Tensor | None]:
        """The weights, with the averages of `mf.optim.averaged` for trained parameters.

        Raises:
            ProgramError: the optimizer keeps no averages.
        """
        state = self.step.state
        known = {**self.fixed, **state}
        if not any(name.endswith(".average") for name in state):
            raise ProgramError(
                f"averages of @{self.step.program.fusion.name}",
                because="its optimizer keeps none",
                hint="optimizer=mf.optim.averaged(mf.optim.adamw, decay=0.999)",
            )
        return [known.get(f"{name}.average", known[name]) for name in self._names]

    def stats(
        self,
        *,
        tokens: float | None = None,
        flops: float | None = None,
        peak: float | None = None,
    ) -> StepStats:
        """Return speed and memory of the steps since the last call; it waits for the device.

        Args:
            tokens: of a step, on all ranks; by default the elements of the first input of integers.
            flops: of a step on this rank, where `StepStats.flops` should not be counted.
            peak: floating-point operations per second of this device; by default of its data sheet.

        Raises:
            ProgramError: no step since the last call, but the very first.

        >>> import torch, mdfuse as mf
        >>> x = torch.ones(3, 4)
        >>> model = mf.from_torch(torch.nn.Linear(4, 2), (x,), mesh=mf.DeviceMesh.arange(dp=1))
        >>> step = model.training_step(lambda y: (y * y).mean(), optimizer=mf.optim.sgd)
        >>> running = step.start(model.load())
        >>> for _ in range(3):
        ...     loss = running(x, torch.tensor(0.1))
        >>> stats = running.stats(peak=1e12)
        >>> stats.steps, stats.flops  # x w^T forwards, one product backwards
        (2, 96)
        """
        program = self.step.program
        rank = init(program.options).rank
        count = flops_of(program.host, rank) if flops is None else flops
        if tokens is None:
            values = (self._training.fusion.values[n] for n in self._training.inputs)
            ints = [v.size for v in values if v.shape and not v.dtype.is_floating_point]
            tokens = ints[0] if ints else None
        return self._meter.stats(tokens, count, peak)

    def save(
        self,
        folder: str | Path,
        *,
        portable: bool = False,
        wait: bool = True,
        keep: int | None = None,
    ) -> Path:
        """Write this rank's part of the state; see `Step.save`."""
        return self.step.save(folder, portable=portable, wait=wait, keep=keep)

    def saved(self) -> None:
        """Wait for the end of a save under way; see `Step.saved`."""
        self.step.saved()

    def load(self, folder: str | Path, *, cast: bool = False) -> None:
        """Read a saved state; see `Step.load`."""
        self.step.load(folder, cast=cast)
