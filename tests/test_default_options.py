"""Runs of tests with other defaults of `Options`, here and on the ranks that a run hosts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.default_options import defaults, parsed

import mdfuse as mf
from mdfuse.config import options_from_environment
from multirank.hosting import Host
from multirank.launchers import torchrun


def test_defaults_are_those_of_a_run() -> None:
    """Also where no options are given; what a test asks for stays."""
    usual = mf.Options()
    with defaults(parsed(["overlap=measure", "compile=always", "prefetch_bytes=12"])):
        found = mf.Options(compile="never")
        assert (found.overlap, found.compile, found.prefetch_bytes) == ("measure", "never", 12)
        assert options_from_environment().overlap == "measure"
    assert mf.Options() == usual and options_from_environment(variables={}) == usual


@pytest.mark.parametrize("text", ["overlp=measure", "overlap=always", "overlap", "plans=x"])
def test_wrong_defaults_are_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--default {text}: "):
        parsed([text])


def test_hosted_ranks_have_them() -> None:
    option = SimpleNamespace(
        tbstyle="short", verbose=0, override_ini=None, default=["overlap=auto"], launches=True
    )
    config: Any = SimpleNamespace(option=option, rootpath=Path("/"), inipath=None)
    arguments = Host(config, torchrun)._pytest_arguments(Path("reports"), Path("tests"))
    assert {"--default=overlap=auto", "--launches"} <= {*arguments}
