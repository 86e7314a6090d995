"""Programs with symbolic extents: values, guards, and how often they are lowered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.oracle import is_close, simulate_shares
from helpers.symbolic_programs import CASES, FOUR, ROWS, WHOLE, defined, guards, inputs

import mdfuse as mf
from mdfuse import DeviceMesh, Shard


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    """Multiples of the ranks and not, fewer rows than ranks, one, and none."""
    definition = defined(name)
    program = mf.compile(definition)
    for n in (8, 5, 6, 7, 1, 12, 3, 0, 2000):
        given = inputs(name, n)
        if name == "reshaped" and n == 0:
            continue  # torch cannot tell what -1 is
        expected = CASES[name][2](*given)
        assert is_close(mf.reference(definition, given)[0], expected), n
        result = mf.simulate(program, given, options=mf.Options(poison=True))
        assert is_close(result.outputs[0], expected), f"{n}\n{program}"
    assert len(program.lowerings) <= 6, guards(program)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_holds_its_part(name: str) -> None:
    """The program of given extents, from parts that are cut here."""
    program = mf.compile(defined(name))
    symbols = program.lowerings[0].assumed.examples
    for n in (8, 5):
        given = inputs(name, n)
        host = program.host_for(dict.fromkeys(symbols, n))
        numbered = mf.Program(program.fusion, program.segments, host)
        (got,) = simulate_shares(numbered, given).outputs
        assert is_close(got, CASES[name][2](*given))


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"joined"}))
def test_text_of_a_known_extent_is_that_of_the_numbers(name: str) -> None:
    """As if the definition had said the number; what is joined is in blocks only of numbers."""
    program = mf.compile(defined(name))
    for n in (8, 5, 7, 16):
        with mf.FusionDefinition(name) as fd:
            define_tensor = fd.define_tensor

            def numbered(shape: Any, *more: Any, n: int = n, **named: Any) -> Any:
                return define_tensor([n if m == -1 else m for m in shape], *more, **named)  # noqa: B023

            fd.define_tensor = numbered  # type: ignore[method-assign]
            CASES[name][0](fd)
        host = program.host_for(dict.fromkeys(program.lowerings[0].assumed.examples, n))
        assert without_lines(str(host)) == without_lines(str(mf.compile(fd)))


def without_lines(text: str) -> list[str]:
    """A program without the comments that name lines."""
    return [line.partition("  #")[0].rstrip() for line in text.splitlines()]


def test_one_lowering_serves_many_extents() -> None:
    program = mf.compile(defined("element_wise"))
    for n in range(2, 40):
        mf.simulate(program, inputs("element_wise", n))
    assert guards(program) == [["x.0 > 1"]]


def test_a_broken_guard_lowers_again() -> None:
    program = mf.compile(defined("gathered"))
    assert guards(program) == [["x.0 mod 4 == 0", "x.0 > 1"]]
    for n, lowerings in ((8, 1), (400, 1), (5, 2), (6, 2), (7, 2), (9, 2), (4, 2), (8, 2)):
        mf.simulate(program, inputs("gathered", n))
        assert len(program.lowerings) == lowerings, (n, guards(program))


def test_hosts_of_known_extents_are_kept_up_to_a_limit() -> None:
    program = mf.compile(defined("element_wise"))
    first = program.host_for({"x.0": 8})
    assert program.host_for({"x.0": 8}) is first
    for n in range(100, 140):
        program.host_for({"x.0": n})
    assert program.host_for({"x.0": 8}) is not first
    assert len(program.lowerings) == 1


def test_printed_program() -> None:
    program = mf.compile(defined("gathered"))
    lines = without_lines(str(program))
    assert str(program).splitlines()[1] == "  # guards: x.0 mod 4 == 0, x.0 > 1"
    assert "  input %x: f32[x.0//4,6] of [x.0,6] (tp=S0)" in lines
    assert "  %t: f32[x.0,6] (tp=R) = alloc" in lines
    assert "lowering 0: for x.0 mod 4 == 0, x.0 > 1" in program.explain()
    again = program.for_rank(1, extents={"x.0": 7})
    assert "f32[2,6] of [7,6]" in str(again)
    assert mf.hir.parse(str(again)) == again
    assert program.bytes_received(0, extents={"x.0": 8}) == 3 * 2 * 6 * 4
    assert [c.kind for c in program.communications] == ["Allgather"]


def test_unrelated_symbols_stay_apart() -> None:
    with mf.FusionDefinition("apart") as fd:
        x = fd.define_tensor([-1, -1], mesh=ROWS)
        fd.add_output(fd.ops.softmax(x, 1))
    program = mf.compile(fd)
    for shape in ((8, 3), (3, 8), (5, 5)):
        x_ = torch.randn(shape)
        result = mf.simulate(program, [x_])
        assert is_close(result.outputs[0], torch.softmax(x_, 1))
    assert guards(program) == [["x.0 > 1", "x.1 > 1"]]


def test_equal_symbols_and_broadcasting() -> None:
    with mf.FusionDefinition("sum") as fd:
        x = fd.define_tensor([-1, 3], mesh=WHOLE)
        y = fd.define_tensor([-1, 3], mesh=WHOLE)
        fd.add_output(x + y)
    program = mf.compile(fd)
    assert "y.0 == x.0" in guards(program)[0]
    for n, m in ((5, 5), (9, 9), (1, 7), (7, 1)):
        a, b = torch.randn(n, 3), torch.randn(m, 3)
        assert is_close(mf.simulate(program, [a, b]).outputs[0], a + b)
        assert is_close(mf.reference(fd, [a, b])[0], a + b)
    assert len(program.lowerings) == 3


def test_an_extent_that_an_operand_fixes() -> None:
    with mf.FusionDefinition("fixed") as fd:
        x = fd.define_tensor([-1, -1], mesh=ROWS)
        w = fd.define_tensor([8, 3], mesh=WHOLE)
        fd.add_output(x @ w)
    program = mf.compile(fd)
    assert "x.1 == 8" in guards(program)[0]
    a, b = torch.randn(6, 8), torch.randn(8, 3)
    assert is_close(mf.simulate(program, [a, b]).outputs[0], a @ b)


def test_an_input_with_the_extent_of_another() -> None:
    with mf.FusionDefinition("shared") as fd:
        x = fd.define_tensor([-1, 3], mesh=ROWS)
        y = fd.define_tensor([x.shape[0] * 2, 3], mesh=WHOLE)
        fd.add_output(fd.ops.cat([x, x], 0) + y)
    program = mf.compile(fd)
    a, b = torch.randn(5, 3), torch.randn(10, 3)
    assert is_close(mf.simulate(program, [a, b]).outputs[0], torch.cat([a, a]) + b)
    with pytest.raises(mf.ProgramError, match=r"2\*x\.0 is 10, but dim 0 of %y has 9"):
        mf.simulate(program, [a, b[:9]])


def test_what_needs_the_number_pins_it() -> None:
    """A loop of the user's is over a number; so it is that number."""
    with mf.FusionDefinition("loop") as fd:
        x = fd.define_tensor([-1, 2], mesh=WHOLE)
        w = fd.define_tensor([3, 2], mesh=WHOLE)
        y = x + w
        for _ in range(x.shape[0]):
            y = y * 2
        fd.add_output(y)
    program = mf.compile(fd)
    assert [str(g) for g in fd.assumed.guards] == ["x.0 == 3"]
    assert torch.equal(
        mf.simulate(program, [torch.ones(3, 2)] * 2).outputs[0], torch.full((3, 2), 16.0)
    )
    with pytest.raises(mf.DefinitionError, match=r"went on for x\.0 == 3"):
        mf.simulate(program, [torch.ones(1, 2), torch.ones(3, 2)])


def test_names_follow_the_variable() -> None:
    with mf.FusionDefinition("named") as fd:
        tokens = fd.define_tensor([-1, 3]).on(ROWS)
        kept = tokens.shape[0]
        fd.add_output(tokens.reshape(kept * 3))
    assert list(fd.examples) == ["tokens.0"]
    assert "of [3*tokens.0]" in str(mf.compile(fd))


def test_extents_that_the_definition_looks_at() -> None:
    with mf.FusionDefinition("looks") as fd:
        x = fd.define_tensor([-1, 3], mesh=ROWS)
        fd.add_output(x * 2 if x.shape[0] > 4 else x)
    program = mf.compile(fd)
    assert is_close(mf.simulate(program, [torch.ones(5, 3)]).outputs[0], torch.full((5, 3), 2.0))
    for run in (lambda x: mf.simulate(program, [x]), lambda x: mf.reference(fd, [x])):
        with pytest.raises(mf.DefinitionError, match=r"looked at its extents.*x\.0 > 4"):
            run(torch.ones(4, 3))


def test_slices_count_from_the_end() -> None:
    with mf.FusionDefinition("ends") as fd:
        x = fd.define_tensor([-1, 3], mesh=WHOLE)
        n = x.shape[0]
        for window in (slice(-2, None), slice(None, 5), slice(n // 2, None), slice(1, -1, 2)):
            fd.add_output(x[window] * 1)
    program = mf.compile(fd)
    for n in (9, 10, 3, 1, 2):
        whole = torch.arange(3.0 * n).reshape(n, 3)
        windows = (slice(-2, None), slice(None, 5), slice(n // 2, None), slice(1, -1, 2))
        for got, window in zip(mf.simulate(program, [whole]).outputs, windows, strict=True):
            assert torch.equal(got, whole[window]), (n, window)


def test_a_random_value_of_symbolic_shape() -> None:
    with mf.FusionDefinition("dropped") as fd:
        x = fd.define_tensor([-1, 3], mesh=ROWS)
        fd.add_output(fd.ops.dropout(x, 0.5, seed=3) + fd.ops.uniform(x.shape, seed=1))
    program = mf.compile(fd)
    for n in (8, 5):
        given = [torch.ones(n, 3)]
        assert is_close(mf.simulate(program, given).outputs[0], mf.reference(fd, given)[0])


def test_traced_functions() -> None:
    @mf.fusion
    def double(x: Any) -> Any:
        return x + x

    fd = double.define(x=mf.TensorSpec((-1, 2), torch.float32, FOUR, {"tp": Shard(0)}))
    assert is_close(
        mf.simulate(mf.compile(fd), [torch.ones(5, 2)]).outputs[0], torch.full((5, 2), 2.0)
    )


def test_numbers_stay_plain() -> None:
    """A definition without symbols has none anywhere, and is lowered once."""
    with mf.FusionDefinition("plain") as fd:
        x = fd.define_tensor([8, 3], mesh=ROWS)
        fd.add_output(x.reshape(x.shape[0] * 3) + 1)
    program = mf.compile(fd)
    assert program.lowerings == ()
    assert program.host_for() is program.host
    assert all(type(n) is int for t in program.host.types.values() for n in t.shape)


# -- wrong use -----------------------------------------------------------------------------------


def gather_program() -> mf.Program:
    return mf.compile(defined("gathered"))


@pytest.mark.parametrize(
    ("extents", "message"),
    [
        ({}, r"extents x\.0 are missing.*sharded.*pass extents=\{\"x\.0\""),
        (None, r"extents x\.0 are missing"),
        ({"x.0": 8, "y.0": 3}, r"there is no y\.0.*symbolic extents are x\.0"),
        ({"x.0": -1}, r"x\.0=-1.*integer of at least 0"),
        ({"x.0": 2.0}, r"x\.0=2\.0.*integer"),
        ({"x.0": True}, r"x\.0=True.*integer"),
        (8, r"extents=8.*by name"),
    ],
)
def test_wrong_extents(extents: Any, message: str) -> None:
    with pytest.raises(mf.ProgramError, match=f"(?s){message}"):
        gather_program().host_for(extents)
    if extents is not None:
        with pytest.raises(mf.ProgramError, match=f"(?s){message}"):
            gather_program().for_rank(0, extents)


def test_extents_of_a_program_without_symbols() -> None:
    with mf.FusionDefinition("plain") as fd:
        fd.add_output(fd.define_tensor([4], mesh=WHOLE) + 1)
    program = mf.compile(fd)
    for use in (
        lambda: program.for_rank(0, {"x.0": 4}),
        lambda: mf.simulate(program, [torch.ones(4)], {"x.0": 4}),
        lambda: mf.simulate(program.host, [torch.ones(4)], {"x.0": 4}),
    ):
        with pytest.raises(mf.ProgramError, match="no symbolic extents"):
            use()


def test_given_extents_that_contradict_global_inputs() -> None:
    with pytest.raises(mf.ProgramError, match=r"(?s)x\.0 is 7, but dim 0 of %x has 8"):
        mf.simulate(gather_program(), [torch.ones(8, 6)], {"x.0": 7})


@pytest.mark.parametrize("x", [torch.ones(8), None, 3])
def test_inputs_that_have_no_such_dim(x: Any) -> None:
    with pytest.raises(mf.ProgramError, match=r"no global tensor for %x, of which x\.0"):
        mf.simulate(gather_program(), [x])
    with pytest.raises(mf.ProgramError, match=r"no global tensor for %x, of which x\.0"):
        mf.reference(defined("gathered"), [x])


def test_other_dims_are_checked_as_ever() -> None:
    with pytest.raises(mf.ProgramError, match=r"expected a global tensor: .* \(8, 6\)"):
        mf.simulate(gather_program(), [torch.ones(8, 5)])


def test_extents_for_which_the_definition_means_nothing() -> None:
    with mf.FusionDefinition("sum") as fd:
        x = fd.define_tensor([-1, 3], mesh=WHOLE)
        y = fd.define_tensor([-1, 3], mesh=WHOLE)
        fd.add_output(x + y)
    program, given = mf.compile(fd), [torch.ones(5, 3), torch.ones(7, 3)]
    message = r"(?s)@sum for the extents \{'x.0': 5, 'y.0': 7\}: add\(%x: f32\[x\.0,3\].*length 7"
    with pytest.raises(mf.DefinitionError, match=message):
        mf.simulate(program, given)
    with pytest.raises(mf.DefinitionError, match=r"add\("):
        mf.reference(fd, given)
    assert is_close(mf.simulate(program, [given[0]] * 2).outputs[0], torch.full((5, 3), 2.0))


def test_a_definition_that_fits_no_extent() -> None:
    with (
        pytest.raises(mf.DefinitionError, match=r"matmul\(%x: f32\[x\.0,3\]"),
        mf.FusionDefinition("never"),
    ):
        _never()


def _never() -> None:
    fd = mf.ops.current.get()
    fd.define_tensor([-1, 3], name="x") @ fd.define_tensor([4, 2], name="w")


def test_shapes_other_than_minus_one() -> None:
    with mf.FusionDefinition("bad") as fd, pytest.raises(mf.DefinitionError, match="or -1 for a"):
        fd.define_tensor([-2, 3])


# -- one process ---------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """No communicator is left behind."""
    yield
    mf.init().close()


@pytest.mark.usefixtures("alone")
def test_run_reads_off_what_every_rank_sees() -> None:
    with mf.FusionDefinition("alone") as fd:
        x = fd.define_tensor([-1, 3], mesh=DeviceMesh([0]))
        fd.add_output(x + 1)
    program = mf.compile(fd)
    for n in (4, 9, 4):
        assert torch.equal(program.run(torch.ones(n, 3))[0], torch.full((n, 3), 2.0))
    assert len(program.lowerings) == 1
    assert torch.equal(
        program.run(torch.ones(5, 3), extents={"x.0": 5})[0], torch.full((5, 3), 2.0)
    )
    with pytest.raises(mf.ProgramError, match=r"x\.0 is 6, but dim 0 of %x has 5 on rank 0"):
        program.run(torch.ones(5, 3), extents={"x.0": 6})
    with pytest.raises(mf.ProgramError, match=r"there is no z\.1"):
        program.run(torch.ones(5, 3), extents={"z.1": 6})
    out = [torch.empty(5, 3)]
    assert program.run(torch.ones(5, 3), out=out)[0] is out[0]


def test_variances_of_any_number_of_rows() -> None:
    """One row or none gives no numbers: the definition asks for neither."""
    with mf.FusionDefinition("variances") as fd:
        x = fd.define_tensor([-1, 3], mesh=DeviceMesh.arange(tp=2), layout={"tp": Shard(0)})
        fd.add_output(x.var(0))
        fd.add_output(torch.std(x, 0, correction=0))
        fd.add_output(x.var())
    program = mf.compile(fd)
    for n in (5, 1, 0, 2):
        x = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
        got = mf.simulate(program, [x]).outputs
        with pytest.warns(UserWarning, match="degrees of freedom") if n < 2 else nullcontext():
            expected = [x.var(0), torch.std(x, 0, correction=0), x.var()]
        torch.testing.assert_close(got, expected, equal_nan=True)
