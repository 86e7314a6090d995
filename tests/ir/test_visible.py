"""Tiles of causal attention, beside the positions of each row and key."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from mdfuse.ir import visible
from mdfuse.ir.visible import Run, Tile, tiles


def seen(tile: Tile) -> Tensor:
    """Which keys of a tile its rows see, by what its fields say."""
    n, m = tile.shape
    last = torch.arange(n).unsqueeze(-1) + (m if tile.shift is None else tile.shift)
    window = tile.window if tile.window is not None else n + 2 * m
    return (torch.arange(m) <= last) & (torch.arange(m) > last - window)


@pytest.mark.parametrize("is_causal", [True, False])
def test_tiles_have_each_visible_pair_once(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(0)

    def runs() -> list[Run]:
        ends = sorted(draw.choices(range(20), k=draw.choice([2, 4])))
        return [(ends[i], ends[i + 1]) for i in range(0, len(ends), 2)]

    for _ in range(500):
        monkeypatch.setattr(visible, "_ROWS", draw.choice([1, 2, 3, 128]))
        rows, keys, window = runs(), runs(), draw.choice([None, 1, 2, 5])
        at = [torch.cat([torch.arange(*run) for run in side]) for side in (rows, keys)]
        far = at[0].unsqueeze(-1) - at[1]
        want = (far >= 0) & (far < (window or 99)) if is_causal else torch.ones_like(far).bool()
        made = torch.zeros_like(want, dtype=torch.int64)
        for tile in tiles(rows, keys, is_causal, window):
            (a, b), (c, d) = tile.rows, tile.keys
            made[a:b, c:d] += seen(tile)
            assert tile.pairs == seen(tile).sum() > 0
            assert tile.window or tile.shift in (None, tile.shape[1] - tile.shape[0])
        assert made.tolist() == want.long().tolist(), (rows, keys, window)


def test_a_triangle_is_what_all_rows_see_and_a_square() -> None:
    (tile,) = tiles([(4, 7)], [(0, 9)], True)
    assert tile.halves() == (Tile((0, 3), (0, 4)), Tile((0, 3), (4, 7), 0))


def test_windows_take_few_keys_beyond_what_they_see() -> None:
    """Rows go in blocks of a window, which reach two windows of keys."""
    made = tiles([(4096, 8192)], [(0, 8192)], True, 512)
    assert len(made) == 8
    assert max(t.shape[1] for t in made) < 2 * 512
