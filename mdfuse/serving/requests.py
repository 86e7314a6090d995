"""Requests of an engine: what is asked, and how far it has come."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mdfuse.errors import ProgramError, counted

#: A request waits for a slot or for pages, then it is computed; the others say how it ended.
State = Literal["waiting", "running", "stop", "length", "cancelled"]


class Continuation(NamedTuple):
    """The tokens of a request so far, and its state.

    Attributes:
        tokens: those behind the prompt so far; the last of them are the stop, where one ended it.
        state: "waiting", "running"; "stop" after a stop, "length" after `max_tokens`, "cancelled".
        because: what a request waits for; else "".
    """

    tokens: tuple[int, ...]
    state: State
    because: str = ""

    @property
    def is_over(self) -> bool:
        """True once nothing follows."""
        return self.state not in ("waiting", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Rules for the choice of a token; see `GenerationEngine.submit`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request in an engine.

    Attributes:
        ids: the prompt, and the tokens behind it.
        prompt: how many of them are the prompt.
        most: how many tokens may follow it.
        draws: the numbers that its tokens are drawn by.
        stops: sequences of tokens that end it.
        pending: how many tokens behind `ids` were chosen that the host has not read.
        done: how many of its tokens are in the caches, or will be by the steps that have begun.
        slot: the slot that it has.
        pages: the pages that it has.
    """

    number: int
    ids: list[int]
    prompt: int
    most: int
    sampling: Sampling
    draws: random.Random
    stops: tuple[tuple[int, ...], ...]
    pending: int = 0
    done: int = 0
    slot: int | None = None
    pages: list[int] = field(default_factory=list)
    state: State = "waiting"
    because: str = ""

    @property
    def length(self) -> int:
        """The number of its tokens, with those that the host has not read."""
        return len(self.ids) + self.pending

    @property
    def is_full(self) -> bool:
        """True once no further token may be chosen, whatever those are that were."""
        return self.length - self.prompt >= self.most

    @property
    def is_over(self) -> bool:
        """True once it has ended."""
        return self.state not in ("waiting", "running")

    @property
    def result(self) -> Continuation:
        """Its tokens so far, and its state."""
        return Continuation(tuple(self.ids[self.prompt :]), self.state, self.because)

    def take(self, token: int) -> bool:
        """Append a token; end, and return True, where it is the last one."""
        self.ids.append(token)
        count = len(self.ids) - self.prompt
        if any(len(s) <= count and self.ids[-len(s) :] == [*s] for s in self.stops):
            self.state = "stop"
        elif count >= self.most:
            self.state = "length"
        return self.is_over


def request_of(
    number: int, ids: Any, context: int, words: int, eos: Sequence[int], said: dict[str, Any]
) -> Request:
    """Return a request for what a caller passes to `submit`, or refuse it.

    Args:
        context: the most tokens of a request.
        words: the size of the vocabulary.
        eos: the tokens that end a request where it says no stops.
        said: the other arguments of `submit`.
    """
    prompt = _tokens("ids", ids, words)
    room, most = context - len(prompt), said["max_tokens"]
    if not prompt:
        raise ProgramError(
            "submit: an empty prompt", because="the first token follows another one", hint="ids=[1]"
        )
    if room < 1 or (most is not None and _whole("max_tokens", most, 1) > room):
        wanted = "" if most is None else f" and {counted(most, 'token')} behind it"
        raise ProgramError(
            f"a prompt of {counted(len(prompt), 'token')}{wanted}",
            because=f"the context of this engine has {counted(context, 'token')}",
            hint=f"ask for at most {room} tokens" if room > 0 else "generate(..., context=) is it",
        )
    seed = said["seed"]
    return Request(
        number=number,
        ids=prompt,
        prompt=len(prompt),
        most=room if most is None else most,
        sampling=_sampling(said),
        draws=random.Random(None if seed is None else _whole("seed", seed)),
        stops=tuple((x,) for x in eos) if said["stop"] is None else _stops(said["stop"], words),
    )


def _sampling(said: dict[str, Any]) -> Sampling:
    temperature, top_p = (_number(name, said[name]) for name in ("temperature", "top_p"))
    top_k = 0 if said["top_k"] is None else _whole("top_k", said["top_k"], 0)
    if not 0 <= temperature < float("inf"):
        raise _refused("temperature", temperature, "it divides logits", "0: the most probable one")
    if not 0 < top_p <= 1:
        raise _refused("top_p", top_p, "it is a share of all probability", "1.0: all tokens")
    return Sampling(temperature=temperature, top_k=min(top_k, 1 << 31), top_p=top_p)


def _stops(stop: Any, words: int) -> tuple[tuple[int, ...], ...]:
    """Return sequences of tokens; of a list some may be numbers."""
    given = [stop] if isinstance(stop, int) else _listed("stop", stop)
    stops = [_tokens("stop", [x] if isinstance(x, int) else x, words) for x in given]
    if not all(stops):
        raise _refused("stop", stop, "an empty sequence stands everywhere", "stop=[2, [5, 7]]")
    return tuple(map(tuple, stops))


def _tokens(name: str, ids: Any, words: int) -> list[int]:
    tokens = [_whole(name, x) for x in _listed(name, ids)]
    for x in tokens:
        if not 0 <= x < words:
            raise _refused(name, x, f"the vocabulary has {words} tokens", "numbers of tokens")
    return tokens


def _listed(name: str, x: Any) -> list[Any]:
    x = x.tolist() if hasattr(x, "tolist") else x
    if not isinstance(x, list | tuple | range):
        raise _refused(name, x, "it is a list of numbers of tokens", f"{name}=[1, 2, 3]")
    return [*x]


def _whole(name: str, x: Any, least: int | None = None) -> int:
    if type(x) is not int or (least is not None and x < least):
        which = "" if least is None else f" of at least {least}"
        raise _refused(name, x, f"it is a whole number{which}", f"{name}={max(least or 0, 1)}")
    return x


def _number(name: str, x: Any) -> float:
    if type(x) not in (int, float) or abs(x) > sys.float_info.max:
        raise _refused(name, x, "it is a number", f"{name}=1.0")
    return float(x)


def _refused(name: str, value: object, because: str, hint: str) -> ProgramError:
    return ProgramError(f"submit: {name} is {value!r}", because=because, hint=hint)
