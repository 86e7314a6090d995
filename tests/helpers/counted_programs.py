"""Host programs that move as many rows as a run counts, and what they give by plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mdfuse import hir

_TEXT = """
host @counted on mesh({mesh}) {{
  input %x: {t}[1,{T},{d}] of [{P},{T},{d}] ({split})
  input %n: i64[1,{E}] of [{P},{E}] ({split})
  %n.all: i64{known} ({whole}) = alloc
  %a = post {gather}(%n) -> %n.all i64[{P},{E}] ({split}) => ({whole}){axes}
  wait %a
  %c: i64{known} ({whole}) = fetch(%n.all, most={T})
  free %n.all
  %s: {t}[<={T}:%c,{d}] of [{P},{E},{T},{d}] ({split}) = pack_rows(%x, %c)
  %r: {t}[<={R}:%c,{d}] of [{P},{E},{T},{d}] ({there}) = alloc(%c)
  %h = post alltoall(%s) -> %r {t}[{P},{E},{T},{d}] ({split}) => ({there}) axis=ep {go} counts=%c
  wait %h
  free %s
  %q: {t}[<={R}:%c,{d}] of [{P},{E},{T},{d}] ({there}) = mul(%r, 2.0)
  free %r
  %b: {t}[<={T}:%c,{d}] of [{P},{E},{T},{d}] ({split}) = alloc(%c)
  %k = post alltoall(%q) -> %b {t}[{P},{E},{T},{d}] ({there}) => ({split}) axis=ep {back} counts=%c
  wait %k
  free %q
  %y: {t}[1,{T},{d}] of [{P},{T},{d}] ({split}) = unpack_rows(%b, %c)
  free %b, %c
  return %y
}}
"""

_NAMES = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Counted:
    """A program that sends rows to the ranks of their experts, doubles them and sends them back.

    Attributes:
        axes: sizes of the mesh axes that split parts; the last one, `ep`, splits experts then.
        experts: how many.
        most: rows of a part.
        width: elements of a row.
        dtype: as programs print it.
        parts: how many; by default one for each rank.
        is_fetched: the host waits for the counts; else each rank reads them in its memory.
        is_near: a rank knows the counts of its part of the outer axes alone, along which no row
            moves; else all counts.
    """

    axes: tuple[int, ...] = (2,)
    experts: int = 4
    most: int = 6
    width: int = 4
    dtype: str = "f32"
    parts: int = 0
    is_fetched: bool = True
    is_near: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", self.parts or math.prod(self.axes))

    @property
    def ranks(self) -> int:
        return math.prod(self.axes)

    def text(self) -> str:
        named = ("pp", "dp", "ep")[-len(self.axes) :]
        ep = self.parts // math.prod(self.axes[:-1])
        is_even = self.parts == self.ranks  # an exchange needs no padding
        gathered = ("ep",) if self.is_near else named
        over = f"axes=[{','.join(gathered)}]" if len(gathered) > 1 else "axis=ep"
        axes, near = f" {over} dim=0", f"[{ep},{self.experts}] of " if self.is_near else ""
        split = ", ".join(f"{a}=S0" for a in named)
        return _TEXT.format(
            mesh=", ".join(f"{a}={n}" for a, n in zip(named, self.axes, strict=True)),
            split=split,
            there=split.replace("ep=S0", "ep=S1"),
            whole=", ".join(f"{a}={'R' if a in gathered else 'S0'}" for a in named),
            known=f"{near}[{self.parts},{self.experts}]",
            gather="allgather" if is_even else "exchange", axes=axes if is_even else "",
            P=self.parts, E=self.experts, T=self.most, d=self.width, R=ep * self.most,
            t=self.dtype, go="dim=0 to_dim=1", back="dim=1 to_dim=0",
        )  # fmt: skip

    def program(self) -> hir.HostProgram:
        text = self.text()
        if not self.is_fetched:
            lines = [x for x in text.splitlines() if "fetch" not in x and x != "  free %n.all"]
            text = "\n".join(lines).replace("%c", "%n.all")
        return hir.parse(text)

    def inputs(self, counts: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.parts, self.most, self.width, generator=generator)
        return x.to(_NAMES[self.dtype]), counts

    def expected(self, x: Tensor, counts: Tensor) -> Tensor:
        """Twice the rows that are there, zeros behind them."""
        there = torch.arange(self.most) < counts.sum(1, keepdim=True)
        return torch.where(there[..., None], 2 * x, torch.zeros((), dtype=x.dtype))


def skewed(case: Counted) -> dict[str, Tensor]:
    """Counts of all kinds: alike, all of one expert, an idle part or expert, none, drawn ones."""
    parts, experts, most = case.parts, case.experts, case.most
    none = torch.zeros(parts, experts, dtype=torch.int64)
    alike, one, empty, few = (none.clone() for _ in range(4))
    for k in range(most):
        alike[:, k % experts] += 1
    one[:, -1] = most
    empty[: parts - 1, 0] = most
    few[-1, experts // 2] = 1
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(0, most // experts + 1, (parts, experts), generator=generator)
    return {"alike": alike, "one": one, "empty": empty, "few": few, "none": none, "drawn": drawn}


CASES = (
    Counted(),
    Counted(axes=(1,), experts=3),
    Counted(axes=(3,), experts=5, most=7, width=3, dtype="bf16"),
    Counted(axes=(4,), experts=2, most=1),
    Counted(axes=(4,), experts=5, most=3, parts=3),
    Counted(axes=(2, 2), experts=3, most=5, width=1),
    Counted(axes=(2, 2), experts=3, most=5, width=2, is_fetched=False),
    Counted(axes=(3,), experts=4, most=4, dtype="bf16", is_fetched=False),
    Counted(axes=(2, 1, 2), experts=8, most=9, dtype="bf16"),
    Counted(axes=(3, 2), experts=3, most=5, width=2, is_near=True),
    Counted(axes=(2, 2), experts=4, most=4, dtype="bf16", is_fetched=False, is_near=True),
    Counted(axes=(2, 1, 2), experts=5, most=7, is_near=True),
)
