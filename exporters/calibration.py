"""Sample prompts -> what a network computes on them, and how far a rounding of it is off."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

from edge_eval.environment import usable_cores
from edge_eval.errors import ExportError
from edge_eval.letters import OPTION_LETTERS
from edge_eval.model import Model, Past, open_session
from edge_eval.model_dir import GRAPH
from edge_eval.prompts import render
from edge_eval.questions import load_questions
from edge_eval.schema import Float32Array, Int64Array, RunConfig
from edge_eval.tokenization import encode_prompts, load_tokenizer
from exporters.network import Network, write_network
from exporters.verify import TEMPLATES

N_CALIBRATION_PROMPTS = 40  # what is rounded is fitted to these; the rest is held out


@dataclass(frozen=True, slots=True)
class Probe:
    """A sample prompt on which precisions are compared."""

    input_ids: Int64Array
    letters: tuple[int, ...]  # the places of its options' letters among the ten


def sample_probes(directory: Path, max_length: int) -> tuple[list[Probe], list[Probe]]:
    """Prompts of the bundled sample in all four templates: to calibrate on, and held out."""
    tokenizer = load_tokenizer(directory)
    questions = load_questions(RunConfig(data="sample")).test
    step = len(questions) // N_CALIBRATION_PROMPTS
    parts = (questions[::step], [q for i, q in enumerate(questions) if i % step])
    found: list[list[Probe]] = []
    for part in parts:
        prompts = [render(q, t) for q, t in zip(part, cycle(TEMPLATES), strict=False)]
        found.append(
            [
                Probe(encoded.input_ids, tuple(map(OPTION_LETTERS.index, prompt.letters)))
                for prompt, encoded in zip(prompts, encode_prompts(tokenizer, prompts), strict=True)
                if 1 < len(encoded.input_ids) <= max_length
            ]
        )
    return found[0], found[1]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one site was given in one prompt."""

    first: Float32Array  # (0 or 1, in): a decoder's first token, whose values dwarf the others'
    rest: Float32Array  # (tokens, in)


def observe(
    network: Network, names: Sequence[str], model: Model, probes: Sequence[Probe], scratch: Path
) -> Iterator[dict[str, Seen]]:
    """The named values in each prompt's forward pass, the first token run apart.

    Errors: ExportError when the network computes what is not finite.
    """
    import onnx

    watched = onnx.ModelProto()
    watched.CopyFrom(network.proto)
    known = {output.name for output in watched.graph.output}
    for name in names:
        if name not in known:
            watched.graph.output.append(
                onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
            )
    write_network(Network(watched, network.tensors), scratch / GRAPH)
    n_present = len(model.present_names)
    watching = replace(
        model,
        session=open_session(scratch / GRAPH, usable_cores()),
        present_names=(*model.present_names, *names),
        answers=None,  # the encoder alone, as a decoder without a past
    )
    for probe in probes:
        at_first: Past = ()
        if model.answers is None:
            _, at_first = watching.run(probe.input_ids[:1], keep=True)
            _, outputs = watching.run(probe.input_ids[1:], at_first[:n_present], keep=True)
        else:
            _, outputs = watching.run(probe.input_ids, keep=True)
        seen = {}
        for index, name in enumerate(names, start=n_present):
            rest = outputs[index].reshape(-1, outputs[index].shape[-1])
            first = at_first[index].reshape(1, -1) if at_first else rest[:0]
            if not np.isfinite(rest).all():
                raise ExportError(f"{name} is not finite on a sample prompt: nothing to round.")
            seen[name] = Seen(first, rest)
        yield seen


@dataclass(frozen=True, slots=True)
class Price:
    """What rounding changed in the answers."""

    n_prompts: int
    n_same: int
    kl: float  # mean Kullback-Leibler divergence over the letters, nats
    # The mean square by which the best letter's lead over another changed; those of products that
    # are rounded together add up.
    noise: float = 0.0
    expected: float = (
        1.0  # share of prompts that keep their letter under Gaussian noise of that size
    )

    @property
    def agreement(self) -> float:
        return self.n_same / self.n_prompts


def _log_shares(logits: Float32Array, probe: Probe) -> npt.NDArray[np.float64]:
    values = logits[list(probe.letters)].astype(np.float64)
    values = values - values.max()
    return values - np.log(np.exp(values).sum())


def price_of(
    probes: Sequence[Probe], reference: Sequence[Float32Array], ours: Sequence[Float32Array]
) -> Price:
    """Agreement and divergence of two precisions' letter logits (10,) a prompt."""
    n_same, divergences = 0, []
    leads, changes = [], []
    for probe, ref_logits, our_logits in zip(probes, reference, ours, strict=True):
        ref, our = _log_shares(ref_logits, probe), _log_shares(our_logits, probe)
        best = int(ref.argmax())
        n_same += int(best == our.argmax())
        divergences.append(float((np.exp(ref) * (ref - our)).sum()))
        leads.append(np.delete(ref[best] - ref, best))
        changes.append(np.delete(our[best] - our, best) - leads[-1])
    noise = float(np.square(np.concatenate(changes)).mean())
    size = max(noise**0.5, 1e-12)
    expected = float(np.mean([norm.cdf(lead / size).prod() for lead in leads]))
    return Price(len(probes), n_same, float(np.mean(divergences)), noise, expected)


class Gauge:
    """The source model's answers, and its distance to any rounding of it."""

    def __init__(
        self,
        model: Model,
        ids: Sequence[int],
        probes: Sequence[Probe],
        first_tokens: Mapping[int, Past],
    ) -> None:
        """first_tokens: what a rounding finds beside its graph instead of computing it."""
        self._model = model
        self._rows = model.head_rows(ids)
        self._first_tokens = first_tokens
        self.probes = probes
        self.reference = [self.read(model, probe) for probe in probes]

    def read(self, model: Model, probe: Probe) -> Float32Array:
        """The ten letters' logits (10,) behind a prompt."""
        return model.logits(model.run(probe.input_ids)[0], self._rows)

    def price(self, network: Network, scratch: Path) -> Price:
        """The price of a rounding, through a session of its own; a decoder's first token apart."""
        write_network(network, scratch / GRAPH)
        manifest = replace(self._model.manifest, first_token_apart=self._model.answers is None)
        session = open_session(scratch / GRAPH, usable_cores())
        model = replace(
            self._model,
            session=session,
            manifest=manifest,
            first_tokens=dict(self._first_tokens),
        )
        return price_of(
            self.probes, self.reference, [self.read(model, probe) for probe in self.probes]
        )
