"""A server on loopback that speaks OpenAI's shapes, well or badly, and what becomes of a run on it."""

import gzip
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import MODULE, edge_eval_, invoke

from edge_eval import endpoint as module
from edge_eval.compare import compare
from edge_eval.endpoint import ATTEMPTS, Endpoint, check_url, open_endpoint, read_key
from edge_eval.errors import EdgeEvalError, EndpointError, OptionError, RecordError
from edge_eval.evaluate import choose_scoring, evaluate
from edge_eval.letters import LATIN
from edge_eval.rescore import rescore
from edge_eval.run_record import read_record
from edge_eval.schema import GeneratedText, LetterLogits, RunConfig, RunRecord, Status
from edge_eval.summary import summarize
from edge_eval.verdict import describe

SECRET = "sk-loopback-0123456789"  # noqa: S105 - no key of anyone
TOP = {"A": -1.0, " B": -0.5, "B": -2.0, "The": -0.1, "C": -3.0}

Reply = Callable[["Handler", dict[str, Any]], None]


class Server(ThreadingHTTPServer):
    """Answers each request by the next entry of ``plan``, or as a healthy server does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.plan: list[Reply] = []
        self.healthy: Reply = completion()
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.lock = threading.Lock()
        self.n_at_once = self.most_at_once = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that did not wait for its answer is what some tests are about."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, _, body in self.requests]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.requests.append((self.path, dict(self.headers), body))
            reply = server.plan.pop(0) if server.plan else server.healthy
            server.n_at_once += 1
            server.most_at_once = max(server.most_at_once, server.n_at_once)
        self.is_counted = True
        try:
            reply(self, body)
        finally:
            self.leave()

    def leave(self) -> None:
        """Count the request as done: before its last byte, for then the next may come."""
        with self.server.lock:
            self.server.n_at_once -= self.is_counted
            self.is_counted = False

    def send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.leave()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


def completion(text: str = " B", top: Any = TOP, *, llama_cpp: bool = False) -> Reply:
    """What a healthy server says: ``top`` where log-probabilities are asked for."""

    def reply(handler: Handler, body: dict[str, Any]) -> None:
        entries = [{"token": token, "logprob": value} for token, value in (top or {}).items()]
        chat_form = {"content": [{"token": text, "logprob": -0.5, "top_logprobs": entries}]}
        is_chat = handler.path.endswith("/chat/completions")
        told: Any = None
        if body.get("logprobs") and top is not None:
            told = chat_form if is_chat or llama_cpp else {"tokens": [text], "top_logprobs": [top]}
        choice = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        answer = {"choices": [{**choice, "logprobs": told}], "usage": {"prompt_tokens": 77}}
        handler.send(200, json.dumps(answer).encode())

    return reply


def failure(status: int, message: str = "no", *, code: str = "", **headers: str) -> Reply:
    content = json.dumps({"error": {"message": message, "code": code}}).encode()
    return lambda handler, _: handler.send(status, content, **headers)


def raw(content: bytes, status: int = 200) -> Reply:
    return lambda handler, _: handler.send(status, content)


def slow(seconds: float) -> Reply:
    def reply(handler: Handler, body: dict[str, Any]) -> None:
        time.sleep(seconds)
        completion()(handler, body)

    return reply


def dripping(start: bytes, drop: bytes, seconds: float = 4) -> Reply:
    """An answer of which a little comes at a time; in the end all of it, and a healthy one."""

    def reply(handler: Handler, body: dict[str, Any]) -> None:
        handler.wfile.write(start)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            handler.wfile.write(drop)
            time.sleep(0.05)
        content = b'{"choices": [{"text": " B"}]}'
        is_body = start.endswith(b"\r\n\r\n")
        handler.wfile.write(content if is_body else b"HTTP/1.0 200 OK\r\n\r\n" + content)

    return reply


def flood(seconds: float = 4) -> Reply:
    """Interim answers, as fast as they can be sent."""

    def reply(handler: Handler, body: dict[str, Any]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
        completion()(handler, body)

    return reply


def endless(n_bytes: int) -> Reply:
    """Spaces without a length, and far behind any answer's end an end after all."""

    def reply(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(n_bytes >> 20):
            handler.wfile.write(b" " * (1 << 20))
        handler.wfile.write(b'{"choices": [{"text": " B"}]}')

    return reply


def packed(encoding: str, times: int = 1, n_spaces: int = 0) -> Reply:
    """A healthy answer in gzip, behind many spaces."""
    content = b" " * n_spaces + b'{"choices": [{"text": " B"}]}'
    for _ in range(times):
        content = gzip.compress(content)
    return lambda handler, _: handler.send(200, content, content_encoding=encoding)


def dropped(handler: Handler, body: dict[str, Any]) -> None:
    """The connection is reset in the middle of an answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices"')
    handler.wfile.flush()
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.close_connection = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.05)
    for name in module.KEY_NAMES:
        monkeypatch.delenv(name, raising=False)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def ask(server: Server) -> Iterator[Endpoint]:
    endpoint = open_endpoint(server.url, "tiny", is_chat=False, timeout_s=5)
    yield endpoint
    endpoint.close()


def config_of(server: Server, **settings: Any) -> RunConfig:
    fixed = {"endpoint": server.url, "model": "tiny", "scenario": "endpoint", "limit": 8}
    return RunConfig(**{**fixed, **settings})


def letters_of(answer: LetterLogits | None) -> list[float]:
    assert answer is not None
    return [float(value) for value in answer.values]


# ---- one request


def test_letters_are_read_as_the_protocol_scores_them(ask: Endpoint) -> None:
    plain = letters_of(ask.read_letters({"prompt": "Answer: "}, LATIN, 20))
    spaced = letters_of(ask.read_letters({"prompt": "Answer:"}, [f" {x}" for x in LATIN], 20))
    np.testing.assert_equal(plain, [-1, -2, -3, np.nan, np.nan])
    np.testing.assert_equal(spaced, [np.nan, -0.5, np.nan, np.nan, np.nan])


def test_a_chats_letter_may_have_a_space_before_it(server: Server) -> None:
    endpoint = open_endpoint(server.url, "tiny", is_chat=True, timeout_s=5)
    values = letters_of(endpoint.read_letters({"messages": []}, LATIN, 7))
    np.testing.assert_equal(values, [-1, -0.5, -3, np.nan, np.nan])
    path, _, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert (body["logprobs"], body["top_logprobs"]) == (True, 7)
    endpoint.close()


def test_llama_cpps_own_form_is_read(server: Server, ask: Endpoint) -> None:
    server.healthy = completion(llama_cpp=True)
    np.testing.assert_equal(
        letters_of(ask.read_letters({"prompt": ""}, LATIN[:3], 20)), [-1, -2, -3]
    )


def test_a_request_is_greedy_and_short(server: Server, ask: Endpoint) -> None:
    ask.read_letters({"prompt": "سؤال "}, LATIN, 20)
    ask.read_text({"prompt": "سؤال "}, 12)
    first, second = server.bodies()
    assert first == {
        "model": "tiny",
        "prompt": "سؤال ",
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 20,
    }
    assert second == {"model": "tiny", "prompt": "سؤال ", "max_tokens": 12, "temperature": 0}


def test_a_text_is_read_with_the_servers_count_of_tokens(ask: Endpoint) -> None:
    answer = ask.read_text({"prompt": ""}, 1)
    assert isinstance(answer, GeneratedText)
    assert (answer.text, answer.n_tokens) == (" B", 77)
    assert 0 < answer.latency_s < 5


@pytest.mark.parametrize("message", ["", None])
def test_an_empty_answer_is_a_text(message: Any, server: Server, ask: Endpoint) -> None:
    content = {"choices": [{"message": {"content": message}, "logprobs": None}]}
    server.healthy = raw(json.dumps(content).encode())
    answer = ask.read_text({"prompt": ""}, 1)
    assert answer is not None
    assert (answer.text, answer.n_tokens) == ("", None)
    assert all(np.isnan(letters_of(ask.read_letters({"prompt": ""}, LATIN, 5))))


# ---- what is tried again


@pytest.mark.parametrize(
    "bad",
    [failure(429), failure(500), failure(503), raw(b"<html>", 502), dropped],
    ids=["429", "500", "503", "502 html", "dropped"],
)
def test_what_may_pass_is_tried_again(bad: Reply, server: Server, ask: Endpoint) -> None:
    ask.read_text({"prompt": ""}, 1)  # a run's first request gives up sooner
    server.plan = [bad] * (ATTEMPTS - 1)
    answer = ask.read_text({"prompt": ""}, 1)
    assert answer is not None
    assert answer.text == " B"
    assert ask.n_retries == ATTEMPTS - 1
    assert len(server.requests) == ATTEMPTS + 1


def test_after_enough_attempts_it_is_given_up(server: Server, ask: Endpoint) -> None:
    ask.read_text({"prompt": ""}, 1)
    server.healthy = failure(503, "the model is loading")
    with pytest.raises(EndpointError, match=rf"503: the model is loading, after {ATTEMPTS} att"):
        ask.read_text({"prompt": ""}, 1)
    assert len(server.requests) == ATTEMPTS + 1


def test_a_wait_that_the_server_asks_for_is_kept_and_not_part_of_the_latency(
    server: Server, ask: Endpoint
) -> None:
    server.plan = [failure(429, retry_after="1")]
    start = time.perf_counter()
    answer = ask.read_text({"prompt": ""}, 1)
    assert time.perf_counter() - start >= 1
    assert answer is not None
    assert answer.latency_s < 1


def test_a_date_is_a_wait_too() -> None:
    from email.utils import formatdate

    assert module._retry_after_s(formatdate(time.time() + 30, usegmt=True)) == pytest.approx(
        30, abs=2
    )
    assert module._retry_after_s(formatdate(time.time() - 30, usegmt=True)) == 0
    absurd = [
        "Fri, 31 Dec 9999 23:59:59 -9999",
        "Mon, 01 Jan 0001 00:00:00 +2359",
        "Mon, 01 Jan 2024 00:00:00 +99999999999999999999",
        "Mon, 01 Jan 0001 00:00:00 -0000",
    ]
    for date in absurd:
        module._retry_after_s(date)
    for nothing in ("soon", "nan", "1e999", ", , ,", absurd[2], None):
        assert module._retry_after_s(nothing) is None


def test_too_long_a_wait_is_given_up_at_once(server: Server, ask: Endpoint) -> None:
    server.plan = [failure(429, "come back tomorrow", retry_after="86400")]
    with pytest.raises(EndpointError, match="asks to wait 86,400 s"):
        ask.read_text({"prompt": ""}, 1)
    assert len(server.requests) == 1


def test_a_slow_answer_is_given_up_in_time(server: Server) -> None:
    endpoint = open_endpoint(server.url, "tiny", is_chat=False, timeout_s=0.2)
    server.healthy = slow(1)
    start = time.perf_counter()
    with pytest.raises(EndpointError, match="in time"):
        endpoint.read_text({"prompt": ""}, 1)
    assert time.perf_counter() - start < 1
    endpoint.close()


HEAD = b"HTTP/1.0 200 OK\r\n"


@pytest.mark.parametrize(
    "bad",
    [
        dripping(HEAD + b"\r\n", b" "),
        dripping(HEAD + b"Content-Length: 9999\r\n\r\n", b" "),
        dripping(HEAD, b"X-Drop: 1\r\n"),
        dripping(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        dripping(b"HTTP/1.0 404 No\r\n\r\n", b" "),
        flood(),
    ],
    ids=["body", "body of a length", "headers", "interim answers", "refusal", "flood"],
)
def test_an_answer_that_drips_is_given_up_in_time(bad: Reply, server: Server) -> None:
    endpoint = open_endpoint(server.url, "tiny", is_chat=False, timeout_s=0.3)
    server.healthy = bad
    start = time.perf_counter()
    with pytest.raises(EndpointError, match=r"in time \(--timeout\), after 2 attempts"):
        endpoint.read_text({"prompt": ""}, 1)
    assert time.perf_counter() - start < 3
    server.healthy = completion()
    server.plan = []
    assert endpoint.read_text({"prompt": ""}, 1) is not None
    endpoint.close()


def test_a_request_out_of_time_ends_no_other(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    endpoint = open_endpoint(server.url, "tiny", is_chat=False, timeout_s=1.5)

    def reply(handler: Handler, body: dict[str, Any]) -> None:
        is_slow = body["prompt"] == "drip"
        (dripping(HEAD + b"\r\n", b" ") if is_slow else slow(0.1))(handler, body)

    server.healthy = reply

    def ask(prompt: str) -> str | None:
        try:
            answer = endpoint.read_text({"prompt": prompt}, 1)
        except EndpointError:
            return "late"
        return answer.text if answer else ""

    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(ask, ["drip", *["good"] * 12, "drip"]))
    assert texts == ["late", *[" B"] * 12, "late"]
    assert sum(body["prompt"] == "good" for body in server.bodies()) == 12
    endpoint.close()


def test_a_connection_is_kept_for_the_next_request(
    server: Server, ask: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "protocol_version", "HTTP/1.1")
    ports = []

    def reply(handler: Handler, body: dict[str, Any]) -> None:
        ports.append(handler.client_address[1])
        (failure(400, "context length") if len(ports) == 3 else completion())(handler, body)

    server.healthy = reply
    for _ in range(6):
        ask.read_text({"prompt": ""}, 1)
    assert len(ports) == 6
    assert len(set(ports)) == 1


def test_an_endpoint_that_is_closed_lets_go_of_what_it_waits_for(server: Server) -> None:
    endpoint = open_endpoint(server.url, "tiny", is_chat=False, timeout_s=30)
    server.healthy = slow(5)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(endpoint.read_text, {"prompt": ""}, 1)
        while not server.requests:
            time.sleep(0.01)
        start = time.perf_counter()
        endpoint.close()
        with pytest.raises(EndpointError):
            waiting.result()
        assert time.perf_counter() - start < 3
    with pytest.raises(EndpointError, match="not asked any more"):
        endpoint.read_text({"prompt": ""}, 1)


def test_a_server_that_is_not_there_is_told_in_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(EndpointError, match=r"cannot be reached.*Is the server running") as told:
        open_endpoint(url, "tiny", is_chat=False, timeout_s=5).read_text({"prompt": ""}, 1)
    assert "\n" not in str(told.value)
    assert url in str(told.value)


# ---- what is not


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (failure(401), "wants a key"),
        (failure(403), "wants a key"),
        (failure(404, "model tiny does not exist"), "--endpoint-kind chat"),
        (failure(400, "logprobs must be at most 5"), "--top-logprobs"),
        (failure(422, "what is this"), "what is this"),
        (failure(301, location="http://127.0.0.1:1/v2/completions"), "to http://127.0.0.1:1/v2: g"),
        (failure(308, location="/proxy/v1/completions"), "/proxy/v1: give that one as --endpoint"),
        (failure(302, location="file:///etc/passwd"), "302) to what is no other endpoint"),
        (failure(302, location="https://login/?token=1"), "302) to what is no other endpoint"),
        (failure(302, location="http://[/"), "302) to what is no other endpoint"),
        (failure(301, location="/v1/completions/"), "301) to what is no other endpoint"),
        (raw(b"", 400), "status 400 and does not say why: check --endpoint"),
        (raw(b" \n", 418), "status 418 and does not say why"),
        (endless(3 * module.MAX_ANSWER_BYTES), "more than 16 MB"),
        (packed("gzip", n_spaces=4 * module.MAX_ANSWER_BYTES), "more than 16 MB"),
        (packed("gzip, gzip", 2), "in the encoding gzip, gzip, which was not asked for"),
        (packed("zstd"), "in the encoding zstd"),
        (raw(b"<html>hello</html>"), "no completion: <html>hello"),
        (raw(b"\xff\xfe\x00"), "no completion"),
        (raw(b""), "no completion: nothing"),
        (raw(b"[" * 100_000), "no completion"),
        (raw(b"[]"), "no completion"),
        (raw(b'{"choices": []}'), "no completion"),
        (raw(b'{"choices": [{"text": 5}]}'), "no completion"),
        (raw(b'{"choices": [{"text": "A", "logprobs": {"content": [{}]}}]}'), "no completion"),
        (raw(b'{"choices": [{"text": "A", "logprobs": {"top_logprobs": [5]}}]}'), "no completion"),
    ],
)
def test_what_will_not_pass_is_one_line_at_once(
    bad: Reply, words: str, server: Server, ask: Endpoint
) -> None:
    server.healthy = bad
    with pytest.raises(EndpointError) as told:
        ask.read_letters({"prompt": ""}, LATIN, 5)
    assert words in str(told.value)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 800
    assert len(server.requests) == 1


def test_an_answer_may_come_in_gzip(server: Server, ask: Endpoint) -> None:
    server.healthy = packed("gzip", n_spaces=1000)
    answer = ask.read_text({"prompt": ""}, 1)
    assert answer is not None
    assert answer.text == " B"
    assert server.requests[0][1]["Accept-Encoding"] == "gzip"


@pytest.mark.parametrize("charset", ["idna", "undefined", "zlib_codec", "rot13", "no-such"])
@pytest.mark.parametrize("status", [404, 200])
def test_the_charset_a_server_names_changes_nothing(
    status: int, charset: str, server: Server, ask: Endpoint
) -> None:
    content = b"\xff\xfe no such page"
    content_type = f"text/plain; charset={charset}"
    server.healthy = lambda h, _: h.send(status, content, content_type=content_type)
    with pytest.raises(EndpointError, match="\ufffd\ufffd no such page"):
        ask.read_text({"prompt": ""}, 1)


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), -1e300, 1e39, float("nan")],
    ids=["400 digits", "-400 digits", "-1e300", "1e39", "nan"],
)
@pytest.mark.parametrize("llama_cpp", [True, False])
def test_a_logprob_that_is_no_finite_float_is_as_if_not_told(
    value: float, llama_cpp: bool, server: Server, ask: Endpoint
) -> None:
    server.healthy = completion(top={"A": value, "B": -3e38}, llama_cpp=llama_cpp)
    values = letters_of(ask.read_letters({"prompt": ""}, LATIN[:2], 5))
    np.testing.assert_equal(values, [np.nan, float(np.float32(-3e38))])


@pytest.mark.parametrize(
    "count", [pytest.param(10**400, id="400 digits"), 1 << 31, 0, -5, True, 1.5, "7", None]
)
def test_a_count_of_tokens_that_is_none_is_unknown(
    count: Any, server: Server, run: Callable[..., RunRecord]
) -> None:
    content = {"choices": [{"text": "A"}], "usage": {"prompt_tokens": count}}
    server.healthy = raw(json.dumps(content).encode())
    record = run(scoring="generated", limit=1)
    assert [p.n_tokens for p in record.predictions] == [0]


@pytest.mark.parametrize(
    "bad",
    [
        failure(400, "too many", code="context_length_exceeded"),
        failure(400, "This model's maximum context length is 512 tokens"),
        failure(400, "the request exceeds the available context size"),
        failure(500, "the input length exceeds the context length"),
    ],
)
def test_a_prompt_that_is_too_long_is_no_error(bad: Reply, server: Server, ask: Endpoint) -> None:
    server.healthy = bad
    assert ask.read_letters({"prompt": ""}, LATIN, 5) is None
    assert ask.read_text({"prompt": ""}, 5) is None


def test_the_limits_newer_name_is_used_where_a_server_wants_it(
    server: Server, ask: Endpoint
) -> None:
    def strict(handler: Handler, body: dict[str, Any]) -> None:
        old = "max_tokens" in body
        refusal = failure(400, "'max_tokens' is not supported, use 'max_completion_tokens'")
        (refusal if old else completion())(handler, body)

    server.healthy = strict
    for _ in range(2):
        answer = ask.read_text({"prompt": ""}, 9)
        assert answer is not None
        assert answer.text == " B"
    assert [body.get("max_completion_tokens") for body in server.bodies()] == [None, 9, 9]


# ---- addresses and keys


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
        ("http://localhost:11434/v1/", "http://localhost:11434/v1"),
        ("https://API.example.com/v1/chat/completions", "https://api.example.com/v1"),
        ("https://api.example.com/openai/v1/completions", "https://api.example.com/openai/v1"),
        (" http://[::1]:8080 ", "http://[::1]:8080/v1"),
    ],
)
def test_an_address_has_one_form(given: str, asked: str) -> None:
    assert check_url(given) == asked
    assert check_url(asked) == asked


@pytest.mark.parametrize(
    "url",
    [
        f"http://me:{SECRET}@127.0.0.1/v1",
        f"https://{SECRET}@host/v1",
        f"https://@host/{SECRET}",
        f"https://host/v1?key={SECRET}",
        f"https://host/v1#{SECRET}",
        f"me:{SECRET}@host/v1",
        f"ftp://{SECRET}",
        f"{SECRET}",
        f"http://{SECRET} and more",
        f"http://host:{SECRET}",
        f"http:///{SECRET}",
        "",
    ],
)
def test_an_address_that_may_hold_a_secret_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(OptionError) as told:
        check_url(url)
    assert SECRET not in str(told.value)
    with pytest.raises(OptionError) as told:
        evaluate(
            RunConfig(endpoint=url or "x", model="m", scenario="endpoint"), Path("unused.jsonl")
        )
    assert SECRET not in str(told.value)


def test_a_key_meant_for_another_server_stays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.delenv("EDGE_EVAL_API_KEY", raising=False)
    assert read_key("https://api.example.com/v1") == SECRET
    assert read_key("http://127.0.0.1:8080/v1") == SECRET
    assert read_key("http://192.168.0.7:8080/v1") == ""
    monkeypatch.setenv("EDGE_EVAL_API_KEY", " own-key-of-this-server\n")
    assert read_key("http://192.168.0.7:8080/v1") == "own-key-of-this-server"


@pytest.mark.parametrize("key", [f"{SECRET}\nX-Other: 1", f"{SECRET} ä", "مفتاح"])
def test_a_key_that_cannot_be_one_is_refused_and_not_repeated(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_EVAL_API_KEY", key)
    with pytest.raises(OptionError, match="EDGE_EVAL_API_KEY") as told:
        open_endpoint("http://127.0.0.1:1/v1", "tiny", is_chat=False, timeout_s=5)
    assert key not in str(told.value)
    assert SECRET not in str(told.value)


def echo(status: int) -> Reply:
    """A server that tells everyone the key it was given, in every place there is."""

    def reply(handler: Handler, body: dict[str, Any]) -> None:
        key = handler.headers["Authorization"]
        content = {"error": {"message": key, "code": key}, "choices": [{"text": f"A. {key}"}]}
        handler.send(status, json.dumps(content).encode(), retry_after="0")

    return reply


@pytest.mark.parametrize("status", [200, 400, 401, 404, 429, 500])
def test_the_key_is_sent_and_stands_nowhere_else(
    status: int,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("EDGE_EVAL_API_KEY", SECRET)
    server.plan = [completion(), completion(), completion()]  # the first and two questions
    server.healthy = echo(status)
    path, seen = tmp_path / "record.jsonl", []
    try:
        record = evaluate(
            config_of(server, scoring="generated", max_new_tokens=9), path, on_note=seen.append
        )
        seen.append(json.dumps(summarize(record)))
        assert any("[key]" in (p.generated or "") for p in record.predictions)
    except EdgeEvalError as error:
        seen.append(str(error))
        assert status != 200
    assert all(headers["Authorization"] == f"Bearer {SECRET}" for _, headers, _ in server.requests)
    for text in (*seen, path.read_text(encoding="utf-8"), caplog.text):
        assert SECRET not in text
        assert SECRET[-8:] not in text
    assert SECRET not in repr(open_endpoint(server.url, "m", is_chat=False, timeout_s=5))


# ---- a whole run


@pytest.fixture
def run(server: Server, tmp_path: Path) -> Callable[..., RunRecord]:
    def run(name: str = "record", **settings: Any) -> RunRecord:
        return evaluate(config_of(server, **settings), tmp_path / f"{name}.jsonl")

    return run


def test_a_run_by_letters_takes_the_likeliest_letter_seen(run: Callable[..., RunRecord]) -> None:
    record = run()
    assert record.complete
    assert [p.index for p in record.predictions] == list(range(8))
    for p in record.predictions:
        assert (p.status, p.predicted, p.n_tokens) == (Status.SCORED, 0, 77)
        assert p.letter_logits[:5] == (-1, -2, -3, None, None)
        assert p.latency_s is not None
    assert record.manifest.precision == "unknown"
    assert record.manifest.source == record.config.endpoint
    assert record.scoring["tokenizer"] == "unknown"
    assert record.scoring["letter_pieces"][:2] == [["A"], ["B"]]


def test_a_row_without_any_letter_seen_is_not_scored(
    server: Server, run: Callable[..., RunRecord]
) -> None:
    # The first request is a trial.
    server.plan = [completion(), completion(top={"The": -0.1, "E": -1.0, " A": -2.0})]
    record = run()
    statuses = [p.status for p in record.predictions]
    assert statuses.count(Status.UNSEEN) == 1
    figures = summarize(record)
    assert (figures["n_unseen"], figures["n_scored"], figures["n_questions"]) == (1, 7, 8)
    assert rescore(record, "argmax").predictions == record.predictions
    with pytest.raises(OptionError, match="--top-logprobs"):
        rescore(record, "bias-corrected")


def test_lm_evals_letters_carry_their_space(run: Callable[..., RunRecord]) -> None:
    record = run(protocol="lm-eval")
    assert {p.predicted for p in record.predictions} == {1}


def test_a_prompt_too_long_for_the_server_is_counted(
    server: Server, run: Callable[..., RunRecord]
) -> None:
    server.plan = [completion(), failure(400, code="context_length_exceeded")]
    assert [p.status for p in run().predictions].count(Status.TOO_LONG) == 1


def test_prompts_are_sent_byte_for_byte(server: Server, run: Callable[..., RunRecord]) -> None:
    run()
    done = invoke("prompts", "--data", "sample", "--limit", 8, "--json")
    texts = [json.loads(line)["text"] for line in done.stdout.splitlines()]
    assert [body["prompt"] for body in server.bodies()[1:]] == texts


def test_a_chat_has_its_shots_as_turns(server: Server, run: Callable[..., RunRecord]) -> None:
    record = run(chat_template="server", system_prompt="Be short.", scoring="generated", limit=2)
    assert record.scoring["chat_template_sha256"] == "the server's"
    messages = server.bodies()[-1]["messages"]
    assert [m["role"] for m in messages] == ["system", "user"]
    assert messages[0]["content"] == "Be short."


def test_answers_are_read_from_what_is_written(
    server: Server, run: Callable[..., RunRecord]
) -> None:
    server.plan = [completion(), *[completion("الله أعلم")] * 3]
    server.healthy = completion("The answer is B.")
    record = run(scoring="generated", max_new_tokens=16)
    read = [p for p in record.predictions if p.matched]
    assert len(read) == 5
    assert {p.predicted for p in read} == {1}
    assert {p.generated for p in read} == {"The answer is B."}
    assert summarize(record)["generated"]["fallbacks"]["value"] == 3 / 8
    assert rescore(record, "generated").predictions == record.predictions


def test_requests_go_side_by_side_and_every_question_is_answered_once(
    server: Server, run: Callable[..., RunRecord]
) -> None:
    server.healthy = slow(0.5)
    record = run(limit=16, concurrency=4)
    assert 2 <= server.most_at_once <= 4
    assert [p.index for p in record.predictions] == list(range(16))
    assert len(server.requests) == 17
    assert record.environment["streams"] == 4


def test_a_run_that_the_server_ended_goes_on(server: Server, run: Callable[..., RunRecord]) -> None:
    server.plan = [completion()] * 5 + [failure(400, "out of credit")]
    with pytest.raises(EndpointError, match="out of credit"):
        run()
    asked = len(server.requests)
    record = run()
    assert record.complete
    assert len(server.requests) - asked == 1 + 8 - 4  # the trial, and what was missing
    assert [p.index for p in record.predictions] == list(range(8))


@pytest.mark.parametrize(
    "other", [{"model": "larger"}, {"top_logprobs": 5}, {"scoring": "generated"}, {"shots": 1}]
)
def test_another_run_does_not_go_on_with_it(
    other: dict[str, Any], server: Server, run: Callable[..., RunRecord]
) -> None:
    server.plan = [completion()] * 3 + [failure(400, "out of credit")]
    with pytest.raises(EndpointError):
        run()
    with pytest.raises(RecordError, match="was begun with another"):
        run(**{"data": "sample", **other})


def test_time_and_requests_at_once_may_change(
    server: Server, run: Callable[..., RunRecord]
) -> None:
    server.plan = [completion()] * 3 + [failure(400, "out of credit")]
    with pytest.raises(EndpointError):
        run()
    assert run(concurrency=2, timeout_s=9).complete


def test_a_server_without_log_probabilities_is_read_by_text(server: Server) -> None:
    assert choose_scoring(config_of(server)) == "argmax"
    server.healthy = completion(top=None)
    assert choose_scoring(config_of(server)) == "generated"
    server.healthy = failure(400, "logprobs are not supported")
    assert choose_scoring(config_of(server)) == "generated"
    server.healthy = failure(400, "no such model")
    with pytest.raises(EndpointError, match="no such model"):
        choose_scoring(config_of(server))
    server.healthy = endless(2 * module.MAX_ANSWER_BYTES)
    with pytest.raises(EndpointError, match="more than 16 MB"):
        choose_scoring(config_of(server))


def test_asking_letters_of_it_says_what_to_do(
    server: Server, run: Callable[..., RunRecord], tmp_path: Path
) -> None:
    server.healthy = completion(top=None)
    with pytest.raises(EndpointError, match="--scoring generated"):
        run()
    assert not (tmp_path / "record.jsonl").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": ""}, "--model NAME"),
        ({"chat_template": "auto"}, "--endpoint-kind chat"),
        ({"reuse": "shared"}, "--concurrency"),
        ({"threads": 2}, "--concurrency"),
        ({"permute": True}, "--permute"),
        (
            {"protocol": "oall", "prompt": "ar", "letters": "arabic", "scoring": "per-character"},
            "sin",
        ),
        ({"top_logprobs": 0}, "--top-logprobs"),
        ({"max_new_tokens": 5}, "--scoring generated"),
        ({"scoring": "generated", "max_new_tokens": 100_000}, "--max-new-tokens"),
        ({"scoring": "cyclic"}, "no scoring"),
        ({"timeout_s": 1e10}, "--timeout"),
        ({"timeout_s": float("nan")}, "--timeout"),
    ],
)
def test_settings_that_an_endpoint_cannot_serve_are_refused_before_it_is_asked(
    settings: dict[str, Any], words: str, server: Server, run: Callable[..., RunRecord]
) -> None:
    with pytest.raises(OptionError) as told:
        run(**settings)
    assert words in str(told.value)
    assert not server.requests


# ---- beside a model that runs here


def test_times_of_an_endpoint_are_never_set_against_local_ones(
    tiny_model: Path, run: Callable[..., RunRecord], tmp_path: Path
) -> None:
    here = evaluate(RunConfig(model=str(tiny_model), limit=8, threads=1), tmp_path / "here.jsonl")
    there = run()
    (comparison,) = compare(here, [there]).comparisons
    assert comparison.latency.value is None
    assert comparison.memory.value is None
    assert "place" in str(comparison.latency.reason)
    assert "not compared" in describe(comparison)
    assert comparison.mean_kl is None
    assert 0 <= comparison.agreement <= 1
    # A slower answer of the same server from the same client is another matter.
    slower = replace(there, predictions=tuple(replace(p, latency_s=1.0) for p in there.predictions))
    assert compare(there, [slower]).comparisons[0].latency.value is not None


# ---- the command


def test_the_command_tells_where_its_figures_were_measured(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    arguments = ["run", "--endpoint", server.url, "--model", "org/tiny:1b", "--limit", 8]
    done = edge_eval_(*arguments, "--scoring", "generated", "-o", path)
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode()
    assert "latency of the endpoint" in text
    assert "at the client, network included" in text
    assert "share answered at random" in text
    assert server.url in text
    assert "peak memory" not in text
    figures = json.loads(invoke("show", path, "--json").stdout)
    assert figures["endpoint"]["model"] == "org/tiny:1b"
    assert figures["generated"]["max_new_tokens"] == 1
    assert read_record(path).config.scoring == "generated"
    page = tmp_path / "report.html"
    invoke("report", path, "-o", page)
    assert "at the client" in page.read_text(encoding="utf-8")


def test_without_a_word_on_scoring_the_server_decides(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for top, scoring in ((TOP, "argmax"), (None, "generated")):
        server.healthy = completion(top=top)
        invoke("run", "--endpoint", server.url, "--model", "org/tiny:1b", "--limit", 4)
        (path,) = Path("runs").iterdir()
        assert path.name.startswith("org-tiny-1b--en-latin--")
        assert read_record(path).config.scoring == scoring
        path.unlink()


def test_a_run_in_which_nothing_could_be_scored_is_no_success(
    server: Server, tmp_path: Path
) -> None:
    arguments = ["run", "--endpoint", server.url, "--model", "m", "--limit", 4]
    server.healthy = completion(top={"The": -0.1})
    with pytest.raises(EndpointError, match="4 times no letter"):
        invoke(*arguments, "-o", tmp_path / "unseen.jsonl")
    server.healthy = failure(400, code="context_length_exceeded")
    with pytest.raises(EndpointError, match="4 prompts were too long"):
        invoke(*arguments, "--scoring", "generated", "-o", tmp_path / "long.jsonl")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "some-model", "--endpoint", "http://127.0.0.1:1"],
        ["run", "--endpoint", "http://127.0.0.1:1"],
        ["run", "--endpoint", "http://127.0.0.1:1", "--model", "m", "--scenario", "offline"],
        ["run", "--endpoint", "http://127.0.0.1:1", "--model", "m", "--chat-template", "auto"],
    ],
)
def test_options_that_do_not_fit_together_are_one_line(
    arguments: list[str], tmp_path: Path
) -> None:
    with pytest.raises(OptionError):
        invoke(*arguments, "-o", tmp_path / "record.jsonl")


@pytest.mark.parametrize("arguments", [["run"], ["run", "some-model", "--model", "name"]])
def test_neither_a_model_nor_an_endpoint_is_wrong_use(arguments: list[str]) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert "--endpoint URL --model NAME" in done.stderr


def test_the_packages_it_needs_are_named(
    server: Server, monkeypatch: pytest.MonkeyPatch, run: Callable[..., RunRecord]
) -> None:
    monkeypatch.setitem(sys.modules, "tenacity", None)
    with pytest.raises(OptionError, match=r"pip install 'edge-eval\[endpoint\]'"):
        run()


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT to another process")
def test_an_interrupt_does_not_wait_for_the_network(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    server.plan = [completion()] * 4
    server.healthy = slow(20)
    command = [*MODULE, "run", "--endpoint", server.url, "--model", "tiny", "--limit", "8"]
    command += ["--scoring", "argmax", "--concurrency", "2", "-o", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(server.requests) < 6 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - start < 15
    record = read_record(path)
    assert not record.complete
    assert len(record.predictions) == 3
