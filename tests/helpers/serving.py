"""A server of `examples/serve.py` in this process, and clients of it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from helpers.example_files import example

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}w1"


class Server(NamedTuple):
    """A server that runs."""

    serve: ModuleType
    worker: Any
    port: int

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and content; a body that is no text is sent as JSON."""
        connection = self.connect()
        data = body if isinstance(body, str | bytes | None) else json.dumps(body)
        connection.request(method, path, data)
        answer = connection.getresponse()
        content = json.loads(answer.read())
        connection.close()
        return answer.status, content

    def complete(self, **said: Any) -> Any:
        """The content of an answer of 200."""
        status, content = self.ask("POST", "/v1/completions", said)
        assert status == 200, content
        return content

    def events(self, path: str = "/v1/completions", **said: Any) -> list[str]:
        """The events of a stream."""
        connection = self.connect()
        connection.request("POST", path, json.dumps({**said, "stream": True}))
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = answer.read().decode().split("\n\n")
        connection.close()
        assert parts.pop() == "" and all(x.startswith("data: ") for x in parts)
        return [x.removeprefix("data: ") for x in parts]


def words(kind: str = "") -> Any:
    """A tokenizer whose tokens are the words w0 to w96, and a point.

    Args:
        kind: "metaspace": words begin with their space, but for a text's first one; "cleaning": no
            space before a point.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    space = "\u2581" if kind == "metaspace" else ""
    vocabulary = {f"{space}w{n}": n for n in range(97)} | {".": 97}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, f"{space}w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if space:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=TEMPLATE,
        clean_up_tokenization_spaces=kind == "cleaning",
    )  # fmt: skip


@contextmanager
def listening(engine: Any, body: int = 2000, tokenizer: Any = None) -> Iterator[Server]:
    """Serve; `worker.run` is the caller's."""
    serve = example("serve")
    worker = serve.Worker(engine)
    front = serve.Front(worker, serve.Text(tokenizer or words()), "small", body)
    server = serve.Listening(front.app, "127.0.0.1", 0)
    try:
        yield Server(serve, worker, server.port)
    finally:
        worker.stop()
        server.close()


@contextmanager
def running(act: Callable[[], object]) -> Iterator[None]:
    """Do something in another thread meanwhile."""
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join(120)


def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether something holds at last."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()
