"""The explorer over HTTP: one page, and the data behind it. Nothing is written to disk.

It runs on the user's own machine, next to a browser that also visits other sites. These sites can't read from
it (no CORS), can't upload (the Origin must be ours), can't make it compute (browsers say when a request comes
from another site), and can't impersonate it under a name of theirs that points here (the Host must be an
address, localhost or the name given by --host).
"""

import ipaddress
import logging
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from PIL import Image
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from softfree.analysis.subject import Subject
from softfree.data.images import MAX_PIXELS, UnreadableImageError
from softfree.explorer.maps import MOST_STEPS, SIZES, Explorer, Place, pack

logger = logging.getLogger(__name__)
PAGE = Path(__file__).parent / "page"
MAX_BYTES = 25 * 2**20
MOST_UPLOADS = 8  # at a time; their pictures are decoded one after the other
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
Size = Annotated[int, Query(ge=SIZES[0], le=SIZES[-1])]
Part = Annotated[float, Query(ge=0, le=1)]


def create_app(
    subjects: Sequence[Subject], samples: Mapping[str, Image.Image], host: str = "127.0.0.1"
) -> FastAPI:
    """Create the application, reached by the name or address ``host``.

    ``samples`` are one or more photos by name.
    """
    explorer = Explorer(subjects, samples)
    uploads = 0
    # FastAPI's own documentation pages would load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    app.add_middleware(Guard, name=host)

    @app.exception_handler(ValueError)
    def refuse(_: Request, problem: ValueError) -> Response:
        return error(422, str(problem))

    def known(model: int) -> int:
        if not 0 <= model < len(subjects):
            raise HTTPException(404, f"there is no model {model}")
        return model

    Model = Annotated[int, Depends(known)]

    def layer_place(model: Model, photo: str, size: Size, stage: int, block: int = -1) -> Place:
        return Place(model, photo, size, stage, block)

    Layer = Annotated[Place, Depends(layer_place)]

    @app.get("/api/setup")
    def setup() -> dict[str, Any]:
        models = [
            {
                "title": subject.title,
                "own_size": subject.metadata["img_size"],
                "sizes": sorted({*SIZES, min(subject.metadata["img_size"], SIZES[-1])}),
                "trained": "class_names" in subject.metadata
                or subject.metadata.get("task") != "classification",
            }
            for subject in subjects
        ]
        photos = [{"id": key, "name": name} for key, name in explorer.sample_names.items()]
        limits = {"bytes": MAX_BYTES, "pixels": MAX_PIXELS, "steps": MOST_STEPS}
        return {"models": models, "photos": photos, "limits": limits}

    @app.post("/api/photos")
    async def upload(request: Request) -> dict[str, str]:
        nonlocal uploads
        if uploads == MOST_UPLOADS:
            raise HTTPException(503, "other photos are being read; try again in a moment")
        uploads += 1
        try:
            content = bytearray()
            async for chunk in request.stream():
                content += chunk
                if len(content) > MAX_BYTES:
                    raise HTTPException(
                        413, f"the file is larger than the limit of {MAX_BYTES // 2**20} MB"
                    )
            return {"id": await run_in_threadpool(explorer.add_photo, bytes(content))}
        except UnreadableImageError as problem:
            raise HTTPException(415, f"that file can't be read as a photo: {problem}") from problem
        finally:
            uploads -= 1

    @app.get("/api/photos/{photo}")
    def show(photo: str, model: int | None = None) -> Response:
        file = BytesIO()
        seen = explorer.photo(photo, None if model is None else known(model))
        seen.save(file, "JPEG", quality=90)
        return Response(file.getvalue(), media_type="image/jpeg")

    @app.get("/api/capture")
    def capture(model: Model, photo: str, size: Size) -> dict[str, Any]:
        return explorer.describe(model, photo, size)

    @app.get("/api/inverse")
    def inverse(place: Layer) -> dict[str, list]:
        return explorer.inverse(place)

    @app.get("/api/maps")
    def maps(
        place: Layer,
        x: Part,
        y: Part,
        steps: Annotated[int | None, Query(ge=0, le=MOST_STEPS)] = None,
    ) -> Response:
        packed = pack(explorer.heat_maps(place, x, y, steps))
        return Response(packed, media_type="application/octet-stream")

    app.mount("/", StaticFiles(directory=PAGE, html=True))
    return app


class Guard:
    """Rejects requests from other sites, and adds the headers that restrict answers to this page."""

    def __init__(self, app: ASGIApp, name: str):
        self.app, self.name = app, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun = False

        async def send_guarded(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self.refusal(scope["path"], Headers(scope=scope))
        try:
            await (refusal or self.app)(scope, receive, send_guarded)
        except ClientDisconnect:
            pass  # the client is gone
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not begun:
                await error(500, "this failed; see the terminal where the explorer was started")(
                    scope, receive, send_guarded
                )

    def refusal(self, path: str, headers: Headers) -> Response | None:
        address, origin = headers.get("host", ""), headers.get("origin")
        if not is_trusted(address, self.name):
            return error(403, f"this explorer does not answer to the name {address}")
        if origin is not None:
            try:
                own = urlsplit(origin).netloc == address
            except ValueError:
                return error(400, f"the Origin {origin} is not an address")
            return None if own else error(403, f"requests from {origin} are refused")
        # Browsers send no Origin for pictures and scripts, but say which site's page asks. Links may lead
        # here.
        follows = headers.get("sec-fetch-mode") == "navigate" and not path.startswith("/api/")
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not follows:
            return error(403, "requests from other sites are refused")
        return None


def is_trusted(host_header: str, name: str) -> bool:
    """Whether a Host header names this server: by any address, as localhost, or by its own name.

    A site whose own name points to this machine (DNS rebinding) is recognized by that name.

    Example:
        >>> is_trusted("127.0.0.1:8642", ""), is_trusted("[::1]:8642", ""), is_trusted("evil.example", "")
        (True, True, False)
    """
    try:
        host = urlsplit(f"//{host_header}").hostname or ""
    except ValueError:
        return False
    if host in ("localhost", name.lower()):
        return bool(host)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def error(status: int, message: str) -> JSONResponse:
    """An error response in the form of FastAPI's own."""
    return JSONResponse({"detail": message}, status)
