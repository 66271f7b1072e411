"""Rounding a model directory: what it may change, what it may not, and what it says of itself."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import typer
from onnx import TensorProto, helper, numpy_helper
from test_model_dir import copy_model, seal
from typer.testing import CliRunner

from edge_eval.errors import ExportError, ModelError
from edge_eval.evaluate import evaluate
from edge_eval.model import open_model
from edge_eval.model_dir import GRAPH, MANIFEST, read_manifest, verify_hashes
from edge_eval.schema import ExportManifest, RunConfig, Status
from exporters import quantize as quantizing
from exporters.calibration import Gauge, Price, Probe, observe, price_of, sample_probes
from exporters.cli import add_commands
from exporters.huggingface import export_checkpoint
from exporters.network import find_sites, read_network, write_network
from exporters.quantize import (
    PRECISIONS,
    choose_kept,
    first_token_ids,
    first_token_past,
    plan_rounding,
    quantize,
    shortfall,
    verdict,
)
from exporters.rounding import (
    ROTATION,
    compensation,
    rotate_rows,
    rotation_of,
    round_to_int4,
    round_to_int8,
)
from exporters.verify import verify_directory

LETTER_IDS = (34, 35, 36, 37, 38, 282, 273, 284, 272, 276)


@pytest.fixture(scope="module")
def quantised(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model in every precision."""
    folder = tmp_path_factory.mktemp("quantised")
    for precision in PRECISIONS:
        quantize(tiny_model, folder / precision, precision)
    return {precision: folder / precision for precision in PRECISIONS}


@pytest.fixture(scope="module")
def input_ids() -> Any:
    return np.random.default_rng(0).integers(2, 600, 60)


def weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "normal": rng.standard_normal((64, 48)),
        "one sign": np.abs(rng.standard_normal((64, 48))),
        "heavy tails": rng.standard_t(2, (64, 48)),
        "odd": rng.standard_normal((63, 48)),
        "zero": np.zeros((64, 48)),
    }


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_quantised_model_opens_scores_and_stays_close(
    precision: str, quantised: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    directory = quantised[precision]
    manifest = read_manifest(directory)
    verify_hashes(directory, manifest)
    record = evaluate(RunConfig(model=str(directory), limit=12), tmp_path / "run.jsonl")
    assert record.manifest.precision == precision
    assert {prediction.status for prediction in record.predictions} == {Status.SCORED}
    source = evaluate(RunConfig(model=str(tiny_model), limit=12), tmp_path / "fp32.jsonl")
    ours, theirs = (
        np.array([p.letter_logits for p in run.predictions], dtype=float)
        for run in (record, source)
    )
    allowed = 0.6 if precision == "int4" else 0.15
    assert np.abs(ours - theirs).max() < allowed * np.abs(theirs).max()
    assert verify_directory(directory)["precision"] == precision


def test_a_quantised_graph_further_off_than_when_it_was_made_is_told(
    quantised: dict[str, Path], tmp_path: Path
) -> None:
    directory = copy_model(quantised["int8"], tmp_path)
    head = np.load(directory / "lm_head.npy")
    np.save(directory / "lm_head.npy", head * head.dtype.type(3))
    with pytest.raises(ModelError, match="further from its checkpoint than when it was made"):
        verify_directory(seal(directory))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_manifest_holds_what_quantising_measured(
    precision: str, quantised: dict[str, Path], tiny_model: Path
) -> None:
    source, manifest = read_manifest(tiny_model), read_manifest(quantised[precision])
    figures = manifest.quantization
    assert figures is not None
    assert figures["n_prompts"] == 120
    assert 0 <= figures["mean_kl"] < 1
    assert figures["agreement"] == figures["n_same_letter"] / 120
    assert figures["speed_ratio"] > 0
    assert figures["size_bytes"] < figures["source_bytes"]
    assert figures["source_sha256"] == source.files[GRAPH]["sha256"]
    assert "instruction_sets" in figures
    assert manifest.first_token_apart
    assert manifest.files[f"{GRAPH}_data"]["size_bytes"] > 0
    assert manifest.parity["reference_logits"] == source.parity["reference_logits"]
    assert manifest.parity["logit_max_difference"] > source.parity["logit_max_difference"]
    assert f"{figures['n_same_letter']} of 120 held-out questions" in verdict(manifest)
    json.dumps(figures, allow_nan=False)


def test_the_tables_are_halved_where_the_letters_allow_it(
    quantised: dict[str, Path], tiny_model: Path
) -> None:
    halved = np.load(quantised["int8"] / "lm_head.npy")
    full = np.load(tiny_model / "lm_head.npy")
    assert halved.dtype == np.float16
    np.testing.assert_allclose(halved, full, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "fused"),
    [
        ("llama", True),
        ("gemma3_text", True),
        ("qwen2", False),
        ("gpt2", False),
    ],
)
def test_folding_alone_changes_nothing(
    model_type: str, fused: bool, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    export_checkpoint(str(make_checkpoint(model_type)), source, fused=fused)
    model = open_model(source, read_manifest(source), 1)
    network = read_network(source / GRAPH)
    sites = find_sites(network)
    assert sum(len(site.products) for site in sites) >= 12
    assert any(site.norm for site in sites)
    assert any(site.spiked for site in sites)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    probes, _ = sample_probes(source, model.manifest.max_length)
    plan = plan_rounding(network, sites, model, probes[:4], PRECISIONS["int8"], scratch)
    changed = [
        name
        for name in plan.folded.tensors
        if not np.array_equal(plan.folded.tensors[name], network.tensors[name])
    ]
    assert changed
    gauge = Gauge(model, LETTER_IDS, probes[:8], {})
    assert gauge.price(plan.folded, scratch).kl < 1e-6
    ours = replace(
        model, session=open_model(scratch_model(source, scratch), model.manifest, 1).session
    )
    for probe in probes[:8]:
        expected, _ = model.run(probe.input_ids)
        np.testing.assert_allclose(ours.run(probe.input_ids)[0], expected, rtol=1e-4, atol=1e-4)
    # Every product rounded, whatever the graph's form, still answers nearly the same.
    assert gauge.price(plan.network(), scratch).kl < 0.05


def scratch_model(source: Path, scratch: Path) -> Path:
    """``scratch``, holding a graph, as a whole model directory."""
    for name in ("lm_head.npy", "embedding.npy"):
        if (source / name).exists():
            (scratch / name).write_bytes((source / name).read_bytes())
    return scratch


@pytest.fixture(scope="module")
def plan(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny model's products, rounded to int8 on four prompts."""
    model = open_model(tiny_model, read_manifest(tiny_model), 1)
    network = read_network(tiny_model / GRAPH)
    probes, _ = sample_probes(tiny_model, 1024)
    scratch = tmp_path_factory.mktemp("plan")
    return plan_rounding(
        network, find_sites(network), model, probes[:4], PRECISIONS["int8"], scratch
    )


def test_a_kept_product_stays_as_it_was(plan: Any) -> None:
    everything = {item.output for site in plan.sites for item in site.products}
    kept = plan.network(everything)
    assert all(tensor.dtype != np.int8 for tensor in kept.tensors.values())
    one = min(everything)
    left = [node for node in plan.network({one}).nodes() if node.op_type == "MatMul"]
    rotations = [node for node in left if node.input[1].startswith("rotation_")]
    assert [node.output[0] for node in left if node not in rotations] == [one]
    assert rotations


def test_products_are_kept_until_the_promise_holds(
    plan: Any, tiny_model: Path, tmp_path: Path
) -> None:
    model = open_model(tiny_model, read_manifest(tiny_model), 1)
    probes, _ = sample_probes(tiny_model, 1024)
    gauge = Gauge(model, LETTER_IDS, probes[:8], {})

    def choose(recipe: Any) -> Any:
        return choose_kept(plan, recipe, gauge, tmp_path)

    int8 = PRECISIONS["int8"]
    everything = choose(replace(int8, keep_worst=False))
    assert everything.kept == ()
    assert choose(replace(int8, max_kl=1.0, min_agreement=0.0)).kept == ()
    some = choose(replace(int8, max_kl=everything.price.kl, min_agreement=0.0))
    assert 0 < len(some.kept) < sum(len(site.products) for site in plan.sites)
    assert some.price.kl < everything.price.kl


def test_hessians_in_several_groups_are_the_same(
    plan: Any, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(tiny_model, read_manifest(tiny_model), 1)
    network = read_network(tiny_model / GRAPH)
    probes, _ = sample_probes(tiny_model, 1024)
    monkeypatch.setattr(quantizing, "HESSIAN_BYTES", 40_000)
    again = plan_rounding(
        network, find_sites(network), model, probes[:4], PRECISIONS["int8"], tmp_path
    )
    for output, weight in plan.rounded.items():
        np.testing.assert_array_equal(again.rounded[output].whole, weight.whole)


def test_what_is_not_finite_is_not_rounded(tiny_model: Path, tmp_path: Path) -> None:
    model = open_model(tiny_model, read_manifest(tiny_model), 1)
    network = read_network(tiny_model / GRAPH)
    probes, _ = sample_probes(tiny_model, 1024)
    site = find_sites(network)[0]
    network.tensors[site.norm[0]] = network.tensors[site.norm[0]] * np.float32(np.inf)
    with pytest.raises(ExportError, match="not finite"):
        list(observe(network, [site.x], model, probes[:1], tmp_path))


def test_a_rotation_and_its_inverse_leave_a_product_as_it_was(plan: Any) -> None:
    site = next(site for site in plan.sites if site.spiked)
    rng = np.random.default_rng(0)
    for width in (64, 48, 1536, 63):
        rotation = rotation_of(site, width)
        assert ROTATION % len(rotation) == 0
        x, weight = rng.standard_normal((5, width)), rng.standard_normal((width, 7))
        mixed = rotate_rows(x.T, rotation).T
        np.testing.assert_allclose(mixed @ rotate_rows(weight, rotation), x @ weight, atol=1e-5)
    spike = np.zeros((1, 64))
    spike[0, 5] = 8
    np.testing.assert_allclose(np.abs(rotate_rows(spike.T, rotation_of(site, 64))), 1, rtol=1e-6)


def test_compensated_rounding_loses_less_of_the_product(plan: Any) -> None:
    """Of inputs that are alike in their channels, as a network's are."""
    rng = np.random.default_rng(0)
    site = next(site for site in plan.sites if site.norm)
    inputs = (rng.standard_normal((400, 8)) @ rng.standard_normal((8, 96))).astype(np.float32)
    inputs += rng.standard_normal(inputs.shape).astype(np.float32) / 10
    weight = rng.standard_normal((96, 40)).astype(np.float32)
    upper = compensation(site, inputs.T @ inputs, np.ones(96, dtype=np.float32))
    lost = [
        np.square(inputs @ (rounded.whole * rounded.scale - weight)).sum()
        for rounded in (round_to_int8(weight, upper), round_to_int8(weight))
    ]
    assert lost[0] < lost[1] / 3


def test_a_first_token_is_computed_in_fp32(
    quantised: dict[str, Path], tiny_model: Path, input_ids: Any
) -> None:
    manifest = read_manifest(quantised["int8"])
    ids = first_token_ids(tiny_model)
    assert list(manifest.first_token_ids) == ids
    assert ids
    source = open_model(tiny_model, read_manifest(tiny_model), 1)
    ours = open_model(quantised["int8"], manifest, 1)
    for token_id, past in first_token_past(source, ids).items():
        for mine, their in zip(ours.first_tokens[token_id], past, strict=True):
            np.testing.assert_array_equal(mine, their)
    other = next(i for i in range(2, 600) if i not in ids)
    ours.run(np.concatenate([[other], input_ids]))
    assert other in ours.first_tokens


def test_first_tokens_of_another_model_are_told(quantised: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_model(quantised["int8"], tmp_path)
    table = np.load(directory / "first_tokens.npy")
    np.save(directory / "first_tokens.npy", table[:, :-1])
    with pytest.raises(ModelError, match="does not fit the graph"):
        open_model(directory, read_manifest(seal(directory)), 1)


def test_weights_with_two_names_on_disk_are_told(tiny_model: Path, tmp_path: Path) -> None:
    directory = copy_model(tiny_model, tmp_path / "model")
    (tmp_path / "other").hardlink_to(directory / f"{GRAPH}_data")
    with pytest.raises(ExportError, match="Copy the model directory"):
        quantize(directory, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_the_first_token_apart_is_the_whole_pass(tiny_model: Path, input_ids: Any) -> None:
    manifest = read_manifest(tiny_model)
    whole = open_model(tiny_model, manifest, 1)
    apart = open_model(tiny_model, replace(manifest, first_token_apart=True), 1)
    for first in (0, 5, 0):
        ids = np.concatenate([[first], input_ids])
        np.testing.assert_allclose(apart.run(ids)[0], whole.run(ids)[0], rtol=1e-4, atol=1e-4)
    assert sorted(apart.first_tokens) == [0, 5]
    _, theirs = whole.run(input_ids, keep=True)
    _, ours = apart.run(input_ids, keep=True)
    for mine, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, their, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(apart.run(input_ids[:1])[0], whole.run(input_ids[:1])[0])
    step = np.array([7], dtype=np.int64)
    np.testing.assert_allclose(
        apart.run(step, ours)[0], whole.run(step, theirs)[0], rtol=1e-4, atol=1e-4
    )


def test_streams_may_share_the_first_tokens(tiny_model: Path, input_ids: Any) -> None:
    manifest = read_manifest(tiny_model)
    apart = open_model(tiny_model, replace(manifest, first_token_apart=True), 1)
    prompts = [np.concatenate([[first % 90], input_ids]) for first in range(200)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda ids: apart.run(ids)[0], prompts))
    assert len(apart.first_tokens) <= 64 + 4
    whole = open_model(tiny_model, manifest, 1)
    for hidden, ids in zip(together[:90], prompts[:90], strict=True):
        np.testing.assert_allclose(hidden, whole.run(ids)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", weights())
def test_int8_weights_keep_neighbours_within_sixteen_bits(name: str, plan: Any) -> None:
    weight = weights()[name].astype(np.float32)
    inputs = np.random.default_rng(2).standard_normal((300, len(weight))).astype(np.float32)
    site = next(site for site in plan.sites if site.norm)
    upper = compensation(site, inputs.T @ inputs, np.ones(len(weight), dtype=np.float32))
    for rounded in (round_to_int8(weight), round_to_int8(weight, upper)):
        whole = rounded.whole.astype(int)
        padded = np.pad(whole, ((0, len(whole) % 2), (0, 0))).reshape(-1, 2, 48)
        assert np.abs(np.maximum(padded, 0).sum(axis=1)).max() <= 128
        assert np.abs(np.minimum(padded, 0).sum(axis=1)).max() <= 128
    plain = round_to_int8(weight)
    assert np.all(np.abs(plain.whole * plain.scale - weight) <= plain.scale / 2 + 1e-7)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("name", weights())
def test_an_int8_product_is_exact_on_this_machine(name: str, rows: int) -> None:
    rounded = round_to_int8(weights()[name].astype(np.float32))
    whole, scale = rounded.whole, rounded.scale
    given = np.random.default_rng(1).integers(200, 256, (rows, len(whole)), dtype=np.uint8)
    zero = np.uint8(3)
    node = helper.make_node(
        "MatMulIntegerToFloat", ["a", "b", "s", "t", "z"], ["y"], domain="com.microsoft"
    )
    constants = {"b": whole, "t": scale, "s": np.float32(1), "z": zero}
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, given.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    exact = ((given.astype(np.int64) - 3) @ whole.astype(np.int64)) * scale.astype(np.float64)
    np.testing.assert_allclose(session.run(None, {"a": given})[0], exact, rtol=1e-5, atol=1e-25)


@pytest.mark.parametrize("n_in", [64, 48])
def test_int4_weights_are_within_half_a_step_of_their_blocks(n_in: int) -> None:
    weight = np.random.default_rng(0).standard_normal((n_in, 8)).astype(np.float32)
    rounded = round_to_int4(weight)
    packed, scale = rounded.whole, rounded.scale
    assert packed.shape == (8, 2, 16)
    whole = np.stack([packed & 15, packed >> 4], axis=-1).reshape(8, 2, 32).astype(int) - 8
    back = (whole * scale.reshape(8, 2, 1)).reshape(8, 64)[:, :n_in].T
    assert np.square(back - weight).mean() < 0.01 * np.square(weight).mean()


def test_what_is_quantised_already_is_refused(quantised: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="int8 already"):
        quantize(quantised["int8"], tmp_path / "twice", "int4")
    assert not list(tmp_path.iterdir())


def test_an_unknown_precision_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"'int2'.*int8, int8-fast, int4"):
        quantize(tiny_model, tmp_path / "out", "int2")


def test_a_directory_that_exists_is_never_overwritten(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="exists already"):
        quantize(tiny_model, tmp_path, "int4")


def test_a_graph_without_products_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    directory = copy_model(tiny_model, tmp_path / "empty")
    network = read_network(directory / GRAPH)
    assert network.tensors
    graph = onnx.load(directory / GRAPH)
    for node in graph.graph.node:
        if node.op_type == "MatMul":
            node.op_type = "Gemm"
            node.attribute.append(helper.make_attribute("alpha", 2.0))
    (directory / GRAPH).write_bytes(graph.SerializeToString())
    assert find_sites(read_network(directory / GRAPH)) == []


def test_a_written_network_reads_back_the_same(tiny_model: Path, tmp_path: Path) -> None:
    network = read_network(tiny_model / GRAPH)
    write_network(network, tmp_path / GRAPH)
    again = read_network(tmp_path / GRAPH)
    assert again.tensors.keys() == network.tensors.keys()
    for name, tensor in network.tensors.items():
        np.testing.assert_array_equal(again.tensors[name], tensor)
    assert (tmp_path / GRAPH).stat().st_size < (tmp_path / f"{GRAPH}_data").stat().st_size


def test_a_manifest_from_before_quantising_is_read(tiny_model: Path, tmp_path: Path) -> None:
    directory = copy_model(tiny_model, tmp_path / "old")
    fields = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    for name in ("first_token_apart", "first_token_ids", "quantization"):
        fields.pop(name)
    (directory / MANIFEST).write_text(json.dumps(fields), encoding="utf-8")
    manifest = read_manifest(directory)
    assert not manifest.first_token_apart
    assert manifest.quantization is None


def with_figures(manifest: ExportManifest, **figures: Any) -> ExportManifest:
    assert manifest.quantization is not None
    return replace(manifest, quantization={**manifest.quantization, **figures})


def test_a_model_below_its_precisions_promise_is_told(quantised: dict[str, Path]) -> None:
    manifest = read_manifest(quantised["int8"])
    assert shortfall(with_figures(manifest, n_same_letter=120, mean_kl=0.001)) is None
    assert "96.7%" in (shortfall(with_figures(manifest, n_same_letter=116, mean_kl=0.001)) or "")
    assert "0.0060" in (shortfall(with_figures(manifest, n_same_letter=120, mean_kl=0.006)) or "")
    assert "slower" in verdict(with_figures(manifest, speed_ratio=0.8))
    assert "1.50 times as fast" in verdict(with_figures(manifest, speed_ratio=1.5))


def test_a_promise_and_what_lets_expect_it() -> None:
    recipe = PRECISIONS["int8"]
    assert recipe.is_kept_by(Price(100, 97, 0.005))
    assert not recipe.is_kept_by(Price(100, 96, 0.001))
    assert not recipe.is_kept_by(Price(100, 99, float("nan")))
    assert recipe.is_likely_kept_by(Price(40, 38, 0.004, expected=0.977))
    assert not recipe.is_likely_kept_by(Price(40, 40, 0.0041))
    assert not recipe.is_likely_kept_by(Price(40, 40, 0.001, expected=0.975))
    assert not recipe.is_likely_kept_by(Price(40, 40, float("nan")))


def test_the_agreement_expected_is_what_many_prompts_show() -> None:
    """Noise on the logits of random prompts, priced on a few of them."""
    rng = np.random.default_rng(0)
    probes = [Probe(np.arange(3), (0, 1, 2, 3))] * 4000
    exact = list(rng.standard_normal((4000, 10)).astype(np.float32))
    ours = [row + rng.normal(0, 0.1, 10).astype(np.float32) for row in exact]
    many = price_of(probes, exact, ours)
    few = price_of(probes[:40], exact[:40], ours[:40])
    assert many.noise == pytest.approx(2 * 0.1**2, rel=0.1)
    assert few.expected == pytest.approx(many.agreement, abs=0.03)
    assert many.expected == pytest.approx(many.agreement, abs=0.01)


def test_the_command_prints_the_verdict(tiny_model: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    add_commands(app)
    arguments = ["quantize", str(tiny_model), "-o", str(tmp_path / "out"), "--precision", "int4"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "int4 chooses the same letter as fp32 on" in result.stdout
