"""Programs under torch's autograd: one program forwards, and one backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mdfuse.caching import Cache
from mdfuse.compiled import overlap
from mdfuse.compiled.program import Program, compile
from mdfuse.compiled.segments import segments_of
from mdfuse.compiled.traced_functions import LIMIT, TracedFunction
from mdfuse.config import Options, options_from_environment
from mdfuse.errors import DefinitionError, ProgramError
from mdfuse.frontend.definition import FusionDefinition
from mdfuse.frontend.phases import Phases, dual, phases
from mdfuse.frontend.plain import brief
from mdfuse.ir.graph import Fusion
from mdfuse.layouts.layout import Layout
from mdfuse.runs.arguments import has_dtensors
from mdfuse.torch_private import untraced


def differentiable(
    of: FusionDefinition | TracedFunction, options: Options | None = None
) -> Callable[..., Any]:
    """Return a function that runs a definition, and whose results torch differentiates.

    It takes what `Program.run` takes, local tensors or DTensors, and runs one program forwards and
    one backwards. The gradient is that of the global function: each rank gets the whole reduced
    gradient of a replicated input (so no wrapper as DDP is needed), and its part of a split one.
    Under `torch.no_grad`, or where no input requires a gradient, the plain program runs. All ranks
    must ask for the same gradients.

    Args:
        of: a definition; or a function of `mdfuse.fusion`, for which the result takes DTensors as
            that does.
        options: how the programs run.

    Returns:
        A function of the inputs, which returns the list of outputs; for a traced function, its
        own result.

    Raises:
        DefinitionError: `of` is of another type; when called, an op without a rule, a definition
            that writes into its inputs, one with extents that each run chooses, or one on ranks
            that hold no input that is differentiated, or no output.

    >>> import torch, mdfuse as mf
    >>> with mf.FusionDefinition() as fd:
    ...     x, w = fd.define_tensor([2, 3]), fd.define_tensor([3])
    ...     fd.add_output((x * w).sum(1))
    >>> f = mf.differentiable(fd)
    >>> w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> (y,) = f(torch.ones(2, 3), w)
    >>> y.sum().backward()
    >>> w.grad
    tensor([2., 2., 2.])
    """
    if isinstance(of, TracedFunction):
        return _AutogradFunction(of, options)
    if isinstance(of, FusionDefinition):
        return _Differentiable(of, options)
    raise DefinitionError(
        f"differentiable({brief(of)})",
        because="what is differentiated is a definition",
        hint="pass a FusionDefinition, or a function made by mf.fusion",
    )


class _AutogradFunction:
    """A traced function on DTensors, under torch's autograd."""

    def __init__(self, function: TracedFunction, options: Options | None) -> None:
        self.function = function
        self.options = options
        self._known: Cache[_Differentiable] = Cache(LIMIT)

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self.function
        if function.is_inside(args, kwargs):
            return function(*args, **kwargs)
        traced, tensors = function.on_dtensors(args, kwargs)
        wrapped = self._known.get_or(  # it keeps the trace alive: no other one gets its id
            id(traced), lambda: _Differentiable(traced.definition, self.options, traced)
        )
        return traced.rebuild(wrapped(*tensors))


class _Differentiable:
    """A definition under torch's autograd.

    Its programs are made when they are needed: the plain one, one forwards for each choice of
    inputs that require a gradient, and for each of these one backwards for each choice of outputs
    that torch has a cotangent of.
    """

    def __init__(
        self, definition: FusionDefinition, options: Options | None, trace: object = None
    ) -> None:
        self.definition = definition
        self.options = options
        self.trace = trace
        fusion = definition.fusion
        self.floating = tuple(
            n
            for n, name in enumerate(fusion.outputs)
            if fusion.values[name].dtype.is_floating_point
        )
        self._forwards: dict[tuple[int, ...], _Forward] = {}

    @untraced
    def __call__(self, *inputs: Any) -> list[Any]:
        wrt = tuple(n for n, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad)
        if not wrt or not torch.is_grad_enabled():
            return compile(self.definition, self.options).run(*inputs)
        if len(inputs) != len(self.definition.fusion.inputs):  # the plain run raises the error
            return compile(self.definition, self.options).run(*inputs)
        forward = self._forwards.get(wrt)
        if forward is None:
            forward = self._forwards[wrt] = _Forward(self, wrt)
        return list(_Border.apply(forward, *inputs))


class _Forward:
    """The program forwards for some inputs that require gradients, and those backwards."""

    def __init__(self, owner: _Differentiable, wrt: tuple[int, ...]) -> None:
        self.definition, self.options, self.wrt = owner.definition, owner.options, wrt
        self.phases = self._phases(owner.floating)
        self.program = _lowered(self.phases.forward(), self.options)
        self.count = len(self.phases.outputs)
        #: name of a saved value -> its position among the inputs, followed by the outputs
        host = self.program.host
        names = [x for x in self.phases.joint.inputs if x not in self.phases.seeds]
        self.places = {x: n for n, x in enumerate((*names, *self.program.fusion.outputs))}
        kinds = [host.types[name] for name in (*host.inputs, *host.outputs)]
        self.layouts = {x: kinds[n].layout for x, n in self.places.items()}
        #: outputs that do not depend on a differentiated input
        self.constant = self._constant(owner.floating)
        self._backwards: dict[tuple[int, ...], tuple[Phases, Program]] = {}
        self._check_ranks()
        self.backward(tuple(n for n in owner.floating if n not in self.constant))

    def _phases(self, seeded: Sequence[int]) -> Phases:
        return phases(self.definition, self.wrt, seeded)

    def _constant(self, floating: Sequence[int]) -> frozenset[int]:
        joint, after = self.phases.joint, {self.phases.joint.inputs[n] for n in self.wrt}
        for expr in joint.exprs:
            if expr.op != "detach" and not after.isdisjoint(expr.reads):
                after.update(expr.outputs)
        return frozenset(
            n for n, x in enumerate(self.phases.outputs) if n not in floating or x not in after
        )

    def _check_ranks(self) -> None:
        """Raise DefinitionError where torch would not start the backward on some rank."""
        inputs = [self.layouts[self.phases.joint.inputs[n]] for n in self.wrt]
        outputs = [
            self.layouts[x] for n, x in enumerate(self.phases.outputs) if n not in self.constant
        ]
        for layout in self.layouts.values():
            for rank in () if layout is None else layout.mesh.ranks:
                if any(
                    all(x is None or rank not in x.mesh for x in side) for side in (inputs, outputs)
                ):
                    raise DefinitionError(
                        f"@{self.definition.name} under torch.autograd: rank {rank} holds no input "
                        "that requires a gradient, or no output that depends on one",
                        because="torch starts the backward on ranks that hold both",
                        hint="take the gradient inside, by mf.grad",
                    )

    def cotangent(self, output: str) -> Layout:
        """Return the layout of an output's cotangent."""
        layout = self.layouts[output]
        assert layout is not None
        return dual(layout)

    def backward(self, seeded: tuple[int, ...]) -> tuple[Phases, Program]:
        """Return the program backwards for cotangents of some outputs."""
        if seeded not in self._backwards:
            back = self._phases(seeded)
            missing = [x for x in back.saved if x not in self.phases.saved]
            assert not missing, missing
            ys = dict(zip(back.seeds, (back.outputs[n] for n in seeded), strict=True))
            layouts = {x: self.layouts[x] for x in back.saved}
            layouts |= {x: self.cotangent(y) for x, y in ys.items()}
            self._backwards[seeded] = back, _lowered(back.backward(layouts), self.options)
        return self._backwards[seeded]


class _Border(torch.autograd.Function):
    """The node of torch's autograd graph for a program."""

    @staticmethod
    def forward(ctx: Any, forward: _Forward, *inputs: Any) -> tuple[Any, ...]:
        given = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        results = forward.program.run(*given)
        everything = [*given, *results]
        saved = [everything[forward.places[x]] for x in forward.phases.saved]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(x for x in saved if isinstance(x, Tensor)))
        ctx.kept = [None if isinstance(x, Tensor) else x for x in saved]
        ctx.is_tensor = [isinstance(x, Tensor) for x in saved]
        ctx.forward_of, ctx.count = forward, len(inputs)
        outputs = results[: forward.count]
        ctx.mark_non_differentiable(
            *(x for n, x in enumerate(outputs) if n in forward.constant and x is not None)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        forward: _Forward = ctx.forward_of
        results: list[Any] = [None] * ctx.count
        seeded = tuple(n for n, ct in enumerate(cotangents) if ct is not None)
        if not seeded:
            return None, *results
        back, program = forward.backward(seeded)
        if not back.gradients:
            return None, *results
        tensors = iter(ctx.saved_tensors)
        saved = {
            name: next(tensors) if is_tensor else x
            for name, is_tensor, x in zip(
                forward.phases.saved, ctx.is_tensor, ctx.kept, strict=True
            )
        }
        seeds = [_seed(cotangents[n], forward.cotangent(back.outputs[n])) for n in seeded]
        with torch.no_grad():
            gradients = program.run(*(saved[x] for x in back.saved), *seeds)
        if torch.is_grad_enabled():
            leaves = [x if x is None else x.detach().requires_grad_() for x in gradients]
            gradients = _Once.apply(forward.definition.name, *leaves)
        for n, gradient in zip(back.wrt, gradients, strict=True):
            results[n] = gradient
        return None, *results


class _Once(torch.autograd.Function):
    """Gradients that torch cannot differentiate again."""

    @staticmethod
    def forward(ctx: Any, name: str, *gradients: Any) -> tuple[Any, ...]:
        ctx.name = name
        return tuple(x if x is None else x.detach() for x in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        raise ProgramError(
            f"@{ctx.name} is differentiated twice by torch.autograd",
            because="its backward is a program, of which torch knows nothing",
            hint="take the first gradient inside: mf.grad, whose results are differentiable",
        )


def _seed(ct: Tensor, layout: Layout) -> Tensor:
    """Return a cotangent as the backward program takes it."""
    if not has_dtensors((ct,)):
        return ct.detach()
    from mdfuse.runs import dtensor

    return dtensor.redistributed(ct.detach(), layout)


def _lowered(fusion: Fusion, options: Options | None) -> Program:
    if options_from_environment(options).same_bits:
        raise ProgramError(
            f"@{fusion.name} recorded by torch.autograd, with same_bits",
            because="torch keeps values between forward and backward, which leaves have apart",
            hint="mf.grad puts both into one program",
        )
    (prepared, parts, host), decisions = overlap.lower(fusion, None, options)
    return Program(
        prepared, segments_of(prepared, parts, host, options), host, options, overlap=decisions
    )
