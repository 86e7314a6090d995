"""The names that `import mdfuse` shows, and those that are attributes besides."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mdfuse as mf
from mdfuse.config import VARIABLES

ROOT = Path(__file__).resolve().parent.parent

#: subject -> its names.
GROUPS = {
    "meshes and layouts": "DeviceMesh Layout Shard Replicate Partial Stream",
    "modules of torch": "from_torch from_plan differentiable to_dtensor",
    "definitions": "FusionDefinition TensorSpec fusion ops register_op",
    "training": "grad recompute optim Step pipeline Schedule",
    "survivors": "rebuild recover Run",
    "serving": "generate",
    "programs": "compile Program Options init simulate shard_tensor unshard_tensor",
    "a closer look": "hir seeing debug MdfuseError",
}
#: Types that a call hands out, and that a user does not make.
HANDED_OUT = ["Communicator", "ImportedModel", "RunningStep", "TrainingStep"]


def test_the_names_stand_in_groups() -> None:
    assert mf.__all__ == [name for names in GROUPS.values() for name in names.split()]
    assert len(mf.__all__) <= 40
    text = (ROOT / "mdfuse" / "__init__.py").read_text(encoding="utf-8")
    listed = re.findall(r"^    # (.*)$", text.partition("__all__ = [")[2], re.MULTILINE)
    assert listed == [*GROUPS]


def test_the_docstring_has_the_groups() -> None:
    assert mf.__doc__ is not None
    listed = mf.__doc__[mf.__doc__.index("Meshes and layouts:") :]
    lines = dict(re.findall(r"^(\w[\w ]+): ([^.]+)\.$", listed, re.MULTILINE))
    named = {
        subject.lower(): " ".join(re.findall(r"(\w+)(?: \([^)]*\))?(?:, |$)", names))
        for subject, names in lines.items()
    }
    assert named == GROUPS


@pytest.mark.parametrize("module", [mf, mf.ops, mf.debug], ids=lambda m: m.__name__)
def test_dir_shows_nothing_internal(module: object) -> None:
    assert dir(module) == sorted(module.__all__)  # type: ignore[attr-defined]
    for name in dir(module):
        assert not name.startswith("_") and getattr(module, name) is not None


@pytest.mark.parametrize("name", [*mf.debug.__all__, *HANDED_OUT])
def test_names_that_moved_are_attributes(name: str) -> None:
    value = getattr(mf, name)
    assert name not in mf.__all__
    assert value is getattr(mf.debug, name, value)
    assert inspect.ismodule(value) or value.__name__ == name


def test_a_new_process_has_all_names() -> None:
    """An import of everything, and of each name that moved, where nothing was looked up before."""
    moved = ", ".join([*mf.debug.__all__, *HANDED_OUT])
    lines = ["from mdfuse import *", f"from mdfuse import {moved}", "print(ops.relu.__name__)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "relu\n"


def test_wrong_names_are_attribute_errors() -> None:
    for module in (mf, mf.debug):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            module.nothing  # noqa: B018


def test_every_error_is_in_debug() -> None:
    from mdfuse import errors

    kinds = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, mf.MdfuseError) and name[0] != "_"
    }
    assert kinds - {"MdfuseError"} <= {*mf.debug.__all__}


@pytest.mark.parametrize("name", sorted({*mf.__all__, *mf.debug.__all__, *HANDED_OUT}))
def test_help_says_what_a_name_is_for(name: str) -> None:
    assert len(inspect.getdoc(getattr(mf, name)) or "") > 40


@pytest.mark.parametrize("kind", [mf.ImportedModel, mf.TrainingStep], ids=lambda k: k.__name__)
def test_help_of_what_is_handed_out(kind: type) -> None:
    """The class has an example; each method says what it takes, returns and raises."""
    text = inspect.getdoc(kind) or ""
    assert ">>> " in text and "hape" in text and "type" in text
    for name, value in vars(kind).items():
        if name.startswith("_") or not (inspect.isfunction(value) or isinstance(value, property)):
            continue
        said = inspect.getdoc(value) or ""
        assert said, name
        if inspect.isfunction(value):
            takes = len(inspect.signature(value).parameters) > 1
            assert "Returns:" in said or said.startswith("Return"), name
            assert ("Args:" in said and "Raises:" in said) or not takes, name


# -- options -------------------------------------------------------------------------------------


def groups_of_the_class() -> dict[str, list[str]]:
    """The groups that the docstring of `Options` has, with the names in each."""
    parts = re.split(r"^(\w+):$", inspect.getdoc(mf.Options) or "", flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    del texts["Raises"]
    return {group: re.findall(r"^    (\w+): ", text, re.MULTILINE) for group, text in texts.items()}


def test_options_are_flat_and_described_in_groups() -> None:
    groups = groups_of_the_class()
    assert [*groups] == ["Compile", "Checks", "World", "Profile"]
    assert [name for names in groups.values() for name in names] == [
        field.name for field in dataclasses.fields(mf.Options)
    ]


def test_the_page_of_options_has_the_groups_of_the_class() -> None:
    """With each default, and the variable that sets an option."""
    variables = {option: name for name, (option, *_) in VARIABLES.items()}
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    shown = {}
    for part in page.split("\n## ")[1:]:
        rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (?:`(\w+)` )?\| .+ \|$", part, re.MULTILINE)
        shown[part.partition("\n")[0]] = [name for name, *_ in rows]
        for name, default, variable in rows:
            assert default == repr(getattr(mf.Options(), name)).replace("'", '"')
            assert variable == variables.get(name, "")
    assert shown == groups_of_the_class()
