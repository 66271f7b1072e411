"""RunRecord <-> other tools' files; a new format is a module here and an entry in WRITERS or READERS.

Writers take the record, where to write and the questions' source, since a record holds no texts.
Readers take the file and that source, and mark what the file does not tell: see foreign.py.
"""

from collections.abc import Callable
from pathlib import Path

from edge_eval.convert.lm_eval_reader import read_lm_eval
from edge_eval.convert.lm_eval_writer import write_lm_eval
from edge_eval.convert.model_index import write_model_index
from edge_eval.convert.official import read_official, write_official
from edge_eval.convert.table import write_table
from edge_eval.schema import RunRecord

WRITERS: dict[str, Callable[[RunRecord, Path, str | None], None]] = {
    "lm-eval": write_lm_eval,
    "model-index": write_model_index,
    "csv": write_table,
    "official": write_official,
}

READERS: dict[str, Callable[[Path, str | None], RunRecord]] = {
    "lm-eval": read_lm_eval,
    "official": read_official,
}
