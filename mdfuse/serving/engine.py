"""An engine that continues texts: `mf.generate`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from mdfuse.config import Options
from mdfuse.errors import MdfuseError, ProgramError, counted, message_of
from mdfuse.frontend.given import refused
from mdfuse.layouts.layout import Layout
from mdfuse.mesh import DeviceMesh
from mdfuse.runtime.communicator import Communicator, init
from mdfuse.serving.cache_layouts import placed
from mdfuse.serving.decoder import cache_types
from mdfuse.serving.engine_programs import Arrival, Programs
from mdfuse.serving.front import Front, Message
from mdfuse.serving.models import model_of
from mdfuse.serving.requests import Continuation, Request, request_of
from mdfuse.serving.rotation import check_context, longest
from mdfuse.serving.shape import StepShape
from mdfuse.serving.turns import Begun, Turns

#: The most tokens of a request where neither caller nor model say fewer.
CONTEXT = 2048


class GenerationEngine:
    """Continues prompts by a causal model, several at once; `mf.generate` returns it.

    A step takes each request with a slot one token further, and one whose prompt is not computed
    yet by a chunk besides. Requests without a slot, or without pages, wait in their order. On GPUs
    the next step has begun by then: `ahead` of `mf.generate`.

    On several ranks rank 0 takes requests; each other rank calls `follow()`, or `step()` as often.
    An engine is not for several threads.

    Attributes:
        shape: of a step.
        programs: what steps run.
        eos: the tokens that end a text where a request says no stops.

    >>> import mdfuse as mf
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    ...     num_attention_heads=2, eos_token_id=None))
    >>> engine = mf.generate(model, max_batch=2, chunk=0, context=32)
    >>> long, short = engine.submit([5, 7, 11], max_tokens=4), engine.submit([3], max_tokens=2)
    >>> while engine.step():
    ...     pass
    >>> engine.result(short).state, len(engine.result(long).tokens)
    ('length', 4)
    """

    def __init__(
        self,
        programs: Programs,
        eos: tuple[int, ...],
        words: int,
        comm: Communicator | None,
        ahead: bool | None,
    ) -> None:
        self.programs, self.shape = programs, programs.shape
        self.eos, self._words, self._comm = eos, words, comm
        self._turns = Turns(programs.shape)
        self._numbers = count()
        self._front = None if comm is None or comm.size == 1 else Front(comm)
        is_gpu = comm is not None and comm.device.type == "cuda"
        self._is_ahead = is_gpu if ahead is None else ahead
        #: the step whose tokens the next call reads, where it has begun
        self._begun: tuple[Begun, Arrival] | None = None
        self._broken: str | None = None

    # -- requests ----------------------------------------------------------------------------------

    def submit(
        self,
        ids: Any,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Any = None,
    ) -> int:
        """Add a request, and return its number.

        Args:
            ids: the tokens of the prompt: numbers, or a tensor [length] of them.
            max_tokens: how many tokens may follow; None: as many as there is room for.
            temperature: logits are divided by it; 0: always the most probable token.
            top_k: only so many of the most probable tokens; None or 0: all.
            top_p: only the most probable tokens whose probabilities together reach it.
            seed: of the numbers that tokens are drawn by; the same seed brings the same tokens,
                whatever runs beside. None: another one each time.
            stop: tokens, or sequences of tokens, that end it; None: those of the model's
                generation config.

        Raises:
            ProgramError: an empty prompt, one that is longer than the context or needs more pages
                than there are, an argument out of its range; on another rank than rank 0.
        """
        self._check("submit")
        said = {
            "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p,
            "seed": seed, "stop": stop,
        }  # fmt: skip
        context, number = self.shape.context, next(self._numbers)
        self._turns.add(request_of(number, ids, context, self._words, self.eos, said))
        return number

    def cancel(self, id: int) -> None:
        """End a request now, and free its slot and pages; nothing happens to one that is over.

        Raises:
            ProgramError: there is no such request.
        """
        self._check("cancel")
        self._turns.cancel(id)

    def result(self, id: int) -> Continuation:
        """Return the tokens of a request so far, its state, and what it waits for.

        Raises:
            ProgramError: there is no such request, or it was over thousands of requests ago.
        """
        self._check("result")
        return self._turns.result(id)

    def report(self) -> str:
        """Return sizes, what caches take, what a rank read, and where parameters live."""
        s, size = self.shape, self.programs.cache_bytes
        pages = f"{s.pages - 1:,} pages of {s.page_size}, and one for slots without a request"
        lines = [
            f"{counted(s.slots, 'slot')}, a context of {counted(s.context, 'token')}, "
            + (f"chunks of {s.chunk}" if s.chunk else "without chunks"),
            f"caches of {s.cache_rows:,} positions in all: {size:,} bytes on a rank; "
            + (pages if s.pages else "each slot has a whole context"),
        ]
        lines += [self.programs.read, self.programs.models[False].report()]
        return "\n".join(lines)

    # -- steps -------------------------------------------------------------------------------------

    def step(self) -> int:
        """Compute one step; return of how many requests, 0 where there is nothing to compute.

        Raises:
            BackendError, ProgramError: a rank failed; the engine is of no more use then.
        """
        if self._front is not None and self._comm is not None and self._comm.rank:
            return self._followed() or 0
        self._check("step")
        try:
            return self._led()
        except BaseException as error:
            self._broken = message_of(error)
            if self._front is not None:
                self._front.say(Message("error", text=self._broken))
            raise

    def _led(self) -> int:
        """Read the tokens of a step; begin the next one before, where the engine goes ahead."""
        now, self._begun = self._begun, None
        if now is None or not now[0].left:
            now = self._begin()
        if now is None:
            return 0
        begun, tokens = now
        if self._is_ahead:
            self._begun = self._begin(begun)
        count = begun.left
        self._turns.take(begun, tokens.read())
        return count

    def _begin(self, last: Begun | None = None) -> tuple[Begun, Arrival] | None:
        """Begin a step; None, and the others hear it, where there is nothing to compute.

        Args:
            last: the step before, where the same call reads its tokens.
        """
        begun = self._turns.begin()
        if begun is None:
            self._say(Message("nothing", requests=0 if last is None else last.left))
            return None
        numbers = self._drawn(begun.chosen)
        count = None if self._is_ahead and last is None else (last or begun).left
        message = Message("step", begun.has_chunk, begun.integers, numbers, requests=count)
        self._say(message)
        return begun, self._run(message)

    def _drawn(self, complete: Mapping[int, Request]) -> npt.NDArray[np.float64] | None:
        """The numbers by which tokens are chosen; None where all take the most probable one."""
        if not any(x.sampling.temperature for x in complete.values()):
            return None
        numbers = np.tile([0.0, 1.0, 1.0, 0.0], (self.shape.slots, 1))
        for slot, request in complete.items():
            s = request.sampling
            top_k = min(s.top_k, self._words) or self._words
            numbers[slot] = s.temperature, top_k, s.top_p, request.draws.random()
        return numbers

    def _run(self, message: Message) -> Arrival:
        assert message.integers is not None
        try:
            return self.programs.begin(message.integers, message.has_chunk, message.numbers)
        except MdfuseError:
            raise
        except Exception as error:  # others would wait in the run until its deadline
            if self._front is not None:
                self.programs.refuse(message.has_chunk, error)
            raise

    def _say(self, message: Message) -> None:
        if self._front is not None:
            self._front.say(message)

    def _followed(self) -> int | None:
        """Do what rank 0 says in a call of `step`; return what it returns, None at the end."""
        assert self._front is not None
        while True:
            message = self._front.hear()
            if message.kind == "end":
                return None
            if message.kind == "step":
                self._run(message)
            if message.requests is not None:
                return message.requests

    def follow(self) -> None:
        """Compute what rank 0 does until it closes the engine: for each other rank.

        Raises:
            BackendError, ProgramError: a rank failed, or rank 0 is gone.
        """
        if self._front is None or self._comm is None or not self._comm.rank:
            raise ProgramError(
                "follow() on the rank that takes requests",
                because="rank 0 calls submit() and step()",
                hint="if comm.rank == 0: ... else: engine.follow()",
            )
        while self._followed() is not None:
            pass

    def close(self) -> None:
        """Rank 0: end `follow` of the others."""
        if self._broken is None and (self._comm is None or not self._comm.rank):
            self._broken = "it was closed"
            self._say(Message("end"))

    def _check(self, call: str) -> None:
        if self._front is not None and self._comm is not None and self._comm.rank:
            raise ProgramError(
                f"{call}() on rank {self._comm.rank}",
                because="rank 0 takes requests, and tells the others what to compute",
                hint="if comm.rank == 0: ... else: engine.follow()",
            )
        if self._broken is not None:
            raise ProgramError(
                f"{call}() of an engine that has ended", because=self._broken, hint="generate(...)"
            )


def generate(
    module: nn.Module | str | Path,
    mesh: Any = None,
    layouts: Mapping[str, Any] | None = None,
    pages: int | None = None,
    page_size: int = 16,
    max_batch: int = 8,
    *,
    chunk: int = 64,
    context: int | None = None,
    ahead: bool | None = None,
    options: Options | None = None,
) -> GenerationEngine:
    """Return an engine that continues texts by a causal model of transformers.

    Its caches follow from the module: from the keys and values that its layers write.

    Args:
        module: a causal model, or a folder that transformers' `from_pretrained` reads.
        mesh: where it lives; by default all ranks along tp. Without a launcher, a mesh of several
            ranks is simulated; with one, it has all ranks.
        layouts: pattern -> axis -> placement, as `from_torch` takes them, also for "caches.*",
            each [positions · slots, heads, features]. By default parameters lie along tp as the
            model's own plan says, experts along ep; caches are split along tp by heads, where
            these are split into equal parts, and along cp by positions.
        pages: how many pages requests share; a request has as many as its prompt and `max_tokens`
            need, and waits while there are too few. None: each slot has room for a whole context.
        page_size: positions of a page.
        max_batch: how many slots there are: requests that are computed at once.
        chunk: how many tokens of a prompt a step computes besides one token of each slot; 0: none.
        context: the most tokens of a request, prompt included; by default the model's
            `max_position_embeddings`, at most 2,048, and no rotary frequency changes in it.
        ahead: whether a step begins before the tokens of the last one are read; None: on GPUs.
        options: of the programs.

    Raises:
        DefinitionError: the module cannot be imported, keeps other state than keys and values, or
            has embeddings of fewer positions than the context; an argument out of its range.
    """
    comm = init(options)
    mesh = _mesh_of(mesh, comm.size)
    served = model_of(module)
    model = served.module
    context = _context_of(model, context)
    caches = cache_types(model, context)
    text = model.config.get_text_config()
    sizes = {x: mesh.axis_size(x) if x in mesh.axes else 1 for x in ("tp", "cp")}
    shape = StepShape(
        slots=_at_least("max_batch", max_batch, 1),
        chunk=_at_least("chunk", chunk, 0),
        context=context,
        pages=0 if pages is None else _at_least("pages", pages, 1) + 1,
        page_size=_at_least("page_size", page_size, 1),
        parts_of_positions=sizes["cp"],
        is_grouped=all(heads % sizes["tp"] == 0 for heads, *_ in caches.values()),
    )
    said, others = placed(model, mesh, caches, layouts)
    runs = None if comm.size == 1 and mesh.size > 1 else comm
    programs = Programs(served, shape, caches, mesh, said, others, runs, options)
    return GenerationEngine(programs, eos_of(model), text.vocab_size, runs, ahead)


def _mesh_of(given: Any, ranks: int) -> DeviceMesh:
    """The mesh that a caller says, which has all ranks; along tp where nobody says one."""
    mesh = DeviceMesh.arange(tp=ranks) if given is None else Layout(given).mesh
    if ranks > 1 and {*mesh.ranks} != {*range(ranks)}:
        raise refused(
            "generate", "mesh", mesh, because=f"each of the {ranks} ranks computes each step",
            hint=f"mesh=DeviceMesh.arange(tp={ranks})",
        )  # fmt: skip
    return mesh


def _context_of(model: Any, given: int | None) -> int:
    """The context that a caller says, in which no frequency changes; else the model's."""
    trained = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if given is None:
        return min(n for n in (trained, longest(model), CONTEXT) if n)
    check_context(model, _at_least("context", given, 1))
    return given


def _at_least(name: str, x: object, least: int) -> int:
    if type(x) is not int or x < least:
        raise refused(
            "generate", name, x, because=f"it is a whole number of at least {least}",
            hint=f"{name}={max(least, 8)}",
        )  # fmt: skip
    return x


def eos_of(model: Any) -> tuple[int, ...]:
    """The tokens that end a text, as the model's generation config says."""
    said = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return () if said is None else (said,) if isinstance(said, int) else tuple(said)
