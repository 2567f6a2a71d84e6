"""The Long Range Arena's files: every layout is read right, bad files are named, batches are padded and masked."""

import json
import lzma
import pickle
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from softfree.data.listops import to_text
from softfree.data.longrange import CIFAR10, TASKS, PadSequences, load_longrange, some_samples


def text_of(tokens):
    return bytes((tokens - 1).tolist())


def write_imdb(root, reviews):
    for split, by_label in reviews.items():
        for label, texts in by_label.items():
            folder = root / split / label
            folder.mkdir(parents=True)
            for number, text in enumerate(texts):
                (folder / f"{number}_7.txt").write_bytes(text)


REVIEWS = {
    "train": {"pos": [b"fine", b"caf\xc3\xa9"], "neg": [b"poor"]},
    "test": {"pos": [b"x" * 5000], "neg": [b""]},
}


@pytest.mark.parametrize("outer", ["", "aclImdb"])
def test_text_from_imdb_folders_is_bytes_cut_to_4000(tmp_path, outer):
    write_imdb(tmp_path / outer, REVIEWS)
    data = load_longrange("text", tmp_path)
    assert [(text_of(tokens), label) for tokens, label in data.train] == [
        (b"poor", 0),
        (b"fine", 1),
        (b"caf\xc3\xa9", 1),
    ]
    (empty, _), (long, _) = data.test[0], data.test[1]
    assert text_of(empty) == b"\n" and text_of(long) == b"x" * 4000
    assert data.dev is data.test


@pytest.mark.parametrize("ending", ["", ".xz"])
def test_text_from_json_lines_with_a_dev_file_if_there_is_one(tmp_path, ending):
    opener = lzma.open if ending else open
    for split, text in (("train", "größe"), ("test", "b"), ("dev", "c")):
        with opener(tmp_path / f"{split}.jsonl{ending}", "wt", encoding="utf-8") as file:
            file.write(json.dumps({"text": text, "label": 1, "rating": 8}) + "\n")
    data = load_longrange("text", tmp_path)
    assert [text_of(split[0][0]).decode() for split in (data.train, data.dev, data.test)] == [
        "größe",
        "c",
        "b",
    ]


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "a"}',
        "no json",
        "[1]",
        '{"text": 3, "label": 0}',
        '{"text": "a", "label": Infinity}',
    ],
)
def test_a_bad_json_line_is_named_with_what_it_must_be(tmp_path, line):
    (tmp_path / "train.jsonl").write_text('\n{"text": "a", "label": 0}\n' + line + "\n")
    expected = '{"text": "...", "label": 0 or 1}, got ' + line
    with pytest.raises(ValueError, match=rf"train.jsonl, line 3 must be {re.escape(expected)}$"):
        load_longrange("text", tmp_path)


def test_a_label_that_is_neither_positive_nor_negative_is_named(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a", "label": 2}\n')
    with pytest.raises(ValueError, match=r"train.jsonl, line 1: the label .* 0 to 1, got 2"):
        load_longrange("text", tmp_path)


def test_blank_json_lines_are_left_out_and_a_file_without_others_is_named(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('\n{"text": "a", "label": 0}\n\n')
    assert len(load_longrange("text", tmp_path).train) == 1
    (tmp_path / "test.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="test.jsonl has no sample for `task` text"):
        load_longrange("text", tmp_path)


def test_an_invalid_packed_file_is_named(tmp_path):
    (tmp_path / "train.jsonl.gz").write_text('{"text": "a", "label": 0}')
    with pytest.raises(ValueError, match=r"train.jsonl.gz can't be read: Not a gzipped file"):
        load_longrange("text", tmp_path)


def write_pairs(root, pairs, ending=b"\n"):
    rows = [b"\t".join([label, b"P00-1", b"P00-2", a, b]) for label, a, b in pairs]
    for split in ("train", "eval", "test"):
        (root / f"new_aan_pairs.{split}.tsv").write_bytes(b"\n".join(rows) + ending)


PAIRS = [(b"1.0", b"one paper", b"cites another"), (b"0.0", b'a "quoted" word', b"y" * 6000)]


@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_retrieval_reads_pairs_by_line_from_disk(tmp_path, ending):
    write_pairs(tmp_path, PAIRS, ending)
    data = load_longrange("retrieval", tmp_path)
    for split in (data.train, data.dev, pickle.loads(pickle.dumps(data.test))):
        assert len(split) == 2
        found = [([text_of(tokens) for tokens in texts], label) for texts, label in map(split.__getitem__, (0, 1))]  # fmt: skip
        assert found == [
            ([b"one paper", b"cites another"], 1),
            ([b'a "quoted" word', b"y" * 4000], 0),
        ]


@pytest.mark.parametrize("label", [b"x", b"3", b"0.7", b"nan", b"inf", b""])
def test_a_bad_label_of_a_pair_is_named_before_the_run(tmp_path, label):
    write_pairs(tmp_path, [*PAIRS, (label, b"a", b"b")])
    with pytest.raises(ValueError, match=r"train.tsv, line 3"):
        load_longrange("retrieval", tmp_path)


@pytest.mark.parametrize("bad", [b"1.0\tid\tid\ttext", b"1.0\tid\tid\ta\tb\tc", b""])
def test_a_line_that_is_no_pair_is_named_before_the_run(tmp_path, bad):
    write_pairs(tmp_path, PAIRS)
    (tmp_path / "new_aan_pairs.eval.tsv").write_bytes(b"0\tid\tid\ta\tb\n" + bad + b"\n")
    with pytest.raises(ValueError, match=r"eval.tsv, line 2"):
        load_longrange("retrieval", tmp_path)


def make_pictures(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), np.uint8)


def write_grid(path, pictures, columns):
    rows = len(pictures) // columns
    grid = pictures.reshape(rows, columns, 32, 32, 3).transpose(0, 2, 1, 3, 4)
    Image.fromarray(grid.reshape(rows * 32, columns * 32, 3)).save(path)


@pytest.fixture
def cifar(tmp_path):
    """Twenty training and ten test pictures, once as grids and once as folders."""
    train, test = make_pictures(20), make_pictures(10, seed=1)
    labels = {"train": np.arange(20) * 3 % 10, "test": np.arange(10)[::-1]}
    grids = tmp_path / "grids"
    grids.mkdir()
    np.savez(grids / "labels.npz", **{k: v.astype(np.uint8) for k, v in labels.items()})
    for part in range(2):
        write_grid(grids / f"train_{part + 1}.png", train[10 * part : 10 * part + 10], 5)
    write_grid(grids / "test.png", test, 5)
    folders = tmp_path / "folders"
    for split, pictures in (("train", train), ("test", test)):
        for number, (picture, label) in enumerate(zip(pictures, labels[split], strict=True)):
            target = folders / split.replace("test", "val") / CIFAR10[label] / f"{number:06d}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(target)
    return grids, folders, test


def test_image_is_the_same_from_grids_and_from_class_folders(cifar):
    grids, folders, test = cifar
    a, b = load_longrange("image", grids), load_longrange("image", folders)
    assert a.class_names == b.class_names == CIFAR10
    assert [len(split) for split in (a.train, a.dev, a.test)] == [18, 2, 10]
    for split in ("train", "dev"):
        pairs = zip(getattr(a, split), getattr(b, split), strict=True)
        assert all(torch.equal(x, y) and m == n for (x, m), (y, n) in pairs)
    tokens, label = a.test[0]
    assert label == 9 and tokens.shape == (1024,)
    expected = np.asarray(Image.fromarray(test[0]).convert("L"), int).reshape(-1) + 1
    assert tokens.tolist() == expected.tolist()


def test_grids_that_do_not_fit_their_labels_are_refused(cifar):
    grids, _, _ = cifar
    (grids / "train_2.png").unlink()
    with pytest.raises(ValueError, match="has 20 labels for train, but its 1 grids .* 10 tiles"):
        load_longrange("image", grids)


@pytest.mark.parametrize("beyond", [10, -1, 256])
def test_a_label_beyond_the_classes_of_the_grids_is_named(cifar, beyond):
    grids, _, _ = cifar
    np.savez(grids / "labels.npz", train=np.full(20, beyond), test=np.arange(10))
    with pytest.raises(
        ValueError, match=rf"labels.npz, train: labels must be 0 to 9, got {beyond}"
    ):
        load_longrange("image", grids)


def test_labels_that_are_no_npz_file_or_lack_a_split_are_named(cifar):
    grids, _, _ = cifar
    np.savez(grids / "labels.npz", train=np.arange(20) % 10)
    with pytest.raises(ValueError, match=r"labels.npz must be an npz file .*: 'test is not"):
        load_longrange("image", grids)
    for content in (b"no npz", b"PK\x03\x04 cut off"):
        (grids / "labels.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"labels.npz must be an npz file"):
            load_longrange("image", grids)


def test_a_picture_of_another_size_is_named(cifar):
    _, folders, _ = cifar
    Image.new("RGB", (33, 32)).save(folders / "train" / "dog" / "odd.png")
    with pytest.raises(ValueError, match=r"odd.png has 33 x 32"):
        load_longrange("image", folders)


def test_a_damaged_picture_in_class_folders_is_named(cifar):
    _, folders, _ = cifar
    (folders / "train" / "dog" / "odd.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"dog/odd.png can't be read: not a picture"):
        load_longrange("image", folders)


def test_class_folders_without_test_pictures_are_named(cifar):
    _, folders, _ = cifar
    shutil.rmtree(folders / "val")
    with pytest.raises(FileNotFoundError, match="has no folder of test pictures; expected train/"):
        load_longrange("image", folders)


def test_a_grid_that_is_no_picture_is_named(cifar):
    grids, _, _ = cifar
    (grids / "test.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"test.png can't be read: not a picture"):
        load_longrange("image", grids)


@pytest.mark.parametrize("outer", ["", "pathfinder32/curv_contour_length_14"])
def test_pathfinder_reads_pictures_by_its_metadata_and_leaves_out_empty_files(tmp_path, outer):
    root = tmp_path / outer
    (root / "metadata").mkdir(parents=True)
    lines = []
    for number in range(21):
        folder = root / "imgs" / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"sample_{number}.png"
        lines.append(f"imgs/{number % 2} sample_{number}.png {number} {number % 2} 1.8 6")
        Image.fromarray(np.full((32, 32), number, np.uint8)).save(path)
    path.write_bytes(b"")
    (root / "metadata" / "0.npy").write_text("\n".join(lines[:10]) + "\n")
    (root / "metadata" / "1.npy").write_text("\n".join(lines[10:]) + "\n")
    data = load_longrange("pathfinder", tmp_path)
    splits = [data.train, data.dev, data.test]
    assert [len(split) for split in splits] == [16, 2, 2]
    seen = {}
    for split in splits:
        for index in range(len(split)):
            tokens, label = split[index]
            assert tokens.shape == (1024,)
            seen[int(tokens[0]) - 1] = label
    assert seen == {number: number % 2 for number in range(20)}


def test_a_bad_listing_of_pathfinder_is_named(tmp_path):
    listing = tmp_path / "metadata" / "0.npy"
    listing.parent.mkdir()
    listing.write_text("imgs/0 sample_0.png 0 1\n")
    with pytest.raises(
        FileNotFoundError, match=r"sample_0.png is missing, but listed in .*0.npy, line 1"
    ):
        load_longrange("pathfinder", tmp_path)
    np.save(listing, np.zeros(3))
    with pytest.raises(ValueError, match=r"0.npy, line 1 must be folder, file, number, label"):
        load_longrange("pathfinder", tmp_path)


def test_listops_is_made_in_the_folder_given_and_needs_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = load_longrange("listops", listops_sizes=(3, 2, 1))
    assert [len(split) for split in (data.train, data.dev, data.test)] == [3, 2, 1]
    assert list((tmp_path / "softfree").glob("listops*.npz"))
    tokens, label = data.train[0]
    assert (
        500 < len(tokens) < 2000
        and tokens.min() >= 1
        and tokens.max() < TASKS["listops"].vocab_size
    )
    assert 0 <= label < 10


LRA_LINE = "( ( ( ( [MAX 4 ) ( ( ( [SM 9 ) 3 ) ] ) ) 1 ) ] )\t4\n"


def write_lra_listops(root, *splits, line=LRA_LINE):
    root.mkdir(exist_ok=True)
    for count, split in enumerate(splits, 1):
        (root / f"basic_{split}.tsv").write_text("Source\tTarget\n" + line * count)


@pytest.mark.parametrize("outer", ["", "listops-1000"])
def test_listops_reads_lras_own_files_and_says_so(tmp_path, caplog, outer):
    caplog.set_level("INFO")
    write_lra_listops(tmp_path / outer, "train", "val", "test")
    data = load_longrange("listops", tmp_path)
    assert [len(split) for split in (data.train, data.dev, data.test)] == [1, 2, 3]
    tokens, label = data.test[2]
    assert to_text(tokens.numpy()) == "[MAX 4 [SM 9 3 ] 1 ]" and label == 4
    assert f"listops: LRA's own samples in {tmp_path / outer}, 1 / 2 / 3" in caplog.text
    assert not list(tmp_path.rglob("*.npz"))


def test_some_of_lras_files_of_listops_are_refused_by_the_names_of_the_others(tmp_path):
    write_lra_listops(tmp_path, "train", "test")
    with pytest.raises(
        FileNotFoundError, match=r"but not basic_val.tsv; samples are only generated if it has none"
    ):
        load_longrange("listops", tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "( [MAX 4 2 ] )\n",
        "[MAX 4 2 ]\t12\n",
        "[MAX 4 2 ]\t]\n",
        "[MAX 42 ]\t4\n",
        "N 4 ]\t4\n",
        "\t4\n",
    ],
)
def test_a_line_that_is_no_sample_of_listops_is_named(tmp_path, line):
    write_lra_listops(tmp_path, "train", "val", "test", line=line)
    with pytest.raises(ValueError, match=r"basic_train.tsv, line 2 must be an expression"):
        load_longrange("listops", tmp_path)


def test_a_file_of_listops_without_its_header_or_without_samples_is_named(tmp_path):
    write_lra_listops(tmp_path, "train", "val", "test", line="")
    with pytest.raises(ValueError, match="basic_train.tsv has no samples"):
        load_longrange("listops", tmp_path)
    (tmp_path / "basic_train.tsv").write_text(LRA_LINE)
    with pytest.raises(ValueError, match="basic_train.tsv must start with the line Source"):
        load_longrange("listops", tmp_path)


@pytest.mark.parametrize("name", ["text", "retrieval", "image", "pathfinder"])
def test_a_task_without_its_files_says_what_it_needs(tmp_path, name):
    with pytest.raises(ValueError, match=f"`task` {name} needs `data_dir` with"):
        load_longrange(name)
    with pytest.raises(FileNotFoundError, match=f"is not a folder; `task` {name} needs"):
        load_longrange(name, tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="`data_dir`"):
        load_longrange(name, tmp_path)


def test_an_unknown_task_lists_those_there_are():
    with pytest.raises(ValueError, match="`task` must be one of listops, text, .* got 'sort'"):
        load_longrange("sort")


def test_a_batch_is_padded_to_a_multiple_and_its_mask_says_what_is_real():
    batch = PadSequences(100, multiple=8)(
        [(torch.arange(1, 4), 5), (torch.arange(1, 12), 6), (torch.tensor([9]), 7)]
    )
    assert batch.tokens.shape == batch.mask.shape == (3, 16)
    assert batch.mask.sum(1).tolist() == [3, 11, 1] and batch.labels.tolist() == [5, 6, 7]
    assert batch.tokens[0].tolist() == [1, 2, 3] + [0] * 13
    assert torch.equal(batch.mask, batch.tokens > 0)


def test_a_batch_is_never_longer_than_the_model_takes_and_has_no_mask_if_nothing_is_padded():
    batch = PadSequences(10, multiple=8)([(torch.ones(30, dtype=torch.long), 0)])
    assert batch.tokens.tolist() == [[1] * 10] and batch.mask is None


def test_pairs_go_through_a_loader_with_workers(tmp_path):
    write_pairs(tmp_path, PAIRS)
    data = load_longrange("retrieval", tmp_path)
    collate = PadSequences(data.task.length)
    (batch,) = DataLoader(data.train, 2, collate_fn=collate, num_workers=1)
    assert batch.tokens.shape == batch.mask.shape == (2, 2, 4000)
    assert batch.mask.sum(-1).tolist() == [[9, 13], [15, 4000]]
    assert batch.labels.tolist() == [1, 0]


def test_some_samples_are_drawn_once_and_the_same_every_time():
    # In an order that repeats, evenly spaced samples would be all of one kind.
    data = [(torch.tensor([1]), index % 10) for index in range(1000)]
    some = some_samples(data, 100)
    labels = [label for _, label in (some[i] for i in range(len(some)))]
    assert len(set(some.indices)) == 100 and len(set(labels)) == 10
    assert some_samples(data, 100).indices == some.indices
    assert some_samples(data, 0) is data and some_samples(data, 2000) is data
