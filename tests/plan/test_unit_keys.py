"""Keys of what units compute, and the names that all processes give them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mdfuse.ir import ops
from mdfuse.plan import unit_keys
from mdfuse.plan.lines import Line, SlotRef
from mdfuse.plan.unit_keys import name_of, unit_key


def line(run: Any, *args: Any, into: int = 9, **kwargs: Any) -> Line:
    return Line(run=run, args=args, kwargs=tuple(kwargs.items()), into=into)


def key(*lines: Line, takes: tuple[int, ...] = (1, 2), makes: tuple[int, ...] = (9,)) -> Any:
    return unit_key(lines, takes, makes)


def test_slots_count_by_their_first_use() -> None:
    one = key(line(torch.add, SlotRef(1), SlotRef(2)))
    other = key(line(torch.add, SlotRef(7), SlotRef(4), into=5), takes=(7, 4), makes=(5,))
    assert one == other and name_of(one) == name_of(other)
    assert one != key(line(torch.add, SlotRef(2), SlotRef(1)))


DIFFERENT = [
    line(torch.add, SlotRef(1), SlotRef(2)),
    line(torch.sub, SlotRef(1), SlotRef(2)),
    line(torch.add, SlotRef(1), SlotRef(1)),
    line(torch.add, SlotRef(1), 1),
    line(torch.add, SlotRef(1), 1.0),
    line(torch.add, SlotRef(1), True),
    line(torch.add, SlotRef(1), "1"),
    line(torch.add, SlotRef(1), None),
    line(torch.add, SlotRef(1), 0.0),
    line(torch.add, SlotRef(1), -0.0),
    line(torch.add, SlotRef(1), [1, 2]),
    line(torch.add, SlotRef(1), (1, 2)),
    line(torch.add, SlotRef(1), [[1], 2]),
    line(torch.add, SlotRef(1), [1, [2]]),
    line(torch.add, SlotRef(1, "flat"), 1),
    line("add", SlotRef(1), 1),
    line(torch.Tensor.add, SlotRef(1), 1),
    line(torch.ops.aten.add.Tensor, SlotRef(1), 1),
    line(torch.ops.aten.add.out, SlotRef(1), 1),
    line(torch.add, SlotRef(1), 1, out=SlotRef(2)),
    line(torch.add, SlotRef(1), 1, alpha=2),
    line(torch.sum, SlotRef(1), dtype=torch.float32),
    line(torch.sum, SlotRef(1), dtype=torch.float64),
    line(torch.empty, [2], device=torch.device("cpu")),
    line(torch.empty, [2], device=torch.device("cuda", 1)),
    line(partial(torch.add, alpha=2), SlotRef(1), 1),
    line(partial(torch.add, alpha=3), SlotRef(1), 1),
    line(ops.TABLE["rms_norm"].call if "rms_norm" in ops.TABLE else torch.neg, SlotRef(1)),
]


def test_what_differs_has_another_key_and_name() -> None:
    keys = [key(x) for x in DIFFERENT]
    names = [name_of(x) for x in keys]
    assert None not in names
    for i in range(len(keys)):
        for j in range(i):
            assert keys[i] != keys[j], (DIFFERENT[i], DIFFERENT[j])
            assert names[i] != names[j], (DIFFERENT[i], DIFFERENT[j])


def test_every_op_of_the_table_has_a_name() -> None:
    rows = [row for row in ops.TABLE.values() if row.call is not None]
    names = [name_of(key(line(row.call, SlotRef(1)))) for row in rows]
    nameless = [row.name for row, name in zip(rows, names, strict=True) if name is None]
    assert nameless == []
    forms = [x.writes.form for x in rows if x.writes is not None and x.writes.form is not None]
    assert all(name_of(key(line(form, SlotRef(1), out=SlotRef(2)))) for form in forms)


def test_functions_made_alike_have_one_key() -> None:
    first, second = (_held(2.0) for _ in range(2))
    assert first is not second and key(line(first)) == key(line(second))
    assert key(line(first)) != key(line(_held(3.0)))


def _held(factor: float) -> Any:
    def scaled(x: Any) -> Any:
        return x * factor

    return scaled


def test_what_only_this_process_knows_has_no_name() -> None:
    """A function from outside of mdfuse may call what no digest covers; an object, anything."""
    assert name_of(key(line(_held(2.0), SlotRef(1)))) is None
    assert name_of(key(line(torch.add, SlotRef(1), object()))) is None
    assert name_of(key(line(torch.add, SlotRef(1), torch.ones(2)))) is None


def test_settings_of_torch_are_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = key(line(torch.add, SlotRef(1), 1))
    torch.use_deterministic_algorithms(True)
    try:
        assert key(line(torch.add, SlotRef(1), 1)) != plain
    finally:
        torch.use_deterministic_algorithms(False)
    assert key(line(torch.add, SlotRef(1), 1)) == plain


def test_another_mdfuse_gives_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = name_of(key(line(torch.add, SlotRef(1), 1)))
    (tmp_path / "changed.py").write_text("")
    monkeypatch.setattr(unit_keys, "PACKAGE", str(tmp_path))
    unit_keys.own_code.cache_clear()
    try:
        assert name_of(key(line(torch.add, SlotRef(1), 1))) != wanted
    finally:
        unit_keys.own_code.cache_clear()


def test_another_mdfuse_in_an_archive_gives_other_names(tmp_path: Path) -> None:
    texts = set[str]()
    for content in (b"one", b"two", b"two"):
        (tmp_path / "app.pyz").write_bytes(content)
        texts.add(unit_keys._code_in(tmp_path / "app.pyz" / "mdfuse"))
    assert len(texts) == 2


def test_constants_in_sets() -> None:
    code = compile("x in {'a', 'b', 1, (2, 3)}", "f", "eval")
    (constant,) = [x for x in code.co_consts if isinstance(x, frozenset)]
    assert unit_keys._constant_text(constant) == "{int 1, str 'a', str 'b', tuple (2, 3)}"


NAMES = """
from mdfuse.ir import ops
from mdfuse.plan.lines import Line, SlotRef
from mdfuse.plan.unit_keys import name_of, unit_key
for row in ops.TABLE.values():
    lines = [Line(run=row.call, args=(SlotRef(1), 0.5, [1, None, "x"]), into=2)]
    print(row.name, name_of(unit_key(lines, (1,), (2,))))
"""


def test_processes_agree_on_names() -> None:
    told = [
        subprocess.run(
            [sys.executable, "-c", NAMES], env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE, text=True, check=True, timeout=300,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert told[0] == told[1] and told[0].count("\n") == len(ops.TABLE)
