"""The last checkpoints of a run: folders beside each other, and one name for the newest.

`newest` is a link beside the folders, which is replaced in one step once all files of a checkpoint
are on the disk: at any moment it leads to a whole checkpoint, whenever the job dies.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from mdfuse import files
from mdfuse.errors import ProgramError, shown
from mdfuse.frontend.importing import metadata

#: The name of the link.
NAME = "newest"
#: Ends the name of a checkpoint that is being removed.
_REMOVED = ".removed"


def check(call: str, folder: Path, keep: object, portable: bool) -> int | None:
    """Return the number of checkpoints to keep, None for all.

    Raises:
        ProgramError: it is no such number; the folder has no number in its name, or none is shared.
    """
    if keep is None:
        return None
    why = None
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        why = "it is the number of checkpoints that stay, the new one among them"
    elif not portable:
        why = "each rank may have a folder of its own, and nobody knows which states are whole"
    elif re.search(r"\d", folder.name) is None:
        why = f"the older ones are the folders beside {folder.name} with other numbers in the name"
    if why is None:
        assert isinstance(keep, int)
        return keep
    raise ProgramError(
        f"{call} into {folder} with keep={shown(keep)}",
        because=why,
        hint='save("checkpoints/step-0100", portable=True, keep=3)',
    )


def _checked(act: Callable[[Path, int], None]) -> Callable[[Path, int], None]:
    """Return a function that raises ProgramError where the system refuses what it does."""

    @wraps(act)
    def acting(folder: Path, keep: int) -> None:
        try:
            act(folder, keep)
        except OSError as error:
            raise ProgramError(
                f"the checkpoints beside {folder} cannot be kept in order",
                because=str(error),
                hint="a folder that this process may make links in, and remove folders from",
            ) from error

    return acting


@_checked
def make_room(folder: Path, keep: int) -> None:
    """Remove a checkpoint of this name that never became the newest, or is so no more.

    Where the link cannot be made, that is said before anything is written.
    """
    link = folder.parent / NAME
    if link.exists() and not link.is_symlink():
        raise FileExistsError(
            errno.EEXIST, "it is no link, and would be replaced by one", f"{link}"
        )
    if _is_whole(folder) and _target(folder.parent) != folder.name:
        _remove(folder)


@_checked
def point(folder: Path, keep: int) -> None:
    """Name a whole checkpoint the newest, and remove all but the last ones."""
    link = folder.parent / NAME
    part = folder.parent / f"{NAME}.part"
    files.remove(part)
    part.symlink_to(folder.name, target_is_directory=True)
    part.replace(link)
    files.sync_folder(folder.parent)
    for old in _older(folder)[keep - 1 :]:
        _remove(old)
    for removed in _removed_in_part(folder):
        _clear(removed)


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder; None where there is none.

    Where somebody has removed the one that the link leads to, it is the last of the others.
    """
    name = _target(folder)
    if name is None or _is_whole(folder / name):
        return None if name is None else folder / name
    others = [x for x in folder.iterdir() if x.name != NAME and _is_whole(x)]
    return max(others, key=_written, default=None)


def _target(folder: Path) -> str | None:
    try:
        return os.readlink(folder / NAME)
    except OSError:  # there is none yet, or it is a folder of the user's
        return None


def _older(folder: Path) -> list[Path]:
    """Return the folders beside one that are named alike but for numbers, the latest first.

    One that is not whole is the last: nobody writes it any more.
    """
    name = _without_numbers(folder)
    alike = [
        x
        for x in folder.parent.iterdir()
        if _without_numbers(x) == name and x.name != folder.name and x.is_dir()
        if _is_whole(x) or any(x.glob("__*_0.distcp"))
    ]
    return sorted((x for x in alike if not x.is_symlink()), key=_written, reverse=True)


def _written(folder: Path) -> int:
    """Return when a checkpoint became whole, ns; 0 where it is not."""
    return (folder / metadata.NAME).stat().st_mtime_ns if _is_whole(folder) else 0


def _is_whole(folder: Path) -> bool:
    return (folder / metadata.NAME).is_file()


def _remove(folder: Path) -> None:
    """Remove a checkpoint: it loses its name in one step, so that a death leaves no part of it."""
    removed = folder.with_name(f"{folder.name}{_REMOVED}")
    if removed.exists():
        _clear(removed)
    folder.replace(removed)
    _clear(removed)


def _clear(removed: Path) -> None:
    """Remove the files: the one first without which the others are no checkpoint."""
    (removed / metadata.NAME).unlink(missing_ok=True)
    shutil.rmtree(removed)


def _removed_in_part(folder: Path) -> list[Path]:
    """Return the folders whose removal a death has cut short, of checkpoints named like one."""
    name = f"{_without_numbers(folder)}{_REMOVED}"
    return [x for x in folder.parent.iterdir() if x.is_dir() and _without_numbers(x) == name]


def _without_numbers(folder: Path) -> str:
    return re.sub(r"\d+", "#", folder.name)
