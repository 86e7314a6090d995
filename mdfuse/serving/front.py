"""Messages of rank 0 to the other ranks before each step, so that all of them run the same."""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mdfuse.errors import BackendError, ProgramError
from mdfuse.runtime.communicator import Communicator
from mdfuse.torch_private import PrefixStore

#: Rank 0 waits for the others after so many messages, and forgets them.
_TOGETHER = 64

#: How long a wait for a message takes at most before it begins anew, seconds; torch logs each end.
_SLICE_S = 600.0

_engines = count()


class Message(NamedTuple):
    """A message of rank 0.

    Attributes:
        kind: "step", "nothing" (there is nothing to compute), "end", or "error".
        has_chunk: of a step.
        integers: of a step.
        numbers: by which a step chooses tokens, [slots, 4]; None: the most probable ones.
        text: of an error.
        requests: what the call of `step` returns; None: another message of this call follows.
    """

    kind: str
    has_chunk: bool = False
    integers: npt.NDArray[np.int64] | None = None
    numbers: npt.NDArray[np.float64] | None = None
    text: str = ""
    requests: int | None = None


class Front:
    """Messages of rank 0, in their order, through the store that all ranks share."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._store: Any = PrefixStore(f"serving/{next(_engines)}", comm.store)
        self._number = 0

    def say(self, message: Message) -> None:
        """Rank 0: tell all others."""
        if self._comm.size > 1:
            self._store.set(str(self._number), _packed(message))
            self._go_on()

    def hear(self) -> Message:
        """Any other rank: wait for the next message, however long.

        Raises:
            BackendError: the store is gone.
            ProgramError: rank 0 failed.
        """
        key = str(self._number)
        while not self._is_there(key):
            pass
        message = _unpacked(self._store.get(key))
        if message.kind == "error":
            raise ProgramError(
                f"rank {self._comm.rank} ends, for rank 0 failed",
                where=message.text.splitlines(),
                because="rank 0 says what the others compute",
            )
        self._go_on()
        return message

    def _is_there(self, key: str) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=_SLICE_S))
        except RuntimeError:
            try:
                return bool(self._store.check([key]))
            except RuntimeError as error:
                raise BackendError(
                    f"rank {self._comm.rank} lost rank 0",
                    because=str(error).split("\n", 1)[0],
                    hint="see what rank 0 printed",
                ) from error
        return True

    def _go_on(self) -> None:
        self._number += 1
        if self._number % _TOGETHER == 0:
            self._comm.barrier()
            if self._comm.rank == 0:
                for n in range(self._number - _TOGETHER, self._number):
                    self._store.delete_key(str(n))


_KINDS = ("step", "nothing", "end", "error")


def _packed(m: Message) -> bytes:
    """Bytes of a message: five integers, and what they count."""
    texts = m.text.encode()
    integers = b"" if m.integers is None else m.integers.tobytes()
    numbers = b"" if m.numbers is None else m.numbers.tobytes()
    requests = -1 if m.requests is None else m.requests
    head = [_KINDS.index(m.kind), m.has_chunk, len(integers), len(numbers), requests]
    return np.array(head, dtype=np.int64).tobytes() + integers + numbers + texts


def _unpacked(data: bytes) -> Message:
    head, data = np.frombuffer(data[:40], dtype=np.int64).tolist(), data[40:]
    kind, has_chunk, n, m, requests = head
    integers = np.frombuffer(data[:n], dtype=np.int64).copy() if n else None
    numbers = np.frombuffer(data[n : n + m]).reshape(-1, 4).copy() if m else None
    text = data[n + m :].decode()
    count = None if requests < 0 else requests
    return Message(_KINDS[kind], bool(has_chunk), integers, numbers, text, count)
