"""Streamed programs as they are printed."""

from __future__ import annotations

import pytest
from helpers.golden import Golden
from helpers.stream_cases import CASES, text

LOCAL = """one_op inner_dim broadcast_operands sliced_once two_sets plain_between reduction casts
    host_unit read_afterwards several_loops"""
SETS = """gather_another_dim gather_by_broadcasts gather_by_exchanges gather_by_ring reduce_all
    scatter_another_dim scatter_by_reductions scatter_by_ring scatter_whole local_slices
    send_to_a_mesh"""
PRODUCTS = """matmul_rows matmul_columns batched_matmul linear_columns gather_matmul
    gather_matmul_in_a_ring matmul_scatter matmul_scatter_in_a_ring matmul_scatter_columns
    matmul_reduce perceptron_in_one_loop"""


@pytest.mark.parametrize("name", f"{LOCAL} {SETS} {PRODUCTS}".split())
def test_program(golden: Golden, name: str) -> None:
    golden(text(CASES[name].compile()))
