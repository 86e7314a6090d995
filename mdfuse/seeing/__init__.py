"""What people look at: events and their traces, timelines, memory over time, comparisons."""

from mdfuse.seeing.costs import H100, UNIT, Costs, Link
from mdfuse.seeing.events import Event
from mdfuse.seeing.timeline import Timeline, timeline

__all__ = ["H100", "UNIT", "Costs", "Event", "Link", "Timeline", "timeline"]
