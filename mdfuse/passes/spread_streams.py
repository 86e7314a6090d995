"""Spread streams to the operands and to the dependents of a streamed value.

    %h: f32[8,6] = matmul(%x, %w)                      %h: f32[8,6] (stream(0,4)) = matmul(%x, %w)
    %y: f32[8,4] (stream(0,4)) = matmul(%h, %v)   ->   %y: f32[8,4] (stream(0,4)) = matmul(%h, %v)
    %z: f32[8,4] = exp(%y)                             %z: f32[8,4] (stream(0,4)) = exp(%y)

One word then makes one loop. Sets stay as they are, so nothing is communicated otherwise: it ends
at them, at what needs the dim as a whole, and at values with streams of their own. Rings stay as
they are stated: each rank begins with another chunk.
"""

from __future__ import annotations

from collections import ChainMap, deque
from collections.abc import Iterator
from dataclasses import replace

from mdfuse.ir.graph import Expr, Fusion, Value
from mdfuse.layouts.stream import Stream
from mdfuse.passes.streams import falls_together, operand_streams

name = "spread_streams"


def run(fusion: Fusion) -> Fusion:
    """Return the fusion with streams of more values.

    Args:
        fusion: with layouts, sets, and the streams that are stated.
    """
    values = dict(fusion.values)
    streamed = deque(x for x, v in values.items() if v.stream is not None)
    while streamed:
        stream = values[streamed[0]].stream
        assert stream is not None
        at = streamed.popleft()
        if stream.op is None and stream.rotate is None:
            near = (*_before(fusion, at, values), *_behind(fusion, at, stream, values))
            for value in near:
                values[value.name] = value
                streamed.append(value.name)
    return replace(fusion, values=values)


def _before(fusion: Fusion, at: str, values: dict[str, Value]) -> Iterator[Value]:
    """Yield the operands that a streamed value reads in chunks, with their streams."""
    expr = fusion.producers.get(at)
    if expr is None or expr.op == "set":
        return
    for x, stream in zip(expr.inputs, operand_streams(expr, values), strict=True):
        if not isinstance(x, str) or stream is None:
            continue
        producer = fusion.producers.get(x)
        value = replace(values[x], stream=stream)
        if (
            producer is not None
            and _is_free(producer, values)
            and any(s is not None for s in _read(producer, value, values))
        ):
            yield value


def _behind(fusion: Fusion, at: str, stream: Stream, values: dict[str, Value]) -> Iterator[Value]:
    """Yield the values computed from chunks of a streamed value, with their streams."""
    for expr in fusion.consumers[at]:
        if not _is_free(expr, values):
            continue
        plain = values[expr.output]
        for dim in range(len(plain.shape)):
            value = replace(plain, stream=replace(stream, dim=dim))
            read = dict(zip(expr.inputs, _read(expr, value, values), strict=True))
            if read.get(at) == stream:
                yield value
                break


def _is_free(expr: Expr, values: dict[str, Value]) -> bool:
    """Return whether an expression computes one tensor on each rank by itself, in one piece."""
    if expr.op == "set" or len(expr.outputs) > 1:
        return False
    value = values[expr.output]
    return value.is_tensor and value.stream is None


def _read(expr: Expr, value: Value, values: dict[str, Value]) -> tuple[Stream | None, ...]:
    """Return how an expression reads its operands if its result had a stream.

    All whole, where a chunk of the result is not made of chunks of the operands.
    """
    streamed = ChainMap({value.name: value}, values)
    read = operand_streams(expr, streamed)
    return read if falls_together(expr, streamed) else (None,) * len(read)
