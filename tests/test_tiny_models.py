"""The exports that most tests run on are whole; with EDGE_EVAL_TEST_MODELS they are kept."""

from collections.abc import Callable
from pathlib import Path

from test_onnx_folder import pairs, without_past

from edge_eval.onnx_folder import is_as_found, read_any_manifest
from exporters.verify import verify_directory

__all__ = ["pairs", "without_past"]  # fixtures


def test_the_encoder_decoder_is_what_its_export_measured(tiny_encoder_decoder: Path) -> None:
    assert verify_directory(tiny_encoder_decoder)["reference"]


def test_the_two_exports_of_one_checkpoint_are_whole(
    pairs: Callable[[str], tuple[Path, Path]],
) -> None:
    folder, model = pairs("llama")
    assert verify_directory(model)["reference"]
    assert is_as_found(read_any_manifest(folder))


def test_the_graph_without_past_is_whole(without_past: Path) -> None:
    assert is_as_found(read_any_manifest(without_past))
