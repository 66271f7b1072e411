"""Model directory -> a smaller and faster one, its price measured; the recipes are PRECISIONS.

How weights are rounded stands in rounding.py, on which prompts in calibration.py. A decoder's first
token, whose activations dwarf all others', is run apart: its keys and values, computed by the fp32
network for every token that a prompt begins with, lie beside the graph.
"""

import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from edge_eval.chat import has_chat_template, load_chat_template
from edge_eval.environment import describe_machine, usable_cores
from edge_eval.errors import EdgeEvalError, ExportError
from edge_eval.model import FIRST_TOKENS, Model, Past, open_model
from edge_eval.model_dir import (
    EMBEDDING,
    FIRST_PAST,
    HEAD,
    describe_files,
    graphs_of,
    read_manifest,
    size_on_disk,
    verify_hashes,
    write_manifest,
)
from edge_eval.prompts import PROMPT_TEMPLATES, render
from edge_eval.questions import load_questions
from edge_eval.schema import ExportManifest, Float32Array, RunConfig
from edge_eval.tokenization import encode_chat, encode_prompts, load_tokenizer
from exporters.calibration import Gauge, Price, Probe, observe, price_of, sample_probes
from exporters.huggingface import new_directory
from exporters.network import Array, Network, Site, find_sites, read_network, write_network
from exporters.rounding import (
    INT4_BLOCK,
    Rounded,
    channel_scales,
    compensation,
    error_of,
    fold,
    given_weight,
    hessian_of,
    ranges_of,
    replace_products,
    rotation_of,
    round_to_int4,
    round_to_int8,
)
from exporters.verify import measure_directory, single_letter_ids

N_ROWS = 192  # rows of each product's input on which its error is estimated

# Hessians held at once; a network with more is observed again for the rest.
HESSIAN_BYTES = 1 << 30

# A choice is made on few prompts: its divergence must stay within this share of the bound, and its
# share of the disagreement that is allowed too. Counted letters would be too coarse for that.
MARGIN = 0.8

# In the names of an encoder's products: the second of a T5 layer's feed-forward, kept in fp32.
KEPT_IN_T5 = "/wo/"

# A letter's logit may move by this share of the largest when the tables become float16.
TABLE_TOLERANCE = 1e-3
N_TABLE_PROMPTS = 16  # on which that is looked at


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a precision is made and what it promises."""

    bits: int
    strength: float  # how far an input's ranges go to its weight: rounding.channel_scales
    keep_worst: bool  # products are kept in fp32 until the promise holds
    min_agreement: float  # share of prompts with the letter fp32 chooses
    max_kl: float  # mean Kullback-Leibler divergence over the letters, nats

    def is_kept_by(self, price: Price) -> bool:
        """Whether the promise holds."""
        return price.agreement >= self.min_agreement and price.kl <= self.max_kl

    def is_likely_kept_by(self, price: Price) -> bool:
        """Whether a few prompts let expect that the promise holds on others."""
        lost = (1 - self.min_agreement) * MARGIN
        return 1 - price.expected <= lost and price.kl <= self.max_kl * MARGIN


PRECISIONS = {
    "int8": Recipe(8, 0.85, True, 0.97, 0.005),
    "int8-fast": Recipe(8, 0.85, False, 0.88, 0.05),
    "int4": Recipe(4, 0.7, False, 0.80, 0.2),
}


# -- Rounding ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """Every product as it is rounded, whichever are kept in the end."""

    folded: Network
    sites: tuple[Site, ...]
    scales: Mapping[str, Float32Array]  # input -> what its channels (in,) are divided by
    rounded: Mapping[str, Rounded]  # product's output -> its weight
    errors: Mapping[str, float]  # product's output -> relative squared error on sample rows

    def network(self, kept: Collection[str] = ()) -> Network:
        """The graph with all but the outputs in ``kept`` rounded."""
        return replace_products(self.folded, self.sites, self.scales, self.rounded, kept)


def plan_rounding(
    network: Network,
    sites: Sequence[Site],
    model: Model,
    probes: Sequence[Probe],
    recipe: Recipe,
    scratch: Path,
) -> Plan:
    """Look at what the products are given, fold their inputs' scales, round every weight."""
    ranges: dict[str, Float32Array] = {}
    rows: dict[str, list[Float32Array]] = {site.x: [] for site in sites}
    for seen in observe(network, [site.x for site in sites], model, probes, scratch):
        for site in sites:
            here = ranges_of(site, seen[site.x])
            ranges[site.x] = np.maximum(ranges.get(site.x, here), here)
            rest = seen[site.x].rest
            some = np.linspace(0, len(rest) - 1, N_ROWS // len(probes) + 1).astype(int)
            rows[site.x].append(rest[np.unique(some)])
    scales = {
        site.x: channel_scales(
            ranges[site.x],
            [network.tensors[item.weight] for item in site.products],
            recipe.strength,
        )
        for site in sites
    }
    folded = fold(network, sites, scales)
    rounded: dict[str, Rounded] = {}
    errors: dict[str, float] = {}
    if recipe.bits == 4:
        for site in sites:
            for item in site.products:
                rounded[item.output] = round_to_int4(given_weight(folded, site, item, scales))
        return Plan(folded, tuple(sites), scales, rounded, errors)
    for group in _groups(network, sites):
        hessians: dict[str, Float32Array] = {}
        for seen in observe(network, [site.x for site in group], model, probes, scratch):
            for site in group:
                more = hessian_of(site, seen[site.x])
                hessians[site.x] = hessians[site.x] + more if site.x in hessians else more
        for site in group:
            upper = compensation(site, hessians.pop(site.x), scales[site.x])
            for item in site.products:
                weight = given_weight(folded, site, item, scales)
                rounded[item.output] = round_to_int8(weight, upper)
            errors |= error_of(folded, site, scales, rounded, np.concatenate(rows[site.x]))
    return Plan(folded, tuple(sites), scales, rounded, errors)


def _groups(network: Network, sites: Sequence[Site]) -> Iterator[list[Site]]:
    """The sites in groups whose Hessians fit HESSIAN_BYTES; one at least."""
    group: list[Site] = []
    n_bytes = 0
    for site in sites:
        size = 4 * len(network.tensors[site.products[0].weight]) ** 2
        if group and n_bytes + size > HESSIAN_BYTES:
            yield group
            group, n_bytes = [], 0
        group.append(site)
        n_bytes += size
    yield group


@dataclass(frozen=True, slots=True)
class Choice:
    """Which products stay in fp32, and on what grounds."""

    kept: tuple[str, ...]  # products' outputs
    price: Price  # on the prompts the choice was made on


def choose_kept(plan: Plan, recipe: Recipe, gauge: Gauge, scratch: Path) -> Choice:
    """The fewest products to keep, worst first, with which the recipe's promise holds."""

    def try_keeping(n: int) -> Choice:
        kept = tuple(ranked[:n])
        return Choice(kept, gauge.price(plan.network(kept), scratch))

    ranked: list[str] = []
    best = try_keeping(0)
    if not recipe.keep_worst or recipe.is_likely_kept_by(best.price):
        return best
    ranked = _by_noise(plan, gauge, scratch)
    # Too few and enough; halving what lies between costs a handful of sessions.
    low, high = 0, len(ranked)
    best = try_keeping(high)
    while high - low > 1:
        middle = (low + high) // 2
        choice = try_keeping(middle)
        if recipe.is_likely_kept_by(choice.price):
            high, best = middle, choice
        else:
            low = middle
    return best


def _by_noise(plan: Plan, gauge: Gauge, scratch: Path) -> list[str]:
    """The products' outputs, those first whose rounding makes most noise for the time it spares.

    Measured for all products of a kind together (the same place in every layer); within a kind by
    the error of each.
    """
    tensors = plan.folded.tensors
    kinds: dict[Any, list[str]] = {}
    sizes: dict[str, int] = {}
    for site in plan.sites:
        shapes = tuple(tensors[item.weight].shape for item in site.products)
        for place, item in enumerate(site.products):
            kinds.setdefault((shapes, place, site.spiked, bool(site.norm)), []).append(item.output)
            sizes[item.output] = tensors[item.weight].size
    found: dict[str, float] = {}
    for outputs in kinds.values():
        noise = gauge.price(plan.network(plan.rounded.keys() - set(outputs)), scratch).noise
        total = sum(plan.errors[output] for output in outputs)
        for output in outputs:
            found[output] = noise * plan.errors[output] / total / sizes[output]
    return sorted(found, key=lambda output: -found[output])


# -- The first token -----------------------------------------------------------------------------


def first_token_ids(source: Path) -> list[int]:
    """The tokens that prompts begin with: in every template, and in the model's chat template."""
    tokenizer = load_tokenizer(source)
    questions = load_questions(RunConfig(data="sample")).test
    found: dict[int, int] = {}
    for template in PROMPT_TEMPLATES:
        prompts = [render(question, template) for question in questions]
        for encoded in encode_prompts(tokenizer, prompts):
            first = int(encoded.input_ids[0])
            found[first] = found.get(first, 0) + 1
    ids = sorted(found, key=lambda token_id: -found[token_id])[: FIRST_TOKENS - 1]
    if has_chat_template(source):
        try:
            chat = load_chat_template("auto", source)
            text = chat.render([], "A", "") if chat else ""
            ids += [int(encode_chat(tokenizer, text, ["A"])[0])]
        except EdgeEvalError:
            pass  # a template that fails is told of when a run asks for it
    return sorted(set(ids))


def first_token_past(model: Model, token_ids: Sequence[int]) -> dict[int, Past]:
    """Each token's keys and values where it stands first."""
    return {
        token_id: model.run(np.array([token_id], dtype=np.int64), keep=True)[1]
        for token_id in token_ids
    }


# -- The directory -------------------------------------------------------------------------------


def quantize(source: Path, output: Path, precision: str) -> ExportManifest:
    """Write the model directory ``source`` to ``output`` in another precision, its price measured.

    Of an encoder-decoder the encoder is rounded: the decoder's passes are of a few tokens.
    Errors: ExportError for an unknown precision, a source that is not fp32 or holds no product
    with constant weights; then nothing is left at ``output``. ModelError for a source that is
    no model directory.
    """
    recipe = PRECISIONS.get(precision)
    if recipe is None:
        raise ExportError(f"no precision {precision!r}: there are {', '.join(PRECISIONS)}.")
    manifest = read_manifest(source)
    if manifest.precision != "fp32" or manifest.quantization is not None:
        raise ExportError(
            f"{source} is {manifest.precision} already: rounding twice would lose twice. Quantise "
            "the fp32 model directory it was made from."
        )
    verify_hashes(source, manifest)
    with new_directory(output) as directory, tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        graph = graphs_of(manifest)[0]
        network = read_network(source / graph)
        sites = find_sites(network)
        if manifest.encoder_decoder:
            sites = _without_kept(sites)
        if not sites:
            raise ExportError(f"{source / graph} has no product with constant weights to round.")
        model = open_model(source, manifest, usable_cores())
        ids = single_letter_ids(load_tokenizer(source))
        calibration, held_out = sample_probes(source, manifest.max_length)
        if not calibration or not held_out:
            raise ExportError(
                f"no sample prompt fits the {manifest.max_length} tokens of {source}."
            )
        firsts = (
            {} if manifest.encoder_decoder else first_token_past(model, first_token_ids(source))
        )
        plan = plan_rounding(network, sites, model, calibration, recipe, scratch)
        gauge = Gauge(model, ids, calibration, firsts)
        choice = choose_kept(plan, recipe, gauge, scratch)
        write_network(plan.network(choice.kept), directory / graph)
        _write_tables(source, directory, model, ids, calibration)
        if firsts:
            rows = [np.concatenate([part.ravel() for part in past]) for past in firsts.values()]
            np.save(directory / FIRST_PAST, np.stack(rows).astype(np.float32))
        for name in manifest.files:
            if name not in {graph, f"{graph}_data"} and not (directory / name).exists():
                shutil.copyfile(source / name, directory / name)
        ours = replace(
            manifest,
            precision=precision,
            first_token_apart=not manifest.encoder_decoder,
            first_token_ids=tuple(firsts),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            files=describe_files(directory, [path.name for path in directory.iterdir()]),
        )
        quantization = _measure(directory, ours, model, ids, held_out)
        quantization |= {
            "products": sum(len(site.products) for site in sites),
            "kept_fp32": sorted(_weight_names(sites, choice.kept)),
            "rows_normed": sum(not site.norm for site in sites),
            "rows_rotated": sum(_is_rotated(network, site) for site in sites),
            "weights": "int8 by column, two neighbours' sum at most 128: exact without VNNI"
            if recipe.bits == 8
            else f"int4, blocks of {INT4_BLOCK}",
            "strength": recipe.strength,
            "n_calibration": len(calibration),
            "choice": {
                "n_prompts": choice.price.n_prompts,
                "n_same": choice.price.n_same,
                "kl": choice.price.kl,
            },
            "source_bytes": size_on_disk(manifest),
            "size_bytes": size_on_disk(ours),
            "source_sha256": manifest.files[graph]["sha256"],
        }
        ours = replace(ours, quantization=quantization)
        write_manifest(directory, ours)
        report = measure_directory(directory)
        again = ("logit_max_difference", "logit_scale", "n_same_letter", "past_max_difference")
        parity = {k: v for k, v in manifest.parity.items() if not k.startswith("hidden_")}
        ours = replace(ours, parity=parity | {name: report[name] for name in again})
        write_manifest(directory, ours)
    return ours


def _is_rotated(network: Network, site: Site) -> bool:
    return len(rotation_of(site, len(network.tensors[site.products[0].weight]))) > 1


def _without_kept(sites: Sequence[Site]) -> list[Site]:
    """The sites without the products that T5's authors keep in fp32, where its values are largest.

    Source: transformers 4.57, modeling_t5.py: _keep_in_fp32_modules.
    """
    return [site for site in sites if not any(KEPT_IN_T5 in item.output for item in site.products)]


def _weight_names(sites: Sequence[Site], outputs: Collection[str]) -> Iterator[str]:
    return (item.weight for site in sites for item in site.products if item.output in outputs)


def _write_tables(
    source: Path, directory: Path, model: Model, ids: Sequence[int], probes: Sequence[Probe]
) -> None:
    """The tables as float16 where the letters' logits stay within TABLE_TOLERANCE, else copied."""
    rows = model.head_rows(ids)
    halved = replace(rows, weight=rows.weight.astype(np.float16).astype(np.float32))
    hiddens = [model.run(probe.input_ids)[0] for probe in probes[:N_TABLE_PROMPTS]]
    exact = np.stack([model.logits(hidden, rows) for hidden in hiddens])
    moved = np.stack([model.logits(hidden, halved) for hidden in hiddens]) - exact
    close = float(np.abs(moved).max()) <= TABLE_TOLERANCE * float(np.abs(exact).max())
    for name in (HEAD, EMBEDDING):
        if not (source / name).is_file():
            continue
        table = model.head if name == HEAD else model.embedding
        if close and table.dtype == np.float32 and _fits_float16(table):
            _save_halved(directory / name, table)
        else:
            shutil.copyfile(source / name, directory / name)


def _blocks(table: Array) -> Iterator[tuple[int, Array]]:
    return ((start, table[start : start + 16384]) for start in range(0, len(table), 16384))


def _fits_float16(table: Array) -> bool:
    largest = float(np.finfo(np.float16).max)
    return all(float(np.abs(block).max()) <= largest for _, block in _blocks(table))


def _save_halved(path: Path, table: Array) -> None:
    """The table (vocab, hidden) in float16, a block of rows at a time."""
    halved = np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=table.shape)
    for start, block in _blocks(table):
        halved[start : start + len(block)] = block
    halved.flush()


def _measure(
    directory: Path,
    manifest: ExportManifest,
    source: Model,
    ids: Sequence[int],
    held_out: list[Probe],
) -> dict[str, Any]:
    """Agreement, divergence and speed against the source, prompt by prompt in turn."""
    ours = open_model(directory, manifest, usable_cores())
    answers: tuple[list[Float32Array], list[Float32Array]] = ([], [])
    times: tuple[list[float], list[float]] = ([], [])
    rows = (source.head_rows(ids), ours.head_rows(ids))
    for probe in (held_out[0], held_out[-1], *held_out):
        for place, model in enumerate((source, ours)):
            start = time.perf_counter()
            hidden, _ = model.run(probe.input_ids)
            times[place].append(time.perf_counter() - start)
            answers[place].append(model.logits(hidden, rows[place]))
    price = price_of(held_out, answers[0][2:], answers[1][2:])
    ratios = [slow / fast for slow, fast in zip(times[0][2:], times[1][2:], strict=True)]
    machine = describe_machine()
    return {
        "n_prompts": price.n_prompts,
        "n_same_letter": price.n_same,
        "agreement": price.agreement,
        "mean_kl": price.kl,
        "speed_ratio": float(np.median(ratios)),
        "source_latency_ms": float(np.median(times[0][2:])) * 1e3,
        "latency_ms": float(np.median(times[1][2:])) * 1e3,
        "threads": usable_cores(),
        "processor": machine["cpu_model"],
        "instruction_sets": machine["instruction_sets"],
    }


def verdict(manifest: ExportManifest) -> str:
    """What quantising gained and cost, in words."""
    figures = manifest.quantization or {}
    kept = len(figures["kept_fp32"])
    share = figures["size_bytes"] / figures["source_bytes"]
    ratio = figures["speed_ratio"]
    speed = f"{ratio:.2f} times as fast" if ratio >= 1 else f"slower ({ratio:.2f} times the speed)"
    sets = figures["instruction_sets"] or []
    return (
        f"{manifest.precision} chooses the same letter as fp32 on {figures['n_same_letter']} of "
        f"{figures['n_prompts']} held-out questions (mean KL {figures['mean_kl']:.4f} nats). It is "
        f"{speed} here ({figures['source_latency_ms']:.0f} -> {figures['latency_ms']:.0f} ms a "
        f"question, {figures['threads']} threads, {', '.join(sets) or 'instruction sets unknown'}) and "
        f"takes {share:.0%} of the disk ({figures['size_bytes'] / 1e6:,.0f} MB). "
        f"{kept} of {figures['products']} products stayed in fp32."
    )


def shortfall(manifest: ExportManifest) -> str | None:
    """What the precision promises and this model does not keep, or None."""
    figures = manifest.quantization or {}
    recipe = PRECISIONS[manifest.precision]
    price = Price(figures["n_prompts"], figures["n_same_letter"], figures["mean_kl"])
    if recipe.is_kept_by(price):
        return None
    return (
        f"{manifest.precision} should agree with fp32 on {recipe.min_agreement:.0%} of questions with a "
        f"mean KL of at most {recipe.max_kl:g}; this model has {price.agreement:.1%} and "
        f"{price.kl:.4f}. Report its scores as the quantised model's own, not as the model's."
    )
