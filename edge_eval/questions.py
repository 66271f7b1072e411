"""Hub, CSV, JSON Lines, parquet or the bundled sample -> Questions; READERS has one per file type.

Every column is text, kept to the character. A row that cannot be a question is refused by line and
reason, and counted; what makes a file untrustworthy as a whole is a DataError.
"""

import codecs
import csv
import difflib
import hashlib
import json
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias, cast

from edge_eval.errors import DataError
from edge_eval.letters import ARABIC, LATIN
from edge_eval.schema import (
    LEVEL_TITLES,
    DataFingerprint,
    Question,
    QuestionSet,
    RefusedRow,
    RunConfig,
    task_name,
)

# Said beside every figure of the bundled questions.
SAMPLE_NOTE = "a smoke sample, not the benchmark"

HUB_REPOSITORY = "MBZUAI/ArabicMMLU"
HUB_REVISION = "7aa530e2893ac420352b3f5c1a1310c010e9758b"

# Group -> subject -> level -> test questions; every task has three few-shot rows more.
# Source: Koto et al. 2024, arXiv:2402.12840.
TASKS: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "STEM": {
        "Biology": {"High": 1409},
        "Computer Science": {"High": 261, "Middle": 27, "Primary": 190, "Univ": 64},
        "Math": {"Primary": 409},
        "Natural Science": {"Middle": 242, "Primary": 336},
        "Physics": {"High": 255},
    },
    "Social Science": {
        "Accounting": {"Univ": 74},
        "Civics": {"High": 87, "Middle": 236},
        "Economics": {"High": 360, "Middle": 87, "Univ": 137},
        "Geography": {"High": 1038, "Middle": 272, "Primary": 57},
        "Political Science": {"Univ": 210},
        "Social Science": {"Middle": 241, "Primary": 705},
    },
    "Humanities": {
        "History": {"High": 760, "Middle": 203, "Primary": 102},
        "Islamic Studies": {"": 639, "High": 334, "Middle": 238, "Primary": 999},
        "Law": {"Prof": 314},
        "Philosophy": {"High": 39},
    },
    "Language": {
        "Arabic Language (General)": {"": 612},
        "Arabic Language (Grammar)": {"": 365},
        "Arabic Language": {"High": 390, "Middle": 27, "Primary": 252},
    },
    "Other": {
        "Driving Test": {"": 1211},
        "General Knowledge": {"": 864, "Middle": 172, "Primary": 162},
        "Management": {"Univ": 75},
    },
}
COUNTRIES = ("Jordan", "Egypt", "Palestine", "Morocco", "Lebanon", "UAE", "Kuwait", "KSA")
GROUP_ALIASES = {"Arabic Language": "Language"}  # the paper's name for it

# What a row's labels may be: the prompts have no words for anything else.
LABELS: Mapping[str, Sequence[str]] = {
    "Group": tuple(TASKS),
    "Subject": tuple(subject for subjects in TASKS.values() for subject in subjects),
    "Level": tuple(LEVEL_TITLES),
    "Country": ("", *COUNTRIES),
}
OPTIONS = ("Option 1", "Option 2", "Option 3", "Option 4", "Option 5")
REQUIRED = ("Group", "Subject", "Level", "Question", "Answer Key", "Option 1", "Option 2")
COLUMNS = ("ID", *LABELS, "Question", "Context", "Answer Key", *OPTIONS, "is_few_shot")

# Looked up after NFKC, which folds presentation forms and full-width letters into these.
ANSWER_KEYS = {
    **{key: index for keys in (LATIN, ARABIC, "12345", "١٢٣٤٥") for index, key in enumerate(keys)},
    "\u0627": 0,  # bare alef
    "\u0647\u0640": 4,  # heh + tatweel
}

# Far above any question, far below what troubles a laptop: a quote left open, or a file that only
# pretends to be a table, ends here and not in the machine's memory.
MAX_ROW_CHARACTERS = 1 << 20
MAX_COLUMNS = 64
_TOO_LONG = f"longer than {MAX_ROW_CHARACTERS:,} characters: not a table of questions"
MAX_REFUSED = 100_000  # rows, each held with its reason
MAX_CHARACTERS = 1 << 30  # of all questions; ArabicMMLU has five million
MAX_BLANK = 1_000_000  # lines: a gigabyte of line ends would be read for half an hour

Row: TypeAlias = Mapping[str, str]
Rows: TypeAlias = Iterator[tuple[int, Row | str]]  # line, and its row or why there is none


def load_questions(config: RunConfig, *, fetch: bool = True) -> QuestionSet:
    """Read ``config.data`` and choose among its test questions by the filters, then the limit.

    Few-shot rows are never filtered: a task's shots are the same whichever country is asked about.
    fetch: whether what is not in the Hub's cache may be fetched.
    Raises DataError for data that cannot be read, for a filter's unknown name, and when no test
    question is left.
    """
    source, kind, revision, rows = _open_source(config.data, fetch=fetch)
    test: list[Question] = []
    shots: dict[str, list[Question]] = {}
    refused: list[RefusedRow] = []
    line_of: dict[str, int] = {}
    n_rows, n_characters = 0, 0
    for line, row in rows:
        n_rows += 1
        question = row if isinstance(row, str) else parse_question(row, n_rows)
        # Runs are paired by id: one that names two questions would pair the wrong ones.
        if isinstance(question, Question) and question.id in line_of:
            question = f"id {_short(question.id)} already used on line {line_of[question.id]}"
        if isinstance(question, str):
            refused.append(RefusedRow(line, question))
            if len(refused) > MAX_REFUSED:
                first = f"line {refused[0].line}: {refused[0].reason}"
                raise DataError(f"{source}: over {MAX_REFUSED:,} rows are no questions; {first}")
            continue
        line_of[question.id] = line
        n_characters += sum(map(len, (question.id, question.context, question.text)))
        n_characters += sum(map(len, question.options))
        # A file of a few bytes may stand for any number of rows, each of its own in memory.
        if n_characters > MAX_CHARACTERS:
            problem = f"over {MAX_CHARACTERS:,} characters in all: not a table of questions"
            raise DataError(f"{source}: line {line}: {problem}")
        (test if question.split == "test" else shots.setdefault(question.task, [])).append(question)
    if not test:
        counts = f"{n_rows} rows read, {len(refused)} refused, {n_rows - len(refused)} few-shot"
        first = f"; line {refused[0].line}: {refused[0].reason}" if refused else ""
        raise DataError(f"{source}: no test questions ({counts}){first}")
    chosen = _sample(_filter(test, config, source), config.limit, config.seed)
    return QuestionSet(
        test=tuple(chosen),
        shots={task: tuple(questions) for task, questions in shots.items()},
        refused=tuple(refused),
        fingerprint=DataFingerprint(
            source=source,
            kind=kind,
            revision=revision,
            sha256=fingerprint_questions(chosen),
            n_rows=n_rows,
            n_refused=len(refused),
            n_selected=len(chosen),
        ),
    )


def fingerprint_questions(questions: Iterable[Question]) -> str:
    """Hash a set of questions, in whatever order: SHA-256 over sorted ASCII JSON arrays, a line each."""
    # A line begins with its id, so ids sort the lines: one is held at a time, not all of them.
    found = hashlib.sha256()
    for _, same_id in groupby(sorted(questions, key=_id_json), key=_id_json):
        for line in sorted(map(_fingerprint_line, same_id)):
            found.update(line)
    return found.hexdigest()


def _id_json(question: Question) -> str:
    return json.dumps(question.id)


def _fingerprint_line(question: Question) -> bytes:
    labels = [question.group, question.subject, question.level, question.country]
    texts = [question.context, question.text, question.options, question.answer, question.split]
    return json.dumps([question.id, *labels, *texts]).encode() + b"\n"


def _open_source(data: str, *, fetch: bool) -> tuple[str, str, str | None, Rows]:
    """Return the source, kind, revision and still unread rows of what ``--data`` names."""
    if data == "sample":
        return data, "sample", None, _sample_rows()
    if data == "hub" or data.startswith("hub:"):
        subjects = [item for subjects in TASKS.values() for item in subjects.items()]
        tasks = [task_name(subject, level) for subject, levels in subjects for level in levels]
        asked = data[len("hub:") :].strip() or "All"
        known = {name.casefold(): name for name in ("All", *tasks)}
        if asked.casefold() not in known:
            raise DataError(_no_such("task", asked, HUB_REPOSITORY, known.values()))
        name = known[asked.casefold()]
        return f"{HUB_REPOSITORY}/{name}", "hub", HUB_REVISION, _hub_rows(name, fetch=fetch)
    path = Path(data)
    reader = READERS.get(path.suffix.lower())
    remedy = f"--data takes sample, hub, hub:TASK or a file ({', '.join(READERS)})"
    try:
        if not path.is_file():
            what = "not a file" if path.exists() else "no such file"
            raise DataError(f"{_short(data)}: {what}; {remedy}")
    except OSError as error:
        raise DataError(f"{_short(data)}: {error.strerror}; {remedy}") from error
    if reader is None:
        raise DataError(f"{data}: the name does not tell what the file holds; {remedy}")
    return data, "file", None, reader(path)


# ---- one row


def parse_question(row: Row, number: int) -> Question | str:
    """Return the row's question, or why it is none; ``number`` is the id of a row without one."""
    cells = {name: row.get(name, "") for name in COLUMNS}
    for name, cell in cells.items():
        try:
            cell.encode()
        except UnicodeEncodeError:
            return f"{name} holds half of a surrogate pair, which is no character"
        if "\0" in cell:
            return f"{name} holds a NUL character"
    labels = {name: cells[name].strip() for name in LABELS}
    labels["Group"] = GROUP_ALIASES.get(labels["Group"], labels["Group"])
    for name, known in LABELS.items():
        if labels[name] not in known:
            hint = _suggest(labels[name], known)
            return f"{name} {_short(labels[name])} is not one of ArabicMMLU's{hint}"
        labels[name] = sys.intern(labels[name])  # held once, not once a question
    if not cells["Question"].strip():
        return "Question is empty"
    texts = [cells[name] for name in OPTIONS]
    n_options = texts.index("") if "" in texts else len(texts)
    if any(texts[n_options:]):
        return f"{OPTIONS[n_options]} is empty, but an option follows it"
    if n_options < 2:
        return f"fewer than 2 options: {OPTIONS[n_options]} is empty"
    key = unicodedata.normalize("NFKC", cells["Answer Key"]).strip().rstrip(".) ")
    answer = ANSWER_KEYS.get(key.upper())
    if answer is None:
        return f"Answer Key {_short(cells['Answer Key'])} is not one of A-E, أ-ه or 1-5"
    if answer >= n_options:
        return f"Answer Key {_short(cells['Answer Key'])}, but the row has {n_options} options"
    shot = cells["is_few_shot"].strip()
    if shot not in ("", "0", "1"):
        return f"is_few_shot {_short(shot)} is neither 0 nor 1"
    return Question(
        id=cells["ID"].strip() or str(number),
        group=labels["Group"],
        subject=labels["Subject"],
        level=labels["Level"],
        country=labels["Country"],
        context=cells["Context"],
        text=cells["Question"],
        options=tuple(texts[:n_options]),
        answer=answer,
        split="dev" if shot == "1" else "test",
    )


def _to_row(record: Iterable[tuple[str, Any]]) -> Row | str:
    """Return the named values of JSON or of a table as text, or why a text is lost."""
    row = {}
    for name, value in record:
        if name not in COLUMNS or value is None:
            continue
        # A bool is an int to Python, but whether the text was true, True or 1 nobody knows.
        if isinstance(value, bool) or not isinstance(value, str | int):
            return f"{name} is a {type(value).__name__}, so its text is lost; write it in quotes"
        row[name] = str(value)
    return row


def _find_column_problem(names: Sequence[str]) -> str | None:
    if len(names) > MAX_COLUMNS:
        return f"{len(names):,} columns, more than {MAX_COLUMNS}: not a table of questions"
    twice = [name for name in COLUMNS if names.count(name) > 1]
    if twice:
        return f"columns named twice: {', '.join(twice)}"
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        return f"columns missing: {', '.join(missing)}; found: {', '.join(map(_short, names))}"
    return None


def _clean_name(name: str) -> str:
    return name.strip("\ufeff \t\r\n")


# ---- files


def _csv_rows(path: Path) -> Rows:
    start, n_characters = 1, 0

    def lines() -> Iterator[str]:
        nonlocal n_characters
        for line in _text_lines(path):
            n_characters += len(line)
            if n_characters > MAX_ROW_CHARACTERS:
                problem = f"the row that begins here passes {MAX_ROW_CHARACTERS:,} characters"
                raise DataError(f"{path}: line {start}: {problem}; is a quote left open?")
            yield line

    # Strict, or a quote that is never closed would end quietly with the file.
    reader = csv.reader(lines(), strict=True)
    names: list[str] = []
    while True:
        start, n_characters = reader.line_num + 1, 0
        try:
            fields = next(reader, None)
        except csv.Error as error:
            # Over several lines other rows may have been swallowed, and nobody could count them.
            if reader.line_num > start or not names:
                read = f"read on to line {reader.line_num}; a quote is left open or not doubled"
                raise DataError(f"{path}: line {start}: not CSV: {error}: {read}") from error
            yield start, f"not CSV: {error}"
            continue
        if fields is None:
            break
        if not fields:  # a blank line
            continue
        if not names:
            names = [_clean_name(name) for name in fields]
            if problem := _find_column_problem(names):
                raise DataError(f"{path}: line {start}: {problem}")
        elif len(fields) != len(names):
            to = f", read on to line {reader.line_num}" if reader.line_num > start else ""
            yield start, f"{len(fields)} fields{to}, but the header has {len(names)}"
        else:
            yield start, dict(zip(names, fields, strict=True))
    if not names:
        raise DataError(f"{path}: the file is empty")


def _json_rows(path: Path) -> Rows:
    for line, text in enumerate(_text_lines(path), start=1):
        if text.lstrip().startswith("["):
            remedy = f"write one object a line: jq -c '.[]' {path.name} > new.jsonl"
            raise DataError(f"{path}: line {line}: an array is not JSON Lines; {remedy}")
        if not text.strip():
            continue
        try:
            # Whole numbers stay the text they are. Pairs, for a dict would drop a repeated name.
            record = json.loads(text, parse_int=str, object_pairs_hook=list)
        except (ValueError, RecursionError) as error:
            yield line, f"not JSON: {error}"
            continue
        if not isinstance(record, list):
            yield line, "not a JSON object"
            continue
        record = [(_clean_name(name), value) for name, value in record]
        yield line, _find_column_problem([name for name, _ in record]) or _to_row(record)


def _parquet_rows(path: Path) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # A footer of a million columns is not even read.
        with pq.ParquetFile(path, thrift_container_size_limit=100 * MAX_COLUMNS) as table:
            raw_names, types = table.schema_arrow.names, table.schema_arrow.types
            names = [_clean_name(name) for name in raw_names]
            if problem := _find_column_problem(names):
                raise DataError(f"{path}: {problem}")
            for name, column in zip(names, types, strict=True):
                kind = column.value_type if pa.types.is_dictionary(column) else column
                whole = name in ("ID", "is_few_shot") and pa.types.is_integer(kind)
                is_text = str(kind) in ("string", "large_string", "string_view", "null")
                if name in COLUMNS and not is_text and not whole:
                    problem = f"column {name} is {column}: its types were guessed and text is lost"
                    remedy = "write it from text: pandas.read_csv(..., dtype=str, na_filter=False)"
                    raise DataError(f"{path}: {problem}; {remedy}")
            wanted = [raw for raw, name in zip(raw_names, names, strict=True) if name in COLUMNS]
            _check_unpacked_size(path, table.metadata, wanted)
            line = 0
            for batch in table.iter_batches(batch_size=64, columns=wanted):
                # A few bytes on disk may stand for gigabytes in memory.
                if max(map(_longest_cell, batch.columns)) > 4 * MAX_ROW_CHARACTERS:
                    raise DataError(f"{path}: row {line + 1} or soon after: {_TOO_LONG}")
                for record in batch.to_pylist():
                    line += 1
                    yield line, _to_row((_clean_name(name), record[name]) for name in wanted)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path}: not readable as parquet: {_reason(error)}") from error


def _check_unpacked_size(path: Path, metadata: Any, wanted: Sequence[str]) -> None:
    """Raise DataError for rows that stand together, and are read so, and are too much."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunks = [group.column(index) for index in range(group.num_columns)]
        size = sum(c.total_uncompressed_size for c in chunks if c.path_in_schema in wanted)
        if size > MAX_CHARACTERS:
            problem = f"row group {number} unpacks to {size:,} bytes: not a table of questions"
            raise DataError(f"{path}: {problem}")


def _longest_cell(column: Any) -> int:
    """Return the bytes of a column's longest text, of a repeated one too, or a number above."""
    import pyarrow as pa
    import pyarrow.compute as pc

    cells = column.dictionary if pa.types.is_dictionary(column.type) else column
    if pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type):
        return pc.max(pc.binary_length(cells)).as_py() or 0
    return int(cells.nbytes)


READERS: Mapping[str, Callable[[Path], Rows]] = {
    ".csv": _csv_rows,
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}


def _text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, or of UTF-16 with its mark, ends kept, none endless."""
    try:
        with path.open("rb") as file:
            utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        with path.open(encoding="utf-16" if utf16 else "utf-8-sig", newline="") as text:
            number, n_blank = 0, 0
            while line := text.readline(MAX_ROW_CHARACTERS + 1):
                number += 1
                n_blank += not line.strip()
                if n_blank > MAX_BLANK:
                    problem = f"over {MAX_BLANK:,} blank lines: not a table of questions"
                    raise DataError(f"{path}: line {number}: {problem}")
                if len(line) > MAX_ROW_CHARACTERS:
                    raise DataError(f"{path}: line {number}: {_TOO_LONG}")
                yield line
    except UnicodeDecodeError as error:
        where = f"not UTF-16: {error.reason}" if utf16 else _locate_undecodable(path)
        # Never decoded by guess: a wrong guess is other words, and no error.
        remedy = f"if it is Windows-1256: iconv -f WINDOWS-1256 -t UTF-8 {path.name} > new.csv"
        raise DataError(f"{path}: {where}; save it as UTF-8 ({remedy})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _locate_undecodable(path: Path) -> str:
    offset = 0
    with path.open("rb") as file:
        # The limit holds more bytes than a line that was read so far can have.
        for line, raw in enumerate(iter(lambda: file.readline(8 * MAX_ROW_CHARACTERS), b""), 1):
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                byte = f"byte 0x{raw[error.start]:02X} at offset {offset + error.start}"
                return f"line {line}: not UTF-8: {byte}"
            offset += len(raw)
    return "not UTF-8"


def _sample_rows() -> Rows:
    with resources.as_file(resources.files("edge_eval") / "sample" / "questions.csv") as path:
        yield from _csv_rows(path)


# ---- the Hub


def _hub_rows(name: str, *, fetch: bool) -> Rows:
    """Yield the rows of a task of the Hub, or of ``All``: its test split, then dev."""
    from huggingface_hub import try_to_load_from_cache

    # The cached files first: they are the pinned revision exactly and need neither network nor
    # lock, whichever tool fetched them. datasets itself does not find a table again offline when
    # it was asked for with features, since the key of its cache then is another one.
    splits: dict[str, Iterable[Row | str]] = {}
    for split in ("test", "dev"):
        file = f"{name}/{split}.csv"
        cached = try_to_load_from_cache(
            HUB_REPOSITORY, file, revision=HUB_REVISION, repo_type="dataset"
        )
        if isinstance(cached, str):
            splits[split] = (row for _, row in _csv_rows(Path(cached)))
    if len(splits) < 2:
        if not fetch:
            raise DataError(
                f"{HUB_REPOSITORY}/{name}: not in the cache, and only --data hub fetches it"
            )
        splits = _download(name)
    line = 0
    for split, rows in splits.items():
        for row in rows:
            line += 1
            keep = split == "test" or isinstance(row, str)
            yield line, row if keep else {**cast("Row", row), "is_few_shot": "1"}


def _download(name: str) -> dict[str, Iterable[Row | str]]:
    from huggingface_hub import HfApi, errors

    # Its bases are the root of the HTTP library's errors, and that library changes with versions.
    roots = cast("tuple[type[Exception], ...]", errors.HfHubHTTPError.__bases__)
    failures: tuple[type[Exception], ...] = (OSError, ValueError, *roots)
    what, use_file = f"{HUB_REPOSITORY} at {HUB_REVISION[:8]}", "use a copy on disk: --data FILE"
    cause = "not in the cache, and the Hub is not reachable (offline, or a proxy?)"
    try:
        # Asked once and briefly, for load_dataset would retry an unreachable Hub for minutes.
        HfApi().dataset_info(HUB_REPOSITORY, revision=HUB_REVISION, timeout=10)
        cause = "cannot be fetched and stored (is the cache, HF_HOME, writable and the disk free?)"

        import datasets

        datasets.disable_progress_bars()
        failures += (datasets.exceptions.DatasetsError,)
        # As the card has them. With guessed types "6" becomes 6.0, and "0" and "None" are lost.
        labels = ("ID", "Source", "Country", "Group", "Subject", "Level")
        columns = (*labels, "Question", "Context", "Answer Key", *OPTIONS, "is_few_shot")
        features = datasets.Features({column: datasets.Value("string") for column in columns})
        tables = datasets.load_dataset(
            HUB_REPOSITORY, name, revision=HUB_REVISION, features=features, keep_default_na=False
        )
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise DataError(f"{what}: not found, says the Hub; {use_file}") from error
    except failures as error:
        raise DataError(f"{what}: {cause}: {_reason(error)}; {use_file}") from error
    return {
        split: [_to_row(record.items()) for record in tables[split].to_list()]
        for split in ("test", "dev")
    }


def _reason(error: BaseException) -> str:
    """Return the first line of what an error began with: libraries wrap it in paragraphs."""
    while cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = cause
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


# ---- which questions


def _filter(questions: list[Question], config: RunConfig, source: str) -> list[Question]:
    """Return the questions every filter accepts; an empty level or country is called none."""
    filters: tuple[tuple[str, tuple[str, ...], Callable[[Question], str]], ...] = (
        ("task", config.tasks, lambda question: question.task),
        ("group", config.groups, lambda question: question.group),
        ("level", config.levels, lambda question: question.level or "none"),
        ("country", config.countries, lambda question: question.country or "none"),
    )
    kept = questions
    for what, asked, value_of in filters:
        # Of this data, not of the benchmark: a name that selects nothing is a mistake too.
        present = {value_of(question).casefold(): value_of(question) for question in questions}
        if what == "group" and "language" in present:
            present |= {alias.casefold(): name for alias, name in GROUP_ALIASES.items()}
        for name in asked:
            if name.strip().casefold() not in present:
                raise DataError(_no_such(what, name, source, present.values()))
        wanted = {present[name.strip().casefold()] for name in asked}
        kept = [question for question in kept if not wanted or value_of(question) in wanted]
    if not kept:
        raise DataError(f"{source}: no question is left by all filters together; drop one of them")
    return kept


def _sample(questions: list[Question], limit: int | None, seed: int) -> list[Question]:
    """Return ``limit`` questions in the data's order, tasks sharing them by largest remainder.

    Every task has one before any has two; where the limit is below that, the largest tasks do.
    """
    if limit is None or limit >= len(questions):
        return questions
    if limit < 1:
        raise DataError(f"a limit of {limit} leaves no question; give 1 or more")
    members: dict[str, list[Question]] = {}
    for question in questions:
        members.setdefault(question.task, []).append(question)
    # A task's next place comes the earlier, the further the task is behind its share.
    places = sorted(
        (place > 0, place * len(questions) - limit * len(of_task), task)
        for task, of_task in members.items()
        for place in range(len(of_task))
    )
    counts = Counter(task for *_, task in places[:limit])

    # By hash and not by a generator: a seed means the same rows on every version of Python, and
    # in whatever order a file has them.
    def draw(question: Question) -> bytes:
        return hashlib.sha256(f"{seed} {question.id}".encode()).digest()

    drawn = {
        question.id
        for task, of_task in members.items()
        for question in sorted(of_task, key=draw)[: counts[task]]
    }
    return [question for question in questions if question.id in drawn]


def _no_such(what: str, name: str, source: str, known: Iterable[str]) -> str:
    names = sorted(set(known))
    has = ", ".join(names)
    return f"{source} has no {what} {_short(name)}{_suggest(name, names)}; it has {has}"


def _suggest(name: str, known: Iterable[str]) -> str:
    names = {entry.casefold(): entry for entry in known}
    matches = difflib.get_close_matches(name.casefold(), names)
    return f"; did you mean {' or '.join(names[match] for match in matches)}?" if matches else ""


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")
