"""The programs of an engine: a step with and without a chunk, and the choice of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mdfuse.compiled.from_torch import from_torch
from mdfuse.compiled.imported import ImportedModel
from mdfuse.compiled.program import Program, compile
from mdfuse.compiled.step import Step
from mdfuse.config import Options
from mdfuse.errors import ProgramError, message_of
from mdfuse.mesh import DeviceMesh
from mdfuse.runtime.communicator import Communicator
from mdfuse.serving import token_choice
from mdfuse.serving.decoder import CACHES, own_attention, served
from mdfuse.serving.models import GivenModel
from mdfuse.serving.rotation import fixed
from mdfuse.serving.shape import StepShape
from mdfuse.serving.turns import Integers
from mdfuse.simulation.simulate import simulate

#: The name of the input with a step's integers.
STEP = "step"


class Programs:
    """The programs that all ranks run, alike, for each step.

    Args:
        model: a causal model of transformers, and where its parameters are.
        shape: of a step with a chunk.
        caches: name -> heads, features, dtype.
        layouts: pattern -> axis -> placement, those of the caches included.
        placed: the other arguments of `from_torch`.
        comm: runs a rank's part; None: all ranks are simulated.

    Attributes:
        shape, without_chunk: of steps.
        read: what this process read of the parameters, as a line.
        steps: whether there is a chunk -> computes a step of these integers, in place.
        models: whether there is a chunk -> the import.
    """

    def __init__(
        self,
        model: GivenModel,
        shape: StepShape,
        caches: Mapping[str, tuple[int, int, torch.dtype]],
        mesh: DeviceMesh,
        layouts: Mapping[str, Any],
        placed: Mapping[str, Any],
        comm: Communicator | None,
        options: Options | None,
    ) -> None:
        self.shape, self._comm, self._options = shape, comm, options
        self._samplers: dict[int, Program] = {}
        module = model.module
        self.without_chunk = replace(shape, chunk=0)
        shapes = {bool(s.chunk): s for s in (shape, self.without_chunk)}
        rows = shape.cache_rows
        buffers = {n: torch.zeros(rows, *hd, dtype=dtype) for n, (*hd, dtype) in caches.items()}
        named = {f"{CACHES}.{name}": x for name, x in buffers.items()}
        self.models: dict[bool, ImportedModel] = {}
        with own_attention(module), fixed(module):
            for has_chunk, s in shapes.items():
                step = torch.zeros(s.size, dtype=torch.int64)
                module_ = served(module, s, buffers)
                self.models[has_chunk] = from_torch(
                    module_, (step,), mesh=mesh, layouts=layouts, buffers=named, **placed
                )
            self.programs = {c: x.compile(options) for c, x in self.models.items()}
            state = self._state(model)
        run = SimulatedSteps if comm is None else LaunchedSteps
        self.steps = {c: run(p, *state[c]) for c, p in self.programs.items()}

    def _state(self, served: GivenModel) -> dict[bool, tuple[Any, Any]]:
        """Return the caches of each program, and all its other inputs but the integers."""
        rank = None if self._comm is None else self._comm.rank
        device = None if self._comm is None else self._comm.device
        first = self.models[bool(self.shape.chunk)]
        loaded = first.load(served.source, rank=rank, device=device)
        parameters = dict(zip(first.fusion.inputs, loaded, strict=False))
        others = {*first.constants(rank, device)}
        self.read = _said_of(served, [
            x for n, x in parameters.items() if n not in others and not n.startswith(f"{CACHES}.")
        ])  # fmt: skip
        state = {}
        for c, model in self.models.items():
            constants = model.constants(rank, device)
            named = parameters | constants
            reused = {*model.fusion.reuse.values()}
            state[c] = (
                {n: named[n] for n in model.fusion.inputs if n in reused},
                [named[n] for n in model.fusion.inputs if n not in reused and n != STEP],
            )
        return state

    def run(
        self, step: Integers, has_chunk: bool, numbers: npt.NDArray[np.float64] | None = None
    ) -> list[int]:
        """Run a step; return the token chosen for each slot.

        Args:
            step: what `StepShape.fields` lists.
            numbers: by which tokens are chosen, [slots, 4]; None: the most probable ones.
        """
        tokens, logits = self.steps[has_chunk](torch.from_numpy(step))
        chosen = tokens.tolist()
        if numbers is not None:
            for slot, token in enumerate(self._drawn(logits, numbers)):
                if numbers[slot, token_choice.TEMPERATURE]:
                    chosen[slot] = token
        return [int(x) for x in chosen]

    @property
    def words(self) -> int:
        """The number of logits of a slot."""
        fusion = self.programs[False].fusion
        return int(fusion.values[fusion.outputs[-1]].shape[-1])

    @property
    def cache_bytes(self) -> int:
        """The size of a rank's part of the caches."""
        model = self.models[False]
        values = [model.fusion.values[name] for name in model.fusion.reuse.values()]
        parts = [(x, model.layout(x.name).local_shape(x.shape, 0)) for x in values]
        return sum(math.prod(shape) * x.dtype.itemsize for x, shape in parts)

    def refuse(self, has_chunk: bool, error: Exception) -> NoReturn:
        """Raise an error of this rank on all ranks: they are in a step, or come to it."""
        problem = ProgramError("a rank cannot compute a step", because=message_of(error))
        self.programs[has_chunk].refuse(problem)
        raise problem from error

    def sampler(self, largest: int) -> Program:
        """The choice of tokens by drawn numbers, with so many of the largest logits in order."""
        if largest not in self._samplers:
            program = self.programs[False]
            layout = program.host.types[program.host.outputs[-1]].layout
            assert layout is not None
            definition = token_choice.define(self.shape.slots, self.words, layout, largest)
            self._samplers[largest] = compile(definition, self._options)
        return self._samplers[largest]

    def _drawn(self, logits: Tensor, numbers: npt.NDArray[np.float64]) -> list[int]:
        sampler = self.sampler(token_choice.ordered(numbers, self.words))
        inputs = logits, torch.from_numpy(numbers)
        if self._comm is None:
            (drawn,) = simulate(sampler, inputs).outputs
        else:
            (drawn,) = sampler.run_all([x.to(self._comm.device) for x in inputs])
        tokens: list[int] = drawn.tolist()
        return tokens


def _said_of(served: GivenModel, parameters: Sequence[Tensor | None]) -> str:
    """Return what a process read of a model, as a line."""
    size = sum(x.nbytes for x in parameters if x is not None)
    if served.because:
        return f"parameters: read whole by each process, for {served.because}"
    if served.source is None:
        return f"parameters: {size:,} bytes here, of a module in memory"
    whole = sum(p.nbytes for p in served.module.parameters())
    return f"parameters: {size:,} of {whole:,} bytes, read from {served.source}"


class LaunchedSteps:
    """Steps of this rank, beside those of the others."""

    def __init__(
        self, program: Program, state: Mapping[str, Tensor], others: Sequence[Any]
    ) -> None:
        self._step, self._others = Step(program, state), others
        self._device = next(iter(state.values())).device
        self._integers: Tensor | None = None

    def __call__(self, step: Tensor) -> tuple[Tensor, Tensor]:
        if self._integers is None:
            self._integers = step.to(self._device)
        self._integers.copy_(step)  # a captured graph reads it where it lies
        tokens, logits = self._step(*self._others, self._integers)
        return tokens, logits


class SimulatedSteps:
    """Steps of all ranks, in this process; the caches of both programs are one."""

    def __init__(
        self, program: Program, state: Mapping[str, Tensor], others: Sequence[Any]
    ) -> None:
        self._program, self._state, others_ = program, state, iter(others)
        fusion = program.fusion
        self._inputs = [
            state[n] if n in state else None if n == STEP else next(others_) for n in fusion.inputs
        ]

    def __call__(self, step: Tensor) -> tuple[Tensor, Tensor]:
        fusion = self._program.fusion
        inputs = [step if x is None else x for x in self._inputs]
        outputs = dict(zip(fusion.outputs, simulate(self._program, inputs).outputs, strict=True))
        for name, old in fusion.reuse.items():
            self._state[old].copy_(outputs.pop(name))
        tokens, logits = outputs.values()
        return tokens, logits
