"""Videos, a frame at a time: read with their times, and written as H.264. Needs PyAV, the extra ``video``.

with VideoWriter(Path("drawn.mp4")) as video:
    for frame in read_frames("street.mp4"):
        video.write(frame.picture, frame.seconds)
"""

import contextlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from PIL import Image

from softfree.data.images import MAX_PIXELS, UnreadableImageError

VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv")
# Of FFmpeg's formats those that hold pictures themselves. Others are lists of files and addresses to fetch them from.
SAFE = {
    "format_whitelist": "asf,avi,m4v,matroska,mov,mp4,mpeg,mpegts,mpegvideo,webm",
    "protocol_whitelist": "file",
}
TICK = Fraction(1, 90_000)  # of seconds, in which written frames are timed
USUAL_RATE = 25  # frames a second of a file that does not say


class Frame(NamedTuple):
    """A picture of a video, its number from 0, and how long after the first it is shown."""

    number: int
    seconds: float
    picture: Image.Image


def is_video(path: str | Path) -> bool:
    """Whether a file's name is one of a video.

    Example:
        >>> is_video("a/street.MP4"), is_video("street.jpg")
        (True, False)
    """
    return Path(path).suffix.lower() in VIDEOS


def import_av() -> Any:
    """PyAV; raises ``ValueError`` with what to install."""
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need a package: pip install 'softfree[video]'") from error
    return av


def count_frames(path: str | Path) -> int | None:
    """How many frames the file says it has; None if it does not say, or can't be read."""
    av = import_av()
    with contextlib.suppress(Exception), av.open(str(path), options=SAFE) as container:
        return container.streams.video[0].frames or None
    return None


def read_frames(path: str | Path) -> Iterator[Frame]:
    """The frames of a video's first stream, turned upright, one after the other.

    Raises :class:`UnreadableImageError` where the file can't be read, or not further.
    """
    av = import_av()
    number, start = 0, 0.0
    try:
        with av.open(str(path), options=SAFE) as container:
            if not container.streams.video:
                raise UnreadableImageError("has no pictures, only sound")
            stream = container.streams.video[0]
            _check_size(stream.codec_context)
            stream.thread_type = "AUTO"
            rate = float(stream.average_rate or USUAL_RATE)
            for frame in container.decode(stream):
                # It may change on the way.
                _check_size(frame)
                seconds = number / rate if frame.time is None else float(frame.time)
                # The clocks of MPEG streams, and of what was cut out of longer videos, begin anywhere.
                start = seconds if number == 0 else start
                picture = frame.to_image()
                # Phones film in one direction, and note how they were held.
                if turn := getattr(frame, "rotation", 0):
                    picture = picture.rotate(turn, expand=True)
                yield Frame(number, seconds - start, picture)
                number += 1
            if not number:
                raise UnreadableImageError("has no frame")
    except (av.FFmpegError, OSError) as error:
        after = f" after {number:,} frames" if number else ""
        raise UnreadableImageError(f"can't be decoded{after}: {error.strerror}") from error


def _check_size(seen: Any) -> None:
    if seen.width * seen.height > MAX_PIXELS:
        raise UnreadableImageError(
            f"more than the limit of {MAX_PIXELS:,} pixels: {seen.width:,} x {seen.height:,}"
        )


class VideoWriter:
    """Writes pictures as an MP4 file, whole or not at all. Its size is that of the first: others are cut or filled up."""

    def __init__(self, path: Path):
        self.path, self.unfinished = path, path.with_name(f".{path.name}.new")
        self.container: Any = None
        self.stream: Any = None
        self.last = -1

    def __enter__(self) -> "VideoWriter":
        return self

    def write(self, picture: Image.Image, seconds: float) -> None:
        """Append a picture that is shown from ``seconds`` on."""
        av = import_av()
        if self.stream is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.container = av.open(str(self.unfinished), "w", format="mp4")
            # All players know H.264; builds of FFmpeg without it have MPEG-4.
            codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
            self.stream = self.container.add_stream(codec, rate=USUAL_RATE)
            self.stream.codec_context.time_base = TICK
            # Colours are stored for 2 x 2 pixels together.
            self.stream.width, self.stream.height = (side - side % 2 for side in picture.size)
            self.stream.pix_fmt = "yuv420p"
        size = self.stream.width, self.stream.height
        if picture.size != size:
            page = Image.new("RGB", size, "white")
            page.paste(picture)
            picture = page
        frame = av.VideoFrame.from_image(picture)
        # Times that a damaged file gives may stand still or go back, which no video can.
        self.last = max(self.last + 1, round(seconds / TICK))
        frame.pts, frame.time_base = self.last, TICK
        self.container.mux(self.stream.encode(frame))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.container is None:
            return
        whole = False
        try:
            if kind is None:
                self.container.mux(self.stream.encode(None))
            self.container.close()
            whole = kind is None
        finally:
            if whole:
                self.unfinished.replace(self.path)
            else:
                self.unfinished.unlink(missing_ok=True)
