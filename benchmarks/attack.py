"""Damaged and hostile files: every command must end by itself, with one line, within its memory limit.

    python benchmarks/attack.py checkpoints                 metadata, settings, weights and states of runs
    python benchmarks/attack.py pictures                    damaged, odd and hostile images and class maps
    python benchmarks/attack.py coco                        annotations of a detection data set
    python benchmarks/attack.py layouts                     files in the layouts of PASCAL VOC, YOLO and CIFAR-10
    python benchmarks/attack.py requests                    what a page or a stranger may send to the explorer
    python benchmarks/attack.py coco --count 100 --seed 1   a given number, drawn with this seed

Each attack runs in its own process. It may succeed, or be refused with one line. A traceback, a signal, no answer,
more memory than the limit, or a failure without a message is a fault. Prints the counts and each fault; the exit code
is 1 if there are any.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import faulthandler
import io
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import softfree_cli

LIMIT_SECONDS = 300  # for attacks that hang; nothing else depends on time
LIMIT_GIB = 2.0  # beyond what the process starts with
LINES = 60  # of stderr that a refusal may print: it names images that can't be read
SMALL = ["--model-kwargs", "embed_dims=16,16,16,16", "num_heads=1,1,1,1", "depths=1,1,1,1"]
SHORT = ["--device", "cpu", "--workers", "0"]
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 3, 0.5, 10**30, 1e308, float("nan"), float("inf"), "", "x", "../x", "\x00\x1b[2J", [], [[]],
    {}, {"x": {}}, [None], ["x"], [1, 2], 5 * [-1], {"x": [1]}, 100 * "y",
)  # fmt: skip
BYTES = (
    b"", b"\x00", b"null", b"5", b'"x"', b"[]", b"{}", b"\xff\xfe\x00", b"{" * 100_000, b"[" * 100_000, b'{"a":' * 100_000,
    b'{"task": "classification"}', 4096 * b"\x00", b"NaN", b"\x89PNG\r\n\x1a\n",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Attack:
    """A description of the attack, and the function that runs it in its own process and returns an exit code."""

    name: str
    run: Callable[[], int]


@dataclasses.dataclass(frozen=True)
class Verdict:
    kind: str
    detail: str = ""

    @property
    def fault(self) -> bool:
        return self.kind not in ("accepted", "refused")


def attempt(attack: Attack, folder: Path) -> Verdict:
    """Run an attack and return its outcome."""
    said = folder / "said"
    child = os.fork()
    if child == 0:
        _be_attacked(attack, said)
    with _alarm(child):
        _, status, usage = os.wait4(child, 0)
    text = said.read_text(errors="replace").strip()
    last = text.splitlines()[-1] if text else ""
    begun = _peak_gib(os.getpid())
    if usage.ru_maxrss / 2**20 > begun + LIMIT_GIB:
        return Verdict("memory", f"{usage.ru_maxrss / 2**20:.1f} GiB")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return Verdict("no answer" if number == signal.SIGKILL else f"signal {number}", last)
    code = os.WEXITSTATUS(status)
    if "Traceback (most recent call last)" in text:
        return Verdict("traceback", last)
    if code == 0:
        return Verdict("accepted")
    if not last:
        return Verdict("no word", f"exit code {code}")
    if len(text.splitlines()) > LINES:
        return Verdict("too many words", last)
    return Verdict("refused", last)


def _be_attacked(attack: Attack, said: Path) -> None:
    faulthandler.disable()  # a test's would write to the stderr of the parent
    with said.open("w") as file:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(file.fileno(), 2)
        sys.stderr = file
        code = 1
        try:
            code = attack.run()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


@contextlib.contextmanager
def _alarm(child: int) -> Iterator[None]:
    def kill(*_: object) -> None:
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def _peak_gib(process: int) -> float:
    text = Path(f"/proc/{process}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 2**20


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all items in nested dicts and lists, the root first."""
    found = [path]
    if isinstance(value, dict):
        found += [p for key in value for p in places(value[key], (*path, key))]
    elif isinstance(value, (list, tuple)):
        found += [p for i, part in enumerate(value[:3]) for p in places(part, (*path, i))]
    return found


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with the item at ``path`` replaced, or removed if ``new`` is ``...``."""
    if not path:
        return new
    value = copy.deepcopy(value)
    value = list(value) if isinstance(value, tuple) else value
    if len(path) == 1:
        if new is ...:
            del value[path[0]]
        else:
            value[path[0]] = new
        return value
    value[path[0]] = changed(value[path[0]], path[1:], new)
    return value


def shown(value: Any) -> str:
    return "removed" if value is ... else f"{value!r:.30}"


# Checkpoints


def train(*words: str) -> None:
    if code := softfree_cli.main(["train", *words, *SHORT]):
        raise SystemExit(code)


def checkpoint_attacks(seed: int, count: int, folder: Path) -> Iterator[Attack]:
    """Every file of a run, changed in every way, read by every command that reads it."""
    generator = random.Random(seed)
    run, copied = folder / "run", folder / "copy"
    digits = ["classification", "--steps", "4", "--warmup-steps", "1", "--model-ema"]
    digits += ["--batch-size", "8", "--output", str(run), *SMALL]
    train(*digits)
    shapes = folder / "shapes"
    # fmt: off
    train("segmentation", "--steps", "2", "--warmup-steps", "1", "--batch-size", "2", "--output", str(shapes))
    # fmt: on
    picture = folder / "picture.png"
    from softfree.data import load_images

    load_images(None).val.read(0)[0].save(picture)
    resume = [str(copied) if word == str(run) else word for word in digits]
    resume[resume.index("4")] = "6"

    def commands(part: str) -> dict[str, list[str]]:
        best = str(copied / part)
        return {
            "predict": ["predict", str(picture), "--checkpoint", best],
            "validate": ["validate", "--checkpoint", best, *SHORT],
            "inspect": ["inspect", str(picture), "--checkpoint", best],
            "figure": ["figure", "heatmap", str(picture), "--checkpoint", best, "--output", str(folder / "f.png")],
            "export": ["export", str(folder / "m.onnx"), "--checkpoint", best],
            "resume": ["train", *resume, "--resume", "auto", *SHORT],
            "config": ["train", "classification", "--config", f"{best}/settings.json", "--output", str(folder / "new"),
                       "--steps", "1", "--warmup-steps", "0", *SHORT],
            "pretrained": ["train", "classification", "--pretrained-checkpoint", best, "--output", str(folder / "new"),
                           "--steps", "1", "--warmup-steps", "0", "--batch-size", "8", *SMALL, *SHORT],
        }  # fmt: skip

    readers = {
        "metadata.json": ["predict", "validate", "inspect", "figure", "export", "resume", "pretrained"],
        "settings.json": ["validate", "resume", "config"],
        "model.safetensors": ["resume", "pretrained"],
        "ema.safetensors": ["predict", "validate", "resume"],
        "state.pt": ["resume"],
    }  # fmt: skip
    for number in range(count):
        source = shapes if generator.random() < 0.2 else run
        choices = [name for name in readers if (source / "last" / name).exists()]
        name = generator.choice(choices)
        known = readers[name] if source == run else ["predict", "validate"]
        known = [reader for reader in known if reader != "export"] if number % 8 else known
        command = generator.choice(known)
        how, change = damage(source / "last" / name, generator)
        keep_sums = generator.random() < 0.3

        def attack(
            source=source, name=name, change=change, command=command, keep_sums=keep_sums
        ) -> int:
            shutil.rmtree(copied, ignore_errors=True)
            shutil.rmtree(folder / "new", ignore_errors=True)
            shutil.copytree(source, copied)
            change(copied / "last" / name)
            if not keep_sums:
                without_checksums(copied / "last" / "metadata.json")
            return softfree_cli.main(commands("last")[command])

        yield Attack(f"{number}: {source.name}/{name} {how}, {command}", attack)


def without_checksums(file: Path) -> None:
    with contextlib.suppress(Exception):
        metadata = json.loads(file.read_text())
        del metadata["crc32"]
        file.write_text(json.dumps(metadata))


def damage(file: Path, generator: random.Random) -> tuple[str, Callable[[Path], object]]:
    """One way to change a file: a description, and a function that changes a copy of the file."""
    content = file.read_bytes()
    kind = generator.choice(("place", "place", "place", "place", "bytes", "cut", "flip", "kind"))
    if kind == "bytes":
        other = generator.choice(BYTES)
        return f"is {other[:12]!r}", lambda f: f.write_bytes(other)
    if kind == "cut":
        end = generator.randrange(len(content))
        return f"cut at {end}", lambda f: f.write_bytes(content[:end])
    if kind == "flip":
        flipped = bytearray(content)
        for _ in range(generator.choice((1, 3, 30))):
            flipped[generator.randrange(len(flipped))] ^= 1 << generator.randrange(8)
        return "with flipped bits", lambda f: f.write_bytes(flipped)
    if kind == "kind":
        word = generator.choice(("missing", "a folder", "a link to itself", "unreadable"))
        return f"is {word}", lambda f: other_kind(f, word)
    if file.suffix == ".safetensors":
        return damaged_tensors(file, generator)
    value = torch.load(file, weights_only=True) if file.suffix == ".pt" else json.loads(content)
    path = generator.choice(places(value))
    new = generator.choice((..., *VALUES)) if path else generator.choice(VALUES)
    result = changed(value, path, new)

    def write(copied: Path) -> None:
        if copied.suffix == ".pt":
            torch.save(result, copied)
        else:
            copied.write_text(json.dumps(result))

    return f"{'.'.join(map(str, path)) or 'all'} {shown(new)}", write


def damaged_tensors(file: Path, generator: random.Random) -> tuple[str, Callable[[Path], object]]:
    tensors = load_file(file)
    name = generator.choice(sorted(tensors))
    tensor = tensors[name]
    ways: dict[str, Any] = {
        "missing": None,
        "half": tensor.half(),
        "whole": tensor.long(),
        "flat": tensor.flatten(),
        "longer": torch.cat([tensor.flatten(), torch.zeros(1, dtype=tensor.dtype)]),
        "empty": tensor.flatten()[:0],
        "not a number": torch.full_like(tensor.float(), float("nan")),
    }
    way = generator.choice(sorted(ways))
    result = {**tensors, name: ways[way]}
    if way == "missing":
        del result[name]
    return f"{name} {way}", lambda f: save_file(result, f)


def other_kind(file: Path, kind: str) -> None:
    file.unlink()
    if kind == "a folder":
        file.mkdir()
    elif kind == "a link to itself":
        file.symlink_to(file)
    elif kind == "unreadable":
        file.symlink_to("/proc/self/mem")


# Pictures

FILES = {  # what Pillow reads and we do not, sizes that no header should declare
    "vector.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 3 2\n%%EndComments\nshowpage\n%%EOF\n",
    "empty.jpg": b"",
    "text.png": b"no picture\n",
    "svg.webp": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
}


def picture_attacks(seed: int, count: int, folder: Path) -> Iterator[Attack]:
    """Folders of twenty damaged images, one of them odd in another way, read by every command that reads images."""
    generator = random.Random(seed)
    numbers = np.random.default_rng(seed)
    sound = sound_pictures(numbers)
    run = folder / "run"
    train(
        "classification",
        "--steps",
        "2",
        "--warmup-steps",
        "1",
        "--batch-size",
        "8",
        "--output",
        str(run),
        *SMALL,
    )
    for number in range(count):
        data = folder / f"data{number}"
        command = generator.choice(("predict", "check", "train", "check maps", "train maps"))
        maps = command.endswith("maps")
        write_pictures(data, sound, generator, maps)
        odd = write_odd(data, generator, maps)
        words = {
            "predict": ["predict", str(data), "--checkpoint", str(run / "best"), "--json"],
            "check": ["check-data", "classification", "--data-dir", str(data), "--workers", "0"],
            "train": ["train", "classification", "--data-dir", str(data), "--output", str(data / "out"), "--steps", "2",
                      "--warmup-steps", "0", "--batch-size", "4", "--img-size", "32", *SMALL, *SHORT],
            "check maps": ["check-data", "segmentation", "--data-dir", str(data), "--workers", "0"],
            "train maps": ["train", "segmentation", "--data-dir", str(data), "--output", str(data / "out"), "--steps", "1",
                           "--warmup-steps", "0", "--batch-size", "2", "--crop", "32", "--short-side", "32",
                           "--model-kwargs", *SMALL[1:], "--no-check-data", *SHORT],
        }[command]  # fmt: skip
        yield Attack(f"{number}: {odd}, {command}", lambda words=words: softfree_cli.main(words))
        shutil.rmtree(data)


def sound_pictures(numbers: np.random.Generator) -> dict[str, bytes]:
    """Images by file extension, in all formats and some modes."""
    found = {}
    pixels = numbers.integers(0, 256, (24, 40, 4), dtype=np.uint8)
    for extension, mode in itertools.product(
        ("png", "jpg", "gif", "bmp", "webp", "tif", "ppm"), ("RGB", "L", "P", "RGBA")
    ):
        content = io.BytesIO()
        picture = Image.fromarray(pixels).convert(
            "RGB" if extension in ("jpg", "ppm") and mode in ("P", "RGBA") else mode
        )
        picture.save(content, {"jpg": "JPEG", "tif": "TIFF"}.get(extension, extension.upper()))
        found[f"{mode}.{extension}"] = content.getvalue()
    return found


def mutated(content: bytes, generator: random.Random) -> bytes:
    """Bytes changed, cut off, doubled or moved; the header, which holds the sizes, more often than the rest."""
    changed_bytes = bytearray(content)
    for _ in range(generator.choice((1, 2, 8, 40))):
        reach = generator.choice((64, len(changed_bytes)))
        place = generator.randrange(max(1, min(reach, len(changed_bytes))))
        way = generator.randrange(4)
        if way == 0 and changed_bytes:
            changed_bytes[place] = generator.choice((0, 1, 127, 128, 255, generator.randrange(256)))
        elif way == 1:
            changed_bytes[place : place + 4] = generator.choice(
                (b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff")
            )
        elif way == 2:
            changed_bytes[place:place] = changed_bytes[place : place + 16]
        elif generator.random() < 0.2:
            del changed_bytes[place:]
    return bytes(changed_bytes)


def write_pictures(
    data: Path, sound: dict[str, bytes], generator: random.Random, maps: bool
) -> None:
    """Twenty mutated images and two valid ones: in class folders, or with class maps."""
    for split in ("train", "val"):
        for kind in ("images", "masks") if maps else ("",):
            place = data / kind / split if maps else data / split
            for group in ("",) if maps else ("a", "b"):
                (place / group).mkdir(parents=True, exist_ok=True)
                for index in range(5):
                    name, content = generator.choice(sorted(sound.items()))
                    if maps:
                        name, content = "P.png", sound["P.png"]
                        if kind == "masks":
                            content = mask_png()
                    bad = index and generator.random() < 0.5 if maps else index
                    content = mutated(content, generator) if bad else content
                    (place / group / f"{index}{Path(name).suffix}").write_bytes(content)
    if maps:
        (data / "classes.txt").write_text("ground\nroad\n")


def mask_png() -> bytes:
    content = io.BytesIO()
    Image.fromarray((np.arange(24 * 40).reshape(24, 40) % 2).astype(np.uint8)).save(content, "PNG")
    return content.getvalue()


def write_odd(data: Path, generator: random.Random, maps: bool) -> str:
    """Write something that is not a damaged image; return what it is."""
    where = data / "masks" / "train" if maps else data / "train" / "a"
    name = "0.png" if maps else "odd.png"
    file = where / name
    kind = generator.choice(
        ("pipe", "device", "loop", "folders", "bytes", "row", "name", "vector", "bomb", "exif")
    )
    if maps or kind not in ("folders", "name"):
        file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "loop":
        file.symlink_to(file)
    elif kind == "folders":
        for link in ("up", "up again"):
            (where / link).symlink_to(where.parent)
    elif kind == "bytes":
        file.write_bytes(generator.choice(BYTES))
    elif kind == "row":
        Image.new("L", generator.choice(((1, 1_000_000), (1_000_000, 1), (1, 20_000)))).save(file)
    elif kind == "name":
        Path(os.fsdecode(os.fsencode(where) + b"/caf\xe9\x1b[2J.png")).write_bytes(b"")
    elif kind == "vector":
        file.write_bytes(FILES["vector.png"])
    elif kind == "bomb":
        file.write_bytes(
            png_of(
                *generator.choice(
                    ((30_000, 30_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1), (0, 5))
                )
            )
        )
    else:
        entry = struct.pack("<HHI4s", 0x0112, generator.choice((2, 3, 5, 12)), 4, b"abc\0")
        exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + bytes(4)
        Image.new("L" if maps else "RGB", (40, 24)).save(file, exif=exif)
    return kind


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header declares a size, but that has only one row."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(100)))
        + chunk(b"IEND", b"")
    )


# COCO files


def coco_attacks(seed: int, count: int, folder: Path) -> Iterator[Attack]:
    """A fault in an annotation file: `check-data` and `train` must both accept it, or both name it."""
    from softfree.data.coco import shape_annotations
    from softfree.data.shapes import draw_shapes

    generator = random.Random(seed)
    data, sound = folder / "data", {}
    (data / "annotations").mkdir(parents=True)
    for split in ("train", "val"):
        (data / split).mkdir()
        sound[split] = shape_annotations(3, split=split, side=64)
        for image in sound[split]["images"]:
            image["file_name"] = f"{image['id']}.png"
            picture = draw_shapes(image["id"], split=split, side=64)
            Image.fromarray(picture.image).save(data / split / image["file_name"])
        first = sound[split]["annotations"][0]
        left, top, width, height = first["bbox"]
        corners = [left, top, left + width, top, left + width, top + height]
        first["segmentation"] = [corners]
        sound[split]["annotations"][1]["segmentation"] = {
            "size": [64, 64],
            "counts": [100, 500, 64 * 64 - 600],
        }
    numbers = (1e9, -1e9, 1e308, -0.0, 2**40, 10**400, 65, 64.5)
    for number in range(count):
        for split in ("train", "val"):
            (data / "annotations" / f"instances_{split}.json").write_text(json.dumps(sound[split]))
        file = data / "annotations" / "instances_train.json"
        if generator.random() < 0.15:
            content = generator.choice(BYTES)
            file.write_bytes(content)
            how = f"is {content[:12]!r}"
        else:
            path = generator.choice(places(sound["train"]))
            new = generator.choice((*([...] if path else ()), *VALUES, *numbers))
            file.write_text(json.dumps(changed(sound["train"], path, new)))
            how = f"{'.'.join(map(str, path)) or 'all'} {shown(new)}"
        check = ["check-data", "detection", "--data-dir", str(data), "--workers", "0"]
        run = ["train", "detection", "--detector", "mask-rcnn", "--data-dir", str(data), "--output", str(folder / "out"), "--steps",
               "1", "--warmup-steps", "0", "--batch-size", "2", "--short-sides", "64", "--short-side", "64", "--max-size", "64",
               "--recipe", "shapes", "--overwrite", *SHORT]  # fmt: skip

        def attack(check=check, run=run) -> int:
            checked = softfree_cli.main(check)
            trained = softfree_cli.main(run)
            if trained and not checked:
                raise AssertionError("check-data found nothing, and the training failed")
            return trained

        yield Attack(f"{number}: {how}", attack)


# Sets in other layouts


def layout_attacks(seed: int, count: int, folder: Path) -> Iterator[Attack]:
    """Damage and hostile strings in files of the VOC, YOLO and CIFAR-10 layouts, which `check-data` accepts or names."""
    generator = random.Random(seed)
    write_layouts(folder / "data")
    files = sorted(p for p in (folder / "data").rglob("*") if p.is_file() and p.suffix != ".png")
    for number in range(count):
        file = generator.choice(files)
        sound = file.read_bytes()
        content = bytearray(sound)
        how = generator.choice(("is", "cut", "changed", "with"))
        place = generator.randrange(len(content))
        words = generator.choice((*BYTES, *WORDS))
        if how == "is":
            content[:] = words
        elif how == "cut":
            del content[place:]
        elif how == "changed":
            content[place] = generator.randrange(256)
        else:
            content[place:place] = words
        file.write_bytes(content)
        layout = file.relative_to(folder / "data").parts[0]
        kind = ["longrange", "--task", "image"] if layout == "cifar" else ["detection"]
        check = ["check-data", *kind, "--data-dir", str(folder / "data" / layout), "--workers", "0"]
        name = (
            f"{number}: {file.relative_to(folder / 'data')} {how} {bytes(words[:12])!r} at {place}"
        )
        yield Attack(name, lambda check=check: softfree_cli.main(check))
        file.write_bytes(sound)


WORDS = (
    b'<!DOCTYPE a [<!ENTITY b "bbbbbbbb"><!ENTITY c "&b;&b;&b;&b;">]>', b"&c;", b"<object/>", b"<a>" * 100_000,
    b"*a", b"&a ", b"- " * 100_000, b"!!python/object/apply:os.system [ls]", b"../../..", b"/etc/passwd", b"1e400", b"nan", b"9" * 400,
    b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04r\xff\xff\xff\x7f", b"\x96\xff\xff\xff\xff\xff\x00\x00\x00", b"\n", b"\r\x00",
)  # fmt: skip


def write_layouts(root: Path) -> None:
    """Small valid data sets with one object per image."""
    box = "<bndbox><xmin>2</xmin><ymin>2</ymin><xmax>9</xmax><ymax>9</ymax></bndbox>"
    texts = {
        "voc/Annotations/{n}.xml": f"<annotation><object><name>cat</name>{box}</object></annotation>",
        "voc/ImageSets/Main/{split}.txt": "{n}\n",
        "yolo/labels/{split}/{n}.txt": "0 0.5 0.5 0.2 0.2\n",
        "yolo/data.yaml": "path: .\ntrain: images/train\nval: images/val\nnames: {{0: cat, 1: dog}}\n",
    }
    for n, split in enumerate(("train", "val")):
        for name, text in texts.items():
            path = root / name.format(n=n, split=split)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(n=n, split=split))
        for path in (
            root / "voc/JPEGImages" / f"{n}.png",
            root / "yolo/images" / split / f"{n}.png",
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32)).save(path)
    (root / "cifar").mkdir()
    for name in ("data_batch_1", "test_batch"):
        batch = {"data": np.zeros((20, 3072), np.uint8), "labels": [*range(10)] * 2}
        (root / "cifar" / name).write_bytes(pickle.dumps(batch, protocol=2))


# Requests


def request_attacks(seed: int, count: int, folder: Path) -> Iterator[Attack]:
    """Headers, paths, methods and bodies that our page never sends, and several large images at the same time."""
    from concurrent.futures import ThreadPoolExecutor

    import timm
    from fastapi.testclient import TestClient

    from softfree.analysis.subject import Subject
    from softfree.explorer import server

    generator = random.Random(seed)
    words = dict(
        embed_dims=(16, 16, 16, 16), num_heads=(1, 1, 1, 1), depths=(1, 1, 1, 1), img_size=64
    )
    model = timm.create_model("softpp_tiny", num_classes=3, **words).eval()
    metadata = {"task": "classification", "model": "softpp_tiny", "img_size": 64, "mean": [0.5] * 3, "std": [0.5] * 3,
                "crop_pct": 1.0, "interpolation": "bilinear"}  # fmt: skip
    subject = Subject("softpp_tiny", model, metadata)
    app = server.create_app([subject], {"one": Image.new("RGB", (64, 64))})
    origins = (
        "http://127.0.0.1:8642",
        "http://[",
        "null",
        "http://evil.example",
        "",
        "\x00",
        "http://127.0.0.1:99999999",
        "://",
    )
    hosts = ("127.0.0.1:8642", "[", "evil.example", "localhost:x", "", "[::1]:8642", 300 * "a")
    sites = (None, "cross-site", "same-site", "same-origin", "none", "x")
    paths = ("/", "/api/setup", "/api/photos", "/api/photos/sample-1", "/api/photos/%00", "/../x", "/api/capture", "/api/maps",
             "/api/inverse", "/%ff", "/api/photos/" + 5000 * "a")  # fmt: skip
    questions = {"model": (0, -1, 10**30, "x", ""), "photo": ("sample-1", "x", "\x00"), "size": (64, 0, 10**9, "nan"),
                 "stage": (1, 0, -1, 99, 10**30), "x": (0.5, "nan", "inf", -1), "y": (0.5, 1e308), "block": (0, -1, 10**6),
                 "steps": (3, -1, 10**9)}  # fmt: skip
    large = {mode: large_png(mode) for mode in ("RGB", "RGBA", "P")}

    def ask(method: str, path: str, query: dict, headers: dict, body: bytes) -> int:
        client = TestClient(app, base_url="http://127.0.0.1:8642")
        answer = client.request(method, path, params=query, headers=headers, content=body)
        if answer.status_code >= 500:
            raise AssertionError(f"{answer.status_code}: {answer.text[:200]}")
        if not answer.headers.get("content-security-policy"):
            raise AssertionError(f"{answer.status_code} without headers")
        if (
            headers.get("sec-fetch-site") == "cross-site"
            and path.startswith("/api/")
            and answer.status_code == 200
        ):
            raise AssertionError("answered another site")
        return 0

    def together(kind: str) -> int:
        client = TestClient(app, base_url="http://127.0.0.1:8642")
        with ThreadPoolExecutor(6) as pool:
            bodies = [large[kind] + bytes(n) for n in range(6)]
            list(
                pool.map(lambda body: client.post("/api/photos", content=body).status_code, bodies)
            )
        kept = (
            int(Path("/proc/self/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
            / 2**30
        )
        if kept > before + 0.5:
            raise AssertionError(f"{kept - before:.1f} GiB were kept")
        return 0

    before = _peak_gib(os.getpid())
    for number in range(count):
        if number % 40 == 39:
            kind = generator.choice(sorted(large))
            yield Attack(
                f"{number}: six large {kind} pictures at once", lambda kind=kind: together(kind)
            )
            continue
        headers = {"origin": generator.choice(origins), "host": generator.choice(hosts[:1] * 4 + hosts),
                   "sec-fetch-site": generator.choice(sites), "sec-fetch-mode": generator.choice(("navigate", "no-cors"))}  # fmt: skip
        headers = {
            name: value
            for name, value in headers.items()
            if value is not None and generator.random() < 0.7
        }
        headers = {name: value for name, value in headers.items() if value.isprintable()}
        query = {
            name: generator.choice(values)
            for name, values in questions.items()
            if generator.random() < 0.8
        }
        body = generator.choice(BYTES) if generator.random() < 0.3 else b""
        request = (
            generator.choice(("GET", "GET", "POST", "PUT", "HEAD")),
            generator.choice(paths),
            query,
            headers,
            body,
        )
        yield Attack(f"{number}: {request!r:.200}", lambda request=request: ask(*request))


def large_png(mode: str) -> bytes:
    """An image of 90 million pixels in a few hundred KB."""
    content = io.BytesIO()
    Image.new(mode, (9000, 10_000)).save(content, "PNG")
    return content.getvalue()


ATTACKS: dict[str, Callable[[int, int, Path], Iterator[Attack]]] = {
    "checkpoints": checkpoint_attacks,
    "pictures": picture_attacks,
    "coco": coco_attacks,
    "layouts": layout_attacks,
    "requests": request_attacks,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=ATTACKS)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="also print what was refused and how")
    given = parser.parse_args()
    torch.set_num_threads(1)
    verdicts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        for attack in ATTACKS[given.what](given.seed, given.count, Path(name)):
            verdict = attempt(attack, Path(name))
            verdicts[verdict.kind] += 1
            if verdict.fault or given.all:
                print(f"{verdict.kind}: {attack.name}: {verdict.detail}", flush=True)
    print(f"{given.what}: {sum(verdicts.values())} attacks, seed {given.seed}: ", end="")
    print(", ".join(f"{count} {kind}" for kind, count in verdicts.most_common()))
    return int(any(Verdict(kind).fault for kind in verdicts))


if __name__ == "__main__":
    sys.exit(main())
