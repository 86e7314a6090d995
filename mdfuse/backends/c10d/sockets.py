"""Find the connections that a process group opened, and shut them down to end a wait in gloo.

gloo waits in C++ until its timeout, and `abort()` of its process group (torch 2.13) ends no wait. A
connection that is shut down does, within milliseconds, as one does whose other end dies.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")

#: Linux's list of a process's open files; on other systems no socket is found, and no wait ended.
_OPEN = "/proc/self/fd"

#: Open connections: file descriptor -> the unique name of its socket.
Sockets = dict[int, str]


def opened(make: Callable[[], Made]) -> tuple[Made, Sockets]:
    """Return the group that a function makes, and the connections opened meanwhile."""
    before = _open_sockets()
    group = make()
    after = _open_sockets()
    new = {fd: name for fd, name in after.items() if before.get(fd) != name}
    return group, {fd: name for fd, name in new.items() if _is_connected(fd)}


def shut_down(sockets: Sockets) -> bool:
    """End those of these connections that are still open; return whether there was one."""
    was_open = False
    for fd, name in sockets.items():
        if _name_of(fd) != name:  # closed; the number may belong to another file by now
            continue
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end was faster, or another thread closed it
            continue
        was_open = True
    return was_open


def _open_sockets() -> Sockets:
    if not os.path.isdir(_OPEN):
        return {}
    names = {int(fd): _name_of(int(fd)) for fd in os.listdir(_OPEN)}
    return {fd: name for fd, name in names.items() if name.startswith("socket:")}


def _name_of(fd: int) -> str:
    """Return a unique name of the file behind a descriptor; "" where it is closed."""
    try:
        return os.readlink(f"{_OPEN}/{fd}")
    except OSError:
        return ""


def _is_connected(fd: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            if connection.type != socket.SOCK_STREAM:
                return False
            connection.getpeername()
    except OSError:  # not connected, or closed meanwhile
        return False
    return True
