"""The explorer's page in a real browser: it loads, follows the query, switches, and survives bad files."""

import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
import uvicorn

from softfree.analysis.subject import Subject
from softfree.data import open_image
from softfree.explorer.maps import Explorer, Place, pack
from softfree.explorer.server import create_app
from tests.analysis.small import small

from .small import PREPARATION, encoded, photo, subjects

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed; try `make browser`"
)
# In the environment itself, then on the PATH.
BROWSERS = (
    str(Path(sys.executable).with_name("chromium")),
    "chromium",
    "chromium-browser",
    "google-chrome",
)
PATIENCE = 600.0  # guards against a hang; nothing depends on it
UNTRAINED = {"task": "classification", **PREPARATION}
BAD = "#message:not([hidden])"


class Site:
    """A running explorer, and what its maps must be."""

    def __init__(self):
        torch.manual_seed(0)
        models = [
            *subjects(),
            Subject("fresh (untrained)", small("softpp_tiny"), UNTRAINED),
            Subject("dull", small("softfree_tiny", query_gain=1e-3), dict(PREPARATION)),
            Subject("apart", small("softpp_tiny", query_gain=1e4), dict(PREPARATION)),
        ]
        samples = {"one": photo(0), "two": photo(1)}
        # Copies: two threads that capture from one model would record each other's layers.
        self.explorer = Explorer(deepcopy(models), samples)
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        self.server = uvicorn.Server(
            uvicorn.Config(create_app(models, samples), log_level="warning")
        )
        self.thread = threading.Thread(target=self.server.run, args=([listening],))
        self.thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    def shades(self, x: float, y: float, variant: int, photo="sample-1", size=64, **changes):
        """The bytes of the first head's map, (H, W)."""
        place = Place(changes.get("model", 0), photo, size, changes.get("stage", 1), -1)
        maps = self.explorer.heat_maps(place, x, y, changes.get("steps"))
        height, width = maps.shape[2:]
        every = np.frombuffer(pack(maps)[9 * maps.shape[0] * maps.shape[1] :], np.uint8)
        return every.reshape(*maps.shape[:2], height, width)[variant, 0]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    running = Site()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def browser():
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    with playwright.sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=found)
        except playwright.Error as error:
            if found:
                raise
            pytest.skip(
                f"no {', '.join(BROWSERS[1:])} on the PATH, and none from playwright "
                f"({str(error).splitlines()[0]}); try `make browser`"
            )
        yield browser
        browser.close()


@pytest.fixture
def page(site, browser):
    """A fresh page with its first maps drawn; any error in it, or question to another site, fails the test."""
    yield from open_page(site, browser)


def open_page(site, browser, **options):
    context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda r: r.url.startswith(site.address) or problems.append(r.url))
    page.goto(site.address)
    until(lambda: page.locator("figcaption").first.inner_text() != "")
    yield page
    context.close()
    assert not problems


def until(holds: Callable[[], bool]) -> None:
    """Wait for it; the page's own waiting evaluates strings, which its security policy forbids."""
    last = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < last, "did not come to hold"
        time.sleep(0.02)


def drawn(page, column: int) -> np.ndarray:
    """The pixels of the map in the first row, (H, W, 3)."""
    width, height, data = (
        page.locator("#maps canvas")
        .nth(column)
        .evaluate(
            "c => [c.width, c.height, [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]]"
        )
    )
    return np.array(data).reshape(height, width, 4)[..., :3]


def shows(page, column: int, shades: np.ndarray) -> bool:
    """Whether a map is drawn in the page's colours, told by green: it rises with the shade in all of them."""
    pixels = drawn(page, column)
    if pixels.shape[:2] != shades.shape:
        return False
    stops = [0x01, 0x2D, 0x52, 0x72, 0x91, 0xAE, 0xC9, 0xDC, 0xE7]
    expected = np.interp(shades, np.linspace(0, 255, len(stops)), stops)
    return bool(np.abs(pixels[..., 1] - expected).max() <= 2)


def hover(page, x: float, y: float) -> None:
    box = page.locator("#photo").bounding_box()
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])


def test_it_loads_with_maps_classes_and_what_is_compared(page, site):
    titles = page.locator("#maps .title").all_inner_texts()
    assert [title.split("\n") for title in titles] == [
        ["SOFT", "what if"],
        ["SOFT++", "this model"],
        ["softmax", "what if"],
    ]
    for variant in range(3):
        until(lambda v=variant: shows(page, v, site.shades(0.5, 0.5, v)))
    assert page.locator("#top li").count() == 5
    assert "<b>eel</b>" in page.locator("#top").inner_text()  # as text, not as a tag
    assert "same queries" in page.locator("#compared").inner_text()
    assert not page.locator(BAD).count()


def test_maps_follow_the_mouse(page, site):
    for x, y in ((0.1, 0.2), (0.9, 0.4), (0.53, 0.97)):
        hover(page, x, y)
        for variant in range(3):
            until(lambda v=variant, at=(x, y): shows(page, v, site.shades(*at, v)))
    assert not np.array_equal(site.shades(0.1, 0.2, 1), site.shades(0.53, 0.97, 1))


def test_a_click_holds_the_patch(page, site):
    hover(page, 0.1, 0.2)
    page.mouse.down()
    page.mouse.up()
    hover(page, 0.9, 0.9)
    assert page.locator("#pinned").is_visible()
    until(lambda: shows(page, 1, site.shades(0.1, 0.2, 1)))
    page.mouse.down()
    page.mouse.up()
    until(lambda: shows(page, 1, site.shades(0.9, 0.9, 1)))


def test_arrow_keys_move_the_patch(page, site):
    page.locator("#photo").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowUp")
    until(lambda: shows(page, 1, site.shades(9.5 / 16, 4.5 / 16, 1)))
    assert page.locator("#where").inner_text() == "Patch in row 5 of 16, column 10 of 16."


def test_everything_is_reached_by_the_tab_key(page):
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
    controls = {"model", "photo", "file", "stages", "block", "heads", "variants", "steps", "size"}
    assert controls <= reached


def test_enter_holds_and_escape_releases_as_the_page_says(page, site):
    assert "Enter holds" in page.locator("#hint").inner_text()
    page.locator("#photo").focus()
    hover(page, 0.1, 0.2)
    page.keyboard.press("Enter")
    assert "Esc to release" in page.locator("#pinned").inner_text()
    hover(page, 0.9, 0.9)
    until(lambda: shows(page, 1, site.shades(0.1, 0.2, 1)))
    page.locator("#model").focus()
    page.keyboard.press("Escape")
    assert page.locator("#pinned").is_hidden()
    hover(page, 0.8, 0.9)
    until(lambda: shows(page, 1, site.shades(0.8, 0.9, 1)))


def test_maps_are_there_when_waiting_ends(site, browser):
    for page in open_page(site, browser):
        page.evaluate(
            """() => {
                window.blank = 0;
                new MutationObserver(() => {
                    if (document.body.classList.contains("busy")) return;
                    const captions = [...document.querySelectorAll("figcaption")];
                    window.blank += !captions.length || captions.some((caption) => !caption.textContent);
                }).observe(document.body, { attributeFilter: ["class"] });
            }"""
        )
        for sample in ("sample-2", "sample-1"):
            page.locator(f'#photos [data-photo="{sample}"]').click()
            until(lambda: page.locator("body.busy").count() == 0)  # noqa: B023
        assert page.evaluate("window.blank") == 0


def test_before_the_first_answer_there_are_placeholders(site, browser):
    context = browser.new_context()
    page = context.new_page()
    page.route("**/api/capture*", lambda route: None)  # never answered
    page.goto(site.address)
    until(lambda: page.locator("#model option").first.inner_text() != "loading …")
    assert page.locator("#maps .waiting").count() == 3
    assert page.locator("#block").is_disabled() and page.locator("#block").inner_text() != ""
    context.close()


def test_without_a_head_or_an_attention_the_page_says_so_and_offers_all(page):
    for head in page.locator("#heads input").all():
        head.uncheck(force=True)
    assert "No head is selected" in page.locator("#maps").inner_text()
    page.locator("#show-all").click()
    assert page.locator("#maps canvas").count() == 3
    for name in ("SOFT", "SOFT++", "softmax"):
        page.locator("#variants").get_by_label(name, exact=True).uncheck(force=True)
    assert "No attention is selected" in page.locator("#maps").inner_text()
    page.locator("#show-all").click()
    assert page.locator("#maps canvas").count() == 3


def test_the_mark_is_whole_at_the_edges(page):
    for x, y in ((0.001, 0.001), (0.999, 0.999)):
        hover(page, x, y)
        assert page.evaluate(
            """() => [...document.querySelectorAll("#photo, .map")].every(
                (frame) => getComputedStyle(frame).overflow === "visible")"""
        )


def test_an_error_goes_with_the_next_action_but_not_with_the_mouse(page):
    bad = {"name": "notes.png", "mimeType": "image/png", "buffer": b"not a photo"}
    page.locator("#file").set_input_files(bad)
    until(lambda: page.locator(BAD).count() == 1)
    hover(page, 0.4, 0.4)
    assert page.locator(BAD).count() == 1
    page.locator("#stages").get_by_label("2").check(force=True)
    assert page.locator(BAD).count() == 0


def test_what_is_looked_at_survives_a_reload(page, site):
    content = encoded(photo(21))
    page.locator("#file").set_input_files(
        {"name": "mine.png", "mimeType": "image/png", "buffer": content}
    )
    name = site.explorer.add_photo(content)
    until(lambda: shows(page, 1, site.shades(0.5, 0.5, 1, photo=name)))
    page.locator("#stages").get_by_label("2").check(force=True)
    page.locator("#heads").get_by_label("2").check(force=True)
    page.locator("#heads").get_by_label("1").uncheck(force=True)
    hover(page, 0.2, 0.7)
    until(lambda: "&stage=2&block=1&heads=1&x=0.2" in page.evaluate("location.hash"))
    page.reload()
    until(lambda: page.locator("body.busy").count() == 0)
    assert page.locator("#stages input:checked + span").inner_text() == "2"
    assert page.locator("#heads input:checked + span").all_inner_texts() == ["2"]
    assert page.locator(f'#photos [data-photo="{name}"]').get_attribute("aria-pressed") == "true"
    page.goto(f"{site.address}#model=1&photo=nowhere&size=9&stage=77&x=5")
    page.reload()
    until(lambda: page.locator("body.busy").count() == 0)
    assert page.locator("#model").input_value() == "1"
    assert page.locator("#maps canvas").count() == 1 and not page.locator(BAD).count()


def test_the_picture_is_saved(page, tmp_path):
    with page.expect_download() as download:
        page.locator("#save").click()
    assert download.value.suggested_filename == "attention_stage1.png"
    download.value.save_as(tmp_path / "saved.png")
    saved = open_image(tmp_path / "saved.png")
    assert saved.width > 4 * 240 and len(saved.getcolors(2**24)) > 100


def test_maps_are_in_the_first_screen_of_a_laptop(page):
    page.set_viewport_size({"width": 1440, "height": 900})
    for frame in page.locator("#maps .map").all():
        box = frame.bounding_box()
        assert box["y"] + box["height"] < 900


def test_many_heads_lie_side_by_side(page):
    page.locator("#stages").get_by_label("4").check(force=True)
    page.locator("#all-heads").click()
    until(lambda: all(page.locator("figcaption").all_inner_texts()))  # which take room below maps
    places = page.evaluate(
        """() => [...document.querySelectorAll("#maps .map")].map((map) => {
            const { x, y } = map.getBoundingClientRect();
            return [Math.round(x), Math.round(y)];
        })"""
    )
    across, down = (set(of) for of in zip(*places, strict=True))
    assert len(places) == 12 and len(across) == 4 and len(down) == 3


def test_an_untrained_model_is_said_so_and_lists_no_classes(site, browser):
    for page in open_page(site, browser):
        assert page.locator("#untrained").is_hidden()
        page.locator("#model").select_option("3")
        until(lambda: page.locator("body.busy").count() == 0)  # noqa: B023
        assert page.locator("#untrained").inner_text().startswith("Untrained.")
        assert page.locator("#classes").is_hidden()


def test_attentions_switch_off_and_on(page, site):
    page.get_by_label("SOFT", exact=True).first.uncheck(force=True)
    assert page.locator("#maps canvas").count() == 2
    until(lambda: shows(page, 0, site.shades(0.5, 0.5, 1)))
    page.get_by_label("SOFT", exact=True).first.check(force=True)
    assert page.locator("#maps canvas").count() == 3


def test_stages_and_heads_are_chosen(page, site):
    page.locator("#stages").get_by_label("3").check(force=True)
    until(lambda: shows(page, 1, site.shades(0.5, 0.5, 1, stage=3)))
    page.locator("#all-heads").click()
    assert page.locator("#maps canvas").count() == 3 * 3


def test_the_newton_slider_changes_maps_and_residual(page, site):
    until(lambda: "converged" in page.locator("#residual").inner_text())
    before = page.locator("#residual").inner_text()
    page.locator("#steps").fill("3")
    until(lambda: shows(page, 1, site.shades(0.5, 0.5, 1, steps=3)))
    assert not np.array_equal(site.shades(0.5, 0.5, 1, steps=3), site.shades(0.5, 0.5, 1))
    after = page.locator("#residual").inner_text()
    assert after != before and "not converged" in after
    assert page.locator("#steps-value").inner_text() == "3 (this model: 20)"
    page.locator("#own-steps").click()
    until(lambda: shows(page, 1, site.shades(0.5, 0.5, 1)))
    assert page.locator("#residual").inner_text() == before


def test_the_resolution_slider_changes_the_grid(page, site):
    page.locator("#size").focus()
    page.keyboard.press("ArrowRight")
    until(lambda: shows(page, 1, site.shades(0.5, 0.5, 1, size=96)))
    assert "= 576 tokens" in page.locator("#grid").inner_text()


def test_another_model_shows_its_own_attention(page, site):
    page.locator("#model").select_option("1")
    until(lambda: page.locator("#maps canvas").count() == 1)
    until(lambda: shows(page, 0, site.shades(0.5, 0.5, 0, model=1)))
    assert page.locator("#inverse").is_hidden()


def test_a_layer_that_solves_shows_what_it_keeps_and_has_no_steps(page, site):
    until(lambda: "eigenvalues" in page.locator("#kept").inner_text())
    page.locator("#model").select_option("2")
    until(lambda: page.locator("#solve").is_visible())
    found = site.explorer.inverse(Place(2, "sample-1", 64, 1, -1))
    said = f"It inverts {found['kept'][0]} of {len(found['shares'])} eigenvalues by more than half."
    until(lambda: page.locator("#kept").inner_text() == said)
    assert page.locator("#residual").inner_text().startswith("Residual |AYA")
    assert "converged" not in page.locator("#residual").inner_text()
    assert "eigenvalue" in page.locator("#curve").get_attribute("aria-label")
    for hidden in ("#newton", "#steps", "#own-steps"):
        assert page.locator(hidden).is_hidden()
    page.locator("#model").select_option("0")
    until(lambda: page.locator("#steps").is_visible())
    until(lambda: "converged" in page.locator("#residual").inner_text())


def test_what_is_said_of_one_layer_s_inverse_does_not_stay_for_another_s(page):
    page.locator("#model").select_option("0")
    until(lambda: "converged" in page.locator("#residual").inner_text())
    page.route("**/api/inverse?*", lambda route: route.fulfill(status=500))
    page.locator("#model").select_option("2")
    until(lambda: page.locator("#solve").is_visible())
    until(lambda: page.locator(BAD).count() == 1)
    for part in ("#residual", "#kept", "#curve"):
        assert page.locator(part).evaluate("element => element.childNodes.length") == 0


def test_a_layer_that_attends_to_everything_alike_is_said_so(page):
    page.locator("#model").select_option("4")
    until(lambda: "alike" in page.locator("#warning").inner_text())
    assert page.locator("#warning").inner_text().startswith("This layer ")
    until(lambda: all(page.locator("figcaption").all_inner_texts()))
    for caption in page.locator("figcaption").all_inner_texts():
        assert caption.startswith("all alike: ")


def test_a_layer_that_attends_to_next_to_nothing_is_said_so(page):
    page.locator("#model").select_option("5")
    until(lambda: "next to nothing" in page.locator("#warning").inner_text())
    until(lambda: all(page.locator("figcaption").all_inner_texts()))
    assert page.locator("figcaption").first.inner_text().startswith("next to nothing: ")


def test_an_uploaded_photo_is_looked_at(page, site):
    content = encoded(photo(9))
    page.locator("#file").set_input_files(
        {"name": "mine.png", "mimeType": "image/png", "buffer": content}
    )
    name = site.explorer.add_photo(content)
    until(lambda: shows(page, 1, site.shades(0.5, 0.5, 1, photo=name)))
    assert page.locator(f'#photos [data-photo="{name}"]').get_attribute("aria-pressed") == "true"


def test_a_dropped_photo_is_looked_at(page, site):
    content = encoded(photo(11))
    page.evaluate(
        """bytes => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], "dropped.png"));
            document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true }));
        }""",
        list(content),
    )
    name = site.explorer.add_photo(content)
    until(lambda: shows(page, 1, site.shades(0.5, 0.5, 1, photo=name)))


def test_a_bad_file_gets_a_message_and_the_page_goes_on(page, site):
    bad = {"name": "notes.png", "mimeType": "image/png", "buffer": b"not a photo"}
    page.locator("#file").set_input_files(bad)
    until(lambda: page.locator(BAD).count() == 1)
    assert page.locator("#message").inner_text().startswith("notes.png: that file can't be read")
    hover(page, 0.2, 0.2)
    until(lambda: shows(page, 1, site.shades(0.2, 0.2, 1)))
    page.locator('#photos [data-photo="sample-2"]').click()
    until(lambda: page.locator(BAD).count() == 0)


def test_a_large_file_is_refused_before_it_is_sent(page, tmp_path):
    (tmp_path / "large.png").write_bytes(bytes(26 * 2**20))
    page.locator("#file").set_input_files(tmp_path / "large.png")
    until(lambda: page.locator(BAD).count() == 1)
    assert page.locator("#message").inner_text() == "large.png has 26 MB; the limit is 25 MB."


def test_on_a_phone_it_follows_the_finger_and_fits(site, browser):
    for page in open_page(site, browser, has_touch=True, is_mobile=True):
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        box = page.locator("#photo").bounding_box()
        page.touchscreen.tap(box["x"] + 0.3 * box["width"], box["y"] + 0.7 * box["height"])
        until(lambda: shows(page, 1, site.shades(0.3, 0.7, 1)))  # noqa: B023
        stage = page.locator("#stages").bounding_box()
        first_map = page.locator("#maps .map").first.bounding_box()
        assert box["y"] + box["height"] <= stage["y"] < first_map["y"]
        assert first_map["y"] + first_map["height"] < 740  # photo and maps are seen together


def test_in_the_dark_it_is_dark(site, browser):
    for page in open_page(site, browser, color_scheme="dark"):
        ground, ink = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        assert brightness(ground) < 40 and brightness(ink) > 200


def brightness(colour: str) -> float:
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(", "))) / 3
