"""README says what is there: its file tour, its commands and its options."""

import re
from pathlib import Path

import pytest
import typer.main

from edge_eval.cli import app
from exporters.cli import add_commands

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOUR = README.split("## Where to change what")[1].split("```")[1]


def commands() -> dict[str, set[str]]:
    """Every command's name with its options, exporters' included."""
    if "export" not in {command.name for command in app.registered_commands}:
        add_commands(app)
    found: dict[str, set[str]] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        found[name] = {opt for p in command.params for opt in (*p.opts, *p.secondary_opts)}
    return found


@pytest.mark.parametrize("package", ["edge_eval", "exporters"])
def test_the_file_tour_names_every_module_and_nothing_else(package: str) -> None:
    start = TOUR.index(f"{package}/")
    section = TOUR[start:].split("\n", 1)[1]
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    named = set(re.findall(r"\b([a-z_]+\.py)\b", section))
    there = {path.name for path in (ROOT / package).glob("*.py") if path.name[0] != "_"}
    assert named == there


def test_the_command_table_lists_every_command() -> None:
    table = README.split("## Commands")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `edge-eval ([a-z]+)", table, re.MULTILINE))
    assert listed == set(commands())


def test_every_command_and_option_that_readme_shows_exists() -> None:
    known = commands()
    shown = re.findall(r"edge-eval ([a-z]+)((?: [^\n`|]*)?)", README)
    used = [(name, rest) for name, rest in shown if name in known]
    assert len(used) > 15
    for name, rest in used:
        for option in re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", rest):
            assert option in known[name], f"edge-eval {name} has no {option}"
    everything = set().union(*known.values())
    outside = re.sub(r"`python benchmarks/[^`]*`", "", README)
    for option in set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", outside)):
        assert option in everything, f"no command has {option}"
