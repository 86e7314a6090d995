"""Engines on real ranks: rank 0 takes requests, and tokens are those of one rank."""

from __future__ import annotations

import json
import random
import resource
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers import sampling
from helpers.causal import drain, greedy, model_of, prompts
from helpers.serving import eventually, listening, running

import mdfuse as mf
from mdfuse import DeviceMesh

#: Bytes that a process may take between the middle and the end of many requests.
GROWTH = 8 << 20


def served(comm: mf.Communicator, mesh: DeviceMesh, **sizes: Any) -> None:
    """Requests of drawn lengths that come one after the other, some cancelled, some drawn."""
    model = model_of("llama")
    engine = mf.generate(model, mesh, max_batch=3, context=32, **sizes)
    if comm.rank:
        with pytest.raises(mf.ProgramError, match="rank 0 takes requests"):
            engine.submit([1])
        engine.follow()
        return
    draw, asked = random.Random(5), dict[int, tuple[list[int], int]]()
    for n, ids in enumerate(prompts([draw.randint(1, 20) for _ in range(9)])):
        count = draw.randint(1, 9)
        asked[engine.submit(ids, count)] = ids, count
        if n % 3 == 2:
            engine.cancel(engine.submit(ids, count))
            engine.step()
    drawn = [engine.submit([7, 9], 5, temperature=1.2, top_p=0.9, seed=4) for _ in range(2)]
    drain(engine)
    for id_, (ids, count) in asked.items():
        assert engine.result(id_).tokens == greedy(model, ids, count)
    assert engine.result(drawn[0]).tokens == engine.result(drawn[1]).tokens
    engine.close()


@pytest.mark.world(2)
def test_two_ranks(comm: mf.Communicator) -> None:
    served(comm, DeviceMesh.arange(tp=2), chunk=4, pages=9, page_size=5)


@pytest.mark.world(2)
def test_two_ranks_go_ahead(comm: mf.Communicator) -> None:
    """Each token stays on its rank; the other one hears a step before rank 0 has read the last."""
    served(comm, DeviceMesh.arange(tp=2), chunk=4, pages=9, page_size=5, ahead=True)


@pytest.mark.world(2)
@pytest.mark.parametrize("ahead", [False, True])
def test_each_rank_steps_as_often(comm: mf.Communicator, ahead: bool) -> None:
    """A call may begin two steps, one, or none: all ranks return the same number of requests."""
    model = model_of("llama", num_hidden_layers=1)
    engine = mf.generate(model, max_batch=2, chunk=0, context=40, ahead=ahead)
    (ids,) = prompts([2])
    for n in (1, 5, 2):
        if comm.rank == 0:
            asked = [engine.submit(ids, most) for most in (n, 1)]
        counts = [engine.step()]
        while counts[-1]:
            counts.append(engine.step())
        assert counts == [2, 2, *[1] * (n - 1), 0]
        if comm.rank == 0:
            assert engine.result(asked[0]).tokens == greedy(model, ids, n)
    engine.close()


@pytest.mark.world(2)
def test_a_failure_of_rank_0_is_one_of_all(comm: mf.Communicator) -> None:
    engine = mf.generate(model_of("llama", num_hidden_layers=1), max_batch=1, chunk=0, context=8)
    if comm.rank:
        with pytest.raises(mf.ProgramError, match=r"rank 0 failed\n.*no memory"):
            engine.follow()
        return

    def integers(*_: Any) -> Any:
        raise RuntimeError("no memory")

    engine._turns.integers = integers  # type: ignore[method-assign, assignment]
    engine.submit([1])
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step()
    with pytest.raises(mf.ProgramError, match="no memory"):
        engine.submit([1])


@pytest.mark.world(2)
def test_a_server_of_two_ranks(comm: mf.Communicator) -> None:
    """Clients come beside each other, one goes away: answers are those of one rank."""
    model = model_of("llama", num_hidden_layers=1)
    engine = mf.generate(model, max_batch=2, chunk=0, context=32, pages=8, page_size=8)
    if comm.rank:
        engine.follow()
        return
    with listening(engine) as server:
        got: dict[int, Any] = {}

        def ask(n: int) -> None:
            got[n] = server.complete(prompt=[n + 1, 5], max_tokens=n + 2, temperature=0)

        def clients() -> None:
            gone = socket.create_connection(("127.0.0.1", server.port))
            body = b'{"prompt": [3], "max_tokens": 30}'
            gone.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: ")
            gone.sendall(str(len(body)).encode() + b"\r\n\r\n" + body)
            gone.close()
            threads = [threading.Thread(target=ask, args=(n,)) for n in range(5)]
            for x in threads:
                x.start()
            for x in threads:
                x.join()
            server.worker.stop()

        with running(clients):
            server.worker.run()
    for n in range(5):
        assert got[n]["choices"][0]["token_ids"] == [*greedy(model, [n + 1, 5], n + 2)]
    engine.close()


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.world(2)
def test_many_requests_of_clients(comm: mf.Communicator) -> None:
    """Six clients ask, draw, wait for stops, and leave: no answer is lost, and nothing grows."""
    count = sampling.of(1000, 60)
    model = model_of("llama", num_hidden_layers=1)
    engine = mf.generate(model, max_batch=4, chunk=4, context=32, pages=12, page_size=8)
    if comm.rank:
        steps, before = 0, 0
        while engine._followed() is not None:
            steps += 1
            before = resident() if steps == count // 2 else before
        assert steps > count // 2 and resident() - before < GROWTH
        return
    pool = prompts([1, 3, 9, 14, 5, 20, 2, 11], 3)
    wanted = [greedy(model, x, 9) for x in pool]
    draw, left, wrong = random.Random(7), [*range(count)], list[Any]()
    asked = [(draw.randrange(8), draw.randint(1, 9), draw.random()) for _ in left]
    before = 0

    def client(server: Any) -> None:
        nonlocal before
        while left:
            n = left.pop()
            before = resident() if n == count // 2 else before
            which, most, kind = asked[n]
            said = {"prompt": pool[which], "max_tokens": most, "temperature": 0}
            if kind < 0.1:
                leave(server.port, {**said, "stream": kind < 0.05})
                continue
            drawn = {"temperature": 2.0, "seed": which, "top_k": 20} if kind > 0.9 else {}
            (choice,) = server.complete(**{**said, **drawn})["choices"]
            tokens = tuple(choice["token_ids"])
            if len(tokens) != most or (not drawn and tokens != wanted[which][:most]):
                wrong.append((n, tokens, wanted[which][:most]))

    with listening(engine) as server:

        def clients() -> None:
            threads = [threading.Thread(target=client, args=(server,)) for _ in range(6)]
            for x in threads:
                x.start()
            for x in threads:
                x.join()
            assert eventually(lambda: not server.worker._listeners)
            server.worker.stop()

        with running(clients):
            server.worker.run()
    assert not wrong and not left
    turns = engine._turns
    assert not turns._all and sorted(turns.pages) == [*range(1, 13)] and len(turns._slots) == 4
    assert resident() - before < GROWTH
    engine.close()


def leave(port: int, said: dict[str, Any]) -> None:
    """Ask, and go away; where it is a stream, behind its first event."""
    body = json.dumps(said).encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        if said["stream"]:
            assert connection.recv(10)


@pytest.mark.world(4)
def test_four_ranks(comm: mf.Communicator) -> None:
    """Heads are fewer than ranks along tp and cp together; positions are split, too."""
    served(comm, DeviceMesh.arange(tp=2, cp=2), chunk=0)
