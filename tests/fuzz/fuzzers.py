"""The fuzzers by name. A new one is a module with a function `fuzz`, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fuzz import (
    arguments,
    command_line,
    definitions,
    environment,
    files,
    imports,
    options,
    runs,
    stored,
    text,
)
from fuzz.driver import Fuzzer

FUZZERS: dict[str, Fuzzer] = {
    "arguments": arguments.fuzz,
    "command_line": command_line.fuzz,
    "definitions": definitions.fuzz,
    "environment": environment.fuzz,
    "imports": imports.fuzz,
    "options": options.fuzz,
    "runs": runs.fuzz,
    "text": text.fuzz,
    **files.FUZZERS,
    **stored.FUZZERS,
}

#: Some fuzzers yield lines on their draws.
TOLD: dict[str, Callable[[], Iterator[str]]] = {"options": options.told}
