"""What a new user types first runs as printed: the README's first screen on 60 photos, and the tutorial."""

import json
import re
import shlex
from pathlib import Path

import pytest
import uvicorn

import softfree_cli
from softfree.commands import quickstart
from tests.photos import photo, write_photos
from tests.shell import SMALL, commands, run_commands

ROOT = Path(__file__).parent.parent
FIRST_SCREEN = (ROOT / "README.md").read_text(encoding="utf-8").split("## Install")[0]


def test_the_first_screen_has_a_picture_two_commands_and_a_few_lines_of_use():
    assert len(FIRST_SCREEN.splitlines()) <= 50
    (picture,) = re.findall(r"^!\[.+\]\((.+)\)$", FIRST_SCREEN, re.M)
    assert (ROOT / picture).is_file()
    assert "make quickstart" in FIRST_SCREEN and "make test" in FIRST_SCREEN
    (code,) = re.findall(r"^```python\n(.*?)^```", FIRST_SCREEN, re.M | re.S)
    assert len(code.strip().splitlines()) <= 7


def test_every_command_of_the_first_screen_runs_on_60_photos(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_photos(Path("photos"), 60)
    photo("discs", 99).save("photo.jpg")
    served = []
    monkeypatch.setattr(
        uvicorn.Server, "run", lambda self, sockets: served.append(sockets[0].close())
    )
    lines = commands(FIRST_SCREEN)
    assert [line.split()[1] for line in lines] == ["train", "predict", "inspect", "explore"]
    further = {"train": SMALL, "explore": "--port 0 --device cpu"}
    out = run_commands(lines, lambda line: further.get(line.split()[1], "--device cpu"), capsys)
    assert "48 training and 12 validation samples" in out
    assert "softfree predict photo.jpg --checkpoint out/best" in out  # what to type next
    assert len(served) == 1


def test_the_quickstart_ends_with_the_command_of_the_first_screen():
    train = commands(FIRST_SCREEN)[0].replace(" photos", " D").replace(" out", " OUT").strip()
    assert train in Path(quickstart.__file__).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    """Cells run one after the other; a line that begins with ! is a command of ours."""
    notebook = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and notebook["nbformat_minor"] >= 5
    identities = [cell["id"] for cell in notebook["cells"]]
    assert len(set(identities)) == len(identities)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {
        "run_command": lambda line: softfree_cli.main(shlex.split(line)[1:])
    }
    for cell in cells:
        code = re.sub(
            r"^!(softfree .*)$",
            r'assert run_command("""\1""") == 0',
            "".join(cell["source"]),
            flags=re.M,
        )
        exec(compile(code, "tutorial", "exec"), names)
