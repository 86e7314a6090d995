"""Drawn host programs of one rank, and what they mean: an interpreter on plain torch tensors.

Matrices `a` to `e` and `y`, rows `p` to `r`, the input `x`. The interpreter keeps one table of
tensors and knows two rules: a name that has a buffer is written, else it is bound; before an
iteration what is computed from the index is dropped, unless it was there before the loop.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: (op, result, operands and attributes...), ("for", index, count, body), ("if", index, body, else)
Statement = tuple[Any, ...]

MATRICES, ROWS = "abcde", "pqr"
TYPES = {**dict.fromkeys("xy" + MATRICES, "f32[2,2] (x=R)"), **dict.fromkeys(ROWS, "f32[2] (x=R)")}
ALIASES: list[dict[str, str]] = [{}, {"y": "x"}, {"b": "a"}, {"b": "x", "c": "x"}]
ARITHMETIC = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "matmul": torch.matmul,
}


class Unbound(Exception):
    """A name that nothing computed is read or freed."""


# -- drawing -------------------------------------------------------------------------------------


@dataclass
class Drawer:
    """Draws statements; most of them read what an earlier one made."""

    draw: random.Random
    made: set[str] = field(default_factory=lambda: {"x"})

    def block(self, depth: int = 0, indices: tuple[str, ...] = ()) -> list[Statement]:
        found = []
        for _ in range(self.draw.randint(2, 7)):
            statement = self.statement(depth, indices)
            found.append(statement)
            if statement[0] not in ("for", "if", "free"):
                self.made.add(statement[1])
        return found

    def one_of(self, names: str) -> str:
        made = [n for n in names if n in self.made]
        return self.draw.choice(made if made and self.draw.random() < 0.98 else list(names))

    def matrix(self) -> str:
        return self.one_of(MATRICES + "xy")

    def statement(self, depth: int, indices: tuple[str, ...]) -> Statement:
        to, row = self.draw.choice(MATRICES + "yy"), self.draw.choice(ROWS)
        match self.draw.choices(range(9), [30, 8, 8, 9, 10, 13, 5, 5, 12])[0]:
            case 0:
                return self.draw.choice([*ARITHMETIC]), to, self.matrix(), self.matrix()
            case 1:
                number = self.draw.choice([1.0, 2.0, *indices])
                return self.draw.choice(["add", "mul"]), to, self.matrix(), number
            case 2:
                return self.draw.choice(["set", "set contiguous"]), to, self.matrix()
            case 3:
                return "permute", to, self.matrix()
            case 4:
                return "select", row, self.matrix(), *self.draw.choices([0, 1], k=2)
            case 5:
                op = self.draw.choice(["add", "mul", "sum"])
                rows = [self.one_of(ROWS) for _ in range(2)]
                return (op, row, self.matrix()) if op == "sum" else (op, row, *rows)
            case 6:
                name = self.one_of(MATRICES + ROWS)
                self.made.discard(name)
                return "free", name
            case 7:
                return "alloc", to
        return self.nested(depth, indices)

    def nested(self, depth: int, indices: tuple[str, ...]) -> Statement:
        if depth == 3:
            return "alloc", "a"
        if indices and self.draw.random() < 0.5:
            branches = (self.block(depth + 1, indices) for _ in range(2))
            return "if", self.draw.choice(indices), *branches
        index, count = "ijk"[depth], self.draw.choice([0, 1, 2, 2, 3])
        return "for", index, count, self.block(depth + 1, (*indices, index))


def walk(block: list[Statement]) -> Iterator[Statement]:
    for s in block:
        yield s
        for inner in s if s[0] in ("for", "if") else ():
            yield from walk(inner) if isinstance(inner, list) else ()


# -- text ----------------------------------------------------------------------------------------


def program_text(block: list[Statement], aliases: dict[str, str]) -> str:
    made = {"x", *(s[1] for s in walk(block) if s[0] not in ("for", "if", "free"))}
    head = [
        "input %x: f32[2,2] (x=R)",
        *(f"alias %{a}: {TYPES[a]} = %{b}" for a, b in aliases.items() if {a, b} & made),
    ]
    return "\n".join((*head, *lines(block), f"return %y: {TYPES['y']}"))


def lines(block: list[Statement]) -> Iterator[str]:
    for op, to, *rest in block:
        if op == "for":
            yield f"for %{to} in 0..{rest[0]} {{"
            yield from (*lines(rest[1]), "}")
        elif op == "if":
            yield f"if %{to} {{"
            yield from (*lines(rest[0]), "} else {", *lines(rest[1]), "}")
        else:
            yield f"free %{to}" if op == "free" else f"%{to}: {TYPES[to]} = {call(op, rest)}"


def call(op: str, rest: list[Any]) -> str:
    name, _, order = op.partition(" ")
    operands = [f"%{x}" if isinstance(x, str) else str(x) for x in rest]
    match name:
        case "alloc":
            return "alloc"
        case "select":
            operands[1:] = [f"dim={rest[1]}", f"index={rest[2]}"]
        case "permute":
            operands.append("dims=[1,0]")
        case "sum":
            operands.append("dims=[1]")
    return f"{name}({', '.join(operands)}) {order}".rstrip()


# -- meaning -------------------------------------------------------------------------------------


@dataclass
class Interpreter:
    """Runs statements on a table of tensors and loop indices."""

    table: dict[str, Any]
    aliases: dict[str, str]
    #: names whose buffer an earlier loop left
    left: set[str] = field(default_factory=set)

    def root(self, name: str) -> str:
        return self.aliases.get(name, name)

    def get(self, x: Any) -> Any:
        if not isinstance(x, str):
            return x
        if self.root(x) not in self.table:
            raise Unbound(x)
        return self.table[self.root(x)]

    def run(self, block: list[Statement]) -> None:
        for s in block:
            match s:
                case ("for", index, count, body):
                    self.loop(index, count, body)
                case ("if", index, body, orelse):
                    self.run(body if self.get(index) else orelse)
                case ("free", name):
                    self.get(name)
                    if self.root(name) in ("x", "y"):
                        raise Unbound(name)
                    del self.table[self.root(name)]
                case (op, to, *rest):
                    self.write(self.root(to), op, *map(self.get, rest))

    def write(self, to: str, op: str, *operands: Any) -> None:
        self.left.discard(to)
        if op == "alloc":
            self.table.setdefault(to, torch.full((2, 2), float("nan")))
        elif to in self.table:
            self.table[to].copy_(value(op, *operands).clone())
        else:
            self.table[to] = value(op, *operands)

    def loop(self, index: str, count: int, body: list[Statement]) -> None:
        kept = set(self.table) - self.left
        dropped = self.dependent(index, body) - kept
        for n in range(count):
            self.table[index] = n
            for name in dropped:
                self.table.pop(name, None)
            self.left -= dropped
            self.run(body)
        self.left |= dropped & set(self.table)
        self.table.pop(index, None)

    def dependent(self, index: str, body: list[Statement]) -> set[str]:
        found = {index}
        for op, to, *rest in walk(body):
            if op not in ("for", "if", "free", "alloc"):
                reads = {self.root(x) for x in rest if isinstance(x, str)}
                found |= {self.root(to)} if reads & found else set()
        return found - {index}


def value(op: str, x: Tensor, *rest: Any) -> Tensor:
    """A result: a view of the operand where it is one."""
    match op:
        case "set":
            return x
        case "set contiguous":
            return x.contiguous().clone()  # a value of its own, whatever shares its memory later
        case "permute":
            return x.T
        case "select":
            return x.select(*rest)
        case "sum":
            return x.sum(1)
    return ARITHMETIC[op](x, *rest)


def is_static(block: list[Statement], aliases: dict[str, str]) -> bool:
    """Some instruction computes each name that is read, be it one that runs or not."""
    made = {aliases.get(s[1], s[1]) for s in walk(block) if s[0] not in ("for", "if", "free")}
    read = [n for op, to, *rest in walk(block) for n in (rest if op != "free" else [to])]
    names = {aliases.get(n, n) for n in read if isinstance(n, str) and n in TYPES}
    return names <= {*made, "x"}


def expected(
    block: list[Statement], aliases: dict[str, str], x: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The output and the input after a run; None where something reads what is not there."""
    if not is_static(block, aliases):
        return None
    interpreter = Interpreter({"x": x.clone()}, aliases)
    try:
        interpreter.run(block)
        return interpreter.get("y"), interpreter.get("x")
    except Unbound:
        return None
