"""The stack, its observers, and replayed frames."""

import contextlib
import threading
from collections.abc import Iterator

import pytest

import whale_nebula as nb
from whale_nebula import scopes
from whale_nebula.scopes.frames import (
    Frame,
    add_watcher,
    cluster_block_of,
    compress_of,
    open_frames,
    reenter,
    stage_of,
)


class Diary:
    """A watcher that writes down what it is told."""

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
def own_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes.frames, "watchers", [])
    monkeypatch.setattr("whale_nebula.scopes.hints.running", lambda: None)


@pytest.fixture
def diary() -> Diary:
    made = Diary()
    add_watcher(made)
    return made


def test_frames_stand_from_the_outermost_to_the_innermost() -> None:
    with nb.cluster() as a, nb.pipeline(2) as b, nb.stage() as c, nb.compress(fp16=True) as d:
        assert open_frames() == (a, b, c, d)
    assert open_frames() == ()


def test_watchers_see_scopes_open_and_close(diary: Diary) -> None:
    with nb.cluster():
        with nb.stage():
            pass
        with nb.stage():
            pass
    assert diary.lines == ["+cluster", "+stage", "-stage", "+stage", "-stage", "-cluster"]


def test_everything_closes_when_the_body_raises(diary: Diary) -> None:
    with pytest.raises(KeyError), nb.cluster(), nb.stage():
        raise KeyError
    assert diary.lines[2:] == ["-stage", "-cluster"]
    assert open_frames() == ()


def test_a_watcher_that_raises_leaves_the_scope_closed(diary: Diary) -> None:
    add_watcher(Diary(refuses="stage"))
    with nb.cluster() as cluster:
        with pytest.raises(ValueError, match="stage"), nb.stage():
            pass
        assert open_frames() == (cluster,)
    assert diary.lines == ["+cluster", "+stage", "-stage", "-cluster"]


def built() -> tuple[Frame, ...]:
    with nb.cluster(), nb.stage(cluster="gpu"), nb.compress(fp16=True):
        return open_frames()


def test_reenter_opens_exactly_these_frames(diary: Diary) -> None:
    frames = built()
    diary.lines.clear()
    with nb.cluster(name="other"):
        with reenter(frames):
            assert open_frames() == frames
        assert [frame.cluster for frame in open_frames()] == ["other"]
    opened = ["+cluster", "+stage", "+compress", "-compress", "-stage", "-cluster"]
    assert diary.lines == ["+cluster", *opened, "-cluster"]


def test_reenter_tells_nothing_of_frames_that_are_open_already(diary: Diary) -> None:
    with nb.cluster(), nb.stage():
        frames = open_frames()
        diary.lines.clear()
        with reenter(frames):
            assert diary.lines == []
        with reenter(frames[:1]):
            assert open_frames() == frames[:1]
        assert open_frames() == frames


def test_reenter_counts_nothing() -> None:
    with nb.cluster():
        with nb.stage() as first:
            frames = open_frames()
        with reenter(frames):
            assert open_frames()[-1].key == first.key
        with nb.stage() as second:
            pass
    assert second.key == "stage1"


def test_a_scope_in_a_layers_call_beats_those_it_was_built_in() -> None:
    cluster, _, compress = frames = built()
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


def test_one_scope_object_may_be_open_in_two_threads() -> None:
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


def test_what_is_found_among_frames() -> None:
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


def test_a_touched_scope_touches_those_around_it() -> None:
    with nb.cluster() as cluster:
        with nb.stage() as still:
            pass
        assert not cluster.touched
        with nb.stage() as stage, nb.compress(fp16=True) as compress:
            compress.touched = True
    assert (cluster.touched, stage.touched, still.touched) == (True, True, False)


def test_a_stage_that_caught_nothing_gives_its_number_back_outside_a_block() -> None:
    with scopes.frames.standing(scopes.frames.Stack()):
        with nb.stage() as passed_by:
            pass
        with nb.stage() as caught:
            caught.touched = True
        with nb.stage() as after:
            after.touched = True
    assert (passed_by.key, caught.key, after.key) == ("stage0", "stage0", "stage1")


def test_options_of_a_frame_cannot_be_changed() -> None:
    with nb.pipeline(2) as frame, pytest.raises(TypeError):
        frame.options["micro_batch"] = 3  # type: ignore[index]
