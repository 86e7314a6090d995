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
from mdfuse.config import Options
from mdfuse.errors import ProgramError, message_of
from mdfuse.mesh import DeviceMesh
from mdfuse.plan.signature import Lasting
from mdfuse.runtime.communicator import Communicator
from mdfuse.serving import token_choice
from mdfuse.serving.decoder import CACHES, CHOSEN, own_attention, served
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
        steps: whether there is a chunk -> computes a step of these integers, in place; returns
            logits [slots, words].
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
        chosen = torch.zeros(shape.slots, dtype=torch.int64)
        named = {CHOSEN: chosen, **{f"{CACHES}.{name}": x for name, x in buffers.items()}}
        self.models: dict[bool, ImportedModel] = {}
        with own_attention(module), fixed(module):
            for has_chunk, s in shapes.items():
                step = torch.zeros(s.size, dtype=torch.int64)
                module_ = served(module, s, buffers, chosen)
                self.models[has_chunk] = from_torch(
                    module_, (step,), mesh=mesh, layouts=layouts, buffers=named, **placed
                )
            self.programs = {c: x.compile(options) for c, x in self.models.items()}
            state = self._state(model)
        run = SimulatedSteps if comm is None else LaunchedSteps
        self.steps = {c: run(p, *state[c]) for c, p in self.programs.items()}
        self._chosen = state[False][0][CHOSEN]
        #: of two steps in turn, the last one first
        self._arrivals = [Arrival(self._chosen), Arrival(self._chosen)]

    def _state(self, served: GivenModel) -> dict[bool, tuple[Any, Any]]:
        """Return the caches of each program, and all its other inputs but the integers."""
        rank = None if self._comm is None else self._comm.rank
        device = None if self._comm is None else self._comm.device
        first = self.models[bool(self.shape.chunk)]
        loaded = first.load(served.source, rank=rank, device=device)
        parameters = dict(zip(first.fusion.inputs, loaded, strict=False))
        others = {*first.constants(rank, device)}
        self.read = _said_of(served, [
            x for n, x in parameters.items()
            if n not in others and n != CHOSEN and not n.startswith(f"{CACHES}.")
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

    def begin(
        self, step: Integers, has_chunk: bool, numbers: npt.NDArray[np.float64] | None = None
    ) -> Arrival:
        """Begin a step, which may read tokens that the last one chose; no more than two are unread.

        Args:
            step: what `StepShape.fields` lists; `LAST` for the token chosen last for a slot.
            numbers: by which tokens are chosen, [slots, 4]; None: the most probable ones.
        """
        self._arrivals.reverse()
        arrival = self._arrivals[0]
        logits = self.steps[has_chunk](arrival.given(step))
        if numbers is not None:
            given = arrival.given(numbers).to(self._chosen.device, non_blocking=True)
            largest = token_choice.ordered(numbers, self.words)
            self._chosen.copy_(self._drawn(logits, given, largest))
        return arrival.begin(self._chosen)

    @property
    def words(self) -> int:
        """The number of logits of a slot."""
        fusion = self.programs[False].fusion
        return int(fusion.values[fusion.outputs[-1]].shape[-1])

    @property
    def cache_bytes(self) -> int:
        """The size of a rank's part of the caches."""
        model = self.models[False]
        names = (n for n in model.fusion.reuse.values() if n != CHOSEN)
        values = [model.fusion.values[name] for name in names]
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
            layout = program.host.types[program.host.outputs[-1]].placed
            definition = token_choice.define(self.shape.slots, self.words, layout, largest)
            self._samplers[largest] = compile(definition, self._options)
        return self._samplers[largest]

    def _drawn(self, logits: Tensor, numbers: Tensor, largest: int) -> Tensor:
        """Return tokens chosen by numbers; each is the most probable one at temperature 0."""
        sampler, inputs = self.sampler(largest), (logits, numbers)
        simulated = self._comm is None
        (drawn,) = simulate(sampler, inputs).outputs if simulated else sampler.run_all(inputs)
        is_drawn = numbers[:, token_choice.TEMPERATURE] > 0
        return torch.where(is_drawn, drawn, self._chosen)


def _said_of(served: GivenModel, parameters: Sequence[Tensor | None]) -> str:
    """Return what a process read of a model, as a line."""
    size = sum(x.nbytes for x in parameters if x is not None)
    if served.because:
        return f"parameters: read whole by each process, for {served.because}"
    if served.source is None:
        return f"parameters: {size:,} bytes here, of a module in memory"
    whole = sum(p.nbytes for p in served.module.parameters())
    return f"parameters: {size:,} of {whole:,} bytes, read from {served.source}"


class Arrival:
    """Memory of the host for a step: what it is given leaves from there, its tokens arrive there.

    Args:
        chosen: the tokens, on the device that chooses them.
    """

    def __init__(self, chosen: Tensor) -> None:
        self._device = chosen.device
        self._done = torch.cuda.Event() if chosen.is_cuda else None
        self._tokens = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=chosen.is_cuda)
        self._given: dict[tuple[int, ...], Tensor] = {}

    def given(self, array: npt.NDArray[Any]) -> Tensor:
        """Return an array as a tensor that a GPU reads while the host goes on."""
        x = torch.from_numpy(array)
        if self._done is None:
            return x
        if array.shape not in self._given:
            self._given[array.shape] = torch.empty_like(x, pin_memory=True)
        self._done.synchronize()  # the step before, which read from there, may have no reader
        return self._given[array.shape].copy_(x)

    def begin(self, chosen: Tensor) -> Arrival:
        """Let tokens arrive once the device has chosen them."""
        self._tokens.copy_(chosen, non_blocking=True)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))
        return self

    def read(self) -> list[int]:
        """Wait for the tokens, [slots], and return them."""
        if self._done is not None:
            self._done.synchronize()
        tokens: list[int] = self._tokens.tolist()
        return tokens


class LaunchedSteps:
    """Steps of this rank, beside those of the others.

    A call copies a step's integers, and returns logits; all other inputs stay where they are.
    """

    def __init__(
        self, program: Program, state: Mapping[str, Tensor], others: Sequence[Any]
    ) -> None:
        fusion, left = program.fusion, iter(others)
        device = next(iter(state.values())).device
        self._integers = torch.zeros(fusion.values[STEP].shape, dtype=torch.int64, device=device)
        named = {**state, STEP: self._integers}
        self._run = program.run_all
        self._inputs = Lasting(named[n] if n in named else next(left) for n in fusion.inputs)

    def __call__(self, step: Tensor) -> Tensor:
        self._integers.copy_(step, non_blocking=True)  # a captured graph reads it where it lies
        logits: Tensor = self._run(self._inputs)[-1]
        return logits


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

    def __call__(self, step: Tensor) -> Tensor:
        fusion = self._program.fusion
        inputs = [step if x is None else x for x in self._inputs]
        outputs = dict(zip(fusion.outputs, simulate(self._program, inputs).outputs, strict=True))
        for name, old in fusion.reuse.items():
            self._state[old].copy_(outputs.pop(name))
        (logits,) = outputs.values()
        assert isinstance(logits, Tensor)
        return logits
