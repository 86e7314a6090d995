"""Any tests with other defaults of `Options`: what a test asks for itself stays as it asks.

pytest --default compile=always --default overlap=measure tests/multidevice
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from mdfuse import config
from mdfuse.config import VARIABLES, Options


def parsed(texts: Sequence[str]) -> dict[str, Any]:
    """The options that texts of the form NAME=VALUE set, read as the variables MDFUSE_NAME are.

    Raises:
        pytest.UsageError: there is no such option, or it cannot have that value.
    """
    variables = {f"MDFUSE_{name.upper()}": x for name, _, x in (t.partition("=") for t in texts)}
    if unknown := variables.keys() - VARIABLES.keys():
        names = ", ".join(option for option, _, _ in VARIABLES.values())
        raise pytest.UsageError(f"--default {' '.join(texts)}: {unknown} is none of {names}")
    try:
        found = config.options_from_environment(variables=variables)
    except Exception as error:
        raise pytest.UsageError(f"--default {' '.join(texts)}: {error}") from error
    return {VARIABLES[x][0]: getattr(found, VARIABLES[x][0]) for x in variables}


@contextmanager
def defaults(options: dict[str, Any]) -> Iterator[None]:
    """In this context `Options` has these defaults, also where no test makes one."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setitem(Options.__init__.__kwdefaults__, name, value)  # type: ignore[misc]
        config._options.cache_clear()
        yield
    config._options.cache_clear()
