"""The steps of a change of layout: local ones, and communications."""

from mdfuse.reshard.nodes import Carriers
from mdfuse.reshard.step_cost import Local, Step
from mdfuse.reshard.steps import (
    arrivals,
    cost,
    costs,
    elements_received,
    extra,
    in_fewer_posts,
    received,
    steps,
    with_type,
)

__all__ = [
    "Carriers", "Local", "Step", "arrivals", "cost", "costs", "elements_received", "extra",
    "in_fewer_posts", "received", "steps", "with_type",
]  # fmt: skip
