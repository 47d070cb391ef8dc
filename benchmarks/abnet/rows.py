"""The compared rows: each is a model, the codec of its boundary, and the codec's first step."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

PAPER = {"fp16": True, "backward": "int8"}
INT4 = {"int4": True, "backward": "int4"}
THREE_SEEDS, ONE_SEED = (1, 2, 3), (1,)
FEWER_PAIRS = {"pairs": 5000}


class Row(NamedTuple):
    """A line of the table. `start` is the share of the run after which the codec is switched on, `own` the deviations
    from the common settings (see `experiment.Setting`), `beside` the row with which this one is compared.
    """

    said: str
    codec: dict[str, Any]
    model: str = "causal"
    start: float = 0.0
    seeds: tuple[int, ...] = ONE_SEED
    paper: str = ""
    own: Mapping[str, Any] = MappingProxyType({})
    beside: str = "none"


def _svd(ratio: float) -> dict[str, Any]:
    return {"svd": ratio, **PAPER}


def _paper_row(ratio: float, bleu: float, seconds: float, seeds: tuple[int, ...] = ONE_SEED) -> Row:
    return Row(f"FP16(SVD({ratio})), int8 back", _svd(ratio), seeds=seeds, paper=f"{bleu}, {seconds} s")


def _axes_row(bits: float, seeds: tuple[int, ...] = ONE_SEED) -> Row:
    codec = f"axes >> coded({bits})"
    said = f"axes, {bits} bits, both ways, without padding"
    return Row(said, {"codec": codec, "backward": codec, "mask": True}, seeds=seeds)


ROWS: dict[str, Row] = {
    "none": Row("nothing", {}, seeds=THREE_SEEDS, paper="43.19, 4.42 s"),
    "fp16": Row("FP16, int8 back", PAPER, seeds=THREE_SEEDS, paper="38.82, 1.60 s"),
    "svd9": _paper_row(0.9, 39.71, 2.10),
    "svd8": _paper_row(0.8, 41.15, 1.50),
    "svd7": _paper_row(0.7, 40.74, 1.56),
    "svd6": _paper_row(0.6, 41.92, 1.42, THREE_SEEDS),
    "svd5": _paper_row(0.5, 39.45, 1.24),
    "svd4": _paper_row(0.4, 39.56, 0.94),
    "svd3": _paper_row(0.3, 37.48, 0.90),
    "svd2": _paper_row(0.2, 39.00, 0.86, THREE_SEEDS),
    "int4": Row("int4, without padding", {**INT4, "mask": True}),
    "int4z": Row("int4, without padding, zstd", {**INT4, "mask": True, "zstd": True}, seeds=THREE_SEEDS),
    "axes-2.3": _axes_row(2.3, THREE_SEEDS),
    "axes-2.25": _axes_row(2.25, THREE_SEEDS),
    "axes-1.6": _axes_row(1.6),
    "axes-1.15": _axes_row(1.15),
    "topk": Row("top 10 %, int8, without padding", {"topk": 0.1, "int8": True, "mask": True}),
    "topk5": Row("top 5 %, int8, without padding", {"topk": 0.05, "int8": True, "mask": True}),
    "shared2": Row(
        "rank H/2, shared, int4, without padding, zstd",
        {"rank": 2, **INT4, "mask": True, "zstd": True},
        seeds=THREE_SEEDS,
    ),
    "learned2": Row(
        "rank H/2, learned, int4, without padding, zstd",
        {"rank": 2, "basis": "learned", **INT4, "mask": True, "zstd": True},
    ),
    "shared4": Row("rank H/4, shared, int4, without padding", {"rank": 4, **INT4, "mask": True}),
    "learned4": Row(
        "rank H/4, learned, int4, without padding",
        {"rank": 4, "basis": "learned", **INT4, "mask": True},
        seeds=THREE_SEEDS,
    ),
    "shared8": Row("rank H/8, shared, int8, without padding", {"rank": 8, "int8": True, "mask": True}),
    "learned8": Row(
        "rank H/8, learned, int8, without padding", {"rank": 8, "basis": "learned", "int8": True, "mask": True}
    ),
    "svd6-10": Row("FP16(SVD(0.6)), int8 back, from 10 % on", _svd(0.6), start=0.1),
    "svd6-20": Row("FP16(SVD(0.6)), int8 back, from 20 % on", _svd(0.6), start=0.2),
    "svd6-50": Row("FP16(SVD(0.6)), int8 back, from 50 % on", _svd(0.6), start=0.5),
    "translator": Row("a Transformer from scratch, nothing", {}, "translator", own={"rate": 1e-3}),
    "abnet-long": Row(
        "ABNet on 5,000 pairs, longer pretrained, nothing (beside the Transformer below)",
        {},
        own={**FEWER_PAIRS, "inner": 512, "rate": 2e-3, "dropout": 0.2, "tied": True, "pretrained": "long"},
        seeds=THREE_SEEDS,
        beside="translator-few",
    ),
    "translator-few": Row(
        "a Transformer from scratch on the same 5,000, nothing",
        {},
        "translator",
        own={**FEWER_PAIRS, "rate": 1e-3, "dropout": 0.1},
        seeds=THREE_SEEDS,
        beside="translator-few",
    ),
    "cmlm": Row("CMLM, nothing", {}, "cmlm", beside="cmlm"),
    "cmlm-int4": Row("CMLM, int4, without padding", {**INT4, "mask": True}, "cmlm", beside="cmlm"),
}
"""`rank` is what the width is divided by; see `options`."""


def options(row: Row, width: int, steps: int) -> dict[str, Any]:
    """The options of `nb.compress`."""
    given = dict(row.codec)
    if "rank" in given:
        given["rank"] = width // given["rank"]
    if row.start:
        given["start_step"] = round(row.start * steps)
    return given
