"""A translator with private texts: every frame of a run over mutual TLS is searched for ids and words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tests.processes.frame_search import Checksums, TextPatterns
from tests.processes.worker_runs import run_workers
from whale_nebula.wire.frame import Header, Kind, compute_checksum, pack_header, split_payload
from whale_nebula.wire.message import encode_message
from whale_nebula.wire.tensor import encode_array, find_dtype_code

DEADLINE = 240.0
PARTS = ("fit plain", "fit int4", "evaluate", "translate")
SIDES = ("source", "target")


Reports = Mapping[str, Mapping[str, Any]]


def run_sides(request: pytest.FixtureRequest, scenario: str) -> Reports:
    """The reports of each cluster's worker; `--grid` runs large models."""
    large = ["large"] * request.config.getoption("--grid")
    found = run_workers("private_inputs", {f"{side}/0": side for side in SIDES}, scenario, *large, deadline=DEADLINE)
    found.result.check()
    return {side: found.reports[f"{side}/0"] for side in SIDES}


@pytest.fixture(scope="module")
def translator_reports(request: pytest.FixtureRequest) -> Reports:
    """Reports of training on a text with two sides."""
    return run_sides(request, "train_translator")


class TestTranslator:
    """Each side is read in its own cluster, and not sent in training, evaluation and translation."""

    @pytest.mark.parametrize("side", SIDES)
    @pytest.mark.parametrize("part", PARTS)
    def test_no_id_or_word_is_sent(self, translator_reports: Reports, side: str, part: str) -> None:
        report = translator_reports[side][part]
        assert report["found"] == []
        assert report["frames"] >= 3 and report["bytes"] > 500

    @pytest.mark.parametrize("side", SIDES)
    def test_search_covers_enough_text_and_frames(self, translator_reports: Reports, side: str) -> None:
        patterns, words = translator_reports[side]["looked for"]
        assert patterns > 2000 and words > 100
        assert sum(translator_reports[side][part]["bytes"] for part in PARTS) > 20_000
        assert sum(translator_reports[side][part]["frames"] for part in PARTS) < 1000, (
            "numbers of frames come near to ids"
        )

    @pytest.mark.parametrize("side", SIDES)
    def test_leaked_ids_are_found(self, translator_reports: Reports, side: str) -> None:
        leak = translator_reports[side]["leak"]
        assert any("ids as int32" in each for each in leak["found"])
        assert leak["kinds"]["BOUNDARY int32"] == 1
        assert [report[f"leaked from {side}"] for report in translator_reports.values()] == [
            translator_reports[side]["sum"]
        ] * 2

    @pytest.mark.parametrize("side", SIDES)
    @pytest.mark.parametrize("part", PARTS)
    def test_only_hidden_states_masks_and_gradients_are_sent(
        self, translator_reports: Reports, side: str, part: str
    ) -> None:
        kinds = {name.removesuffix(" coded") for name in translator_reports[side][part]["kinds"]}
        forward, backward = {"BOUNDARY float32", "BOUNDARY bool"}, {"BOUNDARY float32"}
        crossing = {name for name in kinds if name.startswith("BOUNDARY")}
        assert crossing == (forward if side == "source" else backward if part.startswith("fit") else set())
        scalars = {"SCALAR float32", "SCALAR uint8"}
        assert kinds - crossing <= {"CONTROL uint8", "ACK", "BEAT", "VALUE float32", "VALUE int64", *scalars}
        assert all(dims == [] for dims in translator_reports[side][part]["integers"]), "more than a counter"
        assert all(size <= 64 for size in translator_reports[side][part]["bundled"]), "more than a few numbers"

    @pytest.mark.parametrize("side", SIDES)
    def test_second_epoch_is_encoded(self, translator_reports: Reports, side: str) -> None:
        assert translator_reports[side]["fit int4"]["kinds"]["BOUNDARY float32 coded"] == 8
        assert translator_reports[side]["fit int4"]["bytes"] < 0.6 * translator_reports[side]["fit plain"]["bytes"]

    def test_no_checksum_of_an_input_is_sent(self, translator_reports: Reports) -> None:
        for report in translator_reports.values():
            *without, translate = (report[part]["checksums"] for part in PARTS)
            assert without == [[[]] * 4] * 3  # one a step
            assert translate == [["rows"]]  # the numbers of the rows, which every cluster gives

    def test_translations_stay_in_the_target_cluster(self, translator_reports: Reports) -> None:
        assert translator_reports["target"]["translated"] == 8 and "refused" not in translator_reports["target"]
        assert translator_reports["source"]["translated"] == 0
        assert translator_reports["source"]["refused"] == "this result is on target/0, not in this process"

    def test_losses_agree_and_shutdown_sends_no_text(self, translator_reports: Reports) -> None:
        for part in ("plain", "int4"):
            assert translator_reports["source"][f"{part} loss"] == translator_reports["target"][f"{part} loss"]
        assert [report["farewell"]["found"] for report in translator_reports.values()] == [[], []]


@pytest.fixture(scope="module")
def classifier_reports(request: pytest.FixtureRequest) -> Reports:
    """Reports of a model that begins and ends in the same cluster."""
    return run_sides(request, "train_classifier")


class TestLabels:
    """Sentences and their labels are in one cluster, where the model begins and ends."""

    @pytest.mark.parametrize("side", SIDES)
    def test_no_label_or_id_is_sent(self, classifier_reports: Reports, side: str) -> None:
        report = classifier_reports[side]["fit"]
        assert report["found"] == [] and report["frames"] >= 3 and report["bytes"] > 500
        assert report["checksums"] == [["sample_weight"]] * 8  # one a step: nothing but the weights of rows

    def test_leaked_label_is_found(self, classifier_reports: Reports) -> None:
        assert any("ids as int32" in each for each in classifier_reports["source"]["leak"]["found"])

    @pytest.mark.parametrize("side", SIDES)
    def test_only_float_rows_and_a_mask_are_sent(self, classifier_reports: Reports, side: str) -> None:
        kinds = {name for name in classifier_reports[side]["fit"]["kinds"] if name.startswith("BOUNDARY")}
        assert kinds == {"BOUNDARY float32"} | ({"BOUNDARY bool"} if side == "source" else set())
        assert all(dims == [] for dims in classifier_reports[side]["fit"]["integers"]), "more than a counter"

    def test_losses_agree(self, classifier_reports: Reports) -> None:
        assert classifier_reports["source"]["loss"] == classifier_reports["target"]["loss"]


WORKERS = ("a/0", "a/1", "b/0", "c/0")
READERS = {"x": {0, 1}, "z": {2, 3}, "y": {3}}
"""The workers that read each input, by their places among the names."""


@pytest.fixture(scope="module")
def input_reports() -> Mapping[str, Any]:
    """The reports of the workers of three clusters with private inputs."""
    report = run_workers(
        "private_inputs", {worker: worker[0] for worker in WORKERS}, "train_on_private_inputs", deadline=DEADLINE
    ).reports
    return {name: value for things in report.values() for name, value in things.items()}


class TestInputChecksums:
    """Three clusters, one of them with two workers: checksums of an input are sent only to its readers."""

    @pytest.mark.parametrize("worker", WORKERS)
    @pytest.mark.parametrize("part", ["arrays", "dataset", "failure"])
    def test_checksum_is_sent_only_to_readers(self, input_reports: Mapping[str, Any], worker: str, part: str) -> None:
        report = input_reports[f"{worker} {part}"]
        assert report["frames"] >= 1
        assert [[name, to] for name, to in report["sums"] if to not in READERS[name[0]]] == []

    @pytest.mark.parametrize("part", ["arrays", "dataset"])
    def test_readers_of_one_input_compare_checksums(self, input_reports: Mapping[str, Any], part: str) -> None:
        pairs = {"a/0": ("x", 1), "a/1": ("x", 0), "b/0": ("z", 3), "c/0": ("z", 2)}
        for worker, pair in pairs.items():
            compared = {(name[0], to) for name, to in input_reports[f"{worker} {part}"]["sums"]}
            assert pair in compared or (part, pair[0]) == ("dataset", "x")  # each of the two has different rows

    @pytest.mark.parametrize("worker", WORKERS)
    @pytest.mark.parametrize("part", ["arrays", "dataset", "failure"])
    def test_no_host_folder_or_error_text_is_sent(
        self, input_reports: Mapping[str, Any], worker: str, part: str
    ) -> None:
        assert input_reports[f"{worker} {part}"]["named"] == []

    def test_failure_names_the_worker_and_error_type(self, input_reports: Mapping[str, Any]) -> None:
        for worker in WORKERS[1:]:
            heard = input_reports[f"{worker} heard"]
            assert "'a/0' failed: ValueError" in heard and "4711" not in heard


def pack_frame(header: Header, payload: np.ndarray) -> bytes:
    ((whole, chunk),) = split_payload(header, payload)
    return pack_header(whole, compute_checksum(chunk)) + chunk.tobytes()


class TestTextPatterns:
    """The search itself: it finds leaked text, and nothing else."""

    SENTENCE, ROW = "El gato está en la mesa roja", [2, 3100, 3200, 3300, 3400, 3, 0]
    PATTERNS = TextPatterns.of([SENTENCE], [ROW], 3000)

    @staticmethod
    def sent(array: Any) -> bytes:
        """A tensor as the one frame that carries it."""
        array = np.asarray(array)
        return pack_frame(
            Header(Kind.SCALAR, dtype=find_dtype_code(array.dtype.name), dims=array.shape), encode_array(array)
        )

    @staticmethod
    def said(what: Any) -> bytes:
        """A message as its frame."""
        data = np.frombuffer(encode_message({"kind": "TELL", "what": what}), np.uint8)
        return pack_frame(Header(Kind.CONTROL, dtype=find_dtype_code("uint8"), dims=data.shape), data)

    @pytest.mark.parametrize("dtype", ["int16", "uint16", "int32", "int64", "float16", "float32", "float64"])
    def test_ids_are_found_in_any_dtype(self, dtype: str) -> None:
        assert self.PATTERNS.find_in(self.sent(np.asarray([[7, *self.ROW]], dtype)))
        assert not self.PATTERNS.find_in(self.sent(np.asarray([self.ROW[::-1]], dtype)))

    @pytest.mark.parametrize("before", range(4))
    def test_ids_are_found_at_any_offset(self, before: int) -> None:
        data = bytes(before) + np.asarray(self.ROW, "int32").tobytes()
        assert self.PATTERNS.find_in(self.sent(np.frombuffer(data, np.uint8)))

    @pytest.mark.parametrize("text", [SENTENCE, "está", "la mesa", "gato est", "EL GATO", "a roja"])
    def test_words_are_found_in_bytes(self, text: str) -> None:
        long = {"gato est", "EL GATO", "a roja"}
        data = b"\x00\x01" + text.encode() + b"\xff"
        assert bool(self.PATTERNS.find_in(self.sent(np.frombuffer(data, np.uint8)))) == (text not in long)

    @pytest.mark.parametrize("what", ["gato", "a Gato!", {"mesa": 1}, ["3100", 3100, 3200], "3200, 3300", "roja"])
    def test_short_words_and_ids_are_found_in_messages(self, what: Any) -> None:
        assert self.PATTERNS.find_in(self.said(what))

    @pytest.mark.parametrize("what", ["gatos", "el", [3200, 3100], 3100, "mes", ""])
    def test_unrelated_message_has_no_match(self, what: Any) -> None:
        assert not self.PATTERNS.find_in(self.said(what))

    @pytest.mark.parametrize("form", [int, str, hex, lambda crc: f"{crc:08X}", lambda crc: {"x": [None, crc]}])
    def test_checksum_is_found_in_a_message(self, form: Any) -> None:
        rows = np.arange(8, dtype="int32").reshape(4, 2)
        crc = google_crc32c.value(rows[1:3].tobytes())
        assert Checksums.of({"x": rows}).find_in(self.said(form(crc))) == ["x[1:3]"]
        assert Checksums.of({"x": rows}).find_in(self.said(form(crc ^ 1))) == []

    @pytest.mark.parametrize("dtype", ["<u4", ">u4", "<i8"])
    def test_checksum_is_found_in_a_tensor(self, dtype: str) -> None:
        rows = np.arange(8, dtype="int32").reshape(4, 2)
        crc = np.asarray([1, google_crc32c.value(rows.tobytes())]).astype(dtype)
        assert Checksums.of({"x": rows}).find_in(self.sent(np.frombuffer(crc.tobytes(), np.uint8))) == ["x[0:4]"]
