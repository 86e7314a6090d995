"""What the ranks settle when they join: one backend for all, and a watchdog in each process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mdfuse.backends.c10d_groups import PrefixStore, Store
from mdfuse.backends.work import first_line
from mdfuse.errors import BackendError
from mdfuse.runtime.bootstrap import Launch
from mdfuse.runtime.watch import Watch


def watch_for(
    launch: Launch, name: str, store: Store, timeout_s: float, environment: Mapping[str, str]
) -> Watch:
    """What sees that this rank waits for too long; whoever calls starts it.

    Args:
        launch: how the ranks were started.
        name: of the backend.
        store: shared by all ranks.
        timeout_s: deadline of a wait.
        environment: the process's environment variables: who keeps the store.
    """
    if launch.size == 1:
        return Watch(rank=launch.rank, timeout_s=timeout_s)
    is_kept_elsewhere = launch.name == "default group" or (
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )
    return Watch(
        rank=launch.rank,
        timeout_s=timeout_s,
        store=PrefixStore("watch", store),
        is_capturing=torch._C._cuda_isCurrentStreamCapturing if name == "nccl" else lambda: False,
        ranks=launch.size,
        host=None if is_kept_elsewhere else 0,
    )


def disagreement(store: Store, launch: Launch, name: str) -> BackendError | None:
    """Compare this rank's backend with rank 0's; "auto" may mean another one on another host.

    Raises:
        BackendError: rank 0 did not come.
    """
    if launch.rank == 0:
        store.set("backend", name)
        return None
    try:
        chosen = store.get("backend").decode()
    except RuntimeError as error:
        raise BackendError(
            f"rank {launch.rank} waited for rank 0, which did not join",
            because=first_line(error),
            hint="see the log of rank 0; raise timeout_s where it is only slow",
        ) from error
    if chosen == name:
        return None
    return BackendError(
        f"rank {launch.rank} uses backend {name!r}, rank 0 {chosen!r}",
        because="all ranks communicate by one backend",
        hint="name it: Options(backend=...) or MDFUSE_BACKEND, the same on all ranks",
    )


def problem_elsewhere(texts: Sequence[str | None], launch: Launch) -> BackendError:
    rank, text = next((r, text) for r, text in enumerate(texts) if text is not None)
    return BackendError(
        f"rank {rank} could not join the other {launch.size - 1} ranks", where=text.split("\n")
    )
