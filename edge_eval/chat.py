"""Prompt -> text in a model's chat template, up to the assistant's header.

The template is somebody's program. It is compiled and run in Jinja2's sandbox, which sees nothing
but the messages and the special tokens' names, and that in a process of its own: only a process
can be stopped when a template loops, or kept from taking all memory. The environment is set up as
transformers does it, so that the same template gives the same text.

Source: transformers 4.57, utils/chat_template_utils.py.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from edge_eval.errors import ModelError, OptionError

TIME_LIMIT_S = 5.0  # for one conversation
MEMORY_LIMIT_BYTES = 512 << 20  # of address space, where the system can limit it (Linux)
MAX_CHARACTERS = 1 << 20  # of a template, and of what it writes
MAX_REASON = 200  # characters, of a template's own words

Message = dict[str, str]  # role, content


class _TemplateRefusal(ModelError):  # noqa: N818 - the template's own word for it
    """What a template raises by raise_exception(): of these messages it makes no conversation."""


class ChatTemplate:
    """A compiled template, waiting in its own process for conversations."""

    def __init__(self, text: str, special_tokens: dict[str, str], source: str) -> None:
        self.sha256 = hashlib.sha256(text.encode("utf-8")).hexdigest()
        self.source = source
        self._process = _start(source)
        self._end = weakref.finalize(self, _end, self._process)
        self._begun = False
        # The first answers wait for Python and Jinja2 to start, on a busy machine for long.
        self._ask({}, 12 * TIME_LIMIT_S)
        self._begun = True
        answer = self._ask({"template": text, "special_tokens": special_tokens}, 12 * TIME_LIMIT_S)
        if "error" in answer:
            raise ModelError(f"{source} is not a chat template: {answer['error']}.")

    def render(self, turns: Sequence[tuple[str, str]], question: str, system: str) -> str:
        """The conversation up to the assistant's header.

        turns: earlier questions and answers (the shots); question: the one to answer. Where the
        template has no system role, the system text opens the first user turn.
        """
        messages: list[Message] = []
        for asked, answered in turns:
            messages += [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answered},
            ]
        messages.append({"role": "user", "content": question})
        if not system:
            return self._render(messages)
        try:
            text = self._render([{"role": "system", "content": system}, *messages])
            if system.strip() in text:
                return text
        except _TemplateRefusal:
            pass
        first = {"role": "user", "content": f"{system}\n\n{messages[0]['content']}"}
        return self._render([first, *messages[1:]])

    def _render(self, messages: list[Message]) -> str:
        answer = self._ask({"messages": messages}, TIME_LIMIT_S)
        if "refusal" in answer:
            raise _TemplateRefusal(
                f"{self.source} refuses these messages: {answer['refusal']}. Use --chat-template "
                "off, or leave out what it does not take (shots, a system prompt)."
            )
        if "error" in answer:
            raise ModelError(f"{self.source} fails: {answer['error']}. Use --chat-template off.")
        return answer["text"]

    def _ask(self, request: dict[str, Any], limit_s: float) -> dict[str, str]:
        """One request and its answer; a process that gives none in time is ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None or not self._end.alive:
            raise ModelError(f"{self.source} was stopped before: not used.")
        start = time.monotonic()
        timer = threading.Timer(limit_s, self._process.kill)
        timer.start()
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            answer: dict[str, str] = json.loads(stdout.readline())
        except (OSError, ValueError):  # no reader, or no whole line
            late = time.monotonic() - start >= limit_s
            self._end()
            if not self._begun:
                why = f"did not begin within {limit_s:.0f} s" if late else "ended at once"
                raise _no_process(self.source, f"{sys.executable} {why}") from None
            raise ModelError(
                f"{self.source} does not end within {limit_s:.0f} s: not used."
                if late
                else f"{self.source} ended its process (by too deep a nesting, or too much "
                "memory): not used."
            ) from None
        finally:
            timer.cancel()
        return answer


def _start(source: str) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise _no_process(source, "this one does not know where its own program is")
    try:
        return subprocess.Popen(
            # Without the current folder, whose modules it would run.
            [sys.executable, "-P", "-c", "from edge_eval.chat import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except OSError as error:
        why = f"{sys.executable} cannot be started: {error.strerror}"
        raise _no_process(source, why) from error


def _no_process(source: str, why: str) -> ModelError:
    return ModelError(
        f"{source} is run in a Python process of its own, but {why}: not used. Use --chat-template "
        "off."
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(OSError):
        process.communicate()


def load_chat_template(choice: str, directory: Path) -> ChatTemplate | None:
    """The template a run asks for: None for "off", the model's own for "auto", else a file.

    Errors: OptionError when the model has none, ModelError for one that is no template.
    """
    if choice == "off":
        return None
    path = directory / "chat_template.jinja" if choice == "auto" else Path(choice)
    if not path.is_file():
        raise OptionError(
            f"{path} is not there: this model has no chat template. Use --chat-template off."
        )
    if choice == "auto" and path.resolve().parent != directory.resolve():
        raise ModelError(f"{path} points outside its folder, to {path.resolve()}: not opened.")
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if len(text) > MAX_CHARACTERS:
        raise ModelError(f"{path} has over a million characters: not a chat template.")
    return ChatTemplate(text, _special_tokens(directory), str(path))


def has_chat_template(directory: Path) -> bool:
    """Whether a model directory carries a chat template of its own."""
    return (directory / "chat_template.jinja").is_file()


def _special_tokens(directory: Path) -> dict[str, str]:
    path = directory / "tokenizer_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if not isinstance(settings, dict):
            raise TypeError("not an object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens


# ---- in the template's own process


def serve() -> None:
    """Answer requests, a JSON line each, until there are no more."""
    _limit_memory()
    render: Callable[[list[Message]], str] | None = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer: dict[str, str] = {}
        _limit_time(int(12 * TIME_LIMIT_S))
        try:
            if render is not None:
                answer = {"text": render(request["messages"])}
            elif request:  # the first is empty: whether this process runs at all
                render = _compile(request["template"], request["special_tokens"])
        except _TemplateRefusal as refusal:
            answer = {"refusal": str(refusal)}
        except MemoryError:
            answer = {"error": "it takes too much memory"}
        except Exception as error:  # noqa: BLE001 - it is the template's, and told as such
            words = " ".join(str(error).split())
            answer = {"error": (words or type(error).__name__)[:300].rstrip(".")}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
        _limit_time(0)


def _compile(text: str, special_tokens: dict[str, str]) -> Callable[[list[Message]], str]:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    template = environment.from_string(text)

    def render(messages: list[Message]) -> str:
        found = template.render(messages=messages, add_generation_prompt=True, **special_tokens)
        if len(found) > MAX_CHARACTERS:
            raise ValueError(f"it makes a prompt of {len(found):,} characters")
        try:
            found.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("it makes half of a surrogate pair, which is no character") from None
        return found

    return render


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on Windows, or less already
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))


def _limit_time(seconds: int) -> None:
    """End with a run that was killed while its template looped; 0 for no limit."""
    with contextlib.suppress(ImportError, AttributeError):  # not on Windows
        import signal

        signal.alarm(seconds)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: object) -> NoReturn:
    # In one line here, where a message that is no text, or is too much of it, is still told.
    raise _TemplateRefusal(" ".join(str(message).split())[:MAX_REASON].rstrip("."))
