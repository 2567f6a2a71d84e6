"""The explorer over HTTP: what it answers, and what it refuses."""

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from softfree.explorer import server
from softfree.explorer.maps import Explorer, Place, Subject, pack

from .small import encoded, photo, subjects

LAYER = {"model": 0, "photo": "sample-1", "size": 64, "stage": 1}


@pytest.fixture(scope="module")
def models() -> list[Subject]:
    return subjects()


@pytest.fixture(scope="module")
def client(models) -> TestClient:
    app = server.create_app(models, {"one": photo(0), "two": photo(1)})
    return TestClient(app, base_url="http://127.0.0.1:8642")


def test_the_page_and_its_parts_are_served(client):
    page = client.get("/")
    assert page.status_code == 200 and "<title>Attention explorer</title>" in page.text
    for name in ("explorer.js", "explorer.css", "icon.svg"):
        assert name in page.text
        assert client.get(f"/{name}").status_code == 200
    assert client.get("/../server.py").status_code == 404


def test_the_page_names_no_other_site():
    for file in server.PAGE.iterdir():
        names = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in names and "https:" not in names, file


def test_every_answer_forbids_other_sources(client):
    for path in ("/", "/explorer.js", "/api/setup", "/api/photos/sample-1", "/nowhere"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers


def test_fastapis_own_pages_are_off(client):
    assert [client.get(path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [
        404
    ] * 3


def test_setup_lists_models_photos_and_limits(client):
    setup = client.get("/api/setup").json()
    assert [model["title"] for model in setup["models"]] == [
        "SOFT++ run",
        "softmax run",
        "softfree run",
    ]
    assert setup["models"][0]["own_size"] == 64 and 64 in setup["models"][0]["sizes"]
    assert setup["photos"] == [{"id": "sample-1", "name": "one"}, {"id": "sample-2", "name": "two"}]
    assert setup["limits"]["bytes"] == server.MAX_BYTES


def test_capture_describes_the_layers(client):
    found = client.get("/api/capture", params=LAYER).json()
    assert [layer["grid"] for layer in found["layers"]] == [[16, 16], [8, 8], [4, 4], [2, 2]]
    first = found["layers"][0]
    assert first["kind"] == "SOFT++" and first["variants"] == ["SOFT", "SOFT++", "softmax"]
    assert first["steps"] == 20 and len(found["top"]) == 5


def test_maps_are_the_packed_maps(client, models):
    answer = client.get("/api/maps", params=LAYER | {"x": 0.25, "y": 0.75, "steps": 6})
    explorer = Explorer(models, {"one": photo(0)})
    assert answer.content == pack(
        explorer.heat_maps(Place(0, "sample-1", 64, 1, -1), 0.25, 0.75, 6)
    )
    assert len(answer.content) == 3 * 1 * (8 + 1 + 16 * 16)
    assert answer.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    ("changed", "status", "message"),
    [
        ({"stage": 9}, 422, "stage must be one of 1, 2, 3, 4, got 9"),
        ({"block": 5}, 422, "block must be at most 1"),
        ({"model": 3}, 404, "there is no model 3"),
        ({"photo": "none"}, 422, "no longer kept"),
        ({"size": 4096}, 422, "less than or equal to 512"),
        ({"x": 1.5}, 422, "less than or equal to 1"),
        ({"x": "nan"}, 422, ""),
        ({"steps": -1}, 422, "greater than or equal to 0"),
    ],
)
def test_wrong_questions_are_refused(client, changed, status, message):
    answer = client.get("/api/maps", params={**LAYER, "x": 0.5, "y": 0.5, **changed})
    assert answer.status_code == status
    assert message in answer.text


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_an_uploaded_photo_can_be_looked_at(client, kind):
    answer = client.post("/api/photos", content=encoded(photo(5), kind))
    name = answer.json()["id"]
    shown = client.get(f"/api/photos/{name}")
    assert shown.headers["content-type"] == "image/jpeg"
    assert client.get(f"/api/photos/{name}?model=0").is_success
    assert client.get(f"/api/photos/{name}?model=9").status_code == 404
    assert client.get("/api/capture", params=LAYER | {"photo": name}).status_code == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "can't be read as a photo"),
        (b"not a photo", "not a picture"),
        (encoded(photo(0))[:200], "can't be read as a photo"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not a picture"),
    ],
)
def test_a_bad_file_gets_a_message(client, content, message):
    answer = client.post("/api/photos", content=content)
    assert answer.status_code == 415
    assert message in answer.json()["detail"]


def test_a_photo_that_promises_too_many_pixels_is_refused(client):
    huge = encoded(Image.new("1", (12_000, 9_000)))
    assert len(huge) < 100_000
    answer = client.post("/api/photos", content=huge)
    assert answer.status_code == 415 and "limit of 100,000,000 pixels" in answer.json()["detail"]


def test_a_file_of_too_many_bytes_is_refused(client, monkeypatch):
    monkeypatch.setattr(server, "MAX_BYTES", 2**20)
    answer = client.post("/api/photos", content=bytes(2**20 + 1))
    assert answer.status_code == 413 and "limit of 1 MB" in answer.json()["detail"]


def test_nothing_is_written_to_disk(client):
    written = []
    watching = True

    def watch(event: str, arguments: tuple) -> None:
        if watching and event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            written.append(arguments)

    sys.addaudithook(watch)  # can't be removed, hence the switch
    # Large enough that a form's upload would go to a temporary file.
    content = encoded(photo(7, 1500, 1500), "BMP")
    name = client.post("/api/photos", content=content).json()["id"]
    client.get(f"/api/photos/{name}")
    client.get("/api/capture", params=LAYER | {"photo": name})
    assert not written
    with open(os.devnull, "w"):
        assert written  # the watch does see a file
    watching = False


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "[", ""]
)
def test_other_names_for_this_machine_are_refused(client, host):
    answer = client.get("/api/setup", headers={"Host": host})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    ("host", "name", "trusted"),
    [
        ("localhost:8642", "127.0.0.1", True),
        ("LOCALHOST", "127.0.0.1", True),
        ("192.168.0.7:8642", "0.0.0.0", True),
        ("[::1]:8642", "::1", True),
        ("Workstation:8642", "workstation", True),
        ("workstation:8642", "0.0.0.0", False),
        ("", "", False),
    ],
)
def test_addresses_localhost_and_the_name_asked_for_are_trusted(host, name, trusted):
    assert server.is_trusted(host, name) is trusted


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:9999", "null"])
def test_uploads_from_other_sites_are_refused(client, origin):
    answer = client.post("/api/photos", content=encoded(photo(0)), headers={"Origin": origin})
    assert answer.status_code == 403


def test_uploads_from_the_page_are_taken(client):
    headers = {"Origin": "http://127.0.0.1:8642"}
    assert client.post("/api/photos", content=encoded(photo(0)), headers=headers).is_success


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "http://a]b"])
def test_an_origin_that_is_no_address_is_a_bad_request_with_the_headers(client, origin):
    answer = client.get("/api/setup", headers={"origin": origin})
    assert answer.status_code == 400
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_another_site_asks_for_is_not_computed(client, monkeypatch, site):
    def compute(*_):
        raise AssertionError("computed")

    monkeypatch.setattr(Explorer, "heat_maps", compute)
    headers = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
    answer = client.get("/api/maps", params=LAYER | {"x": 0.5, "y": 0.5}, headers=headers)
    assert answer.status_code == 403
    assert client.get("/explorer.js", headers=headers).status_code == 403
    headers["sec-fetch-mode"] = "navigate"
    assert client.get("/api/setup", headers=headers).status_code == 403
    assert client.get("/", headers=headers).status_code == 200  # a link to the page
    for own in ("same-origin", "none"):
        assert client.get("/api/setup", headers={"sec-fetch-site": own}).status_code == 200


def call(client, scope, messages):
    """The application without a server: what it sends to a client that says these messages."""
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"127.0.0.1:8642")]
    scope = {
        "type": "http",
        "headers": headers,
        "query_string": b"",
        "http_version": "1.1",
        **scope,
    }
    asyncio.run(client.app(scope, receive, send))
    return sent


def test_a_client_that_leaves_while_it_uploads_causes_no_word(client, capfd, caplog):
    scope = {"method": "POST", "path": "/api/photos", "raw_path": b"/api/photos"}
    begun = {"type": "http.request", "body": b"half", "more_body": True}
    assert call(client, scope, [begun, {"type": "http.disconnect"}]) == []
    assert capfd.readouterr() == ("", "") and not caplog.text
    # Its place is free again.
    for _ in range(server.MOST_UPLOADS + 1):
        call(client, scope, [dict(begun), {"type": "http.disconnect"}])
    assert client.post("/api/photos", content=encoded(photo(2), "PNG")).status_code == 200


def test_a_failure_is_logged_and_answered_with_the_headers(client, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Explorer, "describe", fail)
    answer = client.get("/api/capture", params={"model": 0, "photo": "sample-1", "size": 64})
    assert answer.status_code == 500 and "this failed" in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "a bug" in caplog.text


@pytest.mark.slow
def test_large_pictures_at_once_are_decoded_one_after_the_other_and_their_memory_is_given_back(
    client,
):
    content = BytesIO()
    Image.new("RGBA", (6000, 8000)).save(content, "PNG")

    def resident():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    before, most, done = resident(), 0.0, threading.Event()

    def watch():
        nonlocal most
        while not done.wait(0.01):
            most = max(most, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(6) as pool:
        bodies = [content.getvalue() + bytes(n) for n in range(6)]
        codes = list(
            pool.map(lambda body: client.post("/api/photos", content=body).status_code, bodies)
        )
    done.set()
    watcher.join()
    assert codes == [200] * 6
    # One takes 183 MiB for its pixels and as much for the ground below them, and 137 as RGB.
    assert most < before + 1000
    assert resident() < before + 200
