"""Prompt -> text in a model's chat template, up to the assistant's header.

The template is somebody's program: it runs in Jinja2's sandbox, with a time limit, and sees
nothing but the messages and the special tokens' names. The environment is set up as transformers
does it, so that the same template gives the same text.

Source: transformers 4.57, utils/chat_template_utils.py.
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from edge_eval.errors import ModelError, OptionError

TIME_LIMIT_S = 5.0

Message = dict[str, str]  # role, content


class _TemplateRefusal(Exception):  # noqa: N818 - the template's own word, not an error of ours
    """What a template raises by raise_exception()."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    template: Any  # a compiled Jinja2 template
    special_tokens: dict[str, str]  # bos_token, eos_token, ...
    source: str

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
        found: list[Any] = []

        def work() -> None:
            try:
                found.append(
                    self.template.render(
                        messages=messages, add_generation_prompt=True, **self.special_tokens
                    )
                )
            except Exception as error:  # noqa: BLE001 - it is the template's, and told as such
                found.append(error)

        # A template can loop forever, and Python cannot stop a thread: it is left behind.
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(TIME_LIMIT_S)
        if not found:
            raise ModelError(f"{self.source} does not end within {TIME_LIMIT_S:.0f} s: not used.")
        if isinstance(found[0], _TemplateRefusal):
            raise found[0]
        if isinstance(found[0], Exception):
            raise ModelError(f"{self.source} fails: {found[0]}. Use --chat-template off.")
        return str(found[0])


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
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.globals["range"] = range
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        template = environment.from_string(path.read_text(encoding="utf-8"))
    except (jinja2.TemplateError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not a chat template: {error}") from error
    return ChatTemplate(template, _special_tokens(directory), str(path))


def has_chat_template(directory: Path) -> bool:
    """Whether a model directory carries a chat template of its own."""
    return (directory / "chat_template.jinja").is_file()


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _special_tokens(directory: Path) -> dict[str, str]:
    path = directory / "tokenizer_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens
