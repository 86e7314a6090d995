"""Helpers of backends for making teams: new teams, their keys in the store, their errors."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator

from mdfuse.backends.work import first_line
from mdfuse.errors import BackendError
from mdfuse.layouts.call import Call

Team = tuple[int, ...]


def new_teams(teams: Iterable[Team], rank: int, known: Container[Team]) -> Iterator[Team]:
    """Yield the teams that a rank has to make.

    Teams that exist, have one member, or lack this rank are skipped.
    """
    for team in teams:
        if len(team) > 1 and rank in team and team not in known:
            yield team


def team_key(team: Team) -> str:
    """Return a key of a store that only this team uses."""
    return hashlib.sha256(repr(team).encode()).hexdigest()[:32]


def not_connected(library: str, rank: int, team: Team, error: Exception) -> BackendError:
    """Return the error for a team that a rank could not be connected with."""
    return BackendError(
        f"{library} cannot connect rank {rank} with the team {team}",
        because=first_line(error),
        hint="every member must prepare the team; check that their hosts reach each other",
    )


def no_more_posts(call: Call) -> BackendError:
    """Return the error for a post on a team that failed before."""
    return BackendError(
        f"rank {call.rank} cannot post {call.kind} on team {call.team} any more",
        because="an earlier communication of this team failed, so that its members may be "
        "at different ones",
        hint="close() the communicator and call mdfuse.init() again, on all ranks",
    )
