"""Everything a user can get wrong -> one class each; add a class here only for a new kind of remedy.

EdgeEvalError            any mistake that one line can explain; exit code 1
├── DataError            questions: a file, a row, a column, a filter that leaves nothing
├── ModelError           a model directory, its graph, its tokenizer
├── EndpointError        a server that cannot be reached or does not answer as it should
├── ScoringError         letters that this model cannot be scored on
├── RecordError          a run record: unreadable, unlike, in use
├── ExportError          a checkpoint that cannot become a model directory
└── OptionError          options of a command that do not fit together

A message says what is wrong with the value, where it stands, and what to do. Anything that is
not an EdgeEvalError is a bug and keeps its traceback.
"""


class EdgeEvalError(Exception):
    """A mistake the user can mend; its text is the whole message."""


class DataError(EdgeEvalError):
    """Questions that cannot be read or used."""


class ModelError(EdgeEvalError):
    """A model directory that cannot be opened or run."""


class EndpointError(EdgeEvalError):
    """A server that cannot be reached, refuses, or answers with something else than asked."""


class ScoringError(EdgeEvalError):
    """Option letters that this tokenizer cannot tell apart or produce."""


class RecordError(EdgeEvalError):
    """A run record that cannot be read, written, resumed or compared."""


class ExportError(EdgeEvalError):
    """A checkpoint, GGUF file or graph that cannot be exported faithfully."""


class OptionError(EdgeEvalError):
    """Command options that contradict each other."""
