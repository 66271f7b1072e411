"""Prompt -> Answer, from a server that speaks OpenAI's protocol; the only user of httpx.

Two ways to ask: ``/completions`` with the prompt as it is, and ``/chat/completions``, where the
server puts the prompt into its model's chat template. What may be retried stands in RETRIED. The
key comes from the environment and goes into one header: never into a message, a text or a record.

A server may send anything, for ever: an answer has a size that it may have, and when its time is up
its connection is shut, whatever is being read of it.
"""

import contextlib
import json
import math
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any
from urllib.parse import urljoin, urlsplit

import numpy as np

from edge_eval.errors import EndpointError, OptionError
from edge_eval.schema import GeneratedText, LetterLogits

KEY_NAMES = ("EDGE_EVAL_API_KEY", "OPENAI_API_KEY")

# Too busy, or broken for the moment. 529 is Anthropic's word for overloaded.
RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
ATTEMPTS = 7
FIRST_ATTEMPTS = 2  # of a run's first request: a wrong URL should be told at once
FIRST_WAIT_S = 0.5  # doubled each time, with as much again by chance
LONGEST_WAIT_S = 60.0
LONGEST_ASKED_S = 600.0  # a server that asks for more, by Retry-After, is given up
CONNECT_S = 10.0
LONGEST_TIMEOUT_S = 86_400.0  # a socket counts no month
MIN_SECRET = 8  # characters; a shorter key ("none", "EMPTY") is no secret

# Decoded. 1,000 likeliest tokens take about 0.2 MB; what has no end does not end in our memory.
MAX_ANSWER_BYTES = 1 << 24
MAX_WORDS_BYTES = 1 << 16  # of a refusal, of which one line is told
MAX_TOKENS = (1 << 31) - 1  # of a prompt; a record takes no larger count
MAX_LOGPROB = float(np.finfo(np.float32).max)

TOO_LONG_STATUSES = frozenset({400, 413, 422, 500})
# Words in which servers say that a prompt is longer than the model can take.
_TOO_LONG = re.compile(
    r"context.{0,12}(?:length|size|window)|maximum context|prompt.{0,20}too long", re.IGNORECASE
)


# A request's first choice, the prompt's tokens where the server counts them, and its time in s.
_Answer = tuple[dict[str, Any], int | None, float]


@dataclass(frozen=True, slots=True)
class _Received:
    """What came back for a request, bounded and decoded."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    latency_s: float  # from the request to its last byte


@dataclass(slots=True, eq=False)
class _Line:
    """A client with one connection, kept for the next request, that another thread may shut."""

    client: Any
    connection: Any = None  # its socket, once there is one

    def note(self, event: str, info: Mapping[str, Any]) -> None:
        """Keep the socket, as httpx tells of it, at first without and then with TLS."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self.connection = info["return_value"].get_extra_info("socket")

    def shut(self) -> None:
        """End what is being waited for; a close would not wake it."""
        if self.connection is not None:
            with contextlib.suppress(OSError):  # closed already
                # That of a TLS socket lets go of TLS first, under the reader's feet.
                socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


class _ForTheMomentError(Exception):
    """A failure that may pass."""

    def __init__(self, what: str, retry_after_s: float | None = None) -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s


class _RefusedError(Exception):
    """A request that the server will not take, however often."""

    def __init__(self, status: int, words: str, location: str) -> None:
        super().__init__(words)
        self.status = status
        self.location = location


@dataclass(slots=True)
class Endpoint:
    """A server and the model asked of it. Thread-safe: several requests may be on their way."""

    url: str
    model: str
    is_chat: bool
    timeout_s: float  # from a request to the last byte of its answer
    open_client: Callable[[], Any] = field(repr=False)
    key: str = field(repr=False)
    n_retries: int = 0
    _attempts: int = FIRST_ATTEMPTS
    _limit: str = "max_tokens"
    _closed: threading.Event = field(default_factory=threading.Event, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _idle: list[_Line] = field(default_factory=list, repr=False)
    _busy: list[_Line] = field(default_factory=list, repr=False)

    def read_letters(
        self, request: Mapping[str, Any], letters: Sequence[str], n_top: int
    ) -> LetterLogits | None:
        """The log-probabilities of the letters among the ``n_top`` likeliest next tokens.

        A letter that is not among them is NaN. Behind a raw prompt a token must be the letter with
        its space or without, as ``letters`` says; in a chat a token with outer space counts too.
        None for a prompt that is too long.
        Errors: EndpointError when the server tells of no tokens.
        """
        asked = {"logprobs": True, "top_logprobs": n_top} if self.is_chat else {"logprobs": n_top}
        answer = self._ask(request, 1, asked)
        if answer is None:
            return None
        choice, n_tokens, latency_s = answer
        top = _top_tokens(choice)
        if top is None and _text(choice):
            raise EndpointError(
                f"{self.url} returns no log-probabilities for {self.model}: read its answers from "
                "generated text with --scoring generated."
            )
        values = np.full(len(letters), np.nan, dtype=np.float32)
        for token, value in top or ():
            letter = token.strip() if self.is_chat else token
            if letter in letters and abs(value) <= MAX_LOGPROB:
                index = letters.index(letter)
                values[index] = np.fmax(values[index], np.float32(value))
        return LetterLogits(values, latency_s, n_tokens)

    def read_text(self, request: Mapping[str, Any], max_new_tokens: int) -> GeneratedText | None:
        """What the model writes behind a prompt; None for a prompt that is too long."""
        answer = self._ask(request, max_new_tokens, {})
        if answer is None:
            return None
        choice, n_tokens, latency_s = answer
        return GeneratedText(self._clean(_text(choice)), latency_s, n_tokens)

    def gives_letters(self, request: Mapping[str, Any], n_top: int) -> bool:
        """Whether the server tells of the likeliest next tokens, by asking it once."""
        try:
            self.read_letters(request, (), n_top)
        except EndpointError as error:
            if "logprob" in str(error) or "log-prob" in str(error):
                return False
            raise
        return True

    def close(self) -> None:
        """Let go of the connections; requests on their way or waiting to be made again give up."""
        with self._lock:
            self._closed.set()
            for line in self._busy:  # closed by whoever waits for it
                line.shut()
            for line in self._idle:
                line.client.close()
            self._idle.clear()

    def _ask(
        self, request: Mapping[str, Any], max_new_tokens: int, more: Mapping[str, Any]
    ) -> _Answer | None:
        """The first choice, the prompt's tokens where the server counts them, and the time."""
        from tenacity import (
            Retrying,
            retry_if_exception_type,
            sleep_using_event,
            wait_exponential,
            wait_random,
        )

        doubled = wait_exponential(FIRST_WAIT_S, LONGEST_WAIT_S)
        apart = wait_random(0, FIRST_WAIT_S)  # those that were turned away together

        def wait(state: Any) -> float:
            asked = state.outcome.exception().retry_after_s
            return float((doubled(state) if asked is None else asked) + apart(state))

        def stop(state: Any) -> bool:
            asked = state.outcome.exception().retry_after_s or 0.0
            enough = state.attempt_number >= attempts or asked > LONGEST_ASKED_S
            return enough or self._closed.is_set()

        def count(_state: Any) -> None:
            self.n_retries += 1

        body = {"model": self.model, **request, self._limit: max_new_tokens, "temperature": 0}
        attempts = self._attempts
        retrying = Retrying(
            retry=retry_if_exception_type(_ForTheMomentError),
            stop=stop,
            wait=wait,
            sleep=sleep_using_event(self._closed),
            before_sleep=count,
            reraise=True,
        )
        try:
            answer: _Answer = retrying(self._ask_once, body | dict(more))
        except _ForTheMomentError as error:
            asked = error.retry_after_s
            given_up = (
                f"and asks to wait {asked:,.0f} s"
                if asked is not None and asked > LONGEST_ASKED_S
                else f"after {attempts} attempts"
            )
            raise EndpointError(
                f"{self.url} {error}, {given_up}. Is the server running, and is this its URL? What "
                "was answered is kept: the same command with --resume goes on."
            ) from None
        except _RefusedError as error:
            if error.status in TOO_LONG_STATUSES and _TOO_LONG.search(str(error)):
                return None
            newer = "max_completion_tokens"
            if newer in str(error) and newer not in body:  # OpenAI's word since its o1
                self._limit = newer
                return self._ask(request, max_new_tokens, more)
            raise EndpointError(self._refusal(error)) from None
        self._attempts = ATTEMPTS
        return answer

    def _ask_once(self, body: dict[str, Any]) -> _Answer:
        import httpx

        path = "/chat/completions" if self.is_chat else "/completions"
        try:
            got = self._send(self.url + path, body)
        except (httpx.TimeoutException, TimeoutError):
            raise _ForTheMomentError("does not answer in time (--timeout)") from None
        except (httpx.TransportError, zlib.error) as error:
            words = self._clean(str(error)) or type(error).__name__
            raise _ForTheMomentError(f"cannot be reached: {words}") from None
        if got.status != 200:
            words = self._words(got.content)
            is_too_long = got.status in TOO_LONG_STATUSES and _TOO_LONG.search(words)
            if got.status not in RETRIED or is_too_long:
                raise _RefusedError(got.status, words, got.headers.get("location", ""))
            raise _ForTheMomentError(
                f"answers {got.status}{': ' if words else ''}{words}",
                _retry_after_s(got.headers.get("retry-after")),
            )
        try:
            found = json.loads(got.content)
            choice = found["choices"][0]
            _text(choice)
            _top_tokens(choice)
            usage = found.get("usage") or {}
            n_tokens = usage.get("prompt_tokens")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise EndpointError(
                f"{self.url}{path} answers with something that is no completion: "
                f"{self._words(got.content) or 'nothing'}. Is this an OpenAI-compatible server?"
            ) from None
        is_count = type(n_tokens) is int and 0 < n_tokens <= MAX_TOKENS
        return choice, n_tokens if is_count else None, got.latency_s

    def _send(self, url: str, body: dict[str, Any]) -> _Received:
        """What comes back, if it does within the time and the bytes that it may take.

        Errors: TimeoutError, httpx's, zlib.error, and EndpointError for more bytes than an answer
        has.
        """
        import httpx

        line = self._take()
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            line.shut()

        def trace(event: str, info: Mapping[str, Any]) -> None:
            line.note(event, info)
            if is_late.is_set():  # before there was anything to shut
                line.shut()

        timer = threading.Timer(self.timeout_s, end)
        timer.daemon = True
        try:
            timer.start()
            start = time.perf_counter()
            asked = {"json": body, "extensions": {"trace": trace}}
            with line.client.stream("POST", url, **asked) as response:
                content = self._content(url, response, is_late)
            latency_s = time.perf_counter() - start
        except httpx.TransportError:
            if is_late.is_set():
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()
            self._give_back(line)
        if is_late.is_set():  # shut, a body without a length looks whole
            raise TimeoutError
        return _Received(response.status_code, response.headers, content, latency_s)

    def _content(self, url: str, response: Any, is_late: threading.Event) -> bytes:
        """An answer's body, or the beginning of a refusal's; EndpointError where there is no end."""
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        is_gzip = encoding in {"gzip", "x-gzip"}
        is_known = is_gzip or encoding == "identity"
        if response.status_code != 200:
            content, _ = _read_body(response, is_gzip, MAX_WORDS_BYTES, is_late)
            return content if is_known else b""
        if not is_known:
            raise EndpointError(
                f"{url} answers in the encoding {self._clean(encoding)[:100]}, which was not asked "
                "for. Is this an OpenAI-compatible server?"
            )
        content, is_whole = _read_body(response, is_gzip, MAX_ANSWER_BYTES, is_late)
        if not is_whole:
            # gives_letters() would take the option's name for a word on log-probabilities.
            raise EndpointError(
                f"{url} answers with more than {MAX_ANSWER_BYTES >> 20} MB. Is this an "
                "OpenAI-compatible server? If so, ask it for fewer of the likeliest tokens."
            )
        return content

    def _take(self) -> _Line:
        """A line that no other request is on, with its connection if it has one already."""
        with self._lock:
            if self._closed.is_set():
                raise _ForTheMomentError("is not asked any more")
            line = self._idle.pop() if self._idle else _Line(self.open_client())
            self._busy.append(line)
            return line

    def _give_back(self, line: _Line) -> None:
        with self._lock:
            self._busy.remove(line)
            if self._closed.is_set():
                line.client.close()
            else:
                self._idle.append(line)

    def _refusal(self, error: _RefusedError) -> str:
        if error.status in {401, 403}:
            # Servers repeat a part of the key here.
            which = "does not take the key" if self.key else "wants a key"
            return (
                f"{self.url} {which} (status {error.status}): set {' or '.join(KEY_NAMES)} in the "
                "environment."
            )
        if error.status in {404, 405}:
            other = "completions" if self.is_chat else "chat"
            return (
                f"{self.url} has no such address or no model {self.model} (status {error.status}"
                f"{': ' if str(error) else ''}{error}): check --endpoint and --model, or try "
                f"--endpoint-kind {other}."
            )
        if 300 <= error.status < 400 and error.location:
            return self._redirection(error)
        if not str(error):
            return (
                f"{self.url} refuses a request with status {error.status} and does not say why: "
                "check --endpoint, --endpoint-kind and --model."
            )
        hint = ""
        if "logprob" in str(error):
            hint = " Ask for fewer with --top-logprobs, or use --scoring generated."
        return f"{self.url} refuses a request with status {error.status}: {error}.{hint}"

    def _redirection(self, error: _RefusedError) -> str:
        # Not followed: the key would go to another server.
        try:
            there = check_url(urljoin(f"{self.url}/completions", error.location))
        except (ValueError, OptionError):
            there = self.url
        if there == self.url or len(there) > 300:
            return (
                f"{self.url} redirects (status {error.status}) to what is no other endpoint: check "
                "--endpoint."
            )
        return (
            f"{self.url} redirects (status {error.status}) to {self._clean(there)}: give that one "
            "as --endpoint."
        )

    def _words(self, content: bytes) -> str:
        """What a server says, on one line, short, and without the key."""
        # Of the charset that it names nothing is known.
        told = content[:MAX_WORDS_BYTES].decode("utf-8", "replace")
        text: Any = None
        try:
            text = json.loads(told)
            text = text.get("error", text)
            text = {"": text} if isinstance(text, str) else text
            text = " ".join(str(text[k]) for k in ("", "type", "code", "message") if text.get(k))
        except (ValueError, TypeError, AttributeError, RecursionError):
            text = None
        return self._clean(" ".join((text or told).split()))[:300].rstrip(". ")

    def _clean(self, text: str) -> str:
        return text.replace(self.key, "[key]") if len(self.key) >= MIN_SECRET else text


def open_endpoint(
    url: str,
    model: str,
    *,
    is_chat: bool,
    timeout_s: float,
) -> Endpoint:
    """A client of the server at ``url``, which check_url() gave.

    Errors: OptionError when a package is missing, the key cannot be one, or the time is no time.
    """
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise OptionError(
            f"--timeout is more than 0 and at most {LONGEST_TIMEOUT_S:,.0f} s, not {timeout_s:g}."
        )
    try:
        import httpx
        import tenacity  # noqa: F401 - needed with the first request: told before it
    except ImportError:
        raise OptionError(
            "asking an endpoint needs two packages more: pip install 'edge-eval[endpoint]'."
        ) from None
    key = read_key(url)
    is_far = not _is_here(url)  # a proxy cannot reach this machine's own servers
    context = httpx.create_ssl_context(trust_env=is_far)

    def open_client() -> Any:
        return httpx.Client(
            # Other encodings unpack to any size at once.
            headers={"Accept-Encoding": "gzip"}
            | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            limits=httpx.Limits(max_connections=1),
            trust_env=is_far,
            verify=context,
        )

    return Endpoint(url, model, is_chat, timeout_s, open_client, key)


def check_url(url: str) -> str:
    """An endpoint's URL as it is asked and recorded: ``https://host/v1``.

    Errors: OptionError for what is no such URL, or holds what may be a secret; it is not repeated.
    """
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
    except ValueError:
        raise OptionError("the endpoint is no URL: give it as https://HOST/v1.") from None
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise OptionError(
            "the endpoint's URL holds a user name or a password: leave them out, and put the key "
            f"into the environment as {KEY_NAMES[0]}."
        )
    if parts.query or parts.fragment:
        raise OptionError(
            "the endpoint's URL goes on behind a ? or #, where keys are often put: leave that out, "
            f"and put the key into the environment as {KEY_NAMES[0]}."
        )
    if parts.scheme not in {"http", "https"} or not host or re.search(r"[\s\\]", url.strip()):
        raise OptionError("the endpoint is no http URL: give it as https://HOST/v1.")
    path = re.sub(r"/(?:chat/)?completions/?\Z|/+\Z", "", parts.path) or "/v1"
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{name}{f':{port}' if port else ''}{path}"


def read_key(url: str) -> str:
    """The key for an endpoint, from the environment; "" for none.

    EDGE_EVAL_API_KEY is meant for the endpoint named. OPENAI_API_KEY is often set for another
    purpose: it is sent by https or to this machine only.
    """
    for name in KEY_NAMES:
        key = os.environ.get(name, "").strip()
        if not key or (
            name != KEY_NAMES[0] and urlsplit(url).scheme != "https" and not _is_here(url)
        ):
            continue
        if not re.fullmatch(r"[!-~]+", key):
            raise OptionError(f"{name} in the environment holds characters that no key has.")
        return key
    return ""


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_body(
    response: Any, is_gzip: bool, limit: int, is_late: threading.Event
) -> tuple[bytes, bool]:
    """A body's first ``limit`` bytes, out of gzip, and whether that is all of it.

    What is sent counts as well: gzip may hold any number of bytes that come to nothing.
    Errors: TimeoutError, zlib.error.
    """
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 16) if is_gzip else None
    body, n_sent = bytearray(), 0
    for sent in response.iter_raw():
        if is_late.is_set():
            raise TimeoutError
        n_sent += len(sent)
        room = limit + 1 - len(body)
        if unpacker is None:
            body += sent[:room]
        elif not unpacker.eof:  # what stands behind its end would be kept
            body += unpacker.decompress(sent, room)
        if max(len(body), n_sent) > limit:
            return bytes(body[:limit]), False
    return bytes(body), True


def _retry_after_s(value: str | None) -> float | None:
    """The Retry-After header in seconds: it is a number of them, or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError, OSError):  # no date, or one beyond what can be counted
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a completion or of a chat's message; None of it is an empty one."""
    text = choice["message"].get("content") if "message" in choice else choice["text"]
    if text is not None and not isinstance(text, str):
        raise TypeError("the text is no text")
    return text or ""


def _top_tokens(choice: Mapping[str, Any]) -> list[tuple[str, float]] | None:
    """The likeliest first tokens with their log-probabilities; None where the server tells none.

    Completions have ``top_logprobs``, a mapping for each token; chats, and llama.cpp's server in
    both, have ``content``, a list of objects for each token.
    """
    told = choice.get("logprobs")
    if not told:
        return None
    if told.get("content") is not None:
        first = told["content"][0]["top_logprobs"] if told["content"] else []
        return [(str(entry["token"]), _number(entry["logprob"])) for entry in first]
    if told.get("top_logprobs") is None:
        return None
    first = (told["top_logprobs"][0] if told["top_logprobs"] else None) or {}
    return [(str(token), _number(value)) for token, value in first.items() if value is not None]


def _number(value: Any) -> float:
    """A number of JSON's; an integer may be larger than any float, and is infinite then."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
