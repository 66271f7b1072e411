"""Doctor tells what a run would find out a night later: on a real tiny model and on odd rows."""

import csv
import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from edge_eval.doctor import MEASURED_WHOLE, N_ROWS, examine, print_report, verdict
from edge_eval.model import letter_reader, open_model
from edge_eval.model_dir import read_manifest
from edge_eval.prompts import PROMPT_TEMPLATES, render
from edge_eval.questions import load_questions
from edge_eval.schema import RunConfig
from edge_eval.tokenization import encode_prompts, letter_tokens, load_tokenizer


@pytest.fixture(scope="module")
def report(tiny_model: Path) -> dict[str, Any]:
    return examine(tiny_model)


def test_every_template_is_examined_and_the_report_is_strict_json(report: dict[str, Any]) -> None:
    assert set(report["templates"]) == set(PROMPT_TEMPLATES)
    assert json.loads(json.dumps(report, allow_nan=False)) is not None
    for name, found in report["templates"].items():
        assert found["n_measured"] == (N_ROWS if name in MEASURED_WHOLE else -(-N_ROWS // 4))
        assert sum(found["letter_wins"]) == found["n_measured"]
        assert 0 < found["letter_mass"] < 1
        assert 0 <= found["letter_entropy"] <= 1


@pytest.mark.parametrize("template", MEASURED_WHOLE)
def test_the_letters_mass_is_that_of_the_whole_vocabulary_one_prompt_at_a_time(
    template: str, report: dict[str, Any], tiny_model: Path
) -> None:
    model = open_model(tiny_model, read_manifest(tiny_model), threads=1)
    tokenizer = load_tokenizer(tiny_model)
    wording = PROMPT_TEMPLATES[template]
    spelt = letter_tokens(tokenizer, wording.letters, wording.letter_prefix)
    reader = letter_reader(model, spelt.ids, normalized=True)
    rows = load_questions(RunConfig(limit=N_ROWS)).test
    encoded = encode_prompts(tokenizer, [render(q, template) for q in rows])
    masses = [
        np.exp(reader.read(item.input_ids).values[: len(q.options)]).sum()
        for q, item in zip(rows, encoded, strict=True)
    ]
    assert report["templates"][template]["letter_mass"] == pytest.approx(np.mean(masses), rel=1e-4)


def test_special_tokens_are_told_with_the_settings_beside(report: dict[str, Any]) -> None:
    assert report["special_tokens"]["before"] == ["<s>"]
    assert report["special_tokens"]["after"] == []


def test_the_letters_in_place_are_compared_with_those_scored(report: dict[str, Any]) -> None:
    for found in report["templates"].values():
        assert [letter["letter"] for letter in found["letters"]]
        for letter in found["letters"]:
            assert len(letter["ids"]) == len(letter["pieces"])


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    columns = ["ID", "Group", "Subject", "Level", "Country", "Question", "Context", "Answer Key"]
    columns += [f"Option {i}" for i in range(1, 6)] + ["is_few_shot"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


ROW = {
    "Group": "STEM",
    "Subject": "Physics",
    "Level": "High",
    "Question": "ما وحدة القوة؟",
    "Answer Key": "A",
    "Option 1": "نيوتن",
    "Option 2": "جول",
    "is_few_shot": "0",
}


def test_odd_rows_are_counted(tiny_model: Path, tmp_path: Path) -> None:
    rows = [
        ROW | {"ID": "1"},
        ROW | {"ID": "2"},  # the same question again
        ROW | {"ID": "3", "Question": "ما وحدة الشغل؟", "Option 1": "جول", "Option 2": "جول"},
        ROW | {"ID": "4", "Question": "ﻣﺎ وحدة الزمن؟"},  # presentation forms
        ROW | {"ID": "5", "Question": "ما وحدة الطـــول؟"},  # tatweel
        ROW | {"ID": "6", "Question": "ما وحدة \u200fالكتلة؟"},
        ROW | {"ID": "7", "Question": "ما وحدة الضغط؟", "Answer Key": "E"},  # not among its options
    ]
    data = examine(tiny_model, str(write_rows(tmp_path / "odd.csv", rows)))["data"]
    assert (data["n_questions"], data["n_refused"]) == (6, 1)
    assert data["refused"][0].startswith("line 8:")
    assert data["n_repeated"] == 1
    assert data["n_with_equal_options"] == 1
    assert data["n_with_presentation_forms"] == 1
    assert data["n_with_tatweel"] == 1
    assert data["n_with_bidi_marks"] == 1


def measured(**mass: float) -> dict[str, Any]:
    return {name.replace("_", "-"): {"letter_mass": value} for name, value in mass.items()}


@pytest.mark.parametrize(
    ("templates", "word", "said"),
    [
        (measured(en_latin=0.5, lm_eval=0.6), "go", "50.0%"),
        (measured(en_latin=0.001, lm_eval=0.6), "go with another protocol", "--protocol lm-eval"),
        (
            measured(en_latin=0.1, ar_arabic=0.6),
            "go with another protocol",
            "--prompt ar --letters",
        ),
        (measured(en_latin=0.001, lm_eval=0.002), "stop", "noise"),
        ({"en-latin": {"refused": "A is unknown"}}, "stop", "A is unknown"),
    ],
)
def test_the_verdict(templates: dict[str, Any], word: str, said: str) -> None:
    found = verdict(templates)
    assert found["word"] == word
    assert said in found["reason"]


@pytest.mark.parametrize("width", [40, 200])
def test_the_report_prints_at_any_width(report: dict[str, Any], width: int) -> None:
    console = Console(file=StringIO(), width=width)
    print_report(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for name in PROMPT_TEMPLATES:
        assert name[:4] in text
    assert text.strip().splitlines()[-1].strip()
