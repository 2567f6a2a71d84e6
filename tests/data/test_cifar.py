"""CIFAR-10's own files are read as they are, and nothing in them is run."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from softfree.data.cifar import CLASSES, read_batches
from softfree.data.longrange import load_longrange


def python2_pickle(pictures, labels):
    """As Python 2 wrote the originals: protocol 2, bytes as texts, numpy's array by its parts."""

    def text(content):
        return b"T" + len(content).to_bytes(4, "little") + content

    def number(value):
        return b"J" + int(value).to_bytes(4, "little", signed=True)

    kind = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    kind += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        + number(0)
        + b"\x85"
        + text(b"b")
    )
    shape = number(len(pictures)) + number(3072) + b"\x86"
    array += b"\x87R(" + number(1) + shape + kind + b"\x89" + text(pictures.tobytes()) + b"tb"
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    items = text(b"data") + array + text(b"labels") + listed + text(b"batch_label") + text(b"one")
    return b"\x80\x02}(" + items + b"u."


def python3_pickle(protocol):
    return lambda pictures, labels: pickle.dumps(
        {"data": np.asarray(pictures), "labels": list(labels)}, protocol=protocol
    )


def binary(pictures, labels):
    return np.concatenate([np.array(labels, np.uint8)[:, None], pictures], axis=1).tobytes()


WRITERS = {
    "python 2": python2_pickle,
    "protocol 2": python3_pickle(2),
    "protocol 4": python3_pickle(4),
}


def write_batches(folder, write=python2_pickle, ending=""):
    """Two batches of ten pictures to train on and one to test on; their values."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    pictures = generator.integers(0, 256, (30, 3072), np.uint8)
    for number, name in enumerate(("data_batch_1", "data_batch_2", "test_batch")):
        content = write(pictures[10 * number : 10 * number + 10], list(range(10)))
        (folder / f"{name}{ending}").write_bytes(content)
    return pictures


@pytest.mark.parametrize("kind", [*WRITERS, "binary"])
def test_batches_of_all_kinds_give_the_same_pictures(tmp_path, kind):
    writer, ending = (binary, ".bin") if kind == "binary" else (WRITERS[kind], "")
    values = write_batches(tmp_path / "batches", writer, ending)
    pictures, labels = read_batches(tmp_path / "batches", "train")
    assert pictures.shape == (20, 32, 32, 3)
    assert np.array_equal(pictures[3, 5, 7], values[3].reshape(3, 32, 32)[:, 5, 7])
    assert labels.tolist() == [*range(10)] * 2
    assert len(read_batches(tmp_path / "batches", "test")[0]) == 10


def test_the_stand_in_for_an_original_is_what_pickle_takes_for_one():
    pictures = np.arange(2 * 3072).reshape(2, 3072).astype(np.uint8)
    found = pickle.loads(python2_pickle(pictures, [3, 4]), encoding="bytes")
    assert np.array_equal(found[b"data"], pictures)
    assert found[b"labels"] == [3, 4]


def test_the_image_task_reads_them_as_it_reads_class_folders(tmp_path):
    values = write_batches(tmp_path / "a" / "cifar-10-batches-py")
    for number, rows in enumerate(values):
        split = "train" if number < 20 else "test"
        path = tmp_path / "b" / split / CLASSES[number % 10] / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rows.reshape(3, 32, 32).transpose(1, 2, 0)).save(path)
    own, folders = (load_longrange("image", tmp_path / name) for name in "ab")
    assert own.class_names == folders.class_names == CLASSES
    for part in ("train", "dev", "test"):
        mine, theirs = getattr(own, part), getattr(folders, part)
        assert len(mine) == len(theirs) == dict(train=18, dev=2, test=10)[part]
        for index in range(len(mine)):
            assert mine[index][0].tolist() == theirs[index][0].tolist()
            assert mine[index][1] == theirs[index][1]


class Evil:
    def __reduce__(self):
        return (print, ("code of a pickle was run",))


def damaged(content):
    buffer = io.BytesIO()
    pickle.dump(content, buffer, protocol=2)
    return buffer.getvalue()


PICTURES = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (damaged(Evil()), "it refers to __builtin__.print, which is not allowed"),
        (damaged({"data": PICTURES, "labels": [Evil(), 1]}), "it refers to __builtin__.print"),
        (b"cos\nsystem\n(S'true'\ntR.", "it refers to os.system"),
        (b"", "it is truncated"),
        (python2_pickle(PICTURES, [1, 2])[:-100], ""),
        (damaged([1]), "it is not a mapping"),
        (damaged({"data": PICTURES, "fine_labels": [1, 2]}), "no 'data' and 'labels'"),
        (damaged({"data": PICTURES, "labels": [1]}), "2 pictures and 1 labels"),
        (damaged({"data": PICTURES, "labels": [1, 300]}), "labels must be 0 to 9, got 300"),
        (damaged({"data": PICTURES, "labels": [1, 2.0]}), "labels must be whole numbers"),
        (damaged({"data": PICTURES.astype(float), "labels": [1, 2]}), "must be 8 bits"),
        (damaged({"data": PICTURES[:, 1:], "labels": [1, 2]}), "3,072 values each"),
        (b"\x80\x02r\xff\xff\xff\xff.", "it is damaged .IndexError"),  # claims billions of values
        (b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\x00\x00.", "it is damaged .MemoryError"),
    ],
)
def test_damaged_or_hostile_batches_are_refused_by_name(tmp_path, capsys, content, fault):
    write_batches(tmp_path / "batches")
    (tmp_path / "batches" / "data_batch_2").write_bytes(content)
    with pytest.raises(ValueError, match=f"data_batch_2 is not a CIFAR-10 batch: .*({fault})"):
        load_longrange("image", tmp_path / "batches")
    assert "was run" not in capsys.readouterr().out


def test_a_binary_batch_that_is_cut_off_is_refused(tmp_path):
    write_batches(tmp_path / "batches", binary, ".bin")
    path = tmp_path / "batches" / "data_batch_1.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match="data_batch_1.bin is not a CIFAR-10 batch: .* multiple of 3,073"
    ):
        read_batches(tmp_path / "batches", "train")


def test_a_missing_test_batch_is_named(tmp_path):
    write_batches(tmp_path / "batches")
    (tmp_path / "batches" / "test_batch").unlink()
    with pytest.raises(FileNotFoundError, match="has no test_batch"):
        load_longrange("image", tmp_path / "batches")
