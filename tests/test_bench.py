"""A model directory's figures: their form, what is left out or unknown, and the parts exact."""

import io
import itertools
import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from edge_eval import bench, environment, metrics
from edge_eval.bench import (
    NOT_MEASURED,
    count_product_weights,
    drop_page_cache,
    energy_per_pass,
    measure,
    parse_lengths,
    print_bench,
)
from edge_eval.errors import ModelError, OptionError
from edge_eval.model_dir import GRAPH

LENGTHS = (32, 8, 16, 4096, 2048)  # the tiny model takes 1,024 tokens
SERIES = {"scenario", "streams", "threads", "n_tokens", "n", "prompt_tokens_per_s"}


@pytest.fixture(scope="module", autouse=True)
def _small_product() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "PRODUCT_SIZE", 256)
        yield


@pytest.fixture(scope="module")
def steps() -> list[str]:
    return []


@pytest.fixture(scope="module")
def figures(tiny_model: Path, steps: list[str]) -> dict[str, Any]:
    return measure(tiny_model, LENGTHS, threads=2, seconds=0.4, on_step=steps.append)


def series(figures: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        *figures["latency"],
        *figures["threads_sweep"],
        figures["offline"],
        figures["sustained"],
    ]


def printed(figures: dict[str, Any], width: int = 120) -> str:
    text = io.StringIO()
    print_bench(figures, Console(file=text, width=width))
    return text.getvalue()


def test_each_length_within_the_limit_is_a_row_and_longer_ones_are_named(
    figures: dict[str, Any],
) -> None:
    assert [row["n_tokens"] for row in figures["latency"]] == [8, 16, 32]
    assert figures["lengths_left_out"] == [2048, 4096]
    assert "above the model's limit of 1,024 tokens: 2048, 4096" in printed(figures)


def test_each_series_says_its_scenario_threads_length_and_number(figures: dict[str, Any]) -> None:
    for row in series(figures):
        assert set(row) >= SERIES
        assert row["n"] >= bench.MIN_PASSES
        assert row["latency_p25_ms"] <= row["latency_p50_ms"] <= row["latency_p75_ms"]
        assert row["latency_p75_ms"] <= row["latency_max_ms"]
        assert row["prompt_tokens_per_s"] > 0
        assert (row["latency_p90_ms"] is None) == (row["n"] < metrics.P90_MIN_SAMPLES)
    assert len({row["n"] for row in figures["latency"]}) == 1  # they took turns


def test_scenarios_are_the_field_s_own(figures: dict[str, Any]) -> None:
    shapes = [(row["scenario"], row["streams"], row["threads"]) for row in series(figures)]
    assert shapes == [
        *[("single-stream", 1, 2)] * 3,
        ("single-stream", 1, 1),
        ("single-stream", 1, 2),
        ("offline", 2, 1),
        ("single-stream", 1, 2),
    ]


def test_figures_are_strict_json(figures: dict[str, Any]) -> None:
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_what_is_unknown_has_a_reason_and_what_is_known_has_none(figures: dict[str, Any]) -> None:
    unknown = {key for key in NOT_MEASURED if figures[key] is None}
    assert set(figures["not_measured"]) == unknown


def test_what_is_unknown_is_printed_in_words(figures: dict[str, Any]) -> None:
    nothing = dict.fromkeys([*NOT_MEASURED, "rss_anon_bytes", "rss_file_bytes", "on_ac_power"])
    text = printed(figures | nothing | {"not_measured": NOT_MEASURED})
    for key in set(NOT_MEASURED) - {"n_product_weights"}:
        assert f"not measured ({NOT_MEASURED[key]})" in text
    assert "None" not in text


def test_what_is_known_is_printed_with_its_unit(figures: dict[str, Any]) -> None:
    known = {
        "fit": {"fixed_ms": 3.0, "ms_per_token": 0.5},
        "load_cold_s": 2.5,
        "drift": 1.25,
        "peak_memory_bytes": 612_000_000,
        "rss_anon_bytes": 200_000_000,
        "rss_file_bytes": 400_000_000,
        "thermal_throttle_count_before": 40,
        "thermal_throttle_count": 43,
        "battery_percent": 80.0,
        "on_ac_power": False,
        "energy_per_prompt_j": 1.5,
        "not_measured": {},
    }
    text = printed(figures | known)
    assert "not measured" not in text
    for words in (
        "3.0 ms + 0.500 ms x tokens",
        "2.50 s",
        "1.25 x",
        "612 MB",
        "200 MB",
        "400 MB",
        "3 times",
        "80 %",
        "1.50 J",
    ):
        assert words in text


def test_tables_fit_a_terminal_of_80_columns(figures: dict[str, Any]) -> None:
    big = dict.fromkeys([f"latency_{name}_ms" for name in ("p25", "p50", "p75", "max")], 9999.0)
    wide = {"n": 1000, "n_tokens": 4096, "prompt_tokens_per_s": 99999.0, "share_of_fp32_peak": 1.5}
    rows = [row | big | wide | {"latency_p90_ms": None} for row in figures["latency"]]
    lines = printed(figures | {"latency": rows}, width=80).splitlines()
    assert sum("9999-9999  max 9999    99,999    150" in line for line in lines) == len(rows)


def test_too_few_passes_for_a_p90_show_the_maximum_and_say_so(figures: dict[str, Any]) -> None:
    row = figures["latency"][0] | {"latency_p90_ms": None, "latency_max_ms": 77.0}
    assert "max 77" in printed(figures | {"latency": [row]})
    assert "max 77" not in printed(figures | {"latency": [row | {"latency_p90_ms": 66.0}]})


def test_the_steps_are_told_as_they_begin(steps: list[str], figures: dict[str, Any]) -> None:
    assert len(steps) == 4


def test_two_lengths_have_no_fit_and_a_long_series_has_a_p90_and_a_drift(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "MIN_PASSES", metrics.DRIFT_MIN_SAMPLES)
    monkeypatch.setattr(environment, "read_energy_j", itertools.count(100.0, 2.0).__next__)
    figures = measure(tiny_model, (4, 8), threads=1, seconds=0.0)
    assert figures["fit"] is None
    assert figures["not_measured"]["fit"]
    assert figures["drift"] > 0
    assert figures["energy_per_prompt_j"] == 2.0
    assert all(row["latency_p90_ms"] for row in series(figures))
    assert [row["threads"] for row in figures["threads_sweep"]] == [1]


def test_the_fit_is_exact_on_a_straight_line(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounds(_reader: Any, prompts: Any, _seconds: float) -> list[list[float]]:
        times = [[(3.0 + 0.5 * len(prompt)) / 1e3] * 5 for prompt in prompts]
        times[0][2] = 100.0  # one pause of the machine
        return times

    monkeypatch.setattr(bench, "time_rounds", rounds)
    figures = measure(tiny_model, (8, 16, 24, 64), threads=1, seconds=0.1)
    assert figures["fit"] == pytest.approx({"fixed_ms": 3.0, "ms_per_token": 0.5})


def test_no_length_within_the_limit_is_one_message(tiny_model: Path) -> None:
    with pytest.raises(OptionError, match="takes 1024 tokens"):
        measure(tiny_model, (2000, 3000), seconds=0.1)


def test_logits_that_are_not_finite_are_no_speed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        model = open_model(*args)
        model.session.run = lambda *_: [np.full((1, 8, 64), np.nan, dtype=np.float32)]
        return model

    open_model = bench.open_any_model
    monkeypatch.setattr(bench, "open_any_model", broken)
    with pytest.raises(ModelError, match="not finite"):
        measure(tiny_model, (8,), threads=1, seconds=0.1)


def test_what_is_no_model_directory_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no manifest\.json"):
        measure(tmp_path, (8,), seconds=0.1)


@pytest.mark.parametrize("text", ["", "64,", "64;128", "-1", "0", "1.5", "²", "a"])
def test_lengths_that_are_no_numbers_of_tokens_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--lengths"):
        parse_lengths(text)


def test_lengths_are_read_with_spaces_and_in_any_digits() -> None:
    assert parse_lengths("64, 128,٨") == (64, 128, 8)


@pytest.mark.parametrize(
    ("joules", "expected"),
    [
        ([10.0, 12.0, 16.0], 3.0),
        ([262140.0, 262143.0, 1.0, 6.0], 4.0),  # started again once: (3 + 5) / 2
        ([5.0, 5.0], 0.0),
        ([9.0, 1.0], None),
        ([None, None], None),
        ([1.0, None, 3.0], None),
        ([1.0], None),
    ],
)
def test_energy_is_the_mean_rise_without_a_counter_s_restart(
    joules: list[float | None], expected: float | None
) -> None:
    assert energy_per_pass(joules) == expected


def test_a_file_is_dropped_unless_it_is_in_use_or_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1_000_000)
    (tmp_path / "empty").touch()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as used:
        assert used[:: mmap.PAGESIZE]
        assert drop_page_cache([path, tmp_path / "empty"]) is False
    assert drop_page_cache([tmp_path / "absent"]) is False


def test_cold_load_is_known_where_the_page_cache_was_dropped(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dropped in (True, False):
        monkeypatch.setattr(bench, "drop_page_cache", lambda _paths, dropped=dropped: dropped)
        figures = measure(tiny_model, (4,), threads=1, seconds=0.0)
        assert (figures["load_cold_s"] is not None) is dropped
        assert ("load_cold_s" in figures["not_measured"]) is not dropped


def test_product_weights_are_the_decoder_s_matrices_alone(figures: dict[str, Any]) -> None:
    hidden, keys, inner, n_layers = 64, 32, 48, 3  # conftest's TINY
    per_layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner
    assert figures["n_product_weights"] == n_layers * per_layer


def test_product_weights_are_found_behind_casts_and_in_packed_int4(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    def tensor(name: str, kind: int, *shape: int) -> Any:
        return helper.make_tensor(name, kind, shape, np.zeros(shape, dtype=np.uint8).ravel())

    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["x"]),
            helper.make_node("DequantizeLinear", ["w8", "scale"], ["w"]),
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("MatMulInteger", ["y", "w8"], ["z"]),
            helper.make_node("MatMul", ["y", "z"], ["a"]),
            helper.make_node("Gemm", ["a", "w8", "bias"], ["c"], transB=1),
            helper.make_node("MatMulNBits", ["a", "w4", "s4"], ["b"], K=32, N=6, bits=4),
        ],
        "g",
        [],
        [],
        [
            tensor("table", TensorProto.FLOAT, 100, 4),
            tensor("w8", TensorProto.INT8, 4, 300),
            tensor("scale", TensorProto.FLOAT, 300),
            tensor("bias", TensorProto.FLOAT, 4),
            tensor("w4", TensorProto.UINT8, 6, 1, 16),
            tensor("s4", TensorProto.FLOAT, 6),
        ],
    )
    path = tmp_path / GRAPH
    path.write_bytes(helper.make_model(graph).SerializeToString())
    assert count_product_weights(path) == 3 * 1200 + 192
