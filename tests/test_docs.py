"""Code in the documentation runs as printed, and what it says of files and commands is so."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import timm
import torch

import softfree_cli

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "softfree/ops/README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)
WITH_EXAMPLES = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for path in (ROOT / "softfree").rglob("*.py")
    if ">>> " in path.read_text()
)


def python_blocks() -> list:
    return [
        pytest.param(code, id=f"{page}-{number}")
        for page in PAGES
        for number, code in enumerate(
            re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S), 1
        )
    ]


@pytest.mark.parametrize("code", python_blocks())
def test_python_block_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r'"(\w+\.pth)"', code):
        weights = timm.create_model("soft_tiny_release").state_dict()
        torch.save({"model": weights}, tmp_path / name)
    exec(compile(code, "block", "exec"), {})


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples_give_what_they_say(name):
    module = importlib.import_module(name)
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert failed == 0 and tried > 0


def test_there_are_blocks_and_examples_to_run():
    assert len(python_blocks()) >= 6
    assert len(WITH_EXAMPLES) >= 20


@pytest.mark.parametrize("page", (*PAGES, "results/README.md"))
def test_links_lead_to_files_and_headings(page):
    file = ROOT / page
    for link in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
        path, _, heading = link.partition("#")
        if "://" in link:
            continue
        target = file.parent / path if path else file
        assert target.exists(), link
        if heading:
            target = target / "README.md" if target.is_dir() else target
            headings = re.findall(r"^#+ (.*)", target.read_text(), re.M)
            assert heading in [
                re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings
            ]


@pytest.mark.parametrize("page", (*PAGES[:2], *PAGES[3:], "results/README.md"))
def test_flags_in_the_pages_are_taken_by_their_commands(page, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = (ROOT / page).read_text().replace("\\\n", " ")
    for command, rest in re.findall(r"softfree ([a-z][a-z-]+)([^\n`|#]*)", text):
        first = rest.split()[:1]
        help_text = softfree_cli.kept_text([command, *first, "--help"])
        help_text = help_text or softfree_cli.kept_text([command, "--help"])
        flags = set(re.findall(r"(?<=\s)--[a-z][\w-]*", rest))
        # `softfree validate --checkpoint C` finds its task in the checkpoint.
        if command in softfree_cli.COMMANDS and "COMMAND" not in help_text:
            assert flags <= set(re.findall(r"--[a-z][\w-]*", help_text)), (command, rest)


def test_commands_in_the_pages_exist():
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    commands = re.findall(r"(?:`|^|-m )softfree ([a-z][\w-]*) [^`\n]*", text, re.M)
    assert commands and set(commands) <= set(softfree_cli.COMMANDS)
    scripts = re.findall(r"python (benchmarks/\S+\.py)", text)
    assert scripts and all((ROOT / script).is_file() for script in scripts)
    targets = set(re.findall(r"^ *make ([\w-]+)(?: {2,}.*)?$", text, re.M))
    makefile = (ROOT / "Makefile").read_text()
    assert targets and all(re.search(rf"^{target}:", makefile, re.M) for target in targets)


def test_family_table_in_the_readme_has_our_counts():
    from softfree.commands.models import describe

    rows = re.findall(
        r"^\| (?:`soft_\w+`, )?`((?:softfree|softpp)_\w+)` \| ([\d.]+) M \| ([\d.]+) \|",
        (ROOT / "README.md").read_text(),
        re.M,
    )
    assert len(rows) == 10
    for name, parameters, macs in rows:
        row = describe(name, 224)
        assert f"{row['parameters'] / 1e6:.2f}" == parameters
        assert f"{row['macs'] / 1e9:.2f}" == macs
