"""The export, quantize and verify commands: parse, call, print."""

from pathlib import Path
from typing import Annotated

import typer

from edge_eval.console import notes, print_json, results
from edge_eval.errors import ExportError


def need_export_extra(*modules: str) -> None:
    """Raise ExportError where a module of the export extra is missing; all of them by default."""
    import importlib.util

    wanted = modules or ("torch", "optimum", "gguf")
    missing = [name for name in wanted if not importlib.util.find_spec(name)]
    if missing:
        raise ExportError(
            f"exporting needs {', '.join(missing)}: install with pip install 'edge-eval[export]'. "
            "Running an exported model does not."
        )


def export(
    source: Annotated[
        str, typer.Argument(help="Hub id, checkpoint folder, .gguf file or ONNX folder.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The model directory to write.")],
    revision: Annotated[str | None, typer.Option(help="Revision of a Hub id.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Keep the traced graph: slower, for comparison.")
    ] = False,
    file: Annotated[
        str, typer.Option(help="Which graph of an ONNX folder, as in onnx/model.onnx.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest.")] = False,
) -> None:
    """Turn a checkpoint into a model directory, verified against the checkpoint."""
    import dataclasses

    from edge_eval.onnx_folder import find_graphs
    from exporters.checkpoint_tokenizer import tokenizer_note

    folder = Path(source)
    # Where both are there the weights are the better source: their graph is the faster one.
    cut = bool(file) or (find_graphs(folder) and not any(folder.glob("*.safetensors")))
    need_export_extra(*(("onnx", "onnx_ir") if cut else ()))
    notes().print(f"Exporting {source}: about a minute for 300 million parameters.", soft_wrap=True)
    if cut:
        from exporters.cut_graph import export_onnx_folder

        manifest = export_onnx_folder(folder, output, file)
    elif source.endswith(".gguf"):
        from exporters.gguf import export_gguf

        manifest = export_gguf(Path(source), output, fused=not plain)
    else:
        from exporters.huggingface import export_checkpoint

        manifest = export_checkpoint(source, output, revision=revision, fused=not plain)
    if as_json:
        print_json(dataclasses.asdict(manifest))
        return
    parity = manifest.parity
    results().print(
        f"{output}: {manifest.name}, {manifest.architecture}, {manifest.precision}, "
        f"{manifest.graph} graph.\n"
        f"Verified on {parity['n_prompts']} prompts of up to {parity['longest_tokens']} tokens: "
        f"letter logits within {parity['logit_max_difference']:.2g} of the "
        f"{parity.get('reference', 'checkpoint')}'s "
        f"(the largest is {parity['logit_scale']:.3g}), the same letter "
        f"{parity['n_same_letter']} of {parity['n_prompts']} times.\n"
        f"Next: edge-eval run {output}",
        soft_wrap=True,
    )
    if note := tokenizer_note(manifest.tokenizer):
        notes().print(f"Note: {note}", soft_wrap=True, markup=False)


def verify(
    directory: Annotated[Path, typer.Argument(help="A model directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures.")] = False,
) -> None:
    """Hold a model directory against what its export measured; needs no torch."""
    from exporters.verify import verify_directory

    report = verify_directory(directory)
    if as_json:
        print_json(report)
        return
    results().print(
        f"{directory}: every file is as exported. On {report['n_prompts']} prompts of up to "
        f"{report['longest_tokens']} tokens the letter logits are within "
        f"{report['logit_max_difference']:.2g} of the {report['reference']}'s (the largest is "
        f"{report['logit_scale']:.3g}), and within {report['past_max_difference']:.2g} when "
        f"computed in two steps; the same letter {report['n_same_letter']} of "
        f"{report['n_prompts']} times.",
        soft_wrap=True,
    )
    for finding in report["letters"].values():
        results().print(f"Note: {finding}", soft_wrap=True)


def quantize(
    directory: Annotated[Path, typer.Argument(help="A model directory in fp32.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The model directory to write.")],
    precision: Annotated[
        str, typer.Option(help="int8 (faithful), int8-fast (everything) or int4 (memory).")
    ] = "int8",
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest.")] = False,
) -> None:
    """Make a model directory smaller and faster, with the price measured; needs no torch."""
    need_export_extra("onnx")
    import dataclasses

    from exporters.quantize import quantize as make
    from exporters.quantize import shortfall, verdict

    notes().print(f"Quantising {directory} to {precision}: some minutes, mostly measuring.")
    manifest = make(directory, output, precision)
    if as_json:
        print_json(dataclasses.asdict(manifest))
    else:
        results().print(f"{output}: {verdict(manifest)}", soft_wrap=True)
    warning = shortfall(manifest)
    if warning:
        notes().print(f"Warning: {warning}", soft_wrap=True)


def add_commands(app: typer.Typer) -> None:
    """Put the exporters' commands into edge-eval's own command line."""
    app.command()(export)
    app.command()(verify)
    app.command()(quantize)
