"""Recurrent networks of several layers, step by step: `nn.LSTM`, `nn.GRU`, `nn.RNN`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mdfuse.errors import DefinitionError
from mdfuse.frontend import ops as operations
from mdfuse.frontend.handle import Handle

ops: Any = operations


def network(name: str) -> Callable[..., Any]:
    """A network of a cell, as aten calls it: (x, state, weights, …) -> (steps, last states).

    Args:
        name: lstm, gru, rnn_tanh or rnn_relu.
    """
    cell = ops.BY_NAME[f"{name}_cell"]

    def call(
        x: Handle,
        state: Any,
        weights: Sequence[Handle],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        _check(name, dropout if train and layers > 1 else 0)
        steps = ops.unbind(x, 1 if batch_first else 0)
        sides = 2 if bidirectional else 1
        states = [ops.unbind(s) for s in (state if name == "lstm" else [state])]
        size = len(weights) // (layers * sides)
        last = []
        for layer in range(layers):
            directions = []
            for side in range(sides):
                n = layer * sides + side
                start = [s[n] for s in states]
                side_weights = weights[n * size : (n + 1) * size]
                ran = _run(cell, steps[:: 1 - 2 * side], start, side_weights)
                last.append(ran[-1])
                directions.append([h[0] for h in ran][:: 1 - 2 * side])
            steps = (
                directions[0]
                if sides == 1
                else [ops.cat(h, -1) for h in zip(*directions, strict=True)]
            )
        ends = [ops.stack(s) for s in zip(*last, strict=True)]
        return (ops.stack(steps, 1 if batch_first else 0), *ends)

    return call


def _run(
    cell: Callable[..., Any], steps: Sequence[Handle], state: list[Any], weights: Sequence[Handle]
) -> list[list[Any]]:
    """Return the states after each step of one layer in one direction; the first is the output.

    An odd last weight is the projection of the output.
    """
    projection = weights[-1] if len(weights) % 2 else None
    weights = weights[: len(weights) // 2 * 2]
    ran = []
    for x in steps:
        new = cell(x, state if len(state) == 2 else state[0], *weights)
        state = [*new] if isinstance(new, tuple) else [new]
        if projection is not None:
            state[0] = ops.linear(state[0], projection)
        ran.append(state)
    return ran


def _check(name: str, dropout: float) -> None:
    if dropout:
        raise DefinitionError(
            f"{name} with dropout between its layers in training",
            because=f"there is no such operation; it is {dropout} here",
            hint="layers of one nn.LSTM, nn.GRU or nn.RNN each, with nn.Dropout between them",
        )
