"""Check in which order counted rows lie: part by part, or expert by expert, where experts compute.

Rows are sent, received, packed and unpacked part by part. `rows_to_experts` and `rows_to_parts` put
them in the other order, which element-wise operations and products leave.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mdfuse.hir.program import Instruction

#: What puts rows in another order -> whether they lie by expert then.
TURNS = {"rows_to_experts": True, "rows_to_parts": False}
#: Operations that are told the order of the rows that they read.
_TOLD = ("rows_mm", "rows_mm_grad", "sum_of_rows", "spread_rows")
#: Instructions on rows that lie by part.
_BY_PART = ("post", "pack_rows", "unpack_rows")


def by_expert(every: Sequence[Instruction], is_counted: Callable[[object], bool]) -> set[str]:
    """Return the names of rows that lie expert by expert."""
    turned, before = set[str](), -1
    while len(turned) > before:
        before = len(turned)
        for i in every:
            if i.op != "launch" and TURNS.get(str(i.fn), not turned.isdisjoint(i.reads)):
                turned.update(filter(is_counted, i.outputs))
    return turned


def problem(
    i: Instruction, turned: Collection[str], is_counted: Callable[[object], bool]
) -> str | None:
    """Return why an instruction takes rows in another order than they lie; None: it does not.

    Args:
        i: of the program.
        turned: the names of rows that lie by expert.
        is_counted: whether a name is of counted rows.
    """
    if i.op in ("free", "launch"):
        return None
    rows = [x for x in (*i.reads, *i.outputs) if is_counted(x)]
    fn, wanted = i.fn or i.op, None
    if i.fn in TURNS:
        rows, wanted = [i.reads[0]], not TURNS[i.fn]
        if (i.outputs[0] in turned) == wanted:
            rows.append(i.outputs[0])
    elif i.op in _BY_PART:
        wanted = False
    elif i.fn in _TOLD:
        wanted = bool(i.kwargs.get("by_expert"))
    elif rows:
        wanted = rows[0] in turned
    wrong = next((x for x in rows if wanted is not None and (x in turned) != wanted), None)
    if wrong is None:
        return None
    lie, other = ("expert", "part") if wrong in turned else ("part", "expert")
    return f"{fn} takes rows by {other}, and those of %{wrong} lie by {lie}"
