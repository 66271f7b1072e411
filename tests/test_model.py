"""A model directory gives the same logits by every road that leads to them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from test_model_dir import copy_model, seal

from edge_eval.errors import ModelError
from edge_eval.model import Model, TextReader, letter_reader, open_model
from edge_eval.model_dir import read_manifest

SINGLE = tuple((token_id,) for token_id in (34, 35, 36, 37, 38, 282, 273, 284, 272, 276))
# One alone, two that share their first token, one of three tokens, the same three but for the last.
SEVERAL = ((34,), (40, 41), (40, 42), (50, 51, 52), (50, 51, 53))


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Model:
    return open_directory(tiny_model)


@pytest.fixture(scope="module")
def input_ids() -> Any:
    return np.random.default_rng(0).integers(2, 600, 60)


def open_directory(directory: Path, threads: int = 1) -> Model:
    return open_model(directory, read_manifest(directory), threads)


def log_softmax(logits: Any) -> Any:
    logits = logits.astype(np.float64)
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_a_letters_logit_is_that_of_the_whole_vocabulary(model: Model, input_ids: Any) -> None:
    values = letter_reader(model, SINGLE).read(input_ids).values
    hidden, _ = model.run(input_ids)
    expected = model.all_logits(hidden)[[ids[0] for ids in SINGLE]]
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)
    assert values.dtype == np.float32


def test_a_normalized_value_is_a_log_probability(model: Model, input_ids: Any) -> None:
    values = letter_reader(model, SINGLE, normalized=True).read(input_ids).values
    hidden, _ = model.run(input_ids)
    expected = log_softmax(model.all_logits(hidden))[[ids[0] for ids in SINGLE]]
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)


def test_a_letter_of_several_tokens_is_the_sum_of_their_log_probabilities(
    model: Model, input_ids: Any
) -> None:
    reader = letter_reader(model, SEVERAL)
    assert reader.normalized
    expected = []
    for spelling in SEVERAL:
        total, behind = 0.0, input_ids
        for token_id in spelling:
            # Without a past: the whole prompt anew for every step.
            total += float(log_softmax(model.all_logits(model.run(behind)[0]))[token_id])
            behind = np.append(behind, token_id)
        expected.append(total)
    np.testing.assert_allclose(reader.read(input_ids).values, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ids", [SINGLE, SEVERAL], ids=["single", "several"])
def test_a_prompt_continued_from_its_beginning_gives_the_same(
    model: Model, input_ids: Any, ids: tuple[tuple[int, ...], ...]
) -> None:
    reader = letter_reader(model, ids)
    _, past = model.run(input_ids[:25], keep=True)
    continued = reader.read(input_ids[25:], past).values
    np.testing.assert_allclose(continued, reader.read(input_ids).values, rtol=1e-4, atol=1e-4)


def test_a_letter_that_is_not_measured_is_nan(model: Model, input_ids: Any) -> None:
    values = letter_reader(model, ((34,), (), (35,))).read(input_ids).values
    both = letter_reader(model, ((34,), (35,))).read(input_ids).values
    assert np.isnan(values[1])
    assert values[[0, 2]].tolist() == both.tolist()


def test_a_pass_takes_time(model: Model, input_ids: Any) -> None:
    assert 0 < letter_reader(model, SINGLE).read(input_ids).latency_s < 10


def written(model: Model, input_ids: Any, n: int, **settings: Any) -> list[int]:
    """The ids that a model writes, by their spelling in a decoder that only joins them."""
    reader = TextReader(
        model, n, settings.pop("stop_ids", frozenset()), lambda ids: " ".join(map(str, ids))
    )
    text = reader.read(input_ids, **settings).text
    assert text is not None
    return [int(token_id) for token_id in text.split()]


def test_a_text_is_what_whole_passes_would_write(model: Model, input_ids: Any) -> None:
    ids = list(input_ids)
    for _ in range(6):
        hidden, _ = model.run(np.array(ids))
        ids.append(int(np.argmax(model.all_logits(hidden))))
    expected = ids[len(input_ids) :]
    assert written(model, input_ids, 6) == expected
    assert written(model, input_ids, 1) == expected[:1]
    _, past = model.run(input_ids[:3], keep=True)
    assert written(model, input_ids[3:], 6, past=past) == expected


def test_a_text_ends_at_a_stop_token(model: Model, input_ids: Any) -> None:
    ids = written(model, input_ids, 6)
    stop = ids[-1]
    assert written(model, input_ids, 6, stop_ids=frozenset({stop})) == ids[: ids.index(stop)]


def test_a_text_ends_where_the_model_can_take_no_more(model: Model, input_ids: Any) -> None:
    short = replace(model, manifest=replace(model.manifest, max_length=len(input_ids) + 2))
    assert written(short, input_ids, 6) == written(model, input_ids, 3)


def test_a_model_whose_logits_are_not_finite_writes_nothing(model: Model, input_ids: Any) -> None:
    head = np.full_like(model.head, np.nan)
    reader = TextReader(replace(model, head=head), 3, frozenset(), str)
    assert reader.read(input_ids).text is None


def test_keys_and_values_are_kept_only_when_asked_for(model: Model, input_ids: Any) -> None:
    assert model.run(input_ids)[1] == ()
    _, past = model.run(input_ids, keep=True)
    assert {array.shape for array in past} == {(1, 2, len(input_ids), 16)}
    assert len(past) == 2 * model.manifest.n_layers


@pytest.mark.parametrize("threads", [1, 2])
def test_one_model_runs_in_several_threads_at_once(
    threads: int, tiny_model: Path, input_ids: Any
) -> None:
    reader = letter_reader(open_directory(tiny_model, threads), SINGLE)
    prompts = [input_ids[: 5 + n] for n in range(40)]
    one_by_one = [reader.read(prompt).values for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(lambda prompt: reader.read(prompt).values, prompts))
    np.testing.assert_allclose(at_once, one_by_one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 7, 600])
def test_the_head_is_read_in_blocks_without_a_gap(
    n: int, model: Model, input_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    biased = replace(model, head_bias=np.arange(600, dtype=np.float32))
    hidden, _ = model.run(input_ids)
    expected = biased.all_logits(hidden)
    assert expected.shape == (600,)
    monkeypatch.setattr("edge_eval.model.HEAD_BLOCK", n)
    np.testing.assert_allclose(biased.all_logits(hidden), expected, rtol=1e-5, atol=1e-5)


# ---- what the manifest says of the head


def test_a_tied_head_needs_no_table_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    directory = copy_model(tiny_model, tmp_path)
    (directory / "embedding.npy").unlink()
    model = open_directory(seal(directory, tied_embedding=True))
    assert model.embedding is model.head


def test_a_bias_scale_and_cap_act_on_letters_and_vocabulary_alike(
    tiny_model: Path, tmp_path: Path, model: Model, input_ids: Any
) -> None:
    hidden, _ = model.run(input_ids)
    plain = model.all_logits(hidden).astype(np.float64)
    bias = np.random.default_rng(1).standard_normal(600).astype(np.float32)
    directory = copy_model(tiny_model, tmp_path)
    np.save(directory / "lm_head_bias.npy", bias)
    changed = open_directory(seal(directory, head_bias=True, head_scale=0.5, head_softcap=3.0))
    expected = 3 * np.tanh((plain + bias) * 0.5 / 3)
    np.testing.assert_allclose(changed.all_logits(hidden), expected, rtol=1e-4, atol=1e-5)
    values = letter_reader(changed, SINGLE).read(input_ids).values
    chosen = [ids[0] for ids in SINGLE]
    np.testing.assert_allclose(values, expected[chosen], rtol=1e-4, atol=1e-5)


def test_embedded_tokens_are_scaled_as_the_manifest_says(
    tiny_model: Path, tmp_path: Path, input_ids: Any
) -> None:
    scaled, doubled = (copy_model(tiny_model, tmp_path / name) for name in "ab")
    np.save(doubled / "embedding.npy", 2 * np.load(tiny_model / "embedding.npy"))
    by_manifest, _ = open_directory(seal(scaled, embedding_scale=2.0)).run(input_ids)
    by_hand, _ = open_directory(seal(doubled)).run(input_ids)
    assert by_manifest.tolist() == by_hand.tolist()


def test_a_float16_head_gives_float32_logits_close_to_the_float32_heads(
    tiny_model: Path, tmp_path: Path, model: Model, input_ids: Any
) -> None:
    directory = copy_model(tiny_model, tmp_path)
    table = np.load(directory / "lm_head.npy")
    np.save(directory / "lm_head.npy", table.astype(np.float16))
    halved = open_directory(seal(directory))
    values = letter_reader(halved, SINGLE).read(input_ids).values
    assert values.dtype == np.float32
    np.testing.assert_allclose(
        values, letter_reader(model, SINGLE).read(input_ids).values, atol=0.05
    )
    np.testing.assert_allclose(
        values, halved.all_logits(halved.run(input_ids)[0])[[ids[0] for ids in SINGLE]], rtol=1e-5
    )


# ---- what does not fit together


def test_a_letter_beyond_the_head_is_refused(model: Model) -> None:
    with pytest.raises(ModelError, match=r"token 600, and the head has 600 rows"):
        letter_reader(model, ((34,), (5, 600)))
    letter_reader(model, ((34,), (5, 599)))


def write_graph(directory: Path, change: Callable[[Any], None]) -> None:
    graph = onnx.load(directory / "model.onnx")
    change(graph)
    (directory / "model.onnx").write_bytes(graph.SerializeToString())


def rename_output(graph: Any) -> None:
    for node in graph.graph.node:
        node.output[:] = ["logits" if n == "last_hidden_state" else n for n in node.output]
    graph.graph.output[0].name = "logits"


def weights_in(location: str) -> Callable[[Path], None]:
    """Moves the graph's largest weight to a file beside the copy and points to ``location``."""

    def damage(directory: Path) -> None:
        def move(graph: Any) -> None:
            weight = max(graph.graph.initializer, key=lambda tensor: len(tensor.raw_data))
            (directory.parent / "outside.bin").write_bytes(weight.raw_data)
            entry = {"location": location, "offset": "0", "length": str(len(weight.raw_data))}
            weight.ClearField("raw_data")
            weight.data_location = onnx.TensorProto.EXTERNAL
            for key, value in entry.items():
                weight.external_data.add(key=key, value=value)

        write_graph(directory, move)

    return damage


def link_weights(directory: Path) -> None:
    weights_in("linked.bin")(directory)
    (directory / "linked.bin").symlink_to("../outside.bin")


def cut_weights(directory: Path) -> None:
    weights_in("cut.bin")(directory)
    (directory / "cut.bin").write_bytes(b"short")


def test_weights_beside_the_graph_are_read(
    tiny_model: Path, tmp_path: Path, model: Model, input_ids: Any
) -> None:
    directory = copy_model(tiny_model, tmp_path)
    weights_in("model.onnx_data")(directory)
    (tmp_path / "outside.bin").rename(directory / "model.onnx_data")
    moved = open_directory(seal(directory))
    assert moved.run(input_ids)[0].tolist() == model.run(input_ids)[0].tolist()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "model.onnx").write_bytes((d / "model.onnx").read_bytes()[:1000]), "load"),
        (lambda d: (d / "model.onnx").write_bytes(b""), "load"),
        (lambda d: write_graph(d, rename_output), "inputs_embeds to last_hidden_state"),
        (weights_in("../outside.bin"), "does not list"),
        (weights_in("missing.bin"), "does not list"),
        (link_weights, "outside its folder"),
        (cut_weights, "load"),
        (lambda d: (d / "lm_head.npy").write_bytes(b"no table"), "lm_head.npy"),
        (lambda d: (d / "lm_head.npy").write_bytes(b""), "lm_head.npy"),
        (lambda d: (d / "lm_head.npy").write_bytes((d / "lm_head.npy").read_bytes()[:9000]), "lm_head.npy"),
        (lambda d: np.save(d / "lm_head.npy", np.zeros((600, 64))), "lm_head.npy"),
        (lambda d: np.save(d / "lm_head.npy", np.zeros((600, 32), np.float32)), "lm_head.npy"),
        (lambda d: np.save(d / "lm_head.npy", np.zeros(600, np.float32)), "lm_head.npy"),
        (lambda d: np.save(d / "embedding.npy", np.zeros((600, 32), np.float32)), "embedding.npy"),
        (lambda d: np.save(d / "embedding.npy", np.zeros((300, 64), np.float32)), "embedding.npy"),
    ],
    ids=[
        "cut graph",
        "empty graph",
        "another graph's ends",
        "weights outside the folder",
        "missing weights",
        "weights linked outside",
        "cut weights",
        "no table",
        "empty table",
        "cut table",
        "float64",
        "narrow head",
        "flat head",
        "narrow embedding",
        "short embedding",
    ],
)  # fmt: skip
def test_what_cannot_be_opened_is_named_in_one_line(
    damage: Callable[[Path], None], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    directory = copy_model(tiny_model, tmp_path)
    damage(directory)
    with pytest.raises(ModelError) as caught:
        open_directory(seal(directory))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "file"),
    [({"tied_embedding": False}, "embedding.npy"), ({"head_bias": True}, "lm_head_bias.npy")],
    ids=["embedding", "bias"],
)
def test_a_table_the_manifest_speaks_of_but_does_not_list_is_named(
    changes: dict[str, Any], file: str, tiny_model: Path, tmp_path: Path
) -> None:
    directory = copy_model(tiny_model, tmp_path)
    (directory / "embedding.npy").unlink()
    with pytest.raises(ModelError, match=file):
        open_directory(seal(directory, **({"tied_embedding": True} | changes)))


def test_a_bias_of_another_length_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    directory = copy_model(tiny_model, tmp_path)
    np.save(directory / "lm_head_bias.npy", np.zeros(100, np.float32))
    with pytest.raises(ModelError, match=r"lm_head_bias\.npy"):
        open_directory(seal(directory, head_bias=True))


def test_a_graph_of_another_width_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    directory = copy_model(tiny_model, tmp_path)
    for name in ("lm_head.npy", "embedding.npy"):
        np.save(directory / name, np.zeros((600, 32), np.float32))
    with pytest.raises(ModelError, match="hidden size"):
        open_directory(seal(directory, hidden_size=32))


def test_opening_measures_its_own_time(tiny_model: Path) -> None:
    assert 0 < open_directory(tiny_model).load_s < 60
