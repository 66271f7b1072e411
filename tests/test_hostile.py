"""Models and templates from strangers: one line each, in bounded time and memory."""

import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import edge_eval_
from test_evaluate import config_of, values
from test_model_dir import copy_model, edit, seal

import edge_eval.chat as chat_module
from edge_eval.chat import ChatTemplate, load_chat_template
from edge_eval.environment import describe_machine
from edge_eval.errors import EdgeEvalError, ModelError
from edge_eval.evaluate import evaluate
from edge_eval.model_dir import read_manifest
from edge_eval.preparation import check_memory
from edge_eval.schema import Status

onnx = pytest.importorskip("onnx", reason="graphs are forged with onnx, of the export extra")


def refusal(model: Path, tmp_path: Path, **settings: Any) -> str:
    """What a run on this model says: one line, soon, and no record."""
    start = time.monotonic()
    with pytest.raises(EdgeEvalError) as caught:
        evaluate(config_of(model, **settings), tmp_path / "r.jsonl")
    assert time.monotonic() - start < 30
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "r.jsonl").exists()
    return str(caught.value)


# ---- chat templates


def render(template: str, tmp_path: Path) -> str:
    (tmp_path / "chat.jinja").write_text(template)
    chat = load_chat_template(str(tmp_path / "chat.jinja"), tmp_path)
    assert chat is not None
    return chat.render([], "سؤال", "")


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = namespace(v='a') %}{% for i in range(40) %}{% set n.v = n.v + n.v %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ messages[0].content * 10 ** 9 }}",
        "{{ messages[0].content | center(10 ** 10) }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ '%01000000000d' | format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{% for i in range(100000) %}{{ messages }}{% endfor %}",
        "{{ range(10 ** 9) | list }}",
        "{{ lipsum(n=1000, min=1000, max=2000) }}",
    ],
)
def test_a_template_that_takes_memory_is_refused(template: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"chat\.jinja") as caught:
        render(template, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{% for i in range(9) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
        "{% set x = 7 ** (7 ** 9) %}",
    ],
    ids=["loops", "recursion", "a power"],
)
def test_a_template_that_does_not_end_is_ended(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_module, "TIME_LIMIT_S", 0.5)
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"chat\.jinja") as caught:
        render(template, tmp_path)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 20


def test_a_template_that_was_ended_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_module, "TIME_LIMIT_S", 0.5)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    chat = ChatTemplate(loop, {}, "here")
    process = chat._process
    with pytest.raises(ModelError, match="does not end"):
        chat.render([], "سؤال", "")
    assert process.returncode is not None
    with pytest.raises(ModelError, match="stopped before"):
        chat.render([], "سؤال", "")


def test_a_template_is_let_go_with_its_process() -> None:
    chat = ChatTemplate("{{ messages[0].content }}", {}, "here")
    process = chat._process
    assert chat.render([], "سؤال", "") == "سؤال"
    del chat
    assert process.returncode is not None


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ self._TemplateReference__context.environment.loader.x }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{% for %}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ raise_exception(messages.x.y) }}",
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    ],
    ids=lambda template: template[:40],
)
def test_a_template_that_reaches_out_or_is_wrong_is_one_line(template: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"chat\.jinja") as caught:
        render(template, tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_format_string_reaches_no_attribute(tmp_path: Path) -> None:
    assert render("{{ '{0.__class__.__init__}'.format(messages) }}", tmp_path) == ""


def test_a_template_sees_what_transformers_shows_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None})
    )
    written = render(
        "{{ bos_token }}{%- for m in messages %}{{ m['role'] }} {{ m | tojson(indent=1) }}"
        "{%- break %}{%- endfor %}{{ eos_token }}{{ add_generation_prompt }}{{ pad_token }}",
        tmp_path,
    )
    shown = json.dumps({"role": "user", "content": "سؤال"}, ensure_ascii=False, indent=1)
    assert written == f"<s>user {shown}</s>True"


def test_what_a_template_is_not(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a chat template"):
        render("x" * 2_000_000, tmp_path)
    (tmp_path / "chat.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="cannot be read"):
        load_chat_template(str(tmp_path / "chat.jinja"), tmp_path)
    (tmp_path / "outside").write_text("secret")
    model = tmp_path / "model"
    model.mkdir()
    (model / "chat_template.jinja").symlink_to(tmp_path / "outside")
    with pytest.raises(ModelError, match="points outside"):
        load_chat_template("auto", model)


@pytest.mark.parametrize("content", ["[]", "7", "[" * 100_000, "{", "\x00"])
def test_a_tokenizers_settings_that_are_none_are_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read as JSON"):
        render("{{ messages }}", tmp_path)


@pytest.mark.parametrize("system", ["", "be brief"])
@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("'no \x1b]0;x\x07\n way'", "no \x1b]0;x\x07 way"),
        ("messages", "[{'role'"),
        ("'a' * 100000", "a" * 200),
    ],
    ids=["with controls", "no text", "long"],
)
def test_a_template_that_refuses_every_conversation_is_one_line(
    reason: str, told: str, system: str
) -> None:
    chat = ChatTemplate("{{ raise_exception(" + reason + ") }}", {}, "here")
    with pytest.raises(ModelError) as caught:
        chat.render([], "سؤال", system)
    assert str(caught.value).startswith(f"here refuses these messages: {told}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_template_that_refuses_a_system_text_gets_it_with_the_question() -> None:
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    chat = ChatTemplate(no_system + "{{ messages[0].content }}", {}, "here")
    assert chat.render([], "سؤال", "be brief") == "be brief\n\nسؤال"


def test_half_of_a_surrogate_pair_is_no_prompt() -> None:
    chat = ChatTemplate(r'{{ "\ud800" }}{{ bos_token }}', {"bos_token": "<s>"}, "here")
    with pytest.raises(ModelError, match=r"here fails: .*half of a surrogate pair"):
        chat.render([], "سؤال", "")


@pytest.mark.parametrize("module", ["jinja2", "json", "edge_eval"])
def test_a_template_s_process_runs_nothing_of_the_current_folder(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{module}.py").write_text("open('it_ran', 'w').close()")
    monkeypatch.chdir(tmp_path)
    chat = ChatTemplate("{{ messages[0].content }}", {}, "here")
    assert chat.render([], "سؤال", "") == "سؤال"
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize(
    ("executable", "why"),
    [
        (None, "does not know where its own program is"),
        ("", "does not know where its own program is"),
        ("/no/such/python", "/no/such/python cannot be started: No such file"),
        (__file__, "cannot be started: Permission denied"),
        ("/bin/false", "/bin/false ended at once"),
        ("/bin/echo", "/bin/echo ended at once"),
    ],
    ids=str,
)
@pytest.mark.skipif(os.name == "nt", reason="the programs are Unix's")
def test_a_process_that_cannot_be_started_is_told_as_that(
    executable: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(
        ModelError, match=f"here is run in a Python process of its own, but .*{why}"
    ):
        ChatTemplate("{{ messages[0].content }}", {}, "here")


# ---- graphs


@pytest.fixture
def forge(tiny_model: Path, tmp_path: Path) -> Callable[[Callable[[Any], None]], Path]:
    """A copy of the tiny model whose graph was changed, its manifest made true again."""

    def forge(change: Callable[[Any], None]) -> Path:
        model = copy_model(tiny_model, tmp_path)
        graph = onnx.load(str(model / "model.onnx"), load_external_data=False)
        change(graph)
        (model / "model.onnx").write_bytes(graph.SerializeToString())
        return seal(model)

    return forge


def external(graph: Any) -> list[Any]:
    return [
        entry
        for tensor in graph.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    ]


def constant(graph: Any, dims: list[int], location: str | None = None, length: int = 4) -> None:
    """Adds an initialiser that the graph needs."""
    tensor = onnx.TensorProto(name="forged", data_type=onnx.TensorProto.FLOAT, dims=dims)
    if location is None:
        tensor.raw_data = b"\0" * length
    else:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", "0"), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
    graph.graph.initializer.append(tensor)
    old = graph.graph.output[0].name
    for node in graph.graph.node:
        node.output[:] = ["unforged" if name == old else name for name in node.output]
    graph.graph.node.append(onnx.helper.make_node("Add", ["unforged", "forged"], [old]))


@pytest.mark.parametrize(
    "location", ["../secret.bin", "/etc/hostname", "a/../../secret.bin", "linked.bin"]
)
def test_external_data_outside_the_folder_is_refused(
    location: str, forge: Callable[..., Path], tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "secret.bin").write_bytes(b"\0" * 64)
    model = forge(lambda graph: constant(graph, [1], location))
    (model / "linked.bin").symlink_to(tmp_path / "secret.bin")
    assert refusal(model, tmp_path)


def test_weights_that_the_manifest_does_not_list_are_not_read(
    forge: Callable[..., Path], tmp_path: Path
) -> None:
    model = forge(lambda graph: constant(graph, [1], "more.bin"))
    (model / "more.bin").write_bytes(b"\0" * 4)
    assert "reads its weights from 'more.bin', which manifest.json does not list" in refusal(
        model, tmp_path
    )
    assert evaluate(config_of(seal(model)), tmp_path / "r.jsonl").complete


@pytest.mark.parametrize("dims", [[2**40], [2**62, 2**62], [-1], [10**6]], ids=str)
def test_absurd_sizes_of_a_weight_are_refused(
    dims: list[int], forge: Callable[..., Path], tmp_path: Path
) -> None:
    assert "onnxruntime" in refusal(forge(lambda graph: constant(graph, dims)), tmp_path)


def unknown_operator(graph: Any) -> None:
    graph.graph.node[-1].op_type = "Exfiltrate"


def unknown_domain(graph: Any) -> None:
    graph.graph.node[-1].domain = "evil.example"


def newer_ir(graph: Any) -> None:
    graph.ir_version = 99


def newer_opset(graph: Any) -> None:
    for item in graph.opset_import:
        item.version = 999


def other_inputs(graph: Any) -> None:
    for value in graph.graph.input:
        if value.name == "inputs_embeds":
            value.name = "pixel_values"


@pytest.mark.parametrize(
    "change", [unknown_operator, unknown_domain, newer_ir, newer_opset, other_inputs]
)
def test_a_graph_that_cannot_be_run_is_one_line(
    change: Callable[[Any], None], forge: Callable[..., Path], tmp_path: Path
) -> None:
    assert "model.onnx" in refusal(forge(change), tmp_path)


def more_inputs(graph: Any) -> None:
    shape = [1]
    value = onnx.helper.make_tensor_value_info("secret", onnx.TensorProto.FLOAT, shape)
    graph.graph.input.append(value)
    old = graph.graph.output[0].name
    for node in graph.graph.node:
        node.output[:] = ["unforged" if name == old else name for name in node.output]
    graph.graph.node.append(onnx.helper.make_node("Add", ["unforged", "secret"], [old]))


def wider_output(graph: Any) -> None:
    old = graph.graph.output[0].name
    for node in graph.graph.node:
        node.output[:] = ["unforged" if name == old else name for name in node.output]
    twice = onnx.helper.make_node("Concat", ["unforged", "unforged"], [old], axis=-1)
    graph.graph.node.append(twice)
    del graph.graph.output[0].type.tensor_type.shape.dim[:]


@pytest.mark.parametrize("change", [more_inputs, wider_output])
def test_a_graph_that_does_not_fit_is_one_line(
    change: Callable[[Any], None], forge: Callable[..., Path], tmp_path: Path
) -> None:
    assert "model.onnx" in refusal(forge(change), tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\0" * 1000, os.urandom(1000)])
def test_a_graph_that_is_none_is_one_line(content: bytes, tiny_model: Path, tmp_path: Path) -> None:
    model = copy_model(tiny_model, tmp_path)
    (model / "model.onnx").write_bytes(content)
    assert "model.onnx" in refusal(seal(model), tmp_path)


# ---- tables


def npy(shape: str, descr: str = "<f4") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 256


@pytest.mark.parametrize(
    "content",
    [
        npy("(600, 64)"),
        npy("(64,)"),
        npy("(1, 1)"),
        npy("()"),
        npy("(600, 64)", "|O"),
        npy("(600, 64)", "<f8"),
        npy("__import__('os')"),
        pickle.dumps(np.zeros(3)),
        b"PK\x03\x04" + b"\0" * 100,
        b"\x93NUMPY\x01\x00\xff\xff",
        b"\0",
        npy("(4611686018427387904, 64)"),
        npy("(-1, 64)"),
        b"",
    ],
    ids=lambda content: repr(content[10:90]),
)
def test_a_table_that_is_none_is_one_line(content: bytes, tiny_model: Path, tmp_path: Path) -> None:
    model = copy_model(tiny_model, tmp_path)
    (model / "lm_head.npy").write_bytes(content)
    assert "lm_head.npy" in refusal(seal(model), tmp_path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("protocol", ["paper", "lm-eval", "oall"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_model_of_bad_numbers_has_no_predictions(
    bad: float, protocol: str, tiny_model: Path, tmp_path: Path
) -> None:
    model = copy_model(tiny_model, tmp_path)
    head = np.load(model / "lm_head.npy")
    head[:] = bad
    np.save(model / "lm_head.npy", head)
    record = evaluate(config_of(seal(model), protocol=protocol), tmp_path / "r.jsonl")
    assert {p.status for p in record.predictions} == {Status.INVALID}
    assert np.isnan(values(record)).all()


# ---- manifests


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../../etc/passwd": {"size_bytes": 1, "sha256": ""}}},
        {"files": {"/etc/passwd": {"size_bytes": 1, "sha256": ""}}},
        {"files": {}},
        {"hidden_size": "64"},
        {"hidden_size": 65},
        {"max_length": -1},
        {"schema_version": 10**30},
        {"files": {"model.onnx": 7}},
        {"files": {"model.onnx": {}}},
        {"embedding_scale": float("nan")},
        {"max_length": 10**30, "n_layers": -3},
    ],
    ids=str,
)
def test_a_manifest_that_cannot_be_true_is_one_line(
    changes: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    model = copy_model(tiny_model, tmp_path)
    edit(model, **changes)
    assert refusal(model, tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"7", b"[" * 10**6], ids=str)
def test_a_manifest_that_is_none_is_one_line(
    content: bytes, tiny_model: Path, tmp_path: Path
) -> None:
    model = copy_model(tiny_model, tmp_path)
    (model / "manifest.json").write_bytes(content)
    assert "manifest.json" in refusal(model, tmp_path)


def test_what_a_manifest_does_not_list_is_never_run(tiny_model: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "opened"),))

    model = copy_model(tiny_model, tmp_path)
    for name in ("pytorch_model.bin", "lm_head_bias.npy", "weights.zip", "modeling_evil.py"):
        (model / name).write_bytes(pickle.dumps(Bomb()))
    assert evaluate(config_of(model), tmp_path / "r.jsonl").complete
    assert not (tmp_path / "opened").exists()


def test_a_pickled_bias_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = copy_model(tiny_model, tmp_path)
    (model / "lm_head_bias.npy").write_bytes(pickle.dumps([1.0]))
    assert "lm_head_bias.npy" in refusal(seal(model, head_bias=True), tmp_path)


# ---- tokenizers


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b"[" * 10**6])
def test_a_tokenizer_that_is_none_is_one_line(
    content: bytes, tiny_model: Path, tmp_path: Path
) -> None:
    model = copy_model(tiny_model, tmp_path)
    (model / "tokenizer.json").write_bytes(content)
    assert "tokenizer.json" in refusal(seal(model), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "b"}},
        {"normalizer": {"type": "Prepend", "prepend": ""}},
    ],
    ids=str,
)
def test_a_tokenizer_that_makes_its_library_panic_is_one_line(
    changes: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    model = copy_model(tiny_model, tmp_path)
    path = model / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes))
    assert "is damaged" in refusal(seal(model), tmp_path)


# ---- memory


def test_a_model_larger_than_the_memory_allowed_is_refused_before_it_is_loaded(
    tiny_model: Path, tmp_path: Path
) -> None:
    manifest = read_manifest(tiny_model)
    machine = describe_machine() | {"memory_limit_bytes": 64 << 20}
    with pytest.raises(ModelError, match=r"needs \d+ MB of memory at least.* may have 67 MB"):
        check_memory(manifest, machine)
    check_memory(manifest, machine | {"memory_limit_bytes": None})
    check_memory(manifest, machine | {"memory_limit_bytes": 128 << 20})


def test_a_hostile_model_ends_the_command_with_one_line(
    forge: Callable[..., Path], tmp_path: Path
) -> None:
    done = edge_eval_("run", forge(unknown_operator), "-o", tmp_path / "r.jsonl")
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    assert done.stderr.decode().strip().count("\n") == 0
