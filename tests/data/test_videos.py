"""Videos: frames come back with their times, nothing is half written, files that are none are named."""

import sys

import numpy as np
import pytest
from PIL import Image

from softfree.data import videos
from softfree.data.images import UnreadableImageError
from softfree.data.videos import VideoWriter, count_frames, import_av, is_video, read_frames


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"videos need a package: pip install 'softfree\[video\]'"):
        import_av()


def test_videos_are_told_by_their_names():
    assert is_video("a.mp4") and is_video("A.MOV") and not is_video("a.gif") and not is_video("mp4")


@pytest.fixture
def av():
    return pytest.importorskip("av", reason="needs the extra video (PyAV)")


def page(shade, size=(64, 48)):
    return Image.new("RGB", size, (shade, shade, shade))


def test_frames_come_back_with_their_times(av, tmp_path):
    path = tmp_path / "new" / "a.mp4"
    times = [0.0, 0.1, 0.25, 1.0]  # not evenly spaced, as phones film
    with VideoWriter(path) as video:
        for number, seconds in enumerate(times):
            video.write(page(60 * number), seconds)
    frames = list(read_frames(path))
    assert [frame.number for frame in frames] == [0, 1, 2, 3] and count_frames(path) == 4
    assert [frame.seconds for frame in frames] == pytest.approx(times, abs=1e-3)
    for number, frame in enumerate(frames):
        assert frame.picture.size == (64, 48)
        assert abs(np.asarray(frame.picture).mean() - 60 * number) < 5
    assert list(path.parent.iterdir()) == [path]


def test_times_count_from_the_first_frame(av, tmp_path):
    path = tmp_path / "a.mpg"  # whose clock begins at half a second
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg1video", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for shade in (0, 100, 200):
            container.mux(stream.encode(av.VideoFrame.from_image(page(shade))))
        container.mux(stream.encode(None))
    assert [frame.seconds for frame in read_frames(path)] == pytest.approx([0, 0.04, 0.08])


def test_pictures_of_other_and_odd_sizes_fit_the_first(av, tmp_path):
    path = tmp_path / "a.mp4"
    with VideoWriter(path) as video:
        for number, size in enumerate([(65, 49), (40, 90)]):
            video.write(page(0, size), number)
    first, second = (np.asarray(frame.picture).mean(-1) for frame in read_frames(path))
    assert first.shape == second.shape == (48, 64)
    assert second[:, :38].max() < 20 and second[:, 42:].min() > 230


def test_times_that_stand_still_or_go_back_are_mended(av, tmp_path):
    path = tmp_path / "a.mp4"
    with VideoWriter(path) as video:
        for seconds in (1.0, 1.0, 0.5):
            video.write(page(9), seconds)
    times = [frame.seconds for frame in read_frames(path)]
    assert times == sorted(set(times)) and len(times) == 3


def test_nothing_is_left_of_a_video_that_was_not_finished(av, tmp_path):
    with pytest.raises(KeyboardInterrupt), VideoWriter(tmp_path / "a.mp4") as video:
        video.write(page(9), 0.0)
        raise KeyboardInterrupt
    with VideoWriter(tmp_path / "b.mp4"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"no video" * 500])
def test_a_file_that_is_no_video_is_refused(av, tmp_path, content):
    path = tmp_path / "a.mp4"
    path.write_bytes(content)
    with pytest.raises(UnreadableImageError, match="can't be decoded: "):
        next(read_frames(path))
    assert count_frames(path) is None


@pytest.mark.parametrize(
    "listing",
    [
        "ffconcat version 1.0\nfile real.mp4\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nreal.mp4\n#EXT-X-ENDLIST\n",
    ],
    ids=["concat", "hls"],
)
def test_a_list_of_other_files_is_not_followed(av, tmp_path, monkeypatch, listing):
    monkeypatch.chdir(tmp_path)
    with VideoWriter(tmp_path / "real.mp4") as video:
        video.write(page(9), 0.0)
    (tmp_path / "list.mp4").write_text(listing)
    with pytest.raises(UnreadableImageError, match="can't be decoded: "):
        next(read_frames("list.mp4"))


def test_a_frame_beyond_the_limit_of_pictures_is_refused(av, tmp_path, monkeypatch):
    with VideoWriter(tmp_path / "a.mp4") as video:
        video.write(page(9), 0.0)
    monkeypatch.setattr(videos, "MAX_PIXELS", 1000)
    with pytest.raises(UnreadableImageError, match="more than the limit of 1,000 pixels: 64 x 48"):
        next(read_frames(tmp_path / "a.mp4"))


def test_sound_alone_is_refused(av, tmp_path):
    path = tmp_path / "a.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(UnreadableImageError, match="has no pictures, only sound"):
        next(read_frames(path))
