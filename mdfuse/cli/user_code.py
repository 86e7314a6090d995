"""Errors of the user's own file: shown with its lines, and none of mdfuse's."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mdfuse.errors import OWN, DefinitionError, MdfuseError, Source

#: How many lines are shown, and how much of the error's text.
_LINES = 6
_CHARACTERS = 2000


class UserCodeError(DefinitionError):
    """An error that the user's own code raised, perhaps on one rank alone."""


@contextmanager
def user_code(file: str, doing: str) -> Iterator[None]:
    """Whatever the user's code raises becomes an error that tells where; mdfuse's stay as they are.

    Also what ends a process: a command has a result of its own.

    Args:
        file: the user's.
        doing: what of it runs.

    Raises:
        UserCodeError: it raised something.
    """
    linecache.checkcache()  # a file may have changed since it was last quoted
    try:
        yield
    except (MdfuseError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UserCodeError(
            f"{file} raised {_text(error)}",
            where=_lines(error) or file,
            because=f"{doing} did not end well",
            hint="see the first of these lines, which is the innermost one",
        ) from error


def _text(error: BaseException) -> str:
    """Its type and message, as Python prints them, in one line."""
    whole = traceback.TracebackException.from_exception(error, limit=0)
    lines = [line.strip() for part in whole.format_exception_only() for line in part.splitlines()]
    if isinstance(error, SyntaxError):  # lines of the file come first, which `_lines` tells
        lines = [f"{type(error).__name__}: {error.msg}"]
    text = "; ".join(filter(None, lines)) or type(error).__name__
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."


def _lines(error: BaseException) -> list[str]:
    """The lines of users that it passed, the innermost first."""
    found = []
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        found.append(Source(error.filename, error.lineno))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename) and frame.lineno is not None:
            found.append(Source(frame.filename, frame.lineno))
    return [source.quote() for source in found[:_LINES]]


def _is_users(file: str) -> bool:
    """Neither mdfuse's nor torch's, nor an installed package's, nor Python's."""
    is_python = file.startswith((*OWN, str(Path(traceback.__file__).parent), "<frozen"))
    return not is_python and "site-packages" not in file
