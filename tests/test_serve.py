"""The server of `examples/serve.py`, through sockets: answers, streams, clients that go away."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
from helpers.causal import greedy, model_of
from helpers.example_files import example
from helpers.serving import Server, eventually, listening, running, words

import mdfuse as mf
from mdfuse.serving.requests import Continuation


@cache
def model() -> Any:
    return model_of("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine = mf.generate(model(), max_batch=2, chunk=0, context=64)
    with listening(engine) as there, running(there.worker.run):
        yield there
        there.worker.stop()


def text(tokens: tuple[int, ...]) -> str:
    return " ".join(f"w{x}" for x in tokens)


def behind(tokens: tuple[int, ...]) -> str:
    """The text of tokens that follow others."""
    return f" {text(tokens)}"


PROMPT = [5, 9, 2]
SAID: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}


# -- answers ---------------------------------------------------------------------------------------


def test_a_text_and_its_tokens_are_one_prompt(server: Server) -> None:
    wanted = greedy(model(), PROMPT, 6)
    for prompt in (PROMPT, text((*PROMPT,))):
        answer = server.complete(**{**SAID, "prompt": prompt, "model": "small", "user": "me"})
        (choice,) = answer["choices"]
        assert choice["text"] == behind(wanted) and choice["token_ids"] == [*wanted]
        assert choice["finish_reason"] == "length"
        assert answer["usage"] == {
            "prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9,
        }  # fmt: skip


def test_a_stream_brings_the_same_text(server: Server) -> None:
    most = 48  # a piece has all tokens since the last one, so that few might be one piece
    *events, last = server.events(**{**SAID, "max_tokens": most})
    pieces = [json.loads(x)["choices"][0] for x in events]
    assert last == "[DONE]" and len(pieces) > 1
    assert "".join(x["text"] for x in pieces) == behind(greedy(model(), PROMPT, most))
    assert [x["finish_reason"] for x in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_stops_are_texts_or_tokens(server: Server) -> None:
    wanted = greedy(model(), PROMPT, 6)
    place = next(n for n in range(1, 6) if wanted[n] not in wanted[:n])
    for stop in (f" w{wanted[place]}", [f" w{wanted[place]}", "nothing"]):
        (choice,) = server.complete(**SAID, stop=stop)["choices"]
        assert choice["text"] == behind(wanted[:place]) and choice["finish_reason"] == "stop"
    other = next(x for x in range(97) if x not in wanted)
    for eos, ids in (((), [wanted[place]]), ((wanted[place],), [other]), ((wanted[place],), [])):
        server.worker.engine.eos = eos  # the model's own ends stay
        (choice,) = server.complete(**SAID, stop_token_ids=ids)["choices"]
        assert choice["token_ids"] == [*wanted[: place + 1]] and choice["finish_reason"] == "stop"
    server.worker.engine.eos = ()


def test_a_seed_brings_the_same_text(server: Server) -> None:
    said = {**SAID, "temperature": 1.5, "top_p": 0.9, "top_k": 50}
    texts = [server.complete(**said, seed=n)["choices"][0]["text"] for n in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_chat_goes_through_the_template(server: Server) -> None:
    said = {"messages": [{"role": "user", "content": "w5 w9"}], "max_tokens": 3, "temperature": 0}
    status, answer = server.ask("POST", "/v1/chat/completions", said)
    assert status == 200 and answer["object"] == "chat.completion"
    wanted = text(greedy(model(), [5, 9, 1], 3))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": wanted}
    *events, _ = server.events("/v1/chat/completions", **said)
    deltas = [json.loads(x)["choices"][0]["delta"]["content"] for x in events]
    assert "".join(deltas) == wanted


class Scripted:
    """An engine that knows its tokens, and chooses all of them in one step."""

    eos = (97,)

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.said = (*tokens,), dict[str, Any]()

    def submit(self, **said: Any) -> int:
        self.said = said
        return 0

    def step(self) -> int:
        return 1

    def result(self, _: int) -> Continuation:
        return Continuation(self.tokens, "length")

    def cancel(self, _: int) -> None:
        pass


@contextmanager
def scripted(tokens: Sequence[int], tokenizer: Any = None) -> Iterator[Server]:
    with listening(Scripted(tokens), tokenizer=tokenizer) as there, running(there.worker.run):
        try:
            yield there
        finally:
            there.worker.stop()


def test_the_stop_that_ends_first_is_taken_however_many_tokens_come_at_once() -> None:
    """And no token behind it is shown, or counted."""
    with scripted([1, 2, 3, 4, 5]) as there:
        answer = there.complete(prompt=[7], stop=["w1 w2 w3 w4", "2 w3"])
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" w1 w", "stop")
    assert choice["token_ids"] == [1, 2, 3] and answer["usage"]["completion_tokens"] == 3


def test_a_text_goes_on_from_its_prompt() -> None:
    """Tokenizers that leave out a text's first space leave out none between two tokens."""
    tokenizer = words("metaspace")
    with scripted([3, 4], tokenizer) as there:
        (choice,) = there.complete(prompt="w1 w2")["choices"]
        assert there.worker.engine.said["ids"] == [1, 2]
        assert f"w1 w2{choice['text']}" == tokenizer.decode([1, 2, 3, 4]) == "w1 w2 w3 w4"
        said = {"messages": [{"role": "user", "content": "w1"}]}
        _, answer = there.ask("POST", "/v1/chat/completions", said)
    assert answer["choices"][0]["message"]["content"] == "w3 w4"


def test_no_piece_of_a_stream_changes_an_earlier_one() -> None:
    """Where a tokenizer cleans up, it would take back the space before a point."""
    tokenizer = words("cleaning")
    shown = [example("serve").Text(tokenizer).text([1, 97][:n], [2]) for n in (1, 2)]
    assert tokenizer.decode([1, 97]) == "w1." and shown == [" w1", " w1 ."]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "at least one message"),
        ({}, "at least one message"),
        ("w1", "at least one message"),
        ([[{"role": "user", "content": "w1"}]], "an object with a role"),
        ([{"content": "w1"}], "an object with a role"),
        ([{"role": "user"}], "is a text, or a list of parts that are texts"),
        ([{"role": "user", "content": 4}], "is a text, or a list of parts that are texts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "parts that are texts"),
    ],
)
def test_messages_that_no_template_has_are_refused(server: Server, messages: Any, why: str) -> None:
    got, content = server.ask("POST", "/v1/chat/completions", {"messages": messages})
    assert got == 400 and why in content["error"]["message"]


def test_parts_of_a_message_are_its_text() -> None:
    parts = [{"type": "text", "text": "w5 w6"}, {"type": "text", "text": "w7"}]
    with scripted([3]) as there:
        there.ask("POST", "/v1/chat/completions", {"messages": [{"role": "u", "content": parts}]})
        assert there.worker.engine.said["ids"] == [5, 6, 7, 1]
        there.complete(prompt=[7], stop_token_ids=[4])
        assert there.worker.engine.said["stop"] == [4, 97]


def test_models_and_health(server: Server) -> None:
    assert server.ask("GET", "/health") == (200, {"status": "ok"})
    assert server.ask("GET", "/v1/models")[1]["data"][0]["id"] == "small"


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ("{", 400, "the body is no JSON"),
        (b"\xff\xfe", 400, "the body is no JSON"),
        ("[1]", 400, "no object with the field 'prompt'"),
        ("{}", 400, "no object with the field 'prompt'"),
        ("[" * 1900, 400, "the body is no JSON"),
        (json.dumps({"prompt": "w1 " * 1000}), 413, "more than 2,000 bytes"),
        ({**SAID, "max_token": 3}, 400, "unknown field 'max_token'"),
        ({**SAID, "n": 2}, 400, "n = 2 is not served"),
        ({**SAID, "logprobs": 0}, 400, "logprobs = 0 is not served"),
        ({**SAID, "n": True}, 400, "n = true is not served"),
        ({**SAID, "stop_token_ids": 5}, 400, "stop_token_ids is a list"),
        ({**SAID, "stop_token_ids": {}}, 400, "stop_token_ids is a list"),
        ({**SAID, "logprobs": 3}, 400, "logprobs = 3 is not served"),
        ({**SAID, "model": "large"}, 404, "'small' is"),
        ({**SAID, "prompt": []}, 400, "an empty prompt"),
        ({**SAID, "prompt": None}, 400, "no object with the field 'prompt'"),
        ('{"prompt": "w1 \\ud800"}', 400, "half a character"),
        ({**SAID, "temperature": 10**400}, 400, "temperature is 1000"),
        ({**SAID, "stop": ""}, 400, "an empty text"),
        ({**SAID, "stop": ["w1", ""]}, 400, "an empty text"),
        ({**SAID, "prompt": ""}, 400, "an empty prompt"),
        ({**SAID, "prompt": ["w1", "w2"]}, 400, "each prompt is a request of its own"),
        ({**SAID, "prompt": [97]}, 400, "the vocabulary has 97 tokens"),
        ({**SAID, "prompt": [True]}, 400, "a list of tokens"),
        ({**SAID, "max_tokens": 62}, 400, "the context of this engine has 64 tokens"),
        ({**SAID, "temperature": "hot"}, 400, "it is a number"),
        ({**SAID, "stop": 3}, 400, "stop is a text"),
        ({**SAID, "stream": 1}, 400, "stream is true or false"),
        ({**SAID, "stream": True, "top_p": 2}, 400, "a share of all probability"),
    ],
)
def test_what_is_wrong_is_said_and_the_server_goes_on(
    server: Server, body: Any, status: int, why: str
) -> None:
    got, content = server.ask("POST", "/v1/completions", body)
    assert got == status and why in content["error"]["message"]
    assert server.ask("GET", "/health")[0] == 200


def test_other_paths_and_methods(server: Server) -> None:
    connection = server.connect()
    for method, path, status in (("GET", "/", 404), ("GET", "/v1/completions", 405)):
        connection.request(method, path)
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
        assert answer.status == status and f"{method} {path}: " in error["message"]
    assert answer.headers["allow"] == "POST"


def test_a_fault_of_a_tokenizer_is_one_of_its_request(capfd: Any) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a tokenizer that fails")

    with scripted([3], broken) as there:
        status, content = there.ask("POST", "/v1/completions", {"prompt": "w1"})
        assert status == 500 and "a tokenizer that fails" in content["error"]["message"]
        assert there.ask("GET", "/health")[0] == 200
    assert "a tokenizer that fails" in capfd.readouterr().err


# -- clients that go away --------------------------------------------------------------------------


def test_a_client_that_goes_away_in_its_request(server: Server, capfd: Any) -> None:
    for rest in ("content-length: 100", "transfer-encoding: chunked"):
        connection = socket.create_connection(("127.0.0.1", server.port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{rest}\r\n\r\n"
        connection.sendall(head.encode() + b"2\r\n{}\r\n")
        connection.close()
    (choice,) = server.complete(**SAID)["choices"]
    assert choice["text"] == behind(greedy(model(), PROMPT, 6))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(server: Server, stream: bool) -> None:
    """Three clients of long texts for two slots go; the next one is answered."""
    body = json.dumps({**SAID, "max_tokens": 60, "stream": stream})
    for _ in range(3):
        connection = socket.create_connection(("127.0.0.1", server.port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        if stream:
            assert connection.recv(10)
        connection.close()
    turns = server.worker.engine._turns
    (choice,) = server.complete(**SAID)["choices"]
    assert choice["text"] == behind(greedy(model(), PROMPT, 6))
    assert eventually(lambda: not turns._all and not server.worker._listeners)


# -- failures --------------------------------------------------------------------------------------


class Broken:
    """An engine that fails in its first step, and does not know negative seeds."""

    eos = ()

    def submit(self, *, seed: int | None, **_: Any) -> int:
        if seed is not None:
            raise OverflowError("too large")
        return 0

    def step(self) -> int:
        raise RuntimeError("no memory")


def test_a_failure_of_the_engine_reaches_all_clients() -> None:
    with listening(Broken()) as there:

        def run() -> None:
            with pytest.raises(RuntimeError):
                there.worker.run()

        with running(run):
            status, content = there.ask("POST", "/v1/completions", {**SAID, "seed": 3})
            assert status == 500 and "too large" in content["error"]["message"]
            status, content = there.ask("POST", "/v1/completions", SAID)
        assert status == 503 and "no memory" in content["error"]["message"]
        assert there.ask("GET", "/health")[0] == 503
        status, content = there.ask("POST", "/v1/completions", SAID)
        assert status == 503 and "no memory" in content["error"]["message"]


def test_those_who_wait_hear_of_the_end() -> None:
    """One is computed, and one waits for the slot."""
    engine = mf.generate(model(), max_batch=1, chunk=0, context=64)
    with listening(engine) as there:
        got: list[tuple[int, Any]] = []
        body = {**SAID, "max_tokens": 61}
        ask = partial(there.ask, "POST", "/v1/completions", body)
        clients = [threading.Thread(target=lambda: got.append(ask())) for _ in range(2)]
        there.worker.engine = Slow(engine)
        with running(there.worker.run):
            for x in clients:
                x.start()
            assert eventually(lambda: len(there.worker._listeners) == 2)
            there.worker.stop()
            for x in clients:
                x.join(60)
    assert [status for status, _ in got] == [503, 503]
    assert "the server ends" in got[0][1]["error"]["message"]


class Slow:
    """An engine whose steps take a while."""

    def __init__(self, engine: Any) -> None:
        self.submit, self.result, self.eos = engine.submit, engine.result, engine.eos

    def step(self) -> int:
        time.sleep(0.01)
        return 1
