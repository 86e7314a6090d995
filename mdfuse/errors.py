"""Errors that say what is wrong, where, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class MdfuseError(Exception):
    """Base of every error that mdfuse raises on purpose.

    Args:
        what: the fact, with the values in it.
        where: lines that locate it: the user's file and line, a rank, an instruction.
        because: the rule that was broken.
        hint: what to do instead.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | Sequence[str] = (),
        because: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.where = (where,) if isinstance(where, str) else tuple(where)
        self.because = because
        self.hint = hint
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [self.what, *(f"  {line}" for line in self.where if line)]
        if self.because:
            lines.append(f"  because     {self.because}")
        if self.hint:
            lines.append(f"  try         {self.hint}")
        return "\n".join(lines)


class MeshError(MdfuseError):
    """A mesh that cannot be, or a rank or axis that is not in it."""


class LayoutError(MdfuseError):
    """A layout that cannot be, or that contradicts another one."""


class DefinitionError(MdfuseError):
    """A fusion definition that means nothing."""


class LoweringError(MdfuseError):
    """A fusion that cannot be turned into a host program."""


class CommunicationError(MdfuseError):
    """A communication whose kind, team, root or buffers do not fit."""


class ProgramError(MdfuseError):
    """A host program, or the arguments of one run of it, that are wrong."""


class BackendError(MdfuseError):
    """A backend or launcher that is missing, unusable or failing."""
