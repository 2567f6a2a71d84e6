"""`softfree predict` for videos: frames are handled a batch at a time, never all at once."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from softfree.commands.predict.base import Predictor
from softfree.data.images import Unreadable, UnreadableImageError, as_utf8
from softfree.data.videos import Frame, VideoWriter, read_frames


@dataclasses.dataclass
class Watched:
    """How much of a video was seen, and why not all of it."""

    frames: int = 0
    seconds: float = 0.0
    unreadable: Unreadable | None = None


def predict_frames(
    predictor: Predictor, frames: Iterator[Frame], batch_size: int
) -> Iterator[tuple[Frame, dict[str, Any]]]:
    """Yield a result for each frame, in order."""
    while batch := list(itertools.islice(frames, batch_size)):
        results = predictor.predict([predictor.prepare(frame.picture) for frame in batch])
        yield from zip(batch, results, strict=True)


def predict_video(
    predictor: Predictor,
    path: str,
    batch_size: int,
    drawn: Path | None,
    emit: Callable[[dict[str, Any]], None],
    tick: Callable[[], object],
) -> Watched:
    """Call ``emit`` with a record for each frame and ``tick`` after each.

    Write the video ``drawn`` with results. If a file breaks off, the frames before count.
    """
    watched = Watched()

    def readable() -> Iterator[Frame]:
        try:
            yield from read_frames(path)
        except UnreadableImageError as error:
            watched.unreadable = Unreadable(path, str(error))

    with ExitStack() as stack:
        video = None if drawn is None else stack.enter_context(VideoWriter(drawn))
        for frame, result in predict_frames(predictor, readable(), batch_size):
            emit({"path": as_utf8(path), "frame": frame.number, "time": frame.seconds, **result})
            if video is not None:
                video.write(predictor.drawing(frame.picture, result), frame.seconds)
            watched.frames, watched.seconds = frame.number + 1, frame.seconds
            tick()
    return watched
