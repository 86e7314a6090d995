"""The fuzzers by name. A new one is a module with a function `fuzz`, and a line here."""

from __future__ import annotations

from fuzz import definitions
from fuzz.driver import Fuzzer

FUZZERS: dict[str, Fuzzer] = {
    "definitions": definitions.fuzz,
}
