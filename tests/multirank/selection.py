"""Which tests a run executes: those of its world; the others are deselected, never skipped."""

from __future__ import annotations

from collections.abc import Collection

import pytest

MARKERS = (
    "world(size): a multi-rank test, for exactly this many ranks",
    "gpu(count=world size): needs that many CUDA devices; deselected where there are fewer",
    "backend(name): a multi-rank test for that backend; deselected in a world of another one",
)


def world_of(item: pytest.Item) -> int | None:
    """The number of ranks that a test wants, or None where it is an ordinary test."""
    marker = item.get_closest_marker("world")
    return None if marker is None else marker.args[0]


def backend_of(item: pytest.Item) -> str:
    """The backend that a test is for, or "" where it is for whichever the world has."""
    marker = item.get_closest_marker("backend")
    return "" if marker is None else marker.args[0]


class Selection:
    """Checks the markers and deselects.

    Args:
        config: the run's.
        size: ranks of the world that this process is part of; None where it hosts the worlds.
        backends: those that tests may be marked with here.
    """

    def __init__(
        self, config: pytest.Config, size: int | None, backends: Collection[str] = ()
    ) -> None:
        self._config = config
        self._size = size
        self._backends = {"", *backends}

    # Last, so that -k, -m and --deselect have had their say.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        _check_markers(items)
        selected = [item for item in items if self._is_for_here(item)]
        dropped = [item for item in items if not self._is_for_here(item)]
        if dropped:
            self._config.hook.pytest_deselected(items=dropped)
        # A host runs one world at a time, after the ordinary tests; the sort is stable.
        items[:] = sorted(selected, key=lambda item: (world_of(item) or 0, backend_of(item)))

    def _is_for_here(self, item: pytest.Item) -> bool:
        is_of_world = self._size in (None, world_of(item)) and backend_of(item) in self._backends
        return is_of_world and _has_gpus_for(item)


def _check_markers(items: list[pytest.Item]) -> None:
    problems = [f"{item.nodeid}: {what}" for item in items if (what := _problem(item))]
    if problems:
        raise pytest.UsageError(*problems)


def _problem(item: pytest.Item) -> str | None:
    marker = item.get_closest_marker("world")
    if marker is None:
        in_folder = "multidevice" in item.path.parts
        return "a test in multidevice/ needs @pytest.mark.world(N)" if in_folder else None
    match marker.args:
        case (int(size),) if size >= 1 and not marker.kwargs:
            return None
    return f"world takes one number of ranks, not {marker.args} {marker.kwargs}"


def _has_gpus_for(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return True
    needed: int = marker.kwargs.get("count", *marker.args[:1] or (world_of(item) or 1,))
    return _gpus() >= needed


def _gpus() -> int:
    import torch  # only here: a run without gpu tests does not wait for it

    return torch.cuda.device_count()
