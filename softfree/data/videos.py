"""Videos: read frame by frame with their times, and written as H.264. Needs PyAV (the extra ``video``).

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
# FFmpeg's formats that contain the pictures. Others are lists of files, or of addresses to fetch them from.
SAFE = {
    "format_whitelist": "asf,avi,m4v,matroska,mov,mp4,mpeg,mpegts,mpegvideo,webm",
    "protocol_whitelist": "file",
}
TICK = Fraction(1, 90_000)  # seconds, the unit for the times of written frames
USUAL_RATE = 25  # frames per second, for files that do not specify it


class Frame(NamedTuple):
    """A picture of a video, its number from 0, and its time in seconds after the first."""

    number: int
    seconds: float
    picture: Image.Image


def is_video(path: str | Path) -> bool:
    """Whether a file name is that of a video.

    Example:
        >>> is_video("a/street.MP4"), is_video("street.jpg")
        (True, False)
    """
    return Path(path).suffix.lower() in VIDEOS


def import_av() -> Any:
    """Import PyAV; raise ``ValueError`` with what to install if it is missing."""
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need a package: pip install 'softfree[video]'") from error
    return av


def count_frames(path: str | Path) -> int | None:
    """The number of frames according to the file; None if it does not say, or can't be read."""
    av = import_av()
    with contextlib.suppress(Exception), av.open(str(path), options=SAFE) as container:
        return container.streams.video[0].frames or None
    return None


def read_frames(path: str | Path) -> Iterator[Frame]:
    """Yield the frames of a video's first stream, turned upright.

    Raises :class:`UnreadableImageError` if the file can't be read, or where it can't be read any further.
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
                # The size may change within a video.
                _check_size(frame)
                seconds = number / rate if frame.time is None else float(frame.time)
                # The times of MPEG streams, and of parts cut from longer videos, may start anywhere.
                start = seconds if number == 0 else start
                picture = frame.to_image()
                # Phones always film in one direction, and record how they were held.
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
    """Writes pictures to an MP4 file, completely or not at all.

    The video has the size of the first picture; others are cropped or padded.
    """

    def __init__(self, path: Path):
        self.path, self.unfinished = path, path.with_name(f".{path.name}.new")
        self.container: Any = None
        self.stream: Any = None
        self.last = -1

    def __enter__(self) -> "VideoWriter":
        return self

    def write(self, picture: Image.Image, seconds: float) -> None:
        """Append a picture that is shown from the time ``seconds`` on."""
        av = import_av()
        if self.stream is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.container = av.open(str(self.unfinished), "w", format="mp4")
            # All players support H.264; builds of FFmpeg without it have MPEG-4.
            codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
            self.stream = self.container.add_stream(codec, rate=USUAL_RATE)
            self.stream.codec_context.time_base = TICK
            # Sides must be even, because colours are stored for 2 x 2 pixels together.
            self.stream.width, self.stream.height = (side - side % 2 for side in picture.size)
            self.stream.pix_fmt = "yuv420p"
        size = self.stream.width, self.stream.height
        if picture.size != size:
            page = Image.new("RGB", size, "white")
            page.paste(picture)
            picture = page
        frame = av.VideoFrame.from_image(picture)
        # The times in a damaged file may stand still or go back, but those in a video must increase.
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
