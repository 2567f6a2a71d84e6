"""C is compiled once for a source, compiler and processor; where that fails, nothing else does."""

import concurrent.futures
import os
import subprocess
import sys

import pytest

from softfree.ops.shared import compiled_c

SOURCE = "int twice(int x) { return 2 * x; }\n"
needs_compiler = pytest.mark.skipif(compiled_c.compiler() is None, reason="no C compiler")


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("SOFTFREE_CACHE", str(tmp_path / "cache"))
    compiled_c._load.cache_clear()
    path = tmp_path / "sums.c"
    path.write_text(SOURCE)
    yield path
    compiled_c._load.cache_clear()


def libraries(source) -> list[str]:
    return sorted(os.listdir(source.parent / "cache"))


@needs_compiler
def test_a_source_is_compiled_once_and_anew_when_it_changes(source):
    assert compiled_c.load(source).twice(21) == 42
    (first,) = libraries(source)
    time = os.stat(source.parent / "cache" / first).st_mtime_ns
    compiled_c._load.cache_clear()
    assert compiled_c.load(source).twice(3) == 6
    assert os.stat(source.parent / "cache" / first).st_mtime_ns == time
    source.write_text(SOURCE.replace("2 *", "3 *"))
    compiled_c._load.cache_clear()
    assert compiled_c.load(source).twice(3) == 9
    assert len(libraries(source)) == 2


@needs_compiler
def test_another_processor_has_a_library_of_its_own(source, monkeypatch):
    compiled_c.load(source)
    compiled_c._load.cache_clear()
    monkeypatch.setattr(compiled_c, "_processor", lambda: "another")
    compiled_c.load(source)
    assert len(libraries(source)) == 2


@needs_compiler
def test_processes_that_compile_at_once_do_not_meet(source):
    # Without the package, which would import torch first.
    program = (
        "import pathlib, runpy, sys; module = runpy.run_path(sys.argv[1]); "
        "sys.exit(module['load'](pathlib.Path(sys.argv[2])).twice(21) != 42)"
    )
    command = [sys.executable, "-c", program, compiled_c.__file__, str(source)]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert [done.returncode for done in pool.map(subprocess.run, [command] * 3)] == [0] * 3
    assert len(libraries(source)) == 1


@needs_compiler
def test_a_cache_that_can_not_be_written_is_done_without(source, monkeypatch):
    blocked = source.parent / "file"
    blocked.write_text("")
    monkeypatch.setenv("SOFTFREE_CACHE", str(blocked / "cache"))
    assert compiled_c.load(source).twice(21) == 42


@needs_compiler
@pytest.mark.parametrize("folder", ["cache", "file/cache"], ids=["kept", "not kept"])
def test_threads_that_compile_at_once_share_one_library(source, monkeypatch, folder):
    (source.parent / "file").write_text("")
    monkeypatch.setenv("SOFTFREE_CACHE", str(source.parent / folder))
    compiled, run = [], compiled_c._run
    monkeypatch.setattr(compiled_c, "_run", lambda *words: compiled.append(words) or run(*words))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [found.twice(21) for found in pool.map(compiled_c.load, [source] * 4)] == [42] * 4
    assert len(compiled) == 2  # its version, and the source


@needs_compiler
def test_what_a_stopped_compiler_said_is_in_the_warning_as_text(source, monkeypatch):
    def stopped(*given, **options):
        raise subprocess.TimeoutExpired("cc", compiled_c.SECONDS, stderr=b"still optimising\n")

    monkeypatch.setattr(subprocess, "run", stopped)
    with pytest.warns(UserWarning, match="and loaded: still optimising\\. "):
        assert compiled_c.load(source) is None


@needs_compiler
def test_a_compiler_that_fails_is_named_in_one_warning_and_leaves_nothing(source):
    source.write_text("this is no C\n")
    with pytest.warns(UserWarning, match="sums.c could not be compiled by .*SOFTFREE_NATIVE=0"):
        assert compiled_c.load(source) is None
    assert libraries(source) == []


@needs_compiler
@pytest.mark.parametrize(
    "damage", [lambda whole: b"", lambda whole: whole[:5000], lambda whole: b"no ELF"]
)
def test_a_damaged_library_is_compiled_again(source, damage):
    compiled_c.load(source)
    (name,) = libraries(source)
    path = source.parent / "cache" / name
    content = damage(path.read_bytes())
    path.unlink()  # this process has the file mapped: written over, it would end with a bus error
    path.write_bytes(content)
    program = (
        "import pathlib, runpy, sys; module = runpy.run_path(sys.argv[1]); "
        "sys.exit(module['load'](pathlib.Path(sys.argv[2])).twice(21) != 42)"
    )
    command = [sys.executable, "-W", "error", "-c", program, compiled_c.__file__, str(source)]
    assert subprocess.run(command).returncode == 0
    assert libraries(source) == [name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_process_forked_while_a_library_is_compiled_waits_for_nobody():
    program = (
        "import os, runpy, sys; module = runpy.run_path(sys.argv[1]); held = module['LOADING']; held.acquire()\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(not module['load'].__globals__['LOADING'].acquire(blocking=False))\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    command = [sys.executable, "-c", program, compiled_c.__file__]
    assert subprocess.run(command).returncode == 0


@pytest.mark.parametrize("said", [b"\\n", b"\\377\\n"])
def test_a_compiler_that_says_nothing_readable_is_named_all_the_same(source, monkeypatch, said):
    odd = source.parent / "cc"
    odd.write_text(f"#!/bin/sh\nprintf '{said.decode()}' >&2\nexit 1\n")
    odd.chmod(0o755)
    monkeypatch.setenv("CC", str(odd))
    with pytest.warns(UserWarning, match="sums.c could not be compiled by"):
        assert compiled_c.load(source) is None


def test_without_a_compiler_or_where_none_is_wanted_there_is_no_library(source, monkeypatch):
    monkeypatch.setenv("SOFTFREE_NATIVE", "0")
    assert compiled_c.load(source) is None
    monkeypatch.delenv("SOFTFREE_NATIVE")
    compiled_c._load.cache_clear()
    monkeypatch.setenv("PATH", str(source.parent))
    monkeypatch.delenv("CC", raising=False)
    assert compiled_c.load(source) is None
    assert not (source.parent / "cache").exists()


def test_the_cache_is_where_the_user_s_caches_are(monkeypatch, tmp_path):
    monkeypatch.delenv("SOFTFREE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert compiled_c.cache_folder() == tmp_path / "softfree"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compiled_c.cache_folder() == tmp_path / "home" / ".cache" / "softfree"
    monkeypatch.setenv("SOFTFREE_CACHE", "~/own")
    assert compiled_c.cache_folder() == tmp_path / "home" / "own"
