"""Show errors of the user's own file with its lines, and without those of mdfuse."""

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
    """Turn errors that the user's code raises in this context into errors that tell where.

    Errors of mdfuse and KeyboardInterrupt pass unchanged. SystemExit is turned, too: a command has
    an exit status of its own.

    Raises:
        UserCodeError: the code raised something.
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
    """Return an error's type and message, as Python prints them, in one line."""
    whole = traceback.TracebackException.from_exception(error, limit=0)
    lines = [line.strip() for part in whole.format_exception_only() for line in part.splitlines()]
    if isinstance(error, SyntaxError):  # lines of the file come first, which `_lines` tells
        lines = [f"{type(error).__name__}: {error.msg}"]
    text = "; ".join(filter(None, lines)) or type(error).__name__
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."


def _lines(error: BaseException) -> list[str]:
    """Return the user's lines in the traceback of an error, innermost first."""
    sources = []
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        sources.append(Source(error.filename, error.lineno))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename) and frame.lineno is not None:
            sources.append(Source(frame.filename, frame.lineno))
    return [source.quote() for source in sources[:_LINES]]


def _is_users(file: str) -> bool:
    """Return whether a file is neither mdfuse's nor torch's, a package's or Python's."""
    is_python = file.startswith((*OWN, str(Path(traceback.__file__).parent), "<frozen"))
    return not is_python and "site-packages" not in file
