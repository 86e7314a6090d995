"""Norms of rows behind a sum over ranks, which may be computed in the kernel of the sum.

    %c = post allreduce[sum](%x) -> %s … then=row_norm
    wait %c
    launch fused3(%r, %s, %w) -> %t, %y {
      %t = add(%r, %s)                              # the residual; or there is none: %t is %s
      %y = rms_norm(%t, %w, …)                      # or the same, spelled out
    }

`then=row_norm` promises nothing: it says that the unit behind the wait is no more than this. A
backend without such a kernel makes the sum, and the unit is computed as any other one. Whether the
word is right is decided once, by the program for all ranks: a rank does not see who reads the sum
elsewhere, and members of a team must make the same call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mdfuse.extents.extent import is_symbolic
from mdfuse.hir.analysis.dataflow import dataflow
from mdfuse.hir.instructions import PURE_VIEWS, counts_of, op_of
from mdfuse.hir.once import once
from mdfuse.hir.program import BufferType, HostProgram, Instruction

#: The bytes of a chunk, and how many chunks, or rows, arrive at a rank in one small sum at most.
CHUNK, MOST = 8192, 240

#: The widest row: one block holds all of it.
WIDEST = 16_384

#: The most elements of all blocks together, which take 80 multiprocessors: as each block waits for
#: other ranks, blocks of another team's sum must find room beside them.
RESIDENT = 160 * 8192

#: The element types that the kernels add.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNorm:
    """A norm of rows behind a sum: t = sum + residual, y = t / sqrt(mean(t²) + eps) · weight.

    Values are rounded to their dtype as separate operations round them.

    Attributes:
        width: elements of a row.
        eps: added to the mean of the squares.
        dtype: of all values but the weight.
        weight_dtype: of the weight; None: there is none.
        has_residual: whether there is a residual.
        has_total: whether t is a result, too; without a residual it is the sum, which always is.
        is_rounded: y is rounded before it is multiplied by the weight, too.
    """

    width: int
    eps: float
    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    has_residual: bool
    has_total: bool
    is_rounded: bool

    def fits(self, rows: int, members: int) -> bool:
        """Return whether a sum of rows is small: the same on all members.

        >>> norm = RowNorm(width=6144, eps=1e-5, dtype=torch.bfloat16, weight_dtype=None,
        ...     has_residual=True, has_total=True, is_rounded=False)
        >>> [norm.fits(rows, 2) for rows in (1, 160, 161)], norm.fits(22, 8), norm.fits(23, 8)
        ([True, True, False], True, False)
        """
        most = MOST // max(members - 1, 1)
        is_sent = 0 < rows <= most >= 2 and rows * self.stride <= most * CHUNK
        return is_sent and rows * self.block <= RESIDENT

    @property
    def block(self) -> int:
        """The elements of a block, which holds a row: a power of 2."""
        return max(1 << (self.width - 1).bit_length(), 16)

    @property
    def stride(self) -> int:
        """The bytes from one row to the next one, where each begins at a multiple of 16."""
        return -(-self.width * self.dtype.itemsize // 16) * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NormChain:
    """A norm of rows in a program: its names, and its instructions.

    Attributes:
        norm: the operation.
        residual: its operand; None: there is none.
        weight: likewise.
        total: the name of t, where that is a result.
        result: the name of y.
        steps: the instructions, in order.
    """

    norm: RowNorm
    residual: str | None
    weight: str | None
    total: str | None
    result: str
    steps: tuple[Instruction, ...]


@once
def with_sure_norms(program: HostProgram) -> HostProgram:
    """Return a program for all ranks in which the posts before norms of rows alone say so."""
    if not any("then" in i.kwargs for i in program.walk()):
        return program
    sure = _sure(program, SumReaders.of(program.checked), program.instructions)
    return program if sure == program.instructions else replace(program, instructions=sure)


def _sure(
    program: HostProgram, readers: SumReaders, block: Sequence[Instruction]
) -> tuple[Instruction, ...]:
    done = list[Instruction]()
    for n, i in enumerate(block):
        if "then" in i.kwargs and not _is_sure(program, readers, block, n):
            i = replace(i, attrs=tuple((k, v) for k, v in i.attrs if k != "then"))
        elif i.op != "launch" and (i.body or i.orelse):
            body, orelse = (_sure(program, readers, part) for part in (i.body, i.orelse))
            i = replace(i, body=body, orelse=orelse)
        done.append(i)
    return tuple(done)


def _is_sure(
    program: HostProgram, readers: SumReaders, block: Sequence[Instruction], at: int
) -> bool:
    post, behind = block[at], unit_behind(block, at)
    if behind is None or not is_sum(post):
        return False
    unit = block[behind]
    named = (x for i in (post, *unit.body) for x in (*i.reads, *i.outputs))
    if not program.types.keys() >= {*named} - {*post.outputs}:
        return False  # which is an error of its own
    chain = norm_behind(program, post, unit, is_read=readers.are_elsewhere(post, unit))
    return chain is not None and len(chain.steps) == len(unit.body)


def unit_behind(block: Sequence[Instruction], at: int) -> int | None:
    """Return the place of the unit behind a post and its wait; None where another work is there.

    Nothing in between makes or frees what the unit names.
    """
    handle, waits, used = block[at].outputs, 0, set[str]()
    for n in range(at + 1, len(block)):
        i = block[n]
        if i.op == "launch":
            is_apart = used.isdisjoint(i.reads) and used.isdisjoint(i.outputs)
            return n if waits and is_apart else None
        if i.op == "wait" and i.reads == handle and not i.attrs and not waits:
            waits = 1
        elif i.op == "free":
            used.update(i.reads)
        elif i.op in PURE_VIEWS or (i.op == "alloc" and not i.reads and "fill" not in i.kwargs):
            used.update(i.outputs)
        else:
            return None
    return None


def is_sum(i: Instruction) -> bool:
    """Return whether an instruction posts a sum of whole buffers over ranks."""
    comm = i.comm
    if i.op != "post" or comm is None or comm.kind != "Allreduce" or comm.reduce_op != "sum":
        return False
    return counts_of(i) is None and "pieces" not in i.kwargs and all(map(_is_name, i.inputs[:2]))


def _is_name(x: object) -> bool:
    return isinstance(x, str)


@dataclass(frozen=True, slots=True)
class SumReaders:
    """The readers of sums besides the units behind them.

    Attributes:
        reads: how often names are read, and written by posts, outside of units; frees do not count.
        pinned: names that are in use whoever reads them.
    """

    reads: Mapping[str, int]
    pinned: frozenset[str]

    @classmethod
    def of(cls, program: HostProgram) -> SumReaders:
        every = (i for i in program.walk() if i.op not in ("launch", "free"))
        shared = (*program.aliases, *map(program.root, program.aliases))
        reads = Counter(x for i in every for x in i.reads)
        return cls(reads, frozenset((*program.outputs, *shared)))

    def are_elsewhere(self, post: Instruction, unit: Instruction) -> bool:
        """Return whether anything but a unit reads a sum."""
        summed = str(post.inputs[1])
        inside = sum(x == summed for i in unit.body for x in i.reads)
        # one more is the post itself, which writes it
        return summed in self.pinned or self.reads.get(summed, 0) > inside + 1


def norm_behind(
    program: HostProgram, post: Instruction, unit: Instruction, *, is_read: bool
) -> NormChain | None:
    """Return the norm of a sum that a unit computes, maybe besides other work; None: it does not.

    Args:
        program: whose types are asked.
        post: of the sum.
        unit: the work behind its wait.
        is_read: whether anything outside of the unit reads the sum, too.
    """
    summed = post.inputs[1]
    assert isinstance(summed, str)
    kind, search = program.types[summed], _Search.of(program.types, unit)
    if not _has_rows(kind):
        return None
    value, residual, steps = search.total(summed, is_read)
    for result, weight, eps, is_rounded, last in search.norms(value):
        chain = (*steps, *last)
        ids, results = set(map(id, chain)), [x for i in chain for x in i.outputs]
        if len({*results}) < len(results) or not {*results}.isdisjoint(unit.inputs):
            continue  # what a name stands for depends on the step
        inner = {*results} - {value, result}
        beside = {x for i in unit.body if id(i) not in ids for x in i.reads}
        if inner & beside or inner & {*unit.outputs} or result not in {*unit.outputs} | beside:
            continue
        if residual is not None and summed in beside:
            continue
        is_apart = _is_apart(program, summed, residual, weight)
        if not is_apart or not _is_apart(program, value, weight, result):
            continue
        norm = RowNorm(
            width=kind.shape[-1],
            eps=eps,
            dtype=kind.dtype,
            weight_dtype=program.types[weight].dtype if weight is not None else None,
            has_residual=residual is not None,
            has_total=residual is None or value in beside or value in unit.outputs,
            is_rounded=is_rounded and weight is not None,
        )
        return NormChain(
            norm=norm,
            residual=residual,
            weight=weight,
            total=value if norm.has_total else None,
            result=result,
            steps=tuple(i for i in unit.body if id(i) in ids),
        )
    return None


def _is_apart(program: HostProgram, name: str, *others: str | None) -> bool:
    """Return whether a value that the kernel computes lies where no other one does."""
    memory = dataflow(program).memory
    return not any(memory(x) == memory(name) for x in others if x is not None)


def _has_rows(kind: BufferType) -> bool:
    """Return whether each rank has whole rows of a value, of a known width."""
    if kind.layout is None or not kind.shape or kind.dtype not in DTYPES:
        return False
    width, last = kind.shape[-1], len(kind.shape) - 1
    is_plain = kind.padding is None and not kind.flat and kind.counts is None
    if not is_plain or kind.layout.stream is not None or is_symbolic(width):
        return False
    return 0 < width <= WIDEST and not kind.layout.split_axes(last)


#: Name of y, name of the weight, eps, whether y is rounded before the weight, instructions.
_Spelled = tuple[str, str | None, float, bool, tuple[Instruction, ...]]


@dataclass(frozen=True, slots=True)
class _Search:
    """A unit, and who reads what in it."""

    types: Mapping[str, BufferType]
    results: frozenset[str]
    readers: Mapping[str, Sequence[Instruction]]

    @classmethod
    def of(cls, types: Mapping[str, BufferType], unit: Instruction) -> _Search:
        readers: dict[str, list[Instruction]] = defaultdict(list)
        for i in unit.body:
            for name in dict.fromkeys(i.reads):
                readers[name].append(i)
        return cls(types, frozenset(x for i in unit.body for x in i.outputs), readers)

    def total(self, summed: str, is_read: bool) -> tuple[str, str | None, tuple[Instruction, ...]]:
        """Return the name of t, the residual, and the instruction that adds it."""
        users = self.readers.get(summed, ())
        if len(users) == 1 and not is_read and users[0].fn == "add" and not users[0].attrs:
            (i,) = users
            others = [x for x in i.inputs if x != summed]
            kind = self.types[summed]
            if (
                len(others) == 1 == len(i.inputs) - 1
                and isinstance(other := others[0], str)
                and other not in self.results
                and self.types[other] == kind == self.types[i.outputs[0]]
                and self._is_plain(i)
            ):
                return i.outputs[0], other, (i,)
        return summed, None, ()

    def norms(self, value: str) -> Iterator[_Spelled]:
        """Yield norms of a value: those that are one operation, and those spelled out."""
        width, kind = self.types[value].shape[-1], self.types[value]
        for i in self.readers.get(value, ()):
            attrs = i.kwargs
            if i.fn == "rms_norm" and i.inputs[0] == value and self._is_plain(i):
                weight = i.inputs[1]
                is_whole = attrs["normalized_shape"] == (width,)
                if is_whole and self._is_weight(weight, width) and self.types[i.outputs[0]] == kind:
                    named = weight if isinstance(weight, str) else None
                    yield i.outputs[0], named, float(attrs["eps"]), False, (i,)
        wide: list[tuple[str, tuple[Instruction, ...]]] = []
        if kind.dtype == torch.float32:
            wide.append((value, ()))
        wide += [(i.outputs[0], (i,)) for i in self._casts(value, torch.float32)]
        for name, steps in wide:
            for n, eps, behind in self._divided(name):
                yield from self._weighed(n, kind, eps, (*steps, *behind))

    def _divided(self, wide: str) -> Iterator[tuple[str, float, tuple[Instruction, ...]]]:
        """Yield x · rsqrt(mean(x²) + eps), as operations."""
        last = len(self.types[wide].shape) - 1
        for square in self._reading(wide, ("pow", "mul")):
            if square.inputs not in ((wide, 2), (wide, 2.0), (wide, wide)):
                continue
            if square.fn == "pow" and square.inputs[1] == wide:
                continue
            for mean in self._reading(square.outputs[0], ("mean",)):
                dims = mean.kwargs.get("dims")
                if dims not in ((-1,), (last,)) or not mean.kwargs.get("keepdim"):
                    continue
                for moved in self._reading(mean.outputs[0], ("add",)):
                    eps = [x for x in moved.inputs if type(x) in (int, float)]
                    if len(eps) != 1:
                        continue
                    for root in self._reading(moved.outputs[0], ("rsqrt",)):
                        for i in self._reading(root.outputs[0], ("mul",)):
                            if {*i.inputs} == {wide, root.outputs[0]}:
                                steps = (square, mean, moved, root, i)
                                yield i.outputs[0], float(eps[0]), steps  # type: ignore[arg-type]

    def _weighed(
        self, name: str, kind: BufferType, eps: float, steps: tuple[Instruction, ...]
    ) -> Iterator[_Spelled]:
        """Yield the norm with its weight, behind the cast to the dtype of the rows."""
        narrow = [(name, steps)] if kind.dtype == torch.float32 else []
        narrow += [(i.outputs[0], (*steps, i)) for i in self._casts(name, kind.dtype)]
        for x, done in narrow:
            for i in self._reading(x, ("mul",)):
                weights = [w for w in i.inputs if w != x]
                is_one = len(weights) == 1 and isinstance(weights[0], str)
                is_whole = is_one and self._is_weight(weights[0], kind.shape[-1])
                if is_whole and self.types[i.outputs[0]] == kind:
                    yield i.outputs[0], str(weights[0]), eps, True, (*done, i)
            if self.types[x] == kind:
                yield x, None, eps, False, done

    def _casts(self, name: str, dtype: torch.dtype) -> Iterator[Instruction]:
        for i in self._reading(name, ("cast", "set")):  # to the same dtype it is a `set`
            if i.kwargs.get("dtype", self.types[name].dtype) == dtype:
                yield i

    def _reading(self, name: str, fns: tuple[str, ...]) -> Iterator[Instruction]:
        for i in self.readers.get(name, ()):
            if i.fn in fns and self._is_plain(i):
                yield i

    def _is_plain(self, i: Instruction) -> bool:
        """Return whether an instruction has one result, dense in the order of its dims."""
        op = op_of(i)
        is_one = op is not None and i.op == op.host and len(i.outputs) == 1
        return is_one and (i.order is None or [*i.order] == sorted(i.order))

    def _is_weight(self, weight: object, width: int) -> bool:
        """Return whether an operand is no weight, or a whole one from outside."""
        if weight is None:
            return True
        if not isinstance(weight, str) or weight in self.results:
            return False
        kind = self.types[weight]
        if kind.layout is None or kind.dtype not in DTYPES or kind.shape != (width,):
            return False
        return not kind.layout.split_axes(0) and kind.padding is None and not kind.flat
