"""The plans that a program keeps, and the release of those that it drops."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

from mdfuse.caching import Cache
from mdfuse.plan.runnable import Runnable

_log = logging.getLogger("mdfuse.plans")


class User(Protocol):
    """A user of plans, which may hold its last plan."""

    def let_go(self, plan: Runnable) -> None:
        """Drop a plan."""


@dataclass(eq=False)
class Plans(Cache[Runnable]):
    """The plans of a program, by key; a key begins with the number of the plan's user.

    Attributes:
        program: its name.
        users: their numbers -> who uses the plans, as long as they live.
    """

    program: str = field(kw_only=True)
    users: WeakValueDictionary[int, User] = field(default_factory=WeakValueDictionary, init=False)

    def keep(self, key: Hashable, plan: Runnable) -> None:
        """Keep a plan, and release the evicted ones; the first eviction is logged."""
        gone = self.put(key, plan)
        if gone and self.evictions == len(gone):
            _log.warning(
                "@%s: a plan was dropped, since %d are kept; runs of its kind build it again, which"
                " takes as long as a first run: Options(plans=...) or MDFUSE_PLANS keeps more",
                self.program,
                self.limit,
            )
        self._release(gone)

    def drop(self, user: int) -> None:
        """Release the plans of a user."""
        self._release(self.clear(user))

    def _release(self, plans: list[Runnable]) -> None:
        for plan in plans:
            for user in [*self.users.values()]:
                user.let_go(plan)
            plan.release()
