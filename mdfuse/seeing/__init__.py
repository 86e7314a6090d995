"""Profiling: events and their traces, timelines, memory over time, comparisons."""

from mdfuse.seeing.action_times import by_action
from mdfuse.seeing.cost_keys import LinkKey, WorkKey
from mdfuse.seeing.cost_tables import CostTable, cost_table
from mdfuse.seeing.costs import H100, UNIT, Costs, Link
from mdfuse.seeing.deviation import Deviation, compare
from mdfuse.seeing.events import Event
from mdfuse.seeing.merging import merge as merge_traces
from mdfuse.seeing.timeline import Timeline
from mdfuse.seeing.traces import last_run
from mdfuse.seeing.traces import read as read_trace

__all__ = [
    "H100",
    "UNIT",
    "CostTable",
    "Costs",
    "Deviation",
    "Event",
    "Link",
    "LinkKey",
    "Timeline",
    "WorkKey",
    "by_action",
    "compare",
    "cost_table",
    "last_run",
    "merge_traces",
    "read_trace",
]
