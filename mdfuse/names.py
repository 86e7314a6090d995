"""The one rule for names: of programs, of mesh axes, of values.

A name is letters, digits and underscores of any script, and begins with no digit; a dot may join
several such words (`x.0`). Other names are refused in the definition, so that every program prints
as text that reads back.
"""

from __future__ import annotations

import re

#: `NAME` of the grammar of host programs.
NAME = re.compile(r"[^\W\d]\w*(\.\w+)*")
#: The name behind the % of a value, which may be a number, as `%0`.
VALUE = re.compile(r"\w+(\.\w+)*")

RULE = "a name is letters, digits and underscores, begins with no digit, and may be joined by dots"


def is_name(name: object) -> bool:
    """Return whether a value is a name.

    >>> [is_name(x) for x in ("tp", "µ", "mlp.0", "my fusion", "2nd", "")]
    [True, True, True, False, False, False]
    """
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def is_value_name(name: object) -> bool:
    """Return whether a text may be the name of a value in a host program."""
    return isinstance(name, str) and VALUE.fullmatch(name) is not None


def base_name(name: str) -> str:
    """Return a name as its program has it, without the number of an iteration.

    >>> base_name("h@3"), base_name("h")
    ('h', 'h')
    """
    return name.partition("@")[0]


def as_name(text: str, otherwise: str) -> str:
    """The name that is nearest to a text that Python chose, as `<lambda>`.

    >>> as_name("<lambda>", "fusion"), as_name("°", "fusion"), as_name("2 x", "fusion")
    ('lambda', 'fusion', '_2_x')
    """
    if is_name(text):
        return text
    name = re.sub(r"\W+", "_", text).strip("_")
    if not name:
        return otherwise
    return name if is_name(name) else f"_{name}"
