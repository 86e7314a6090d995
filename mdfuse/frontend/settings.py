"""Attributes of operations, as users write them and as expressions hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mdfuse.errors import DefinitionError
from mdfuse.extents.extent import Extent
from mdfuse.frontend.handle import Handle, ValueId
from mdfuse.frontend.plain import brief, is_in_range
from mdfuse.frontend.sites import Derived, Site


def check_setting(op: str, key: str, x: Any, site: Site | Derived) -> None:
    """Raise DefinitionError for attributes other than numbers, words, dtypes or lists of these."""
    if isinstance(x, Handle | ValueId):
        raise DefinitionError(
            f"{op}: {key} is a value of the fusion",
            where=site.where,
            because=f"{key} is fixed when the fusion is defined",
            hint="pass a number",
        )
    items = x if isinstance(x, list | tuple) else (x,)
    for item in items:
        if not (item is None or isinstance(item, _SETTINGS)) or not is_in_range(item):
            raise DefinitionError(
                f"{op}: {key} = {brief(x)}",
                where=site.where,
                because="arguments are numbers of at most 64 bits, strings, dtypes and lists of "
                "integers",
                hint="docs/operations.md lists operations and their arguments",
            )


_SETTINGS = bool | int | float | Extent | str | torch.dtype


def settings_of(attrs: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Attributes as expressions hold them: hashable; None and False are left out."""
    said = [(k, v) for k, v in attrs.items() if v is not None and v is not False]
    return tuple([(k, frozen(v)) for k, v in said])


def frozen(x: Any) -> Any:
    """Turn lists into tuples, nested ones too."""
    return tuple(map(frozen, x)) if isinstance(x, list | tuple) else x
