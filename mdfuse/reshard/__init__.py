"""The steps of a change of layout: local ones, and communications."""

from mdfuse.reshard.nodes import Carriers
from mdfuse.reshard.step import Local, Step
from mdfuse.reshard.steps import cost, costs, elements_received, steps, with_type

__all__ = ["Carriers", "Local", "Step", "cost", "costs", "elements_received", "steps", "with_type"]
