"""What is fuzzed, and where a search begins; with the fuzzer by fuzz.py, without by test_fuzz.py.

A target takes bytes. Errors of edge-eval's own tree are what it should end with, or success;
anything else is a crash. Add one to TARGETS.
"""

import atexit
import json
import random
import shutil
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

from edge_eval.errors import EdgeEvalError
from edge_eval.prompts import PROMPT_TEMPLATES, render
from edge_eval.questions import COLUMNS, READERS, load_questions
from edge_eval.run_record import read_record
from edge_eval.schema import RunConfig
from edge_eval.summary import print_summary
from exporters.gguf import copy_without_vocabulary
from exporters.gguf_tokenizer import build_tokenizer, read_metadata, tokenizer_config

# In memory where there is such a place: a file is written for every input.
SCRATCH = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))  # noqa: S108
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)


def read_a_record(content: bytes) -> None:
    """A run record is read; what is read can be shown."""
    from rich.console import Console

    path = SCRATCH / "record.jsonl"
    path.write_bytes(content)
    record = read_record(path)
    print_summary(record, Console(file=StringIO(), width=100))


def read_questions(content: bytes) -> None:
    """The first byte chooses the kind of file; questions that are read can be put in words."""
    suffix = list(READERS)[content[0] % len(READERS)] if content else ".csv"
    path = SCRATCH / f"rows{suffix}"
    path.write_bytes(content[1:])
    for question in load_questions(RunConfig(data=str(path))).test:
        for template in PROMPT_TEMPLATES:
            render(question, template).text.encode()


def read_a_gguf(content: bytes) -> None:
    """A GGUF file's metadata is read; a tokenizer that comes of it takes any text."""
    path = SCRATCH / "model.gguf"
    path.write_bytes(content)
    metadata = read_metadata(path)
    copy_without_vocabulary(path, SCRATCH / "copy.gguf", metadata)
    json.dumps(tokenizer_config(metadata))
    build_tokenizer(metadata).encode("سؤال: 12 a\0")


ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**63,
        10**400,
        0.5,
        -1e308,
        5e-324,
        "",
        "A",
        "أ",
        "\ud800",
    ),
    *(
        "\0",
        "[red]",
        [],
        {},
        [[]],
        [1.0] * 10,
        [None] * 10,
        ["A", "B"],
        {"a": {}},
        "scored",
        "paper",
    ),
]


def changed(value: Any, chance: random.Random) -> Any:
    """A value with one of its parts, or itself, replaced."""
    if value and isinstance(value, dict) and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: changed(value[key], chance)}
    if value and isinstance(value, list) and chance.random() < 0.6:
        at = chance.randrange(len(value))
        return [*value[:at], changed(value[at], chance), *value[at + 1 :]]
    return chance.choice(ODD)


# ---- where a search begins


def record_seeds() -> list[bytes]:
    """Whole records, one for each protocol, as the tests write them."""
    sys.path.append(str(Path(__file__).parents[1]))
    from dataclasses import replace

    from test_run_record import CONFIG, DATA, ENVIRONMENT, MANIFEST, OBSERVED, PREDICTIONS, SCORING

    from edge_eval.run_record import open_record

    found = []
    for protocol in ("paper", "oall", "lm-eval"):
        path = SCRATCH / "seed.jsonl"
        path.unlink(missing_ok=True)
        config = replace(CONFIG, protocol=protocol, permute=protocol == "oall")
        with open_record(path, config, MANIFEST, DATA, ENVIRONMENT, SCORING) as record:
            for prediction in PREDICTIONS:
                record.append(prediction)
            record.finish(OBSERVED, len(PREDICTIONS))
        found.append(path.read_bytes())
    return found


def question_seeds() -> list[bytes]:
    """The same two rows in every kind of file, and in UTF-16."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = ("STEM", "Physics", "High", "Jordan")
    rows = [
        dict(
            zip(COLUMNS, ("1", *labels, "ما؟", "سياق", "A", "أ", "ب", "", "", "", "0"), strict=True)
        ),
        dict(
            zip(COLUMNS, ("2", *labels, '"', "", "٢", "0", "None", "c", "d", "e", "1"), strict=True)
        ),
    ]
    quoted = [[f'"{cell.replace(chr(34), chr(34) * 2)}"' for cell in row.values()] for row in rows]
    table = "\r\n".join(",".join(cells) for cells in [[*COLUMNS], *quoted])
    pq.write_table(pa.Table.from_pylist(rows), SCRATCH / "seed.parquet")
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    kinds = {
        ".csv": [table.encode(), table.encode("utf-16"), table.encode("utf-8-sig")],
        ".jsonl": [lines.encode(), b"[" + lines.replace("\n", ",").encode() + b"]"],
        ".parquet": [(SCRATCH / "seed.parquet").read_bytes()],
    }
    numbers = {suffix: number for number, suffix in enumerate(READERS)}
    return [bytes([numbers[kind]]) + text for kind, texts in kinds.items() for text in texts]


def gguf_seeds() -> list[bytes]:
    """A small vocabulary of each kind."""

    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    def value(item: Any) -> bytes:
        if isinstance(item, bool):
            return struct.pack("<IB", 7, item)
        if isinstance(item, int):
            return struct.pack("<Ii", 5, item)
        if isinstance(item, str):
            return struct.pack("<I", 8) + text(item)
        kind, letter = (8, "") if isinstance(item[0], str) else (6, "f")
        kind, letter = (5, "i") if isinstance(item[0], int) else (kind, letter)
        body = [text(part) if kind == 8 else struct.pack(f"<{letter}", part) for part in item]
        return struct.pack("<IIQ", 9, kind, len(item)) + b"".join(body)

    def file(keys: dict[str, Any]) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys))
        pairs = b"".join(text(key) + value(item) for key, item in keys.items())
        tensor = text("w") + struct.pack("<IQIQ", 1, 2, 0, 0)
        return head + pairs + tensor + b"\0" * 64

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab"]
    spm = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [float(-n) for n in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 4],
        "tokenizer.ggml.add_bos_token": True,
    }
    bpe = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "Ø", "³", "<|im_end|>"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3],
        "tokenizer.ggml.bos_token_id": 5,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return [file(spm), file(bpe)]


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "record": (read_a_record, record_seeds),
    "questions": (read_questions, question_seeds),
    "gguf": (read_a_gguf, gguf_seeds),
}


def ends_well(target: Callable[[bytes], None], content: bytes) -> None:
    """Run a target; only an error of edge-eval's own may come of it, and that is one short line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target(content)
    except EdgeEvalError as error:
        told = str(error)
        if "\n" in told or len(told) > 3000:
            raise AssertionError(f"not one short line: {told[:300]!r}") from error
