"""Prompt -> Answer, from a server that speaks OpenAI's protocol; the only user of httpx.

Two ways to ask: ``/completions`` with the prompt as it is, and ``/chat/completions``, where the
server puts the prompt into its model's chat template. What may be retried stands in RETRIED. The
key comes from the environment and goes into one header: never into a message, a text or a record.
"""

import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

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
MIN_SECRET = 8  # characters; a shorter key ("none", "EMPTY") is no secret

TOO_LONG_STATUSES = frozenset({400, 413, 422, 500})
# Words in which servers say that a prompt is longer than the model can take.
_TOO_LONG = re.compile(
    r"context.{0,12}(?:length|size|window)|maximum context|prompt.{0,20}too long", re.IGNORECASE
)


# A request's first choice, the prompt's tokens where the server counts them, and its time in s.
_Answer = tuple[dict[str, Any], int | None, float]


class _ForTheMomentError(Exception):
    """A failure that may pass."""

    def __init__(self, what: str, retry_after_s: float | None = None) -> None:
        super().__init__(what)
        self.retry_after_s = retry_after_s


class _RefusedError(Exception):
    """A request that the server will not take, however often."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass(slots=True)
class Endpoint:
    """A server and the model asked of it. Thread-safe: several requests may be on their way."""

    url: str
    model: str
    is_chat: bool
    client: Any = field(repr=False)
    key: str = field(repr=False)
    n_retries: int = 0
    _attempts: int = FIRST_ATTEMPTS
    _limit: str = "max_tokens"
    _closed: threading.Event = field(default_factory=threading.Event, repr=False)

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
            if letter in letters and math.isfinite(value):
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
        """Let go of the connections; requests still waiting for another attempt give up."""
        self._closed.set()
        self.client.close()

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
        start = time.perf_counter()
        try:
            response = self.client.post(self.url + path, json=body)
        except httpx.TimeoutException:
            raise _ForTheMomentError("does not answer in time (--timeout)") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            words = self._clean(str(error)) or type(error).__name__
            raise _ForTheMomentError(f"cannot be reached: {words}") from None
        latency_s = time.perf_counter() - start
        status = response.status_code
        if status != 200:
            words = self._words(response)
            is_too_long = status in TOO_LONG_STATUSES and _TOO_LONG.search(words)
            if status not in RETRIED or is_too_long:
                raise _RefusedError(status, words)
            raise _ForTheMomentError(
                f"answers {status}{': ' if words else ''}{words}",
                _retry_after_s(response.headers.get("retry-after")),
            )
        try:
            found = response.json()
            choice = found["choices"][0]
            _text(choice)
            _top_tokens(choice)
            usage = found.get("usage") or {}
            n_tokens = usage.get("prompt_tokens")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise EndpointError(
                f"{self.url}{path} answers with something that is no completion: "
                f"{self._words(response) or 'nothing'}. Is this an OpenAI-compatible server?"
            ) from None
        return choice, n_tokens if type(n_tokens) is int and n_tokens > 0 else None, latency_s

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
        hint = ""
        if "logprob" in str(error):
            hint = " Ask for fewer with --top-logprobs, or use --scoring generated."
        return f"{self.url} refuses a request with status {error.status}: {error}.{hint}"

    def _words(self, response: Any) -> str:
        """What a server says, on one line, short, and without the key."""
        text: Any = None
        try:
            text = response.json()
            text = text.get("error", text)
            text = {"": text} if isinstance(text, str) else text
            text = " ".join(str(text[k]) for k in ("", "type", "code", "message") if text.get(k))
        except (ValueError, TypeError, AttributeError, RecursionError):
            text = None
        return self._clean(" ".join((text or response.text).split()))[:300].rstrip(". ")

    def _clean(self, text: str) -> str:
        return text.replace(self.key, "[key]") if len(self.key) >= MIN_SECRET else text


def open_endpoint(
    url: str, model: str, *, is_chat: bool, timeout_s: float, concurrency: int = 1
) -> Endpoint:
    """A client of the server at ``url``, which check_url() gave.

    Errors: OptionError when a package is missing or the key cannot be one.
    """
    try:
        import httpx
        import tenacity  # noqa: F401 - needed with the first request: told before it
    except ImportError:
        raise OptionError(
            "asking an endpoint needs two packages more: pip install 'edge-eval[endpoint]'."
        ) from None
    key = read_key(url)
    client = httpx.Client(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s), pool=None),
        limits=httpx.Limits(max_connections=concurrency),
        # A proxy cannot reach this machine's own servers.
        trust_env=not _is_here(url),
    )
    return Endpoint(url, model, is_chat, client, key)


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


def _retry_after_s(value: str | None) -> float | None:
    """The Retry-After header in seconds: it is a number of them, or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
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
        return [(str(entry["token"]), float(entry["logprob"])) for entry in first]
    if told.get("top_logprobs") is None:
        return None
    first = (told["top_logprobs"][0] if told["top_logprobs"] else None) or {}
    return [(str(token), float(value)) for token, value in first.items() if value is not None]
