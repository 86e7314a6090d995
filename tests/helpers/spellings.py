"""Common spellings of torch, one program per line of `tests/frontend/torch_spellings.txt`.

`python tests/helpers/spellings.py` tries all of them and writes down what is refused, and why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import mdfuse as mf
from mdfuse import DeviceMesh, MdfuseError, Shard
from mdfuse.frontend.handle import Handle

FILE = Path(__file__).resolve().parents[1] / "frontend" / "torch_spellings.txt"
_GAP = " :: "
MESH = DeviceMesh.arange(tp=2)

#: Where the operands of a case lie: whole on both ranks, or split along their first or last dim.
PLACES: dict[str, int | None] = {"replicated": None, "first": 0, "last": -1}

#: Why, where torch itself refuses a handle and does not ask it, and what to write instead.
OF_TORCH = "torch takes tensors alone"
INSTEAD = {
    "torch.cond": "where(condition, a, b)",
    "torch.vmap": "operations take a batch as it is, by a dim in front",
}


def _drawn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64) * 4 - 2


def _below(n: int, seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, n, shape, generator=generator)


#: Operands by name: floats of both signs, p and pu in (0, 1), indices i, j, ids and c, a mask m.
OPERANDS: dict[str, Tensor] = {
    "x": _drawn(0, 4, 6), "y": _drawn(1, 4, 6), "v": _drawn(2, 6), "u": _drawn(3, 4),
    "w": _drawn(4, 6, 3), "a": _drawn(5, 2, 4, 6), "b": _drawn(6, 2, 6, 4), "s": _drawn(7)[()],
    "p": _drawn(8, 4, 6) / 5 + 0.5, "pu": _drawn(9, 4) / 5 + 0.5, "q": _drawn(10, 2, 2, 4, 6),
    "sq": _drawn(11, 4, 4) + 4 * torch.eye(4, dtype=torch.float64), "img": _drawn(12, 2, 4, 8, 6),
    "k1": _drawn(13, 3, 4, 3), "k2": _drawn(14, 4, 4, 3, 3), "g": _drawn(15, 2, 3, 5, 2) * 0.6,
    "f": _drawn(16, 2, 8, 12), "wi": _drawn(17, 18, 6), "wo": _drawn(18, 6, 6),
    "h": _drawn(19, 4, 3), "wx": _drawn(20, 12, 6), "wh": _drawn(21, 12, 3), "bx": _drawn(22, 12),
    "z": torch.complex(_drawn(23, 4, 6), _drawn(24, 4, 6)),
    "i": _below(4, 25, 4, 6), "j": _below(9, 26, 4, 6), "ids": _below(4, 27, 4),
    "c": _below(4, 28, 4), "m": _drawn(29, 4, 6) > 0, "perm": torch.tensor([2, 0, 3, 1]),
}  # fmt: skip


@dataclass(frozen=True)
class Spelling:
    """A line of the list.

    Attributes:
        group, name: what it is about.
        operands: names of its operands.
        program: an expression of these, of torch, F and `new`.
        why: the reason that the error gives where it is refused; "" where it works.
        instead: the way out that the error gives.
    """

    group: str
    name: str
    operands: str
    program: str
    why: str = ""
    instead: str = ""

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"

    @property
    def line(self) -> str:
        fields = (self.group, self.name, self.operands, self.program, self.why, self.instead)
        return _GAP.join(x for x in fields if x)

    def tensors(self) -> list[Tensor]:
        return [OPERANDS[name].clone() for name in self.operands.split()]

    def results(self, values: Iterable[Any]) -> list[Any]:
        """What the program makes of tensors, or of handles, one by one."""
        given = dict(zip(self.operands.split(), values, strict=True))
        is_fusion = any(isinstance(x, Handle) for x in given.values())
        known = {"torch": torch, "F": F, "operator": operator, "checkpoint": checkpoint}
        known |= {"new": mf.ops if is_fusion else torch, "order": _order}
        return _flat(eval(self.program, known | given))  # the lines are our own


def _order(like: Any, dim: int) -> Any:
    """Places along a dim, none of them twice."""
    return like.argsort(dim)


def _flat(x: Any) -> list[Any]:
    return [part for item in x for part in _flat(item)] if isinstance(x, tuple | list) else [x]


def spellings() -> list[Spelling]:
    """The lines of the list."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    return [Spelling(*line.split(_GAP)) for line in lines if not line.startswith("#")]


def simulated(case: Spelling, dim: int | None) -> list[Tensor]:
    """The results on two simulated ranks, whose operands are split along a dim, or not."""
    with mf.FusionDefinition("spelling") as fd:
        handles = []
        for x in case.tensors():
            split = {} if dim is None or not x.ndim else {"tp": Shard(dim)}
            handles.append(fd.define_tensor(x.shape, x.dtype, MESH, split))
        found = case.results(handles)
        for y in found:
            fd.add_output(fd.ops.set(y).on(MESH, {}))
    return mf.simulate(mf.compile(fd), case.tensors()).outputs


def tried(case: Spelling, attempt: Callable[..., Any] = simulated) -> Spelling:
    """The case with what is said where it is refused."""
    try:
        attempt(case, None)
    except MdfuseError as error:
        return replace(case, why=error.because or "?", instead=error.hint or "?")
    except (RuntimeError, TypeError, ValueError):  # of torch.cond and torch.vmap
        return replace(case, why=OF_TORCH, instead=INSTEAD[case.name])
    return replace(case, why="", instead="")


def rewritten(text: str) -> str:
    """The list with the reasons of today."""
    found = iter(map(tried, spellings()))
    return "".join(
        f"{line if line.startswith('#') else next(found).line}\n" for line in text.splitlines()
    )


if __name__ == "__main__":
    FILE.write_text(rewritten(FILE.read_text(encoding="utf-8")), encoding="utf-8")
