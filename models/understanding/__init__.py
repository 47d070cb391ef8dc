"""Language-understanding tasks on sentences, pairs and spans: their files, metrics, and a BERT with a head.

* `generated_task`, `read_glue`, `read_squad`: examples
* `Encoder`: conversion of examples to ids
* `understanding`, `loss_of`: the model and its loss
* `score`, `read_spans`, `METRICS`: evaluation
"""

from .encoding import Encoder, Rows, Spans, read_spans
from .examples import Examples, Question, Task
from .generated import TASKS, generated_task, generated_text
from .glue import GLUE, read_glue, read_squad
from .metrics import METRICS, exact_match, span_f1
from .model import Head, loss_of, score, understanding

__all__ = [
    "GLUE",
    "METRICS",
    "TASKS",
    "Encoder",
    "Examples",
    "Head",
    "Question",
    "Rows",
    "Spans",
    "Task",
    "exact_match",
    "generated_task",
    "generated_text",
    "loss_of",
    "read_glue",
    "read_spans",
    "read_squad",
    "score",
    "span_f1",
    "understanding",
]
