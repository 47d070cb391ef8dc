"""The stack, its observers, and replayed frames."""

import contextlib
import threading
from collections.abc import Iterator

import pytest

import whale_nebula as nb
from whale_nebula import scopes
from whale_nebula.scopes.frames import (
    Frame,
    cluster_block_of,
    compress_of,
    open_frames,
    reenter,
    stage_of,
)


class RecordingWatcher:
    """A watcher that records the scopes that open and close."""

    def __init__(self, refuses: str = "") -> None:
        self.lines: list[str] = []
        self.refuses = refuses

    @contextlib.contextmanager
    def enter(self, frame: Frame) -> Iterator[None]:
        if frame.kind == self.refuses:
            raise ValueError(frame.kind)
        assert open_frames()[-1] is frame or frame in open_frames()
        self.lines.append(f"+{frame.kind}")
        try:
            yield
        finally:
            self.lines.append(f"-{frame.kind}")


@pytest.fixture(autouse=True)
def isolate_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes.frames, "watchers", [])
    monkeypatch.setattr("whale_nebula.scopes.hints.find_code_kind", lambda: None)


@pytest.fixture
def recorder() -> RecordingWatcher:
    made = RecordingWatcher()
    scopes.frames.watchers.append(made)
    return made


def test_open_frames_are_ordered_from_outermost_to_innermost() -> None:
    with nb.cluster() as a, nb.pipeline(2) as b, nb.stage() as c, nb.compress(fp16=True) as d:
        assert open_frames() == (a, b, c, d)
    assert open_frames() == ()


def test_watchers_are_called_when_scopes_open_and_close(recorder: RecordingWatcher) -> None:
    with nb.cluster():
        with nb.stage():
            pass
        with nb.stage():
            pass
    assert recorder.lines == ["+cluster", "+stage", "-stage", "+stage", "-stage", "-cluster"]


def test_all_scopes_close_when_the_body_raises(recorder: RecordingWatcher) -> None:
    with pytest.raises(KeyError), nb.cluster(), nb.stage():
        raise KeyError
    assert recorder.lines[2:] == ["-stage", "-cluster"]
    assert open_frames() == ()


def test_failing_watcher_leaves_the_scope_closed(recorder: RecordingWatcher) -> None:
    scopes.frames.watchers.append(RecordingWatcher(refuses="stage"))
    with nb.cluster() as cluster:
        with pytest.raises(ValueError, match="stage"), nb.stage():
            pass
        assert open_frames() == (cluster,)
    assert recorder.lines == ["+cluster", "+stage", "-stage", "-cluster"]


def open_and_close_scopes() -> tuple[Frame, ...]:
    with nb.cluster(), nb.stage(cluster="gpu"), nb.compress(fp16=True):
        return open_frames()


def test_reenter_opens_exactly_the_given_frames(recorder: RecordingWatcher) -> None:
    frames = open_and_close_scopes()
    recorder.lines.clear()
    with nb.cluster(name="other"):
        with reenter(frames):
            assert open_frames() == frames
        assert [frame.cluster for frame in open_frames()] == ["other"]
    opened = ["+cluster", "+stage", "+compress", "-compress", "-stage", "-cluster"]
    assert recorder.lines == ["+cluster", *opened, "-cluster"]


def test_reenter_does_not_notify_watchers_of_open_frames(recorder: RecordingWatcher) -> None:
    with nb.cluster(), nb.stage():
        frames = open_frames()
        recorder.lines.clear()
        with reenter(frames):
            assert recorder.lines == []
        with reenter(frames[:1]):
            assert open_frames() == frames[:1]
        assert open_frames() == frames


def test_reenter_does_not_change_stage_numbers() -> None:
    with nb.cluster():
        with nb.stage() as first:
            frames = open_frames()
        with reenter(frames):
            assert open_frames()[-1].key == first.key
        with nb.stage() as second:
            pass
    assert second.key == "stage1"


def test_scope_in_a_layers_call_overrides_reentered_ones() -> None:
    cluster, _, compress = frames = open_and_close_scopes()
    with reenter(frames):
        with nb.stage(cluster="npu") as inner:
            assert open_frames() == (cluster, compress, inner)
            assert inner.cluster == "npu"
            with pytest.raises(nb.errors.NestingError), nb.stage(cluster="tpu"):
                pass
        with nb.cluster() as anew:
            assert open_frames() == (anew,)
        with nb.compress(bf16=True) as narrower:
            assert open_frames() == (*frames, narrower)
            assert compress_of(open_frames()) is narrower
        assert open_frames() == frames


def test_scope_object_can_be_open_in_two_threads() -> None:
    scope, errors = nb.cluster(), []
    both = threading.Barrier(2, timeout=10)

    def work() -> None:
        try:
            with scope as frame:
                both.wait()
                assert open_frames() == (frame,)
                both.wait()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert errors == []


def test_innermost_frames_are_found_by_kind() -> None:
    outer = nb.compress(fp16=True)
    with (
        nb.cluster() as cluster,
        outer,
        nb.pipeline(2),
        nb.stage() as stage,
        nb.compress("bf16") as last,
    ):
        frames = open_frames()
    assert cluster_block_of(frames) is cluster
    assert stage_of(frames) is stage
    assert compress_of(frames) is last
    assert stage_of(()) is None


def test_touched_scope_touches_enclosing_scopes() -> None:
    with nb.cluster() as cluster:
        with nb.stage() as still:
            pass
        assert not cluster.touched
        with nb.stage() as stage, nb.compress(fp16=True) as compress:
            compress.touched = True
    assert (cluster.touched, stage.touched, still.touched) == (True, True, False)


def test_unused_stage_releases_its_number_outside_a_block() -> None:
    with scopes.frames.use_stack(scopes.frames.Stack()):
        with nb.stage() as passed_by:
            pass
        with nb.stage() as caught:
            caught.touched = True
        with nb.stage() as after:
            after.touched = True
    assert (passed_by.key, caught.key, after.key) == ("stage0", "stage0", "stage1")


def test_frame_options_are_immutable() -> None:
    with nb.pipeline(2) as frame, pytest.raises(TypeError):
        frame.options["micro_batch"] = 3  # type: ignore[index]
