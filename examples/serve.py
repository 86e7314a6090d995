"""Answer HTTP requests by a causal model of transformers, in the form of OpenAI's interface.

python examples/serve.py Llama-3.2-1B                                        # http://127.0.0.1:8000
torchrun --nproc-per-node 2 examples/serve.py Llama-3.2-1B --mesh tp=2 --max-batch 32 --pages 4096
curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "You may", "max_tokens": 20}'

A folder has the model, as `save_pretrained` writes it, and its tokenizer, if there is one.

    POST /v1/completions       prompt: a text, or a list of tokens; stream: true for events
    POST /v1/chat/completions  messages; where the tokenizer has a template
    GET  /v1/models, /health

Rank 0 answers; it computes in its main thread, and speaks HTTP in another one. All others follow.
It listens on this machine alone, unless --host says otherwise; nobody is asked who they are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import signal
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import mdfuse as mf
from mdfuse.cli import screen
from mdfuse.cli.program_file import parse_mesh

#: The most bytes of a request's body.
BODY = 1 << 20

#: How often an engine steps that has nothing to do, seconds: other ranks then hear from rank 0.
IDLE_S = 300.0

#: Fields of a request -> what they are where nobody says.
FIELDS: dict[str, Any] = {
    "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": None, "seed": None, "stop": None,
    "stop_token_ids": None, "stream": False,
}  # fmt: skip

#: How many tokens of a prompt stand before a text that follows it.
BEFORE = 8

#: Fields of OpenAI's interface that change nothing where they have one of these values.
IDLE: dict[str, tuple[Any, ...]] = {
    "n": (None, 1), "best_of": (None, 1), "echo": (None, False), "logprobs": (None, False),
    "suffix": (None, ""), "presence_penalty": (None, 0), "frequency_penalty": (None, 0),
    "logit_bias": (None, {}), "stream_options": (None,),
}  # fmt: skip


class Refused(Exception):
    """A request that is answered by a status of 4xx or 5xx, and the reason."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status

    @property
    def body(self) -> dict[str, Any]:
        """The answer, in OpenAI's form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": None}}


# -- the engine ------------------------------------------------------------------------------------


class Worker:
    """Does what other threads ask of an engine, one after the other, and steps between.

    Attributes:
        failure: why it ended; None while it goes on.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.failure: str | None = None
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[int, Callable[[Any], None]] = {}
        self._is_over = False

    def run(self) -> None:
        """Go on until `stop`, or until the engine fails: then all who wait hear why."""
        reason = "the server ends"
        try:
            while True:
                self._do_all(is_patient=not self._listeners)
                if self._is_over:
                    return
                self.engine.step()
                self._tell()
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise
        finally:
            self._end(reason)

    def _end(self, reason: str) -> None:
        """Answer all who wait, also those whose requests nobody has seen yet."""
        self.failure = f"the engine has ended: {reason}"
        while self._listeners:
            self._listeners.popitem()[1](Refused(self.failure, 503))
        while not self._asked.empty():
            self._asked.get()()

    def _do_all(self, is_patient: bool) -> None:
        """Do what was asked by now; where nothing is to be computed, wait for something."""
        while True:
            try:
                self._asked.get(block=is_patient, timeout=IDLE_S)()
            except queue.Empty:
                return
            is_patient = False

    def _tell(self) -> None:
        for id_, hear in [*self._listeners.items()]:
            result = self.engine.result(id_)
            hear(result)
            if result.is_over:
                del self._listeners[id_]

    def submit(self, hear: Callable[[Any], None], **said: Any) -> Callable[[], None]:
        """Add a request; return the function that cancels it.

        Args:
            hear: gets what the request has come to after each step, or the error.
            said: as `submit` of an engine takes it.
        """
        ids: list[int] = []

        def do() -> None:
            if self.failure is not None:
                hear(Refused(self.failure, 503))
                return
            try:
                ids.append(self.engine.submit(**said))
            except mf.MdfuseError as error:
                said_ = (error.what, error.because, error.hint)
                hear(Refused("; ".join(x for x in said_ if x)))
            except Exception as error:  # of this request alone: others do not end by it
                hear(Refused(f"{type(error).__name__}: {error}", 500))
            else:
                self._listeners[ids[0]] = hear

        def undo() -> None:
            if ids and self._listeners.pop(ids[0], None):
                self.engine.cancel(ids[0])

        self._asked.put(do)
        if self.failure is not None:  # it may have ended before it could see this
            hear(Refused(self.failure, 503))
        return lambda: self._asked.put(undo)

    def stop(self) -> None:
        """End `run`."""
        self._asked.put(lambda: setattr(self, "_is_over", True))


# -- text ------------------------------------------------------------------------------------------


class Text:
    """Text as tokens of a tokenizer of transformers; without one there are tokens alone."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer

    def tokens(self, prompt: Any) -> list[int]:
        """The tokens of a prompt: a text, or tokens already."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise Refused("prompt is a text, and this model has no tokenizer: pass tokens")
            return self._encoded("prompt", prompt)
        if isinstance(prompt, list) and all(type(x) is int for x in prompt):
            return prompt
        raise Refused("prompt is a text or a list of tokens; each prompt is a request of its own")

    def of_messages(self, messages: Any) -> list[int]:
        """The tokens of a chat, by the tokenizer's template."""
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise Refused("this model has no template for chats: use /v1/completions", 404)
        if not isinstance(messages, list) or not messages:
            raise Refused("messages is a list of at least one message")
        plain = [*map(_plain, messages)]
        try:
            given = self._tokenizer.apply_chat_template(
                plain, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # the template is the model's, and raises whatever it likes
            raise Refused(f"messages do not fit the template: {error}") from error
        return self._encoded("messages", given, add_special_tokens=False)

    def _encoded(self, field: str, text: str, **said: Any) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Refused(f"{field} has half a character: {error}") from error
        return [*self._tokenizer(text, **said)["input_ids"]]

    def text(self, tokens: Sequence[int], before: Sequence[int] = ()) -> str:
        """The text of tokens that follow others: with its first space, which stands between."""
        first, whole = self._decoded(before), self._decoded([*before, *tokens])
        follows = whole.startswith(first)  # not where `before` ends in half a character
        return whole[len(first) :] if follows else self._decoded(tokens)

    def _decoded(self, tokens: Sequence[int]) -> str:
        """Text of which no later token changes what is there, as cleaning up would."""
        if self._tokenizer is None:
            return ""
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode([*tokens], **how))


def _plain(message: Any) -> dict[str, Any]:
    """A message as templates take it: of several texts one."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("a message is an object with a role, which is a text")
    content = message.get("content")
    if isinstance(content, list):
        texts = [x.get("text") if isinstance(x, dict) else None for x in content]
        is_text = all(isinstance(x, str) for x in texts)
        content = "\n".join(map(str, texts)) if is_text else None
    if not isinstance(content, str) and "tool_calls" not in message:
        raise Refused("the content of a message is a text, or a list of parts that are texts")
    return {**message, "content": content}


def cut(text: str, stops: list[str], is_over: bool) -> tuple[str, bool]:
    """Return as much of a text as can be shown, and whether a stop has come.

    Neither a stop is shown, nor the begin of one that may follow, nor half a character.

    >>> cut("one two", [" two"], False), cut("one t", [" two"], False), cut("one t", [" two"], True)
    (('one', True), ('one', False), ('one t', False))
    """
    places = [(at + len(s), at) for s in stops if (at := text.find(s)) >= 0]
    if places:  # the one that ends first, however many tokens come at once
        return text[: min(places)[1]], True
    if is_over:
        return text, False
    text = text.rstrip("\ufffd")
    begun = (n for s in stops for n in range(len(s) - 1, 0, -1) if text.endswith(s[:n]))
    return text[: len(text) - max(begun, default=0)], False


# -- HTTP ------------------------------------------------------------------------------------------


class Front:
    """Answers requests by what a worker computes.

    Attributes:
        app: the ASGI application.
    """

    def __init__(self, worker: Worker, text: Text, name: str, body: int = BODY) -> None:
        self._worker, self._text, self._name, self._body = worker, text, name, body
        self._since = int(time.time())
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
        ]
        every = dict.fromkeys((Refused, HTTPException, Exception), _refusal)
        self.app = Starlette(routes=routes, exception_handlers=every)

    async def _health(self, _: Request) -> Response:
        failure = self._worker.failure
        if failure is not None:
            raise Refused(failure, 503)
        return JSONResponse({"status": "ok"})

    async def _models(self, _: Request) -> Response:
        model = {"id": self._name, "object": "model", "created": self._since, "owned_by": "mdfuse"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _completions(self, request: Request) -> Response:
        said = await self._read(request, "prompt")
        return await self._answer(request, said, self._text.tokens(said["prompt"]), is_chat=False)

    async def _chat(self, request: Request) -> Response:
        said = await self._read(request, "messages")
        return await self._answer(
            request, said, self._text.of_messages(said["messages"]), is_chat=True
        )

    async def _read(self, request: Request, wanted: str) -> dict[str, Any]:
        """Return the fields of a request's body, all that may be there."""
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > self._body:
                    raise Refused(f"the body has more than {self._body:,} bytes", 413)
        except ClientDisconnect as error:
            raise Refused("the client went away", 499) from error
        try:
            said = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refused(f"the body is no JSON: {error}") from error
        if not isinstance(said, dict) or said.get(wanted) is None:
            raise Refused(f"the body is no object with the field {wanted!r}")
        known = {"model", "user", wanted, *FIELDS}
        for field, value in said.items():
            if field in IDLE and not any(_is_same(value, x) for x in IDLE[field]):
                raise Refused(f"{field} = {json.dumps(value)} is not served")
            if field not in known and field not in IDLE:
                raise Refused(f"unknown field {field!r}; known are {', '.join(sorted(known))}")
        if said.get("model") not in (None, self._name):
            raise Refused(f"model {said['model']!r} is not served here; {self._name!r} is", 404)
        return FIELDS | {x: value for x, value in said.items() if value is not None}

    async def _answer(
        self, request: Request, said: dict[str, Any], ids: list[int], is_chat: bool
    ) -> Response:
        if type(said["stream"]) is not bool:
            raise Refused("stream is true or false")
        answer = Answer(self._worker, self._text, said, ids, () if is_chat else ids[-BEFORE:])
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": ("chat.completion" if is_chat else "text_completion")
            + (".chunk" if is_chat and said["stream"] else ""),
            "created": int(time.time()),
            "model": self._name,
        }
        pieces = answer.pieces(request)
        first = await anext(pieces)  # an error of this request comes before the status
        if said["stream"]:
            lines = _events(head, first, pieces, is_chat)
            return StreamingResponse(lines, media_type="text/event-stream")
        every = [first, *[x async for x in pieces]]
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(answer.tokens)}
        usage["total_tokens"] = sum(usage.values())
        choice = _choice("".join(x for x, _ in every), every[-1][1], is_chat, "message")
        choice["token_ids"] = [*answer.tokens]
        return JSONResponse({**head, "choices": [choice], "usage": usage})


def _is_same(x: Any, y: Any) -> bool:
    """True for equal values of JSON: 0 is not false."""
    return bool(x == y) and isinstance(x, bool) == isinstance(y, bool)


class Answer:
    """The text behind a prompt, piece by piece, while its client waits for it.

    Args:
        before: tokens that the text goes on from.

    Attributes:
        tokens: those so far.
    """

    def __init__(
        self,
        worker: Worker,
        text: Text,
        said: dict[str, Any],
        ids: list[int],
        before: Sequence[int] = (),
    ) -> None:
        self._text, self._before, self.tokens = text, before, tuple[int, ...]()
        stops = [] if said["stop"] is None else said["stop"]
        self._stops = [stops] if isinstance(stops, str) else stops
        if not isinstance(self._stops, list) or not all(isinstance(x, str) for x in self._stops):
            raise Refused("stop is a text, or a list of texts; of tokens it is stop_token_ids")
        if "" in self._stops:
            raise Refused("stop is an empty text, which stands everywhere")
        self._results: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hear(result: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._results.put_nowait, result)

        names = "max_tokens", "temperature", "top_k", "top_p", "seed"
        given = {name: said[name] for name in names} | {"stop": said["stop_token_ids"]}
        if not isinstance(given["stop"], list | None):
            raise Refused("stop_token_ids is a list of tokens")
        if given["stop"] is not None:  # besides the ends that the model has
            given["stop"] = [*given["stop"], *worker.engine.eos]
        self._cancel = worker.submit(hear, ids=ids, **given)

    async def pieces(self, request: Request) -> AsyncIterator[tuple[str, str | None]]:
        """Yield what is new of the text, and at the end why it ends; cancel it if nobody waits.

        Raises:
            Refused: it cannot be computed.
        """
        shown, gone = "", asyncio.ensure_future(_disconnected(request))
        try:
            while True:
                result = await self._next(gone)
                self.tokens = result.tokens
                text, is_stopped = self._shown(self.tokens, result.is_over)
                while is_stopped and self._shown(self.tokens[:-1])[1]:
                    self.tokens = self.tokens[:-1]  # it was computed before somebody looked
                is_over = is_stopped or result.is_over
                if text != shown or is_over:
                    reason = "stop" if is_stopped else result.state if is_over else None
                    yield text[len(shown) :], reason
                    shown = text
                if is_over:
                    return
        finally:
            gone.cancel()
            self._cancel()

    def _shown(self, tokens: tuple[int, ...], is_over: bool = False) -> tuple[str, bool]:
        return cut(self._text.text(tokens, self._before), self._stops, is_over)

    async def _next(self, gone: asyncio.Future[None]) -> Any:
        """Return the newest result."""
        getting = asyncio.ensure_future(self._results.get())
        try:
            await asyncio.wait({getting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                raise Refused("the client went away", 499)
            result = getting.result()
        finally:
            getting.cancel()
        while not self._results.empty():
            result = self._results.get_nowait()
        if isinstance(result, Refused):
            raise result
        return result


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _choice(text: str, reason: str | None, is_chat: bool, field: str) -> dict[str, Any]:
    said = {field: {"role": "assistant", "content": text}} if is_chat else {"text": text}
    return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


async def _events(
    head: dict[str, Any], first: tuple[str, str | None], pieces: Any, is_chat: bool
) -> AsyncIterator[str]:
    """The lines of server-sent events; an error that comes later is an event, too."""
    try:
        yield _event({**head, "choices": [_choice(*first, is_chat, "delta")]})
        async for piece in pieces:
            yield _event({**head, "choices": [_choice(*piece, is_chat, "delta")]})
    except Refused as error:
        yield _event(error.body)
    finally:
        await pieces.aclose()
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _refusal(request: Request, error: Exception) -> Response:
    headers = None
    if isinstance(error, HTTPException):
        what = f"{request.method} {request.url.path}: {error.detail}"
        headers, error = error.headers, Refused(what, error.status_code)
    elif not isinstance(error, Refused):
        error = Refused(f"{type(error).__name__}: {error}", 500)
    return JSONResponse(error.body, error.status, headers)


class Listening:
    """A server of an application in a thread of its own.

    Attributes:
        port: that it listens on.
    """

    def __init__(self, app: Any, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        run = self._server.run
        self._thread = threading.Thread(target=run, args=([self._socket],), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer those that wait, for a short time, and end."""
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer in a folder; None where there is none."""
    from transformers import AutoTokenizer

    if not any((folder / x).exists() for x in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return AutoTokenizer.from_pretrained(folder)


def main() -> None:
    """Answer until somebody ends this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder with a model of transformers")
    parser.add_argument("--mesh", default=None, help="axes, sizes; by default all ranks along tp")
    parser.add_argument("--host", default="127.0.0.1", help="to listen on: %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="%(default)s; 0: any that is free")
    parser.add_argument("--name", default=None, help="of the model; by default the folder's")
    for name in ("max-batch", "chunk", "context", "pages", "page-size"):
        parser.add_argument(f"--{name}", type=int, help="as mf.generate takes it")
    said = vars(parser.parse_args())
    folder, host, port, name = (said.pop(x) for x in ("model", "host", "port", "name"))
    mesh = said.pop("mesh")
    sizes = {x: n for x, n in said.items() if n is not None}
    with screen.errors():
        comm = mf.init()
        engine = mf.generate(folder, mesh and parse_mesh(mesh), **sizes)
        if comm.rank:
            engine.follow()
            return
        worker = Worker(engine)
        front = Front(worker, Text(tokenizer_of(folder)), name or folder.resolve().name)
        listening = Listening(front.app, host, port)
        signal.signal(signal.SIGTERM, lambda *_: worker.stop())
        screen.output().print(f"serving {folder} at http://{host}:{listening.port}", markup=False)
        try:
            worker.run()
        except KeyboardInterrupt:
            pass
        finally:
            listening.close()
            engine.close()


if __name__ == "__main__":
    main()
