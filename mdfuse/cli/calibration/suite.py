"""Everything that a calibration measures, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from mdfuse.cli.calibration.microbenchmarks import (
    FEW,
    MASKS,
    WORKS,
    Microbenchmark,
    attentions,
    products,
    works,
)
from mdfuse.cli.calibration.scales import Scale, blocks_of
from mdfuse.cli.calibration.sending import USUAL, Backends, links, ways
from mdfuse.mesh import DeviceMesh


def subjects(
    scale: Scale, ranks: int, backends: Backends = USUAL
) -> Mapping[str, Callable[[], Iterator[Microbenchmark]]]:
    """Return the subjects for some ranks: local work first, which communications need."""
    mesh = DeviceMesh.arange(x=ranks)
    return {
        "work": lambda: works(scale, mesh),
        "products": lambda: products(scale, mesh),
        "attention": lambda: attentions(scale, mesh),
        "communications": lambda: links(scale, ways(ranks, backends)),
    }


def points(scale: Scale, ranks: int, backends: Backends = USUAL) -> int:
    """Return about how many subjects there are."""
    few = math.ceil(len(scale.features) / 2) ** 2 * math.ceil(len(scale.rows) / 2)
    many = len(scale.features) ** 2 * len(scale.rows)
    of_types = len(scale.dtypes)
    blocks = sum(max(1, len(blocks_of(scale, mask))) for mask in MASKS)
    return (
        (len(WORKS) + 2 + (of_types - 1) * (len(FEW) + 2)) * len(scale.sizes)
        + many + few + (of_types - 1) * 2 * few
        + 3 * len(scale.compiled)
        + len(scale.heads) * len(scale.lengths) * blocks
        + len(scale.lengths)
        + len(ways(ranks, backends)) * (len(scale.messages) + len(scale.chilled))
    )  # fmt: skip
