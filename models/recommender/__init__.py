"""Recommenders: click logs, generated or in Criteo's format, three networks, and an exact AUC.

* `generated_clicks`, `iterate_criteo`: rows of click logs
* `wide_and_deep`, `dlrm`, `multi_view`: models that predict clicks
* `HashedEmbedding`: a table of rows that grows with new ids
* `SplitEmbedding`: such tables in other clusters, of which only distinct rows are sent; `most_frequent` selects the ids
  whose rows stay next to the dense part
* `look_ahead`: a dataset whose ids are looked up a step before they are needed
* `auc`: the quality of predictions
"""

from .clicks import Clicks, generated_clicks
from .criteo import CRITEO_FIELDS, CRITEO_NUMBERS, iterate_criteo
from .hashed_embedding import HashedEmbedding
from .hashing import cross_fields
from .look_ahead import look_ahead
from .networks import auc, dlrm, multi_view, wide_and_deep
from .row_table import RowTable
from .split_embedding import DistinctRows, GatherRows, SplitEmbedding, most_frequent

__all__ = [
    "CRITEO_FIELDS",
    "CRITEO_NUMBERS",
    "Clicks",
    "DistinctRows",
    "GatherRows",
    "HashedEmbedding",
    "RowTable",
    "SplitEmbedding",
    "auc",
    "cross_fields",
    "dlrm",
    "generated_clicks",
    "iterate_criteo",
    "look_ahead",
    "most_frequent",
    "multi_view",
    "wide_and_deep",
]
