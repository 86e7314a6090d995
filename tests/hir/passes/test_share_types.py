"""Equal types of a program are one object, and so are their layouts."""

from __future__ import annotations

import mdfuse as mf
from mdfuse import hir
from mdfuse.hir.passes import share_types

TEXT = """
host @p on mesh(x=2) {
  input %a: f32[2] of [4] (x=S0)
  input %b: f32[2] of [4] (x=S0)
  input %c: f32[3] of [6] (x=S0)
  %d: f32[2] of [4] (x=S0) = add(%a, %b)
  return %c, %d
}"""


def test_equal_types_are_one_object() -> None:
    program = hir.parse(TEXT)
    found = share_types.run(program, mf.Options())
    assert found == program
    assert found.types["a"] is found.types["b"] is found.types["d"]
    assert found.types["c"] is not found.types["a"]
    assert found.types["c"].layout is found.types["a"].layout
