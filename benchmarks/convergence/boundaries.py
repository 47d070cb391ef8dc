"""The compared boundaries: their options of `nb.compress`, and their names in the table."""

from __future__ import annotations

from typing import Any

CODECS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "paper": {"svd": 0.6, "fp16": True, "backward": "int8"},
    "int8": {"int8": True},
    "int4": {"int4": True, "backward": "int4"},
    "learned16-int8": {"rank": 16, "basis": "learned", "int8": True},
    "learned16-int4": {"rank": 16, "basis": "learned", "int4": True, "backward": "int4"},
    "shared16-int8": {"rank": 16, "int8": True},
    "topk-int8": {"topk": 0.1, "int8": True},
    "delta-int4": {"int4": True, "backward": "int4", "delta": "x/ids"},
    "int4-mask": {"int4": True, "backward": "int4", "mask": "x/marks"},
    "learned32-int4": {"rank": 32, "basis": "learned", "int4": True, "backward": "int4"},
    "learned32-int4-mask": {
        "rank": 32, "basis": "learned", "int4": True, "backward": "int4", "mask": "x/marks"
    },
    "learned32-int8-mask": {"rank": 32, "basis": "learned", "int8": True, "mask": "x/marks"},
    "shared32-int8-mask": {"rank": 32, "int8": True, "mask": "x/marks"},
    "learned64-int4-mask": {
        "rank": 64, "basis": "learned", "int4": True, "backward": "int4", "mask": "x/marks"
    },
    "shared64-int4-mask": {"rank": 64, "int4": True, "backward": "int4", "mask": "x/marks"},
    "shared16-int4": {"rank": 16, "int4": True, "backward": "int4"},
    "shared32-int4": {"rank": 32, "int4": True, "backward": "int4"},
    "axes-16": {"codec": "axes >> coded(1.9)", "backward": "axes >> coded(1.9)"},
    "axes-16-mask": {"codec": "axes >> coded(2.65)", "backward": "axes >> coded(2.65)", "mask": "x/marks"},
    "axes-32-mask": {"codec": "axes >> coded(1.25)", "backward": "axes >> coded(1.25)", "mask": "x/marks"},
}  # fmt: skip

LABELS = {
    "none": "nothing",
    "paper": "FP16(SVD(0.6)), int8 back: the paper's",
    "int8": "int8",
    "int4": "int4",
    "learned16-int8": "rank H/8, learned, int8",
    "learned16-int4": "rank H/8, learned, int4",
    "shared16-int8": "rank H/8, shared, int8",
    "topk-int8": "top 10 %, int8",
    "delta-int4": "int4, differences of samples",
    "int4-mask": "int4, without padding",
    "learned32-int4": "rank H/4, learned, int4",
    "learned32-int4-mask": "rank H/4, learned, int4, without padding",
    "learned32-int8-mask": "rank H/4, learned, int8, without padding",
    "shared32-int8-mask": "rank H/4, shared, int8, without padding",
    "learned64-int4-mask": "rank H/2, learned, int4, without padding",
    "shared64-int4-mask": "rank H/2, shared, int4, without padding",
    "shared16-int4": "rank H/8, shared, int4",
    "shared32-int4": "rank H/4, shared, int4",
    "axes-16": "axes, 1.9 bits",
    "axes-16-mask": "axes, 2.65 bits, without padding",
    "axes-32-mask": "axes, 1.25 bits, without padding",
}
