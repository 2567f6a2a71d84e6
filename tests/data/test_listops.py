"""ListOps: values are right, the rules are LRA's, samples repeat by seed and are cached safely."""

import os
import random
import statistics
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from softfree.data import listops
from softfree.data.listops import ListOpsRules, Samples, generate, load, to_text

SMALL = ListOpsRules(max_depth=5, max_args=5, min_length=20, max_length=120)


def texts(samples):
    """Every sample as words."""
    bounds = zip(samples.offsets[:-1], samples.offsets[1:], strict=True)
    return [to_text(samples.tokens[first:last]).split() for first, last in bounds]


def evaluate(words):
    """Value and depth by a stack, one word at a time; every bracket must close."""
    stack, deepest = [], 1
    for word in words:
        if word.startswith("["):
            stack.append([word])
            deepest = max(deepest, len(stack) + 1)
            continue
        if word == "]":
            name, *args = stack.pop()
            value = {
                "[MIN": min,
                "[MAX": max,
                "[MED": lambda numbers: int(statistics.median(numbers)),
                "[SM": lambda numbers: sum(numbers) % 10,
            }[name](args)
            assert 2 <= len(args)
        else:
            value = int(word)
        if not stack:
            return value, deepest
        stack[-1].append(value)
    raise AssertionError("a bracket is open at the end")


def draw_tree(rng, rules, depth=1):
    """LRA's rule as a recursion: words and arguments of every operator."""
    if depth == rules.max_depth or rng.random() > 0.25:
        return [str(rng.randrange(10))], []
    number = rng.randint(2, rules.max_args)
    words, counts = [], [number]
    for _ in range(number):
        child, more = draw_tree(rng, rules, depth + 1)
        words += child
        counts += more
    return [rng.choice(["[MIN", "[MAX", "[MED", "[SM"]), *words, "]"], counts


@pytest.mark.parametrize("rules", [SMALL, ListOpsRules()], ids=["small", "LRA's"])
def test_labels_are_the_values_of_the_expressions(rules):
    samples = generate(60, seed=3, rules=rules)
    assert len(samples.labels) == 60 and samples.offsets[-1] == len(samples.tokens)
    for words, label in zip(texts(samples), samples.labels, strict=True):
        value, depth = evaluate(words)
        assert value == label
        assert rules.min_length < len(words) < rules.max_length
        assert depth <= rules.max_depth


def test_every_operator_and_every_label_occurs():
    samples = generate(300, rules=SMALL)
    assert set(samples.tokens.tolist()) == set(range(1, 16))
    assert set(samples.labels.tolist()) == set(range(10))


def test_the_distribution_is_that_of_the_recursive_rule():
    rng = random.Random(0)
    wanted = []
    while len(wanted) < 2000:
        words, counts = draw_tree(rng, SMALL)
        if SMALL.min_length < len(words) < SMALL.max_length:
            wanted.append((len(words), sum(counts) / len(counts), evaluate(words)))
    ours = []
    for words in texts(generate(2000, rules=SMALL)):
        operators = sum(word.startswith("[") for word in words)
        # Every node but the root is an argument: words without the ends and the root.
        ours.append((len(words), (len(words) - operators - 1) / operators, evaluate(words)))
    for pick in (
        lambda s: s[0],
        lambda s: s[1],
        lambda s: s[2][0],
        lambda s: s[2][1],
        lambda s: s[2][0] == 9,
    ):
        a, b = (np.array([pick(s) for s in side], float) for side in (wanted, ours))
        error = np.sqrt(a.var() / len(a) + b.var() / len(b))
        assert abs(a.mean() - b.mean()) < 4 * error


def test_samples_repeat_by_seed_and_do_not_depend_on_the_count():
    few, many, other = generate(20, 1, SMALL), generate(50, 1, SMALL), generate(20, 2, SMALL)
    assert texts(few) == texts(many)[:20]
    assert few.labels.tolist() == many.labels[:20].tolist()
    assert texts(few) != texts(other)


def test_samples_differ_from_each_other():
    rules = ListOpsRules(max_depth=2, max_args=2, min_length=1, max_length=5)
    words = [" ".join(sample) for sample in texts(generate(390, rules=rules))]
    assert len(set(words)) == 390


def test_more_samples_than_there_are_is_an_error_that_says_so():
    rules = ListOpsRules(max_depth=2, max_args=2, min_length=1, max_length=5)
    with pytest.raises(ValueError, match="only 400 of 401 different samples exist"):
        generate(401, rules=rules)


def test_rules_that_cannot_be_met_are_refused():
    with pytest.raises(ValueError, match="max_length"):
        ListOpsRules(min_length=50, max_length=51)
    with pytest.raises(ValueError, match="max_args"):
        ListOpsRules(max_args=1)


def test_splits_are_disjoint_and_dev_and_test_do_not_depend_on_train(tmp_path):
    splits = load(tmp_path, (30, 10, 5), rules=SMALL)
    words = [" ".join(sample) for split in splits.values() for sample in texts(split)]
    assert [len(splits[name].labels) for name in ("train", "dev", "test")] == [30, 10, 5]
    assert len(set(words)) == 45
    larger = load(tmp_path, (60, 10, 5), rules=SMALL)
    assert texts(larger["test"]) == texts(splits["test"])
    assert texts(larger["dev"]) == texts(splits["dev"])


def test_the_second_load_reads_the_cache_and_leaves_no_temporary_file(tmp_path, monkeypatch):
    first = load(tmp_path, (8, 4, 4), rules=SMALL)
    monkeypatch.setattr(listops, "generate", None)
    second = load(tmp_path, (8, 4, 4), rules=SMALL)
    assert texts(first["train"]) == texts(second["train"])
    assert not list(tmp_path.glob("*.tmp"))


def test_an_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, (8, 4, 4), rules=SMALL)
    assert not list(tmp_path.glob("*.npz")) and not list(tmp_path.glob("*.tmp"))


def test_a_pickle_in_place_of_the_cache_is_not_executed(tmp_path):
    load(tmp_path, (8, 4, 4), rules=SMALL)
    (path,) = tmp_path.glob("*.npz")
    objects = np.array([print], dtype=object)
    np.savez(path, **Samples(objects, objects, objects)._asdict())
    with pytest.raises(ValueError, match="is damaged .*allow_pickle=False"):
        load(tmp_path, (8, 4, 4), rules=SMALL)


@pytest.mark.parametrize("kept", [0, 10, 300])
def test_a_cache_that_is_cut_off_is_named(tmp_path, kept):
    load(tmp_path, (8, 4, 4), rules=SMALL)
    (path,) = tmp_path.glob("*.npz")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"npz is damaged .* delete it"):
        load(tmp_path, (8, 4, 4), rules=SMALL)


def test_two_processes_make_the_samples_once_and_say_so(tmp_path, caplog):
    caplog.set_level("INFO", "softfree")
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(load, tmp_path, (8, 4, 4), rules=SMALL) for _ in range(2)]
        first, second = (job.result() for job in jobs)
    assert caplog.messages == ["generating the ListOps samples (only once)"]
    assert texts(first["train"]) == texts(second["train"])
