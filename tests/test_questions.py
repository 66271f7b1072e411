import csv
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_run_record import MANIFEST

from edge_eval import questions as module
from edge_eval.errors import DataError
from edge_eval.questions import fingerprint_questions, load_questions
from edge_eval.run_record import open_record
from edge_eval.schema import LEVEL_TITLES, Question, QuestionSet, RunConfig, task_name

HEADER = [
    *("ID", "Source", "Country", "Group", "Subject", "Level", "Question", "Context", "Answer Key"),
    *("Option 1", "Option 2", "Option 3", "Option 4", "Option 5", "is_few_shot"),
]
EGYPT = Path(__file__).parents[2] / "shared/data/arabicmmlu_egypt.csv"
SAMPLE = Path(module.__file__).parent / "sample/questions.csv"


def row(identifier: object = "", **cells: str) -> dict[str, str]:
    """Return a sound row; keyword arguments name columns, with ``_`` for the space in them."""
    sound = {
        **dict.fromkeys(HEADER, ""),
        "ID": str(identifier),
        "Country": "Egypt",
        "Group": "STEM",
        "Subject": "Biology",
        "Level": "High",
        "Question": "ما وحدة بناء الكائن الحي؟",
        "Answer Key": "B",
        "Option 1": "الذرة",
        "Option 2": "الخلية",
        "Option 3": "العضو",
        "is_few_shot": "0",
    }
    names = {name.replace(" ", "_"): name for name in HEADER}
    return {**sound, **{names[key]: value for key, value in cells.items()}}


def write_csv(path: Path, rows: list[dict[str, str]], encoding: str = "utf-8") -> str:
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, HEADER)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, object]]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


WRITERS = {
    ".csv": write_csv,
    ".jsonl": write_jsonl,
    ".json": write_jsonl,
    ".parquet": write_parquet,
}


def load(data: str | Path, **settings: object) -> QuestionSet:
    return load_questions(RunConfig(data=str(data), **settings))


def load_rows(tmp_path: Path, rows: list[dict[str, str]], **settings: object) -> QuestionSet:
    return load(write_csv(tmp_path / "rows.csv", rows), **settings)


def reasons(loaded: QuestionSet) -> list[tuple[int, str]]:
    return [(refused.line, refused.reason) for refused in loaded.refused]


def test_there_is_a_writer_here_for_every_reader():
    assert set(WRITERS) == set(module.READERS)


# ---- the constants


def test_the_tasks_are_the_papers():
    sizes = {
        group: sum(n for levels in subjects.values() for n in levels.values())
        for group, subjects in module.TASKS.items()
    }
    assert sizes == {
        "STEM": 3193,
        "Social Science": 3504,
        "Humanities": 3628,
        "Language": 1646,
        "Other": 2484,
    }
    levels = [level for group in module.TASKS.values() for of in group.values() for level in of]
    assert len(levels) == 40
    assert set(levels) == set(LEVEL_TITLES)


# ---- text is text

LITERALS = ("0", "None", "NA", "null", "007", "5", "5.0", "nan", "True", "-", " ", "1e3", "#N/A")


@pytest.mark.parametrize("suffix", WRITERS)
def test_options_that_look_like_other_types_survive(suffix, tmp_path):
    rows = [
        row(number, Option_1=literal, Option_2=f" {literal} ", Option_3="", Context=literal)
        for number, literal in enumerate(LITERALS)
    ]
    loaded = load(WRITERS[suffix](tmp_path / f"rows{suffix}", rows))
    assert [question.options for question in loaded.test] == [
        (literal, f" {literal} ") for literal in LITERALS
    ]
    assert [question.context for question in loaded.test] == list(LITERALS)
    assert not loaded.refused


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_row_becomes_its_question_wherever_it_stands(suffix, tmp_path):
    cells = {"Context": " نص\r\n\nثان ", "Option_4": '"quoted", ', "Option_5": "x\ny"}
    loaded = load(WRITERS[suffix](tmp_path / f"rows{suffix}", [row("q-1", **cells)]))
    assert loaded.test == (
        Question(
            id="q-1",
            group="STEM",
            subject="Biology",
            level="High",
            country="Egypt",
            context=" نص\r\n\nثان ",
            text="ما وحدة بناء الكائن الحي؟",
            options=("الذرة", "الخلية", "العضو", '"quoted", ', "x\ny"),
            answer=1,
            split="test",
        ),
    )


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
SUBJECTS = [
    (group, subject, level)
    for group, subjects in module.TASKS.items()
    for subject, levels in subjects.items()
    for level in levels
]


@st.composite
def drawn_rows(draw: st.DrawFn) -> list[dict[str, str]]:
    rows = []
    for identifier in range(draw(st.integers(1, 6))):
        group, subject, level = draw(st.sampled_from(SUBJECTS))
        options = draw(st.lists(TEXT.filter(bool), min_size=2, max_size=5))
        cells = {f"Option_{number}": text for number, text in enumerate(options, 1)}
        rows.append(
            row(
                identifier,
                **{"Group": group, "Subject": subject, "Level": level, "Option_3": "", **cells},
                Country=draw(st.sampled_from(["", *module.COUNTRIES])),
                Question=draw(TEXT.filter(str.strip)),
                Context=draw(TEXT),
                Answer_Key="ABCDE"[draw(st.integers(0, len(options) - 1))],
                is_few_shot="0" if identifier == 0 else draw(st.sampled_from("01")),
            )
        )
    return rows


@settings(max_examples=60, deadline=None)
@given(rows=drawn_rows())
def test_the_same_rows_are_the_same_questions_whatever_file_holds_them(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    loaded = {
        suffix: load(write(folder / f"rows{suffix}", rows)) for suffix, write in WRITERS.items()
    }
    written = [
        tuple(row[name] for name in module.OPTIONS if row[name])
        for row in rows
        if row["is_few_shot"] == "0"
    ]
    for questions in loaded.values():
        assert questions.test == loaded[".csv"].test
        assert questions.shots == loaded[".csv"].shots
        assert questions.fingerprint.sha256 == loaded[".csv"].fingerprint.sha256
        assert [question.options for question in questions.test] == written
        assert not questions.refused


# ---- JSON Lines


def test_json_numbers_are_text_where_their_text_is_known(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {**row(1), "Option 1": 5, "is_few_shot": 0, "ID": 7},
        {**row(2), "Option 1": 6.0},
        {**row(3), "Option 1": True},
        {**row(4), "Option 3": None, "Level": None, "Subject": "Driving Test", "Group": "Other"},
        {**row(5), "Option 1": ["a"]},
        {**row(6), "Option 1": {"a": 1}},
        {**row(7), "Option 1": 10**5000, "Extra": {"ignored": [1.5, True]}},
    ]
    sys.set_int_max_str_digits(0)
    try:
        loaded = load(write_jsonl(path, rows))
    finally:
        sys.set_int_max_str_digits(4300)
    assert [question.id for question in loaded.test] == ["7", "4"]
    assert loaded.test[0].options == ("5", "الخلية", "العضو")
    assert loaded.test[1].options == ("الذرة", "الخلية")
    assert loaded.test[1].level == ""
    assert [line for line, _ in reasons(loaded)] == [2, 3, 5, 6, 7]
    assert "Option 1 is a float, so its text is lost" in loaded.refused[0].reason
    assert "Option 1 is a bool" in loaded.refused[1].reason
    assert "id '7' already used on line 1" in loaded.refused[4].reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("{'ID': 1}", "not JSON"),
        ("3", "not a JSON object"),
        ("null", "not a JSON object"),
        ('{"ID": 1}', "columns missing: Group, Subject"),
        ('{"x":' + "[" * 100_000, "not JSON"),
        (json.dumps(row(1)).replace('"Option 2"', '"Option 1"'), "columns named twice: Option 1"),
        (json.dumps(row(1, Question="ما \ud800؟")), "Question holds half of a surrogate pair"),
        (json.dumps(row(1, Option_1="a\0")), "Option 1 holds a NUL character"),
        (json.dumps({**row(1), "Option 1": float("nan")}), "Option 1 is a float"),
    ],
)
def test_a_bad_json_line_is_refused_with_its_number(line, reason, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row(0))}\n\n{line}\n{json.dumps(row(9))}\n", encoding="utf-8")
    loaded = load(path)
    assert [question.id for question in loaded.test] == ["0", "9"]
    ((number, found),) = reasons(loaded)
    assert number == 3
    assert reason in found
    assert loaded.fingerprint.n_rows == 3


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_told_from_json_lines(indent, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row(1)], indent=indent), encoding="utf-8")
    with pytest.raises(DataError, match=r"line 1: an array is not JSON Lines; .* jq"):
        load(path)


# ---- parquet


def test_parquet_with_guessed_types_is_refused_as_a_whole(tmp_path):
    path = write_parquet(tmp_path / "rows.parquet", [{**row(1), "Option 3": 6.0}])
    with pytest.raises(DataError, match=r"column Option 3 is double.*dtype=str, na_filter=False"):
        load(path)


def test_parquet_takes_whole_ids_nulls_and_dictionary_columns(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {**row(), "ID": number, "is_few_shot": number % 2, "Option 4": None} for number in (0, 1)
    ]
    table = pa.Table.from_pylist(rows)
    subject = table.schema.get_field_index("Subject")
    table = table.set_column(subject, "Subject", table["Subject"].dictionary_encode())
    pq.write_table(table, tmp_path / "rows.parquet")
    loaded = load(tmp_path / "rows.parquet")
    assert [question.id for question in loaded.test] == ["0"]
    assert [question.id for question in loaded.shots["Biology (High School)"]] == ["1"]


def test_parquet_rows_are_numbered_across_batches(tmp_path):
    rows = [row(number, Answer_Key="A" if number % 300 else "?") for number in range(700)]
    loaded = load(write_parquet(tmp_path / "rows.parquet", rows))
    assert [line for line, _ in reasons(loaded)] == [1, 301, 601]
    assert loaded.fingerprint.n_rows == 700


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"Group,Subject"]
)
def test_what_is_not_parquet_is_one_message(content, tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not readable as parquet"):
        load(path)


def test_a_parquet_footer_of_many_columns_is_not_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for n, said in ((65, "65 columns, more than 64"), (10_000, "not readable as parquet")):
        path = tmp_path / f"{n}.parquet"
        pq.write_table(pa.table({f"c{i}": ["a"] for i in range(n)}), path)
        with pytest.raises(DataError, match=said) as caught:
            load(path)
        assert "\n" not in str(caught.value)


def write_long_parquet(path: Path, n: int, length: int, *, named_once: bool) -> None:
    """Write ``n`` rows of one long question, each without an id; the file stays small."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([row()] * n)
    long = pa.array(["x" * length]).dictionary_encode().take(pa.array([0] * n))
    at = table.column_names.index("Question")
    table = table.set_column(at, "Question", long if named_once else long.cast(pa.string()))
    pq.write_table(table, path, compression="zstd", use_dictionary=named_once)
    assert path.stat().st_size < 100_000


@pytest.mark.parametrize("named_once", [True, False])
def test_parquet_cells_too_long_for_a_question_are_never_taken(named_once, tmp_path):
    write_long_parquet(tmp_path / "rows.parquet", 8, 5 << 20, named_once=named_once)
    with pytest.raises(DataError, match="row 1 or soon after: longer than 1,048,576 characters"):
        load(tmp_path / "rows.parquet")


def test_parquet_that_unpacks_to_too_much_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_CHARACTERS", 1 << 22)
    path = tmp_path / "rows.parquet"
    write_long_parquet(path, 6, 1 << 20, named_once=False)
    with pytest.raises(DataError, match=r"row group 0 unpacks to 6,292,\d\d\d bytes"):
        load(path)
    # Columns are read side by side, so that they count together; what is not read does not count.
    write_parquet(path, [{**row(), "Question": "x" * 3_000_000, "Context": "y" * 3_000_000}])
    with pytest.raises(DataError, match=r"row group 0 unpacks to 6,0\d\d,\d\d\d bytes"):
        load(path)
    write_parquet(path, [{**row(), "Remarks": "x" * 6_000_000}])
    assert len(load(path).test) == 1
    # One text, held once and named six times, is a question of its own every time.
    write_long_parquet(path, 6, 1 << 20, named_once=True)
    with pytest.raises(DataError, match="line 4: over 4,194,304 characters in all"):
        load(path)


def test_parquet_without_a_column_names_it(tmp_path):
    path = write_parquet(tmp_path / "rows.parquet", [{"Group": "STEM"}])
    with pytest.raises(DataError, match=r"columns missing: Subject, Level.*found: 'Group'"):
        load(path)


# ---- CSV and encodings


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_encodings_that_say_what_they_are_and_line_ends_are_read(encoding, end, tmp_path):
    path = tmp_path / "rows.CSV"
    lines = [",".join(HEADER), *(",".join(row(number).values()) for number in (1, 2))]
    path.write_bytes((end.join(lines) + end).encode(encoding))
    loaded = load(path)
    assert [question.text for question in loaded.test] == [row()["Question"]] * 2
    assert loaded.fingerprint.n_rows == 2


def test_windows_1256_is_named_by_place_and_not_guessed(tmp_path):
    path = tmp_path / "rows.csv"
    sound = ",".join(HEADER).encode() + b"\n" + ",".join(row(1).values()).encode() + b"\n"
    bad = ",".join(row(2).values()).encode("cp1256")
    path.write_bytes(sound * 1 + bad)
    offset = len(sound) + bad.index("ما".encode("cp1256"))
    with pytest.raises(DataError) as caught:
        load(path)
    message = str(caught.value)
    assert f"line 3: not UTF-8: byte 0xE3 at offset {offset}" in message
    assert "iconv -f WINDOWS-1256 -t UTF-8 rows.csv" in message


def test_a_bad_byte_far_into_a_file_is_found(tmp_path):
    path = Path(write_csv(tmp_path / "rows.csv", [row(number) for number in range(2000)]))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"\xc7")
    with pytest.raises(DataError, match=rf"line 2002: not UTF-8: byte 0xC7 at offset {size};"):
        load(path)


def test_a_cut_utf_16_file_is_one_message(tmp_path):
    path = Path(write_csv(tmp_path / "rows.csv", [row(1)], encoding="utf-16"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="not UTF-16: truncated data"):
        load(path)


def test_columns_are_found_by_name_in_any_order_among_others(tmp_path):
    path = tmp_path / "rows.csv"
    names = [*reversed(HEADER), "#", "notes", "notes"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([f" {name} " for name in names])
        writer.writerow([row("q").get(name, "anything") for name in names])
    assert [question.id for question in load(path).test] == ["q"]


def test_optional_columns_may_be_absent_and_the_row_number_is_the_id(tmp_path):
    path = tmp_path / "rows.csv"
    cells = [row()[name] for name in module.REQUIRED]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([module.REQUIRED, cells, [], cells])
    loaded = load(path)
    assert [question.id for question in loaded.test] == ["1", "2"]
    assert loaded.test[0].options == ("الذرة", "الخلية")
    assert loaded.test[0].country == loaded.test[0].context == ""


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            "Group,Subject,Level,Question,Answer Key,Option 1",
            "columns missing: Option 2; found: 'Gr",
        ),
        (";".join(HEADER), "columns missing: Group"),
        (",".join(HEADER).lower(), "columns missing: Group"),
        (",".join([*HEADER, "Question"]), "columns named twice: Question"),
        (",".join([*HEADER, *"x" * 60]), "75 columns, more than 64"),
        (",".join(["x"] * 200_000), "200,000 columns, more than 64"),
        (",".join(["x"] * 1_000_000), "line 1: longer than 1,048,576 characters"),
        ('"Group,Subject', "line 1: not CSV"),
    ],
)
def test_a_header_that_is_no_table_of_questions_is_one_message(header, message, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(header + "\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def csv_lines(*lines: str) -> str:
    return "\n".join([",".join(HEADER), *lines]) + "\n"


def line(identifier: object, **cells: str) -> str:
    return ",".join(row(identifier, **cells).values())


@pytest.mark.parametrize("kind", [".csv", ".jsonl"])
def test_a_file_of_rows_that_are_no_questions_is_not_read_to_its_end(kind, tmp_path):
    path = tmp_path / f"rows{kind}"
    text = csv_lines(line(1)) if kind == ".csv" else json.dumps(row(1)) + "\n"
    path.write_text(text + "1,2\n" * 100_001, encoding="utf-8")
    with pytest.raises(
        DataError, match=r"over 100,000 rows are no questions; line [23]: "
    ) as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [".csv", ".jsonl"])
@pytest.mark.parametrize("blank", ["\n", "\r\n"])
def test_a_file_of_blank_lines_is_not_read_to_its_end(kind, blank, tmp_path):
    path = tmp_path / f"rows{kind}"
    path.write_text(blank * 1_000_001, encoding="utf-8", newline="")
    with pytest.raises(DataError, match="line 1000001: over 1,000,000 blank lines"):
        load(path)


def test_rows_with_a_field_too_many_or_too_few_are_refused_by_line(tmp_path):
    path = tmp_path / "rows.csv"
    two_lines = line(1, Question='"a\nb"')
    path.write_text(
        csv_lines(two_lines, line(2) + ",", "", line(3)[: -len(",,,0")], line(4), two_lines + ","),
        encoding="utf-8",
    )
    loaded = load(path)
    assert [question.id for question in loaded.test] == ["1", "4"]
    assert reasons(loaded) == [
        (4, "16 fields, but the header has 15"),
        (6, "12 fields, but the header has 15"),
        (8, "16 fields, read on to line 9, but the header has 15"),
    ]
    assert (loaded.fingerprint.n_rows, loaded.fingerprint.n_refused) == (5, 3)


def test_a_quote_left_open_is_named_by_the_line_where_its_row_began(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(csv_lines(line(1), line(2, Question='"open'), line(3), line(4)))
    with pytest.raises(
        DataError, match=r"line 3: not CSV: .* read on to line 5; a quote is left op"
    ):
        load(path)
    path.write_text(csv_lines(line(1), line(2, Question='"open'), line(3, Question='"x"'), line(4)))
    with pytest.raises(
        DataError, match=r"line 3: not CSV: .* read on to line 4; a quote is left op"
    ):
        load(path)


def test_a_quote_wrong_within_one_line_refuses_that_row_only(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(csv_lines(line(1), line(2, Question='"said "so""'), line(3)), encoding="utf-8")
    loaded = load(path)
    assert [question.id for question in loaded.test] == ["1", "3"]
    ((number, reason),) = reasons(loaded)
    assert number == 3
    assert reason.startswith("not CSV")


def test_a_nul_is_refused_by_row(tmp_path):
    loaded = load_rows(tmp_path, [row(1), row(2, Context="a\0b")])
    assert reasons(loaded) == [(3, "Context holds a NUL character")]


def test_an_endless_field_ends_in_one_message_and_not_in_memory(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(csv_lines(line(1, Question="x" * 200_000), line(2)), encoding="utf-8")
    assert reasons(load(path))[0][0] == 2
    path.write_text(csv_lines(line(1), "x" * 3_000_000), encoding="utf-8")
    with pytest.raises(DataError, match="line 3: longer than 1,048,576 characters"):
        load(path)
    path.write_text(csv_lines(line(1), '"a\n",' * 400_000), encoding="utf-8")
    with pytest.raises(DataError, match="line 3: the row that begins here passes"):
        load(path)
    many = tmp_path / "rows.jsonl"
    many.write_text(json.dumps(row(1, Question="x" * 3_000_000)), encoding="utf-8")
    with pytest.raises(DataError, match="line 1: longer than 1,048,576 characters"):
        load(many)


# ---- files that are none


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", "", "the file is empty"),
        ("rows.csv", "\n\n", "the file is empty"),
        ("rows.csv", csv_lines(), "no test questions (0 rows read"),
        ("rows.jsonl", "", "no test questions (0 rows read"),
        ("rows.csv", csv_lines(line(1, is_few_shot="1")), "1 rows read, 0 refused, 1 few-shot"),
        ("rows.csv", csv_lines(line(1, Answer_Key="")), "1 refused, 0 few-shot); line 2: Answer"),
        ("rows.tsv", "", "does not tell what the file holds"),
        ("rows", "", "does not tell what the file holds"),
    ],
)
def test_data_without_a_question_is_one_message(name, content, message, tmp_path):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("no/such.csv", "no such file; --data takes sample, hub, hub:TASK or a file"),
        ("", "not a file"),
        (".", "not a file"),
        ("x" * 5000 + ".csv", "File name too long"),
        ("hub:Biolgy (High School)", "did you mean Biology (High School)"),
        ("hub:Alchemy", "it has Accounting (University), All, Arabic"),
    ],
)
def test_data_that_is_not_there_says_what_to_give(data, message):
    with pytest.raises(DataError) as caught:
        load(data)
    assert message in str(caught.value)


# ---- rows


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        *(("A", 0), ("b", 1), (" C ", 2), ("D.", 3), ("e)", 4), ("E )", 4), ("\uff22", 1)),
        *(("أ", 0), ("ا", 0), ("ب", 1), ("ج", 2), ("د", 3), ("ه", 4), ("هـ", 4), ("ب.", 1)),
        *(("\ufe83", 0), ("\u0627\u0654", 0), ("\ufe91", 1), ("\ufe9d", 2), ("\ufea9", 3)),
        *(("\ufeeb", 4), ("\ufeebـ", 4), ("1", 0), ("5", 4), ("١", 0), ("٥)", 4), ("\uff13", 2)),
    ],
)
def test_answer_keys_in_every_alphabet_are_understood(key, answer, tmp_path):
    loaded = load_rows(tmp_path, [row(1, Answer_Key=key, Option_4="x", Option_5="y")])
    assert [question.answer for question in loaded.test] == [answer]


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"Answer_Key": ""}, "Answer Key '' is not one of"),
        ({"Answer_Key": "  "}, "Answer Key '  ' is not one of"),
        ({"Answer_Key": "F"}, "Answer Key 'F' is not one of"),
        ({"Answer_Key": "AB"}, "Answer Key 'AB' is not one of"),
        ({"Answer_Key": "0"}, "Answer Key '0' is not one of"),
        ({"Answer_Key": "6"}, "Answer Key '6' is not one of"),
        ({"Answer_Key": "B\u200f"}, r"Answer Key 'B\u200f' is not one of"),
        ({"Answer_Key": "."}, "Answer Key '.' is not one of"),
        ({"Answer_Key": "و"}, "Answer Key 'و' is not one of"),
        ({"Answer_Key": "D"}, "Answer Key 'D', but the row has 3 options"),
        ({"Answer_Key": "ه"}, "Answer Key 'ه', but the row has 3 options"),
        ({"Option_2": ""}, "Option 2 is empty, but an option follows it"),
        ({"Option_5": "x"}, "Option 4 is empty, but an option follows it"),
        ({"Option_2": "", "Option_3": ""}, "fewer than 2 options: Option 2 is empty"),
        ({"Option_1": "", "Option_2": "", "Option_3": ""}, "fewer than 2 options: Option 1"),
        ({"Question": " \n"}, "Question is empty"),
        (
            {"Subject": "Biolgy"},
            "Subject 'Biolgy' is not one of ArabicMMLU's; did you mean Biology",
        ),
        ({"Subject": ""}, "Subject '' is not one of ArabicMMLU's"),
        ({"Level": "high"}, "Level 'high' is not one of ArabicMMLU's; did you mean High?"),
        ({"Country": "Syria"}, "Country 'Syria' is not one of ArabicMMLU's"),
        ({"Group": "Stem"}, "Group 'Stem' is not one of ArabicMMLU's; did you mean STEM?"),
        ({"is_few_shot": "yes"}, "is_few_shot 'yes' is neither 0 nor 1"),
        ({"Subject": "x" * 500}, f"Subject '{'x' * 60}…' is not one"),
    ],
)
def test_a_row_that_is_no_question_is_refused_with_the_reason(cells, reason, tmp_path):
    loaded = load_rows(tmp_path, [row(1), row(2, **cells)])
    assert [question.id for question in loaded.test] == ["1"]
    ((number, found),) = reasons(loaded)
    assert number == 3
    assert found.startswith(reason)


def test_labels_may_stand_in_space_and_the_papers_group_is_known(tmp_path):
    cells = {"Group": "Arabic Language", "Subject": " Arabic Language ", "Level": "High "}
    (question,) = load_rows(tmp_path, [row(1, **cells, Country=" UAE")]).test
    assert (question.group, question.task) == ("Language", "Arabic Language (High School)")
    assert question.country == "UAE"


def test_a_repeated_id_is_refused_and_a_repeated_question_is_not(tmp_path):
    loaded = load_rows(tmp_path, [row("a"), row("b"), row(" a "), row("b", is_few_shot="1")])
    assert [question.id for question in loaded.test] == ["a", "b"]
    assert reasons(loaded) == [
        (4, "id 'a' already used on line 2"),
        (5, "id 'b' already used on line 3"),
    ]


def test_few_shot_rows_are_kept_apart_by_task_in_file_order(tmp_path):
    rows = [
        row("s2", is_few_shot="1"),
        row("t1", is_few_shot=""),
        row("s1", is_few_shot="1"),
        row("p1", is_few_shot="1", Subject="Physics"),
        row("t2"),
    ]
    loaded = load_rows(tmp_path, rows, limit=1, countries=("egypt",))
    assert {task: [shot.id for shot in shots] for task, shots in loaded.shots.items()} == {
        "Biology (High School)": ["s2", "s1"],
        "Physics (High School)": ["p1"],
    }
    assert all(shot.split == "dev" for shots in loaded.shots.values() for shot in shots)
    assert loaded.fingerprint.n_selected == len(loaded.test) == 1


# ---- filters


@pytest.fixture
def mixed(tmp_path):
    rows = [
        row("b", Country=""),
        row("p", Subject="Physics", Country="KSA"),
        row("d", Group="Other", Subject="Driving Test", Level="", Country="UAE"),
        row("l", Group="Language", Subject="Arabic Language", Level="High", Country="UAE"),
        row("i", Group="Humanities", Subject="Islamic Studies", Level="", Country="KSA"),
    ]
    return write_csv(tmp_path / "mixed.csv", rows)


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        ({}, "bpdli"),
        ({"tasks": ("biology (HIGH school)",)}, "b"),
        ({"tasks": ("Driving Test", "Physics (High School)")}, "pd"),
        ({"groups": ("stem",)}, "bp"),
        ({"groups": ("Language",)}, "l"),
        ({"groups": ("arabic language",)}, "l"),
        ({"levels": ("none",)}, "di"),
        ({"levels": ("high", "None")}, "bpdli"),
        ({"countries": ("none", " uae ")}, "bdl"),
        ({"countries": ("ksa",), "levels": ("none",)}, "i"),
    ],
)
def test_filters_choose_by_name_in_any_case(filters, ids, mixed):
    assert "".join(question.id for question in load(mixed, **filters).test) == ids


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (
            {"tasks": ("Biolgy (High School)",)},
            "has no task 'Biolgy (High School)'; did you mean Bi",
        ),
        (
            {"tasks": ("Biology",)},
            "it has Arabic Language (High School), Biology (High School), Dr",
        ),
        ({"groups": ("Social Science",)}, "has no group 'Social Science'; it has Humanities, Lang"),
        ({"levels": ("Univ",)}, "has no level 'Univ'; it has High, none"),
        ({"countries": ("Egpt",)}, "has no country 'Egpt'; it has KSA, UAE, none"),
        ({"countries": ("",)}, "has no country ''"),
        ({"groups": ("STEM",), "levels": ("none",)}, "no question is left by all filters together"),
    ],
)
def test_a_filter_that_selects_nothing_says_what_there_is(filters, message, mixed):
    with pytest.raises(DataError) as caught:
        load(mixed, **filters)
    assert message in str(caught.value)


# ---- the limit

SIZES = {
    ("Biology", "High"): 60,
    ("Physics", "High"): 29,
    ("Math", "Primary"): 10,
    ("Law", "Prof"): 1,
}


@pytest.fixture
def sized(tmp_path):
    rows = [
        row(f"{subject}-{number}", Subject=subject, Level=level)
        for (subject, level), size in SIZES.items()
        for number in range(size)
    ]
    rows.sort(key=lambda cells: hashlib.sha256(cells["ID"].encode()).digest())
    return write_csv(tmp_path / "sized.csv", rows)


@pytest.mark.parametrize(
    ("limit", "counts"),
    [
        (100, [60, 29, 10, 1]),
        (500, [60, 29, 10, 1]),
        (99, [59, 29, 10, 1]),
        (50, [30, 14, 5, 1]),  # shares 30, 14.5, 5, 0.5
        (10, [6, 2, 1, 1]),  # shares 6, 2.9, 1, 0.1: Law's one comes from Physics
        (5, [2, 1, 1, 1]),
        (4, [1, 1, 1, 1]),
        (2, [1, 1, 0, 0]),
        (1, [1, 0, 0, 0]),
    ],
)
def test_a_limit_shares_itself_among_tasks_by_largest_remainder(limit, counts, sized):
    loaded = load(sized, limit=limit)
    found = Counter(question.subject for question in loaded.test)
    assert [found[subject] for subject, _ in SIZES] == counts
    assert loaded.fingerprint.n_selected == sum(counts)
    assert loaded.fingerprint.n_rows == 100


def test_a_limit_is_a_seeded_draw_in_the_datas_order(sized):
    everything = load(sized).test
    drawn = load(sized, limit=40).test
    order = [everything.index(question) for question in drawn]
    assert order == sorted(order)
    assert drawn == load(sized, limit=40).test
    assert drawn == load(sized, limit=40, seed=0).test
    assert set(drawn) != set(load(sized, limit=40, seed=1).test)
    assert set(drawn) != set(everything[:40])


def test_a_limit_draws_the_same_rows_in_whatever_order_they_stand(sized, tmp_path):
    with open(sized, encoding="utf-8", newline="") as file:  # noqa: PTH123
        rows = list(csv.DictReader(file))
    shuffled = write_csv(tmp_path / "shuffled.csv", rows[::-1])
    assert set(load(sized, limit=17).test) == set(load(shuffled, limit=17).test)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    limit=st.integers(1, 400),
    seed=st.integers(-3, 3),
)
def test_a_limit_keeps_every_task_within_its_share(sizes, limit, seed):
    tasks = SUBJECTS[: len(sizes)]
    template = Question("", "", "", "", "", "", "text", ("a", "b"), 0, "test")
    questions = [
        replace(template, id=f"{task}{number}", subject=task[1], level=task[2])
        for task, size in zip(tasks, sizes, strict=True)
        for number in range(size)
    ]
    chosen = module._sample(questions, limit, seed)
    assert len(chosen) == min(limit, len(questions))
    counts = Counter(question.task for question in chosen)
    shares = [min(1, limit / len(questions)) * size for size in sizes]
    found = [counts[task_name(subject, level)] for _, subject, level in tasks]
    if limit >= len(sizes):
        assert all(found)
    if all(share >= 1 for share in shares):
        assert all(abs(n - share) < 1 for n, share in zip(found, shares, strict=True))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_nothing_is_refused(limit, sized):
    with pytest.raises(DataError, match="leaves no question"):
        load(sized, limit=limit)


# ---- the fingerprint


def test_the_fingerprint_is_of_every_field_and_not_of_the_order():
    question = Question("1", "STEM", "Biology", "High", "", "", "text", ("a", "b"), 0, "test")
    changes = [
        *({"id": "2"}, {"group": "Other"}, {"subject": "Physics"}, {"level": ""}),
        *({"country": "UAE"}, {"context": "c"}, {"text": "text "}, {"options": ("a", "b", "c")}),
        *({"options": ("ab", ""), "answer": 0}, {"answer": 1}, {"split": "dev"}),
    ]
    others = [replace(question, **change) for change in changes]
    prints = {fingerprint_questions([each]) for each in [question, *others]}
    assert len(prints) == len(others) + 1
    assert fingerprint_questions([question, others[0]]) == fingerprint_questions(
        [others[0], question]
    )


def test_the_fingerprint_never_changes_its_encoding():
    question = Question("1", "STEM", "Biology", "High", "", "", "سؤال", ("a", "b"), 0, "test")
    line = (
        '["1", "STEM", "Biology", "High", "", "", '
        '"\\u0633\\u0624\\u0627\\u0644", ["a", "b"], 0, "test"]\n'
    )
    assert fingerprint_questions([question]) == hashlib.sha256(line.encode()).hexdigest()


@given(st.lists(st.text('1 ,"\\\\س', max_size=3), max_size=8))
def test_the_fingerprint_is_of_the_sorted_lines_whatever_the_ids(ids: list[str]) -> None:
    questions = [
        Question(name, "STEM", "Biology", "High", "", "", f"{n % 3}", ("a", "b"), 0, "test")
        for n, name in enumerate(ids)
    ]
    lines = [
        f"{json.dumps([name, 'STEM', 'Biology', 'High', '', '', f'{n % 3}', ['a', 'b'], 0, 'test'])}\n"
        for n, name in enumerate(ids)
    ]
    whole = "".join(sorted(lines)).encode()
    assert fingerprint_questions(questions) == hashlib.sha256(whole).hexdigest()


# ---- the bundled sample and the real rows


@pytest.mark.skipif(not SAMPLE.exists(), reason="the sample is not bundled yet")
def test_the_bundled_sample_is_read_whole():
    loaded = load("sample")
    assert loaded.fingerprint.kind == loaded.fingerprint.source == "sample"
    assert loaded.test
    assert not loaded.refused


@pytest.mark.skipif(not EGYPT.exists(), reason=f"the benchmark's Egyptian rows are not at {EGYPT}")
def test_the_benchmarks_egyptian_rows_are_read_as_counted():
    loaded = load(EGYPT)
    assert len(loaded.test) == 2487
    assert sum(map(len, loaded.shots.values())) == 19
    assert not loaded.refused
    assert Counter(len(question.options) for question in loaded.test) == {
        4: 1706,
        3: 251,
        2: 529,
        5: 1,
    }
    everything = [*loaded.test, *(shot for shots in loaded.shots.values() for shot in shots)]
    assert sum(bool(question.context) for question in everything) == 70
    assert sum("\n" in question.text for question in everything) == 326
    rows = [question.options for question in everything]
    assert sum(any("\n" in option for option in options) for options in rows) == 111
    assert sum(any(option != option.strip() for option in options) for options in rows) == 138
    assert sum(options.count("0") for options in rows) == 8
    assert sum(len(set(options)) < len(options) for options in rows) == 7
    assert sum(1 / len(question.options) for question in loaded.test) / 2487 == pytest.approx(
        0.312, abs=5e-4
    )
    assert loaded.fingerprint.n_rows == 2506
    sample = load(EGYPT, limit=100)
    assert len(sample.test) == 100
    assert {question.task for question in sample.test} == {q.task for q in loaded.test}


# ---- the Hub, played by a server on this machine

CARD = """---
configs:
- config_name: All
  data_files:
  - {split: test, path: All/test.csv}
  - {split: dev, path: All/dev.csv}
- config_name: Biology (High School)
  data_files:
  - {split: test, path: Biology (High School)/test.csv}
  - {split: dev, path: Biology (High School)/dev.csv}
---
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub's interface as fetching one dataset needs."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    status = 200  # of every answer, when it is another
    n_requests = 0

    def do_GET(self):
        cls = type(self)
        cls.n_requests += 1
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        revision = module.HUB_REVISION
        api = f"/api/datasets/{module.HUB_REPOSITORY}"
        files = f"/datasets/{module.HUB_REPOSITORY}/resolve/{revision}/"
        if self.status != 200:
            self.answer(self.status, b"<html>no way through</html>")
        elif path == f"{api}/revision/{revision}":
            self.answer(200, json.dumps({"id": module.HUB_REPOSITORY, "sha": revision}).encode())
        elif path.startswith(f"{api}/tree/{revision}"):
            folder = path.removeprefix(f"{api}/tree/{revision}").strip("/")
            entries = [
                {"type": "file", "path": name, "size": len(body), "oid": "0"}
                for name, body in self.files.items()
                if name.rpartition("/")[0] == folder
            ]
            self.answer(200, json.dumps(entries).encode())
        elif (body := self.files.get(path.removeprefix(files))) is not None:
            etag = hashlib.sha256(body).hexdigest()
            self.answer(200, body, ("ETag", f'"{etag}"'), ("X-Repo-Commit", revision))
        else:
            code = "EntryNotFound" if path.startswith(files) else "RepoNotFound"
            self.answer(404, b"", ("X-Error-Code", code), ("X-Repo-Commit", revision))

    do_HEAD = do_GET  # noqa: N815 - the server looks for methods of these names

    def answer(self, status, body, *headers):
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


HUB_ROWS = [
    row(0, Option_1="0", Option_2="None", Option_3="NA"),
    row(1, Option_1="007", Option_2="5", Option_3=" null", Question='"ق"\r\nس, '),
    row(2, Option_1="1.0", Option_2="nan", Option_3="N/A", Option_4="true", Country=""),
    row(3, Subject="Driving Test", Group="Other", Level="", Option_3="", Context="\n"),
    row(4, Answer_Key="E"),
]
HUB_SHOTS = [row(5, is_few_shot="1", Option_1="6"), row(6, is_few_shot="0")]


@pytest.fixture
def hub(tmp_path):
    paths = [
        write_csv(tmp_path / f"{name}.csv", rows)
        for name, rows in (("test", HUB_ROWS), ("dev", HUB_SHOTS))
    ]
    test, dev = (Path(path).read_bytes() for path in paths)
    handler = type("ThisHub", (Hub,), {})
    handler.files = {"README.md": CARD.encode(), "All/test.csv": test, "All/dev.csv": dev}
    handler.files |= {f"Biology (High School)/{name}.csv": test for name in ("test", "dev")}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        handler.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield handler
        server.shutdown()


ASK = """
import dataclasses, json, sys
from edge_eval.errors import DataError
from edge_eval.questions import load_questions
from edge_eval.schema import RunConfig
try:
    loaded = load_questions(RunConfig(data=sys.argv[1]))
except DataError as error:
    sys.exit(f"DataError: {error}")
json.dump(dataclasses.asdict(loaded), open(sys.argv[2], "w"))
"""


def ask_hub(hub, tmp_path, data="hub", code: str = ASK, **environment: str) -> dict | str:
    """Load in a fresh process, since the Hub's address is read once, at import."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    proxies = {name for name in kept if name.lower().endswith("_proxy")}
    kept = {name: value for name, value in kept.items() if name not in proxies}
    home = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url}
    done = subprocess.run(
        [sys.executable, "-c", code, data, tmp_path / "loaded.json"],
        env={**kept, **home, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode:
        assert done.stderr.startswith("DataError: ")
        assert done.stderr.count("\n") == 1
        return done.stderr.strip()
    if code != ASK:
        return done.stdout
    assert done.stdout == done.stderr == ""
    return json.loads((tmp_path / "loaded.json").read_text())


def test_the_hub_gives_text_and_again_without_a_network(hub, tmp_path):
    fetched = ask_hub(hub, tmp_path)
    assert [question["options"] for question in fetched["test"]] == [
        ["0", "None", "NA"],
        ["007", "5", " null"],
        ["1.0", "nan", "N/A", "true"],
        ["الذرة", "الخلية"],
    ]
    assert fetched["test"][1]["text"] == '"ق"\r\nس, '
    assert fetched["test"][3]["context"] == "\n"
    assert [shot["id"] for shot in fetched["shots"]["Biology (High School)"]] == ["5", "6"]
    assert fetched["refused"] == [
        {"line": 5, "reason": "Answer Key 'E', but the row has 3 options"}
    ]
    assert fetched["fingerprint"] == {
        "source": "MBZUAI/ArabicMMLU/All",
        "kind": "hub",
        "revision": module.HUB_REVISION,
        "sha256": load_rows(tmp_path, HUB_ROWS).fingerprint.sha256,
        "n_rows": 7,
        "n_refused": 1,
        "n_selected": 4,
    }
    n_requests = hub.n_requests
    assert ask_hub(hub, tmp_path, HF_HUB_OFFLINE="1") == fetched
    assert ask_hub(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:1") == fetched
    assert hub.n_requests == n_requests


READ_AGAIN = """
import sys
from pathlib import Path
from edge_eval.report import load_report_questions
from edge_eval.run_record import read_record
print(len(load_report_questions([read_record(Path(sys.argv[1]))]) or ()))
"""


def test_a_report_takes_from_the_hub_what_is_in_the_cache_and_fetches_nothing(hub, tmp_path):
    found = load_rows(tmp_path, HUB_ROWS)
    config = RunConfig(data="hub")
    path = tmp_path / "record.jsonl"
    with open_record(path, config, MANIFEST, found.fingerprint, {}, {}) as record:
        record.finish({}, 0)
    assert ask_hub(hub, tmp_path, code=READ_AGAIN, data=path) == "0\n"
    assert hub.n_requests == 0
    ask_hub(hub, tmp_path)
    n_requests = hub.n_requests
    assert ask_hub(hub, tmp_path, code=READ_AGAIN, data=path) == "4\n"
    assert hub.n_requests == n_requests


def test_one_task_of_the_hub_is_found_in_any_case(hub, tmp_path):
    fetched = ask_hub(hub, tmp_path, "hub: biology (HIGH school)")
    assert fetched["fingerprint"]["source"] == "MBZUAI/ArabicMMLU/Biology (High School)"
    assert fetched["fingerprint"]["n_selected"] == 4


@pytest.mark.parametrize("status", [404, 502])
def test_a_proxys_refusal_is_not_told_as_not_found(status, hub, tmp_path):
    hub.status = status
    message = ask_hub(hub, tmp_path)
    assert "not in the cache, and the Hub is not reachable (offline, or a proxy?)" in message
    assert str(status) in message
    assert "--data FILE" in message
    assert hub.n_requests <= 2  # not tried again and again


def test_an_unreachable_hub_is_one_line(hub, tmp_path):
    message = ask_hub(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:1")
    assert "the Hub is not reachable" in message
    assert "refused" in message
    assert "offline mode is enabled" in ask_hub(hub, tmp_path, HF_HUB_OFFLINE="1")


def test_a_repository_the_hub_does_not_know_is_not_found(hub, tmp_path):
    message = ask_hub(hub, tmp_path, HF_ENDPOINT=f"{hub.url}/elsewhere")
    assert "not found, says the Hub" in message


def test_a_cache_that_cannot_be_written_is_named(hub, tmp_path):
    (tmp_path / "file").write_text("")
    message = ask_hub(hub, tmp_path, HF_DATASETS_CACHE=str(tmp_path / "file"))
    assert "cannot be fetched and stored (is the cache, HF_HOME, writable" in message


def test_importing_the_module_imports_no_data_library():
    heavy = "{'datasets', 'pyarrow', 'pandas', 'huggingface_hub'}"
    code = f"import sys, edge_eval.questions; sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
