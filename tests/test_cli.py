"""The dispatcher: what it prints, what it returns, and that it stays light."""

import ast
import errno
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import softfree
import softfree_cli

COMMANDS_FOLDER = Path(softfree.__file__).parent / "commands"


def command_files() -> dict[str, Path]:
    """The file or the package of each command; those of what they share have no ``main``."""
    files = [*COMMANDS_FOLDER.glob("*.py"), *COMMANDS_FOLDER.glob("*/__init__.py")]
    found = {path.stem if path.name != "__init__.py" else path.parent.name: path for path in files}
    return {
        name.replace("_", "-"): path
        for name, path in found.items()
        if "def main(" in path.read_text() or "\nmain = " in path.read_text()
    }


@pytest.fixture
def command(monkeypatch):
    """Replaces the code of `softfree models` by a function."""

    def replace(main):
        module = ModuleType("softfree.commands.models")
        module.main = main
        monkeypatch.setitem(sys.modules, "softfree.commands.models", module)
        monkeypatch.setattr(softfree_cli, "kept_text", lambda arguments: "")

    return replace


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(arguments, capsys):
    assert softfree_cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(f"  {name} " in out for name in command_files())


def test_every_command_is_listed_with_the_first_line_of_its_docstring():
    summaries = {
        name: (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        for name, path in command_files().items()
    }
    assert summaries == softfree_cli.COMMANDS


def test_help_version_and_the_list_of_models_import_neither_torch_nor_the_package():
    program = (
        "import sys, softfree_cli\n"
        "assert softfree_cli.main(['--help']) == softfree_cli.main(['--version']) == 0\n"
        "assert softfree_cli.main(['no-such']) == 2\n"
        "for name in softfree_cli.COMMANDS:\n"
        "    assert softfree_cli.main([name, '--help']) == 0\n"
        "assert softfree_cli.main(['train', 'detection', '-h']) == softfree_cli.main(['models']) == 0\n"
        "heavy = {'torch', 'timm', 'numpy', 'rich', 'tyro', 'softfree'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_version_is_the_package_version(capsys):
    assert softfree_cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"softfree {softfree.__version__}\n"
    assert importlib.metadata.version("softfree") == softfree.__version__


def test_unknown_command_suggests_the_nearest(capsys):
    assert softfree_cli.main(["modles"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "softfree: error: there is no command 'modles'; did you mean 'models'?\n"


def test_unknown_option_points_to_the_help(capsys):
    assert softfree_cli.main(["--frobnicate"]) == 2
    assert "no option '--frobnicate'; try `softfree --help`" in capsys.readouterr().err


def test_command_gets_the_remaining_arguments_and_gives_the_exit_code(command):
    seen = []
    command(lambda argv: seen.append(argv) or 7)
    assert softfree_cli.main(["models", "a", "--b"]) == 7
    assert seen == [["a", "--b"]]


@pytest.mark.parametrize(
    ("arguments", "new"),
    [
        (
            "figure resolution --checkpoints A/best",
            "`softfree figure resolution` is now --checkpoint",
        ),
        ("figure spectrum photo.jpg --sizes=64", "is now --img-size"),
        ("demo --image photo.jpg", "is now the photo itself: softfree demo PHOTO"),
        ("validate detection --results-file ap.csv", "is now --csv"),
        ("validate --checkpoint A/best --results-file=a.csv", "is now --csv"),
    ],
)
def test_a_flag_of_an_earlier_version_names_its_successor(arguments, new, capsys):
    assert softfree_cli.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("softfree: error: --") and new in error and error.count("\n") == 1


def test_the_parsers_other_spelling_of_an_earlier_flag_is_known_too(monkeypatch, capsys):
    monkeypatch.setitem(softfree_cli.RENAMED, "models", {"--old-name": "--new-name"})
    assert softfree_cli.main(["models", "--old_name=3"]) == 2
    assert "--old-name of `softfree models` is now --new-name" in capsys.readouterr().err


def test_only_commands_that_there_are_have_earlier_flags_and_no_longer_take_them(capsys):
    for command, flags in softfree_cli.RENAMED.items():
        assert softfree_cli.main([*command.split(), "--help"]) == 0
        said = capsys.readouterr().out
        for old, new in flags.items():
            assert f"{old} " not in said, (command, old)
            assert not new.startswith("--") or f"{new.split(',')[0]} " in said, (command, new)


def test_an_argument_of_the_package_is_shown_as_the_flag_that_the_user_types(command, capsys):
    def fail(_):
        raise ValueError("`img_size` must be 1; try `softfree models` or `x_y` 2, not `A`")

    command(fail)
    assert softfree_cli.main(["models"]) == 2
    shown = "--img-size must be 1; try `softfree models` or --x-y 2, not `A`"
    assert capsys.readouterr().err == f"softfree: error: {shown}\n"


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError])
def test_bad_input_is_one_line_and_exit_code_2(error, command, capsys, monkeypatch):
    monkeypatch.delenv("SOFTFREE_TRACEBACK", raising=False)

    def fail(argv):
        raise error("no such thing")

    command(fail)
    assert softfree_cli.main(["models"]) == 2
    assert capsys.readouterr().err == "softfree: error: no such thing\n"
    monkeypatch.setenv("SOFTFREE_TRACEBACK", "1")
    with pytest.raises(error):
        softfree_cli.main(["models"])


def test_a_long_error_breaks_between_words_in_a_terminal_and_is_one_line_in_a_file(
    command, capsys, monkeypatch
):
    words = "`img_size` must be " + "a-rather-long-word " * 12

    def fail(argv):
        raise ValueError(words.strip() + "\n  and a second line")

    command(fail)
    assert softfree_cli.main(["models"]) == 2
    (first, second) = capsys.readouterr().err.splitlines()
    assert len(first) > 200 and second == "  and a second line"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert softfree_cli.main(["models"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(lines[:-1]) == first and lines[-1] == second
    assert max(map(len, lines)) <= 80


def test_other_errors_are_not_hidden(command):
    def fail(argv):
        raise RuntimeError("a bug")

    command(fail)
    with pytest.raises(RuntimeError, match="a bug"):
        softfree_cli.main(["models"])


def test_interrupt_exits_130_without_traceback(command, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    command(interrupt)
    assert softfree_cli.main(["models"]) == 130
    assert "Traceback" not in capsys.readouterr().err


IMPATIENT = """
import os, signal, sys, time, types, softfree_cli
def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
def load(name, own_process):
    if sys.argv[2] == "while it loads":
        press()
    return types.SimpleNamespace(main=main)
def main(argv):
    try:
        press()
    finally:  # what a command still has to do
        if argv == ["often"]:
            press()
softfree_cli._load = load
sys.exit(softfree_cli.main())
"""


@pytest.mark.parametrize("when", ["once", "often", "while it loads"])
def test_ctrl_c_however_often_and_early_prints_one_line(when):
    program = [sys.executable, "-c", IMPATIENT, "models", when]
    result = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (130, "\nsoftfree: interrupted\n")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_is_one_line(command, capsys, code):
    def fail(argv):
        raise OSError(code, os.strerror(code), "out.png")

    command(fail)
    assert softfree_cli.main(["models"]) == 1
    assert capsys.readouterr().err == f"softfree: error: out.png: {os.strerror(code)}\n"


def test_a_full_disk_behind_stdout_is_one_line():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", FULL, "models", "x"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (result.returncode, result.stderr) == (
        1,
        "softfree: error: No space left on device\n",
    )


FULL = """
import sys, types, softfree_cli
softfree_cli._load = lambda name, own_process: types.SimpleNamespace(main=lambda argv: print("said"))
sys.exit(softfree_cli.main())
"""


@pytest.mark.parametrize("given, used", [({}, "1"), ({"THP_MEM_ALLOC_ENABLE": "0"}, "0")])
def test_a_process_of_ours_takes_memory_in_huge_pages_unless_told_otherwise(given, used):
    program = """
import os, sys, types, softfree_cli
say = lambda argv: print(os.environ["THP_MEM_ALLOC_ENABLE"])
softfree_cli._load = lambda name, own_process: types.SimpleNamespace(main=say)
sys.argv = ["softfree", "train"]
softfree_cli.main()
"""
    environment = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"} | given
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert (result.returncode, result.stdout) == (0, f"{used}\n")


def test_python_m_does_the_same():
    result = subprocess.run(
        [sys.executable, "-m", "softfree", "modles"], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert (
        result.stderr == "softfree: error: there is no command 'modles'; did you mean 'models'?\n"
    )


def test_a_reader_that_leaves_early_causes_no_traceback():
    command = [sys.executable, "-m", "softfree", "models", "soft_tiny", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141


def test_a_process_of_torchrun_ends_at_once_with_all_it_said_and_its_exit_code():
    program = """
import atexit, os, sys, types, softfree_cli
atexit.register(print, "torn down")
softfree_cli._load = lambda name, own_process: types.SimpleNamespace(main=lambda argv: print("said") or 75)
os.environ["RANK"], sys.argv = "1", ["softfree", "train"]
softfree_cli.main()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (75, "said\n")
