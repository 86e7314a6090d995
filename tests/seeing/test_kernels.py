"""What a launch reads and writes between the calls of libraries, counted by hand."""

from dataclasses import replace

import pytest
import torch

import mdfuse as mf
from mdfuse import DeviceMesh
from mdfuse.hir.rank.pipelines import as_run, project
from mdfuse.seeing import Costs
from mdfuse.seeing.amounts import is_across, is_work
from mdfuse.seeing.cost_keys import works_of
from mdfuse.seeing.curves import Curve, Grid
from mdfuse.seeing.kernels import Kernel, kernels

ROWS, WIDTH, HIDDEN = 4, 8, 16


def program() -> mf.hir.HostProgram:
    with mf.FusionDefinition("block") as fd:
        x = fd.define_tensor([ROWS, WIDTH], mesh=DeviceMesh([0]))
        up = fd.define_tensor([HIDDEN, WIDTH], mesh=DeviceMesh([0]))
        down = fd.define_tensor([WIDTH, HIDDEN], mesh=DeviceMesh([0]))
        y = fd.ops.exp(x * 2)
        h = fd.ops.relu(fd.ops.linear(y, up) + 1)
        fd.add_output(y + fd.ops.linear(h, down))
    return project(mf.compile(fd, mf.Options(compile="always")).host, 0)


def test_work_between_products_is_a_kernel() -> None:
    host = program()
    (launch,) = (i for i in host.instructions if i.op == "launch")
    small, large = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN
    first, second, third = 2 * small, 2 * large, 3 * small  # y is written, and read at the end
    assert kernels(host, launch) == [Kernel(n, "f32") for n in (first, second, third)]


def test_kernels_that_add_rows_up_or_read_across_are_told_apart() -> None:
    with mf.FusionDefinition("block") as fd:
        x = fd.define_tensor([ROWS, WIDTH], mesh=DeviceMesh([0]))
        w = fd.define_tensor([WIDTH, WIDTH], mesh=DeviceMesh([0]))
        z = fd.define_tensor([WIDTH, ROWS], mesh=DeviceMesh([0]))
        y = fd.ops.linear(fd.ops.softmax(x * 2, -1), w)
        y = fd.ops.linear(fd.ops.exp(y), w)
        y = fd.ops.linear(y - fd.ops.amax(y, [-1], keepdim=True), w)
        fd.add_output(y + fd.ops.permute(z, [1, 0]))
    host = project(mf.compile(fd, mf.Options(compile="always")).host, 0)
    (launch,) = (i for i in host.instructions if i.op == "launch")
    assert [k.like for k in kernels(host, launch)] == ["sum", "*", "sum", "across"]
    byte = {"*": 1.0, "sum": 10.0, "across": 100.0}
    works = {f"{key} f32": Curve(((1.0, s), (1e6, 1e6 * s))) for key, s in byte.items()}
    grid = Grid(((1.0,), (1.0,), (1.0,)), (1e-9,))
    costs = Costs(works=works_of(works), products=works_of({"matmul f32": grid}))
    small = 4 * ROWS * WIDTH
    seconds = costs.seconds(host, launch)
    assert round(seconds) == 2 * small * 10 + 2 * small + 2 * small * 10 + 3 * small * 100
    less = replace(costs, works=works_of({"* f32": works["* f32"]})).seconds(host, launch)
    assert round(less) == (2 + 2 + 2 + 3) * small, "what is not measured is like other work"


def test_a_launch_takes_its_products_and_its_kernels() -> None:
    host = program()
    (launch,) = (i for i in host.instructions if i.op == "launch")
    curve = Curve(((1.0, 1.0), (1e6, 1e6)))  # a second for each byte
    grid = Grid(((1.0,), (1.0,), (1.0,)), (1e-3,))  # a millisecond for each multiplication
    costs = Costs(works=works_of({"* f32": curve}), products=works_of({"matmul f32": grid}))
    bytes_moved = 4 * (5 * ROWS * WIDTH + 2 * ROWS * HIDDEN)
    seconds = bytes_moved + 2 * ROWS * WIDTH * HIDDEN * 1e-3
    assert round(costs.seconds(host, launch), 6) == round(seconds, 6)
    modelled = Costs(bandwidth=1.0, flops=1e3).seconds(host, launch)
    product = 4 * (ROWS * WIDTH + WIDTH * HIDDEN + ROWS * HIDDEN)  # its bytes take longer
    assert modelled == bytes_moved + 2 * product  # weights are no kernel's
    torch.testing.assert_close(
        Costs(works=costs.works, products=costs.products, is_fused=False).seconds(host, launch),
        4 * ROWS * (2 * WIDTH + 2 * WIDTH + 2 * HIDDEN + 2 * HIDDEN + 3 * WIDTH)
        + 2 * ROWS * WIDTH * HIDDEN * 1e-3,
    )


def test_a_processor_computes_attention_query_by_query() -> None:
    """Each takes what its keys take, however few there are; operations count no more."""
    with mf.FusionDefinition("attending") as fd:
        q = fd.define_tensor([3, 2, 5, 64], mesh=DeviceMesh([0]))
        k, v = (fd.define_tensor([3, 2, 40, 64], mesh=DeviceMesh([0])) for _ in range(2))
        fd.add_output(fd.ops.scaled_dot_product_attention(q, k, v))
    host = project(mf.compile(fd, mf.Options(compile="never")).host, 0)
    (i,) = (i for i in host.instructions if i.fn == "scaled_dot_product_attention")
    byte = Curve(((1.0, 1e-9), (1e12, 1.0)))
    works = {"* f32": byte}
    for size, more in ((64, 1.0), (128, 2.0)):
        works[f"query f32 {size}"] = Curve(((20.0, more), (60.0, 3 * more)))
    assert Costs(works=works_of(works)).seconds(host, i) == 3 * 2 * 5 * 2.0


def attention_of(
    heads: int,
    queries: int,
    keys: int,
    *,
    is_causal: bool = False,
    features: int = 64,
    multiprocessors: int = 0,
    one_query: Curve | None = None,
) -> float:
    """The seconds of an attention by a grid of heads of 64 and 128 features."""
    with mf.FusionDefinition("attending") as fd:
        shape = [1, heads, keys, features]
        q = fd.define_tensor([1, heads, queries, features], mesh=DeviceMesh([0]))
        k, v = (fd.define_tensor(shape, mesh=DeviceMesh([0])) for _ in range(2))
        fd.add_output(fd.ops.scaled_dot_product_attention(q, k, v, is_causal=is_causal))
    host = project(mf.compile(fd, mf.Options(compile="never")).host, 0)
    (i,) = (i for i in host.instructions if i.fn == "scaled_dot_product_attention")
    axes = (1.0, 4.0, 6.0, 8.0), (100.0, 200.0), (64.0, 128.0)
    of_64 = 1.0, 2.0, 1.0, 2.0, 2.0, 4.0, 2.0, 4.0  # a second for 4 blocks and 100 keys
    times = tuple(t * more for t in of_64 for more in (1, 3))
    causal = tuple(t / 2 for t in times)
    grids = {"f32": Grid(axes, times), "f32 causal": Grid(axes, causal)}
    works = {"* f32": Curve(((1.0, 1e-9), (1e12, 1.0))), "query f32 64": Curve(((1.0, 7.0),))}
    if one_query is not None:
        works["one query f32"] = one_query
    costs = Costs(
        works=works_of(works), attentions=works_of(grids), multiprocessors=multiprocessors
    )
    return costs.seconds(host, i)


def test_attention_takes_as_long_as_the_blocks_that_are_there_at_once() -> None:
    """128 queries of a head are a block; four of them run at once."""
    found = [attention_of(n, 128, 100) for n in (1, 3, 4, 6, 8, 16)]
    assert found == [1, 1, 1, 2, 2, 4]
    assert attention_of(4, 128, 150) == 1.5 and attention_of(4, 128, 400) == 4
    assert [attention_of(2, n, 100) for n in (64, 128, 256, 257)] == [1, 1, 1, 2]
    assert attention_of(4, 100, 100, is_causal=True) == 0.5


def test_a_block_too_many_takes_as_long_as_all_that_are_there_at_once() -> None:
    """Where it is known how many, and no mask ends blocks one by one."""
    blocks = 4, 5, 8, 9, 12, 13
    found = [attention_of(n, 128, 100, multiprocessors=4) for n in blocks]
    assert found == [1, 2, 2, 3, 3, 4]
    assert [attention_of(n, 128, 100) for n in blocks] == [1, 1.5, 2, 2.25, 3, 3.25]
    found = [attention_of(n, 128, 100, is_causal=True, multiprocessors=4) for n in blocks[:3]]
    assert found == [0.5, 0.75, 1]


def test_heads_of_a_size_between_two_take_what_the_next_one_takes() -> None:
    found = [attention_of(4, 128, 100, features=n) for n in (32, 64, 65, 96, 128, 256)]
    assert found == [1, 1, 3, 3, 3, 6]


def test_one_query_fills_no_block() -> None:
    """Then the keys are shared out, and bytes count: here next to nothing."""
    assert attention_of(64, 1, 400) == 1.0, "the least that was measured"
    assert attention_of(64, 16, 400) == attention_of(64, 64, 400) == 4 * 16


def test_one_query_takes_what_its_bytes_took() -> None:
    """64 heads of 400 keys and values of 64 features, and what is asked and answered."""
    moved = 64 * 64 * 4 * (2 * 400 + 2)
    curve = Curve(((moved / 2, 3.0), (2.0 * moved, 12.0)))
    assert attention_of(64, 1, 400, one_query=curve) == pytest.approx(6.0)
    assert attention_of(64, 16, 400, one_query=curve) == 4 * 16, "there are more"


def test_a_compiled_kernel_takes_what_was_measured_compiled() -> None:
    with mf.FusionDefinition("gated") as fd:
        x, z = (fd.define_tensor([64, 32], mesh=DeviceMesh([0])) for _ in range(2))
        fd.add_output(fd.ops.silu(x) * z)
    host = project(mf.compile(fd, mf.Options(compile="always")).host, 0)
    (launch,) = (i for i in host.instructions if i.op == "launch")
    size = 3 * 4 * 64 * 32
    for key, more in (("compiled f32", 2.0), ("compiled bf16", 2.0), ("compiled across f32", 1.0)):
        works = {k: Curve(((1.0, s), (1e6, 1e6 * s))) for k, s in (("* f32", 1.0), (key, 2.0))}
        assert round(Costs(works=works_of(works)).seconds(host, launch) / size, 6) == more, key


def test_a_kernel_across_memory_takes_what_was_measured_compiled() -> None:
    with mf.FusionDefinition("turned") as fd:
        x = fd.define_tensor([64, 32], mesh=DeviceMesh([0]))
        z = fd.define_tensor([32, 64], mesh=DeviceMesh([0]))
        fd.add_output(-(x + fd.ops.permute(z, [1, 0])))
    host = project(mf.compile(fd, mf.Options(compile="always")).host, 0)
    (launch,) = (i for i in host.instructions if i.op == "launch")
    size = 3 * 4 * 64 * 32

    def seconds(**speeds: float) -> float:
        works = {
            k.replace("__", "* ").replace("_", " "): Curve(((1.0, s), (1e6, 1e6 * s)))
            for k, s in speeds.items()
        }
        return round(Costs(works=works_of(works)).seconds(host, launch) / size, 6)

    assert seconds(__f32=1.0) == 1, "measured without it"
    assert seconds(__f32=1.0, across_f32=5.0) == 5
    assert seconds(__f32=1.0, across_f32=5.0, compiled_across_f32=3.0) == 3
    assert seconds(__f32=1.0, across_f32=5.0, compiled_across_bf16=2.0) == 2, "of another type"
    assert seconds(__f32=1.0, compiled_across_f32=0.5) == 1, "at least as long as any"


def test_a_kernel_across_memory_that_goes_through_rows_takes_what_was_measured() -> None:
    """Else what it takes eagerly: no order of its tiles suits both."""
    with mf.FusionDefinition("turned") as fd:
        x = fd.define_tensor([64, 32], mesh=DeviceMesh([0]))
        z = fd.define_tensor([32, 64], mesh=DeviceMesh([0]))
        fd.add_output(fd.ops.softmax(x + fd.ops.permute(z, [1, 0]), -1))
    host = project(mf.compile(fd, mf.Options(compile="always")).host, 0)
    (launch,) = (i for i in host.instructions if i.op == "launch")
    size = 3 * 4 * 64 * 32
    assert kernels(host, launch) == [Kernel(size, "f32", "rows across")]
    speeds = {"* f32": 1.0, "sum f32": 2.0, "across f32": 5.0, "compiled across f32": 3.0}
    works = {key: Curve(((1.0, s), (1e6, 1e6 * s))) for key, s in speeds.items()}
    assert round(Costs(works=works_of(works)).seconds(host, launch) / size, 6) == 5
    works["compiled rows across f32"] = Curve(((1.0, 4.0), (1e6, 4e6)))
    assert round(Costs(works=works_of(works)).seconds(host, launch) / size, 6) == 4
    del works["compiled rows across f32"], works["across f32"]
    assert round(Costs(works=works_of(works)).seconds(host, launch) / size, 6) == 1, (
        "measured without it"
    )


def test_attention_takes_at_least_what_its_bytes_take() -> None:
    """One query that attends to many keys: each is read once."""
    with mf.FusionDefinition("decoding") as fd:
        q = fd.define_tensor([1, 1, 1, 64], mesh=DeviceMesh([0]))
        k, v = (fd.define_tensor([1, 1, 1000, 64], mesh=DeviceMesh([0])) for _ in range(2))
        fd.add_output(fd.ops.scaled_dot_product_attention(q, k, v))
    host = project(mf.compile(fd, mf.Options(compile="never")).host, 0)
    (i,) = (i for i in host.instructions if i.fn == "scaled_dot_product_attention")
    byte = Curve(((1.0, 1.0), (1e9, 1e9)))  # a second for each
    costs = Costs(works=works_of({"* f32": byte}))
    assert round(costs.seconds(host, i), 3) == 4 * 64 * (1 + 1 + 2 * 1000)


def test_a_part_that_is_added_up_where_it_is_made_is_neither_written_nor_read() -> None:
    with mf.FusionDefinition("sums") as fd:
        x = fd.define_tensor([8, WIDTH], mesh=DeviceMesh([0]), name="x")
        fd.add_output(fd.ops.sum(fd.ops.exp(x * 2), dims=[0]))
    options = mf.Options(compile="always")
    local = project(mf.pipeline(fd, microbatches=2, batch={"x": 0}, options=options).host, 0)
    units = [i for i in as_run(local).instructions if i.op == "launch"]
    chunk, total = 4 * 4 * WIDTH, 4 * WIDTH
    wanted = Kernel(chunk + 2 * total, "f32", "sum")
    assert [kernels(as_run(local), i) for i in units] == [[wanted]] * 2


def test_work_by_itself_is_priced_as_across_where_its_operands_lie_in_different_orders() -> None:
    with mf.FusionDefinition("orders") as fd:
        x = fd.define_tensor([ROWS, WIDTH], mesh=DeviceMesh([0]))
        z = fd.define_tensor([WIDTH, ROWS], mesh=DeviceMesh([0]))
        turned = fd.ops.permute(z, [1, 0])
        for y in (x + x, x + turned, turned + turned, fd.ops.exp(turned)):
            fd.add_output(y)
        fd.add_output(
            x * fd.ops.permute(fd.define_tensor([WIDTH, 1], mesh=DeviceMesh([0])), [1, 0])
        )
    host = project(mf.compile(fd, mf.Options(compile="never")).host, 0)
    work = [i for i in host.instructions if is_work(i)]
    assert [is_across(host, i) for i in work] == [False, True, False, False, False]
    byte = {"*": 1.0, "across": 100.0}
    works = {f"{key} f32": Curve(((1.0, s), (1e6, 1e6 * s))) for key, s in byte.items()}
    plain, across, *_ = (Costs(works=works_of(works)).seconds(host, i) for i in work)
    small = 4 * ROWS * WIDTH
    assert (round(plain), round(across)) == (2 * small, 100 * 3 * small)
    (less,) = {Costs(works=works_of({"* f32": works["* f32"]})).seconds(host, i) for i in work[1:2]}
    assert round(less) == 3 * small, "where it was not measured it is like other work"
