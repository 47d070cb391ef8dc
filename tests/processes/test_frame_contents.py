"""A translator with private texts: every frame of a run over mutual TLS is searched for ids and words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tests.processes.frame_search import Checksums, Look
from tests.processes.worker_runs import run
from whale_nebula.wire.frame import Header, Kind, checksum, chunks, pack
from whale_nebula.wire.message import encode_message
from whale_nebula.wire.tensor import array_bytes, dtype_code

DEADLINE = 240.0
PARTS = ("fit plain", "fit int4", "evaluate", "translate")
SIDES = ("source", "target")


Ran = Mapping[str, Mapping[str, Any]]


def run_sides(request: pytest.FixtureRequest, lesson: str) -> Ran:
    """What each cluster's worker told; `--grid` runs large models."""
    large = ["large"] * request.config.getoption("--grid")
    found = run("private_inputs", {f"{side}/0": side for side in SIDES}, lesson, *large, deadline=DEADLINE)
    found.result.check()
    return {side: found.told[f"{side}/0"] for side in SIDES}


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Ran:
    """Of a text with two sides."""
    return run_sides(request, "private")


class TestRun:
    """Each side is read in its own cluster; nothing of it leaves in training, evaluation and translation."""

    @pytest.mark.parametrize("side", SIDES)
    @pytest.mark.parametrize("part", PARTS)
    def test_no_id_and_no_word_of_its_side_leaves_a_process(self, ran: Ran, side: str, part: str) -> None:
        told = ran[side][part]
        assert told["found"] == []
        assert told["frames"] >= 3 and told["bytes"] > 500

    @pytest.mark.parametrize("side", SIDES)
    def test_there_was_a_text_to_look_for_and_frames_to_look_at(self, ran: Ran, side: str) -> None:
        patterns, words = ran[side]["looked for"]
        assert patterns > 2000 and words > 100
        assert sum(ran[side][part]["bytes"] for part in PARTS) > 20_000
        assert sum(ran[side][part]["frames"] for part in PARTS) < 1000, "numbers of frames come near to ids"

    @pytest.mark.parametrize("side", SIDES)
    def test_ids_that_are_sent_on_purpose_are_found(self, ran: Ran, side: str) -> None:
        leak = ran[side]["leak"]
        assert any("ids as int32" in each for each in leak["found"])
        assert leak["kinds"]["BOUNDARY int32"] == 1
        assert [told[f"leaked from {side}"] for told in ran.values()] == [ran[side]["sum"]] * 2

    @pytest.mark.parametrize("side", SIDES)
    @pytest.mark.parametrize("part", PARTS)
    def test_what_crosses_are_hidden_states_masks_and_gradients(self, ran: Ran, side: str, part: str) -> None:
        kinds = {name.removesuffix(" coded") for name in ran[side][part]["kinds"]}
        forward, backward = {"BOUNDARY float32", "BOUNDARY bool"}, {"BOUNDARY float32"}
        crossing = {name for name in kinds if name.startswith("BOUNDARY")}
        assert crossing == (forward if side == "source" else backward if part.startswith("fit") else set())
        scalars = {"SCALAR float32", "SCALAR uint8"}
        assert kinds - crossing <= {"CONTROL uint8", "ACK", "BEAT", "VALUE float32", "VALUE int64", *scalars}
        assert all(dims == [] for dims in ran[side][part]["integers"]), "more than a counter"
        assert all(size <= 64 for size in ran[side][part]["bundled"]), "more than a few numbers"

    @pytest.mark.parametrize("side", SIDES)
    def test_the_second_epoch_goes_by_the_codec(self, ran: Ran, side: str) -> None:
        assert ran[side]["fit int4"]["kinds"]["BOUNDARY float32 coded"] == 8
        assert ran[side]["fit int4"]["bytes"] < 0.6 * ran[side]["fit plain"]["bytes"]

    def test_not_even_a_checksum_of_an_input_is_sent(self, ran: Ran) -> None:
        for told in ran.values():
            *without, translate = (told[part]["checksums"] for part in PARTS)
            assert without == [[[]] * 4] * 3  # one a step
            assert translate == [["rows"]]  # the numbers of the rows, which every cluster gives

    def test_translations_stay_where_they_are_written(self, ran: Ran) -> None:
        assert ran["target"]["translated"] == 8 and "refused" not in ran["target"]
        assert ran["source"]["translated"] == 0
        assert ran["source"]["refused"] == "this result is on target/0, not in this process"

    def test_both_come_to_the_same_loss_and_part_in_silence(self, ran: Ran) -> None:
        for part in ("plain", "int4"):
            assert ran["source"][f"{part} loss"] == ran["target"][f"{part} loss"]
        assert [told["farewell"]["found"] for told in ran.values()] == [[], []]


@pytest.fixture(scope="module")
def middle(request: pytest.FixtureRequest) -> Ran:
    """Of a model that begins and ends in the same cluster."""
    return run_sides(request, "labels")


class TestLabels:
    """Sentences and their labels are in one cluster, where the model begins and ends."""

    @pytest.mark.parametrize("side", SIDES)
    def test_no_label_and_no_id_leaves_it(self, middle: Ran, side: str) -> None:
        told = middle[side]["fit"]
        assert told["found"] == [] and told["frames"] >= 3 and told["bytes"] > 500
        assert told["checksums"] == [["sample_weight"]] * 8  # one a step: nothing but the weights of rows

    def test_a_label_that_is_sent_on_purpose_is_found(self, middle: Ran) -> None:
        assert any("ids as int32" in each for each in middle["source"]["leak"]["found"])

    @pytest.mark.parametrize("side", SIDES)
    def test_what_crosses_are_rows_of_the_rank_and_a_mask(self, middle: Ran, side: str) -> None:
        kinds = {name for name in middle[side]["fit"]["kinds"] if name.startswith("BOUNDARY")}
        assert kinds == {"BOUNDARY float32"} | ({"BOUNDARY bool"} if side == "source" else set())
        assert all(dims == [] for dims in middle[side]["fit"]["integers"]), "more than a counter"

    def test_both_come_to_the_same_loss(self, middle: Ran) -> None:
        assert middle["source"]["loss"] == middle["target"]["loss"]


WORKERS = ("a/0", "a/1", "b/0", "c/0")
READERS = {"x": {0, 1}, "z": {2, 3}, "y": {3}}
"""The workers that read each input, by their places among the names."""


@pytest.fixture(scope="module")
def kept() -> Mapping[str, Any]:
    """What the workers of three clusters told of which each keeps its inputs."""
    told = run("private_inputs", {worker: worker[0] for worker in WORKERS}, "keeping", deadline=DEADLINE).told
    return {name: value for things in told.values() for name, value in things.items()}


class TestKept:
    """Three clusters, one of them of two workers: what is derived of an input goes to those alone that read it."""

    @pytest.mark.parametrize("worker", WORKERS)
    @pytest.mark.parametrize("part", ["arrays", "dataset", "failure"])
    def test_a_checksum_goes_to_readers_alone(self, kept: Mapping[str, Any], worker: str, part: str) -> None:
        told = kept[f"{worker} {part}"]
        assert told["frames"] >= 1
        assert [[name, to] for name, to in told["sums"] if to not in READERS[name[0]]] == []

    @pytest.mark.parametrize("part", ["arrays", "dataset"])
    def test_those_who_read_the_same_compare_it(self, kept: Mapping[str, Any], part: str) -> None:
        pairs = {"a/0": ("x", 1), "a/1": ("x", 0), "b/0": ("z", 3), "c/0": ("z", 2)}
        for worker, pair in pairs.items():
            compared = {(name[0], to) for name, to in kept[f"{worker} {part}"]["sums"]}
            assert pair in compared or (part, pair[0]) == ("dataset", "x")  # each of the two has other rows

    @pytest.mark.parametrize("worker", WORKERS)
    @pytest.mark.parametrize("part", ["arrays", "dataset", "failure"])
    def test_no_host_no_folder_and_no_text_of_an_error(self, kept: Mapping[str, Any], worker: str, part: str) -> None:
        assert kept[f"{worker} {part}"]["named"] == []

    def test_the_others_hear_who_failed_and_by_what(self, kept: Mapping[str, Any]) -> None:
        for worker in WORKERS[1:]:
            heard = kept[f"{worker} heard"]
            assert "'a/0' failed: ValueError" in heard and "4711" not in heard


def frame(header: Header, payload: np.ndarray) -> bytes:
    ((whole, chunk),) = chunks(header, payload)
    return pack(whole, checksum(chunk)) + chunk.tobytes()


class TestLook:
    """The look by itself: it finds what is there, and nothing where nothing is."""

    SENTENCE, ROW = "El gato está en la mesa roja", [2, 3100, 3200, 3300, 3400, 3, 0]
    LOOK = Look.of([SENTENCE], [ROW], 3000)

    @staticmethod
    def sent(array: Any) -> bytes:
        """A tensor as the one frame that carries it."""
        array = np.asarray(array)
        return frame(Header(Kind.SCALAR, dtype=dtype_code(array.dtype.name), dims=array.shape), array_bytes(array))

    @staticmethod
    def said(what: Any) -> bytes:
        """A message as its frame."""
        data = np.frombuffer(encode_message({"kind": "TELL", "what": what}), np.uint8)
        return frame(Header(Kind.CONTROL, dtype=dtype_code("uint8"), dims=data.shape), data)

    @pytest.mark.parametrize("dtype", ["int16", "uint16", "int32", "int64", "float16", "float32", "float64"])
    def test_ids_are_found_as_any_numbers(self, dtype: str) -> None:
        assert self.LOOK.finds(self.sent(np.asarray([[7, *self.ROW]], dtype)))
        assert not self.LOOK.finds(self.sent(np.asarray([self.ROW[::-1]], dtype)))

    @pytest.mark.parametrize("before", range(4))
    def test_ids_are_found_wherever_they_begin(self, before: int) -> None:
        data = bytes(before) + np.asarray(self.ROW, "int32").tobytes()
        assert self.LOOK.finds(self.sent(np.frombuffer(data, np.uint8)))

    @pytest.mark.parametrize("text", [SENTENCE, "está", "la mesa", "gato est", "EL GATO", "a roja"])
    def test_words_are_found_among_bytes(self, text: str) -> None:
        long = {"gato est", "EL GATO", "a roja"}
        data = b"\x00\x01" + text.encode() + b"\xff"
        assert bool(self.LOOK.finds(self.sent(np.frombuffer(data, np.uint8)))) == (text not in long)

    @pytest.mark.parametrize("what", ["gato", "a Gato!", {"mesa": 1}, ["3100", 3100, 3200], "3200, 3300", "roja"])
    def test_short_words_and_ids_are_found_in_messages(self, what: Any) -> None:
        assert self.LOOK.finds(self.said(what))

    @pytest.mark.parametrize("what", ["gatos", "el", [3200, 3100], 3100, "mes", ""])
    def test_a_message_of_other_things_is_none(self, what: Any) -> None:
        assert not self.LOOK.finds(self.said(what))

    @pytest.mark.parametrize("form", [int, str, hex, lambda crc: f"{crc:08X}", lambda crc: {"x": [None, crc]}])
    def test_a_checksum_is_found_in_a_message(self, form: Any) -> None:
        rows = np.arange(8, dtype="int32").reshape(4, 2)
        crc = google_crc32c.value(rows[1:3].tobytes())
        assert Checksums.of({"x": rows}).finds(self.said(form(crc))) == ["x[1:3]"]
        assert Checksums.of({"x": rows}).finds(self.said(form(crc ^ 1))) == []

    @pytest.mark.parametrize("dtype", ["<u4", ">u4", "<i8"])
    def test_a_checksum_is_found_in_a_tensor(self, dtype: str) -> None:
        rows = np.arange(8, dtype="int32").reshape(4, 2)
        crc = np.asarray([1, google_crc32c.value(rows.tobytes())]).astype(dtype)
        assert Checksums.of({"x": rows}).finds(self.sent(np.frombuffer(crc.tobytes(), np.uint8))) == ["x[0:4]"]
