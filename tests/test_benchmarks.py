"""benchmarks/: what scripts do that no command does."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from softfree.layers import ATTENTIONS, attention

FOLDER = Path(__file__).parent.parent / "benchmarks"


def load(name):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_without_attention_a_layer_is_its_projections_and_the_convolution_of_its_values(
    monkeypatch,
):
    script = load("without_attention")
    # Set to what they are, these are set back after the test.
    monkeypatch.setattr(attention, "soft_attention", attention.soft_attention)
    whole = attention.SoftAttention
    monkeypatch.setattr(whole, "_is_one_operator", whole._is_one_operator)
    layer = attention.SoftAttention(dim=12, num_heads=3, stride=2, value_conv=3, landmark_gain=0.25)
    x = torch.randn(2, 24, 12)
    values = layer.qv(x)[..., 12:]
    expected = layer.proj(layer.value_conv(values, (6, 4)))
    assert not torch.allclose(layer(x, (6, 4)), expected)
    script.leave_attention_out()
    torch.testing.assert_close(layer(x, (6, 4)), expected)
    script.leave_attention_out(own_values=True)
    with_values = layer.proj(values + layer.value_conv(values, (6, 4)))
    torch.testing.assert_close(layer(x, (6, 4)), with_values)


@pytest.fixture
def variants(monkeypatch):
    """benchmarks/variants.py; what it changes is set back after the test."""
    for name in ("soft_attention", "normed", "pooled_share"):
        monkeypatch.setattr(attention, name, getattr(attention, name))
    whole = attention.SoftAttention
    for name in ("__init__", "keys_and_landmarks", "_is_one_operator"):
        monkeypatch.setattr(whole, name, getattr(whole, name))
    return load("variants").VARIANTS


def own_layer(**options):
    torch.manual_seed(0)
    options = {"landmarks": "average", "bandwidth": "learned", **options}
    return attention.SoftAttention(dim=12, num_heads=2, stride=2, query_norm=True, **options)


def test_on_the_sphere_queries_keep_their_mean(variants):
    q = torch.randn(1, 2, 24, 6) + 1
    assert own_layer().keys_and_landmarks(q, (6, 4))[0].mean(-1).abs().max() < 1e-6
    variants["sphere"]()
    keys, _ = own_layer().keys_and_landmarks(q, (6, 4))
    expected = q / q.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(keys, expected, rtol=1e-4, atol=1e-4)


def test_divided_by_their_sums_rows_keep_a_constant(variants):
    layer, x = own_layer(landmarks="average:4"), torch.randn(2, 24, 12)
    with torch.no_grad():
        layer.qv.weight[12:] = 0
        layer.qv.bias[12:] = 3
    constant = layer.proj(torch.full((2, 24, 12), 3.0))
    assert not torch.allclose(layer(x, (6, 4)), constant, atol=1e-3)
    variants["row-sums"]()
    torch.testing.assert_close(layer(x, (6, 4)), constant)


def test_with_places_equal_tokens_are_as_far_from_each_other_as_their_places(variants):
    x = torch.randn(1, 1, 12).expand(1, 24, 12)
    plain = own_layer()(x, (6, 4))
    torch.testing.assert_close(plain, plain[:, :1].expand_as(plain))
    variants["place"]()
    layer = own_layer()
    keys, (landmarks, _) = layer.keys_and_landmarks(layer.split(x), (6, 4))
    assert (keys.shape[-1], landmarks.shape[-1]) == (8, 8)
    distances = torch.cdist(keys[0, 0], keys[0, 0])[0].view(6, 4)
    assert torch.equal(distances[0].argsort(), torch.arange(4))
    with pytest.raises(ValueError, match="place is for pictures"):
        own_layer(sequence=True)(x)
    with_places = layer(x, (6, 4))
    assert not torch.allclose(with_places, with_places[:, :1].expand_as(with_places), atol=1e-3)
    with_places.sum().backward()
    assert layer.log_place.grad.abs().min() > 0


@pytest.fixture(scope="module")
def compare_commits():
    return load("compare_commits")


def trained(script, *, losses=("2.5", "2.25"), speed=100.0, **weights):
    weights = {name: torch.tensor(values) for name, values in (weights or {"w": [1.0]}).items()}
    return script.Trained(list(losses), weights, speed)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"losses": ("2.5", "2.2500001")}, "step 2: loss 2.25, now 2.2500001"),
        ({"losses": ("2.5",)}, "2 steps, now 1"),
        ({"w": [1.0], "more": [0.0]}, "weights of only one: more"),
        ({"w": [1.0000001]}, "losses are the same, the weight w is not"),
        ({"w": [1]}, "the weight w is not"),
    ],
)
def test_the_first_difference_of_two_runs_is_named(compare_commits, changed, words):
    base, new = trained(compare_commits), trained(compare_commits, **changed)
    found = compare_commits.first_difference(base, new)
    assert words in found and bool(words) is bool(found)


def test_bits_are_compared_and_not_values(compare_commits):
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert compare_commits.same_bits(nan, nan.clone())
    assert not compare_commits.same_bits(zero, -zero)


def test_the_median_of_the_turns_decides_over_the_speed(compare_commits):
    def turn(new_speed):
        return trained(compare_commits), trained(compare_commits, speed=new_speed)

    within = compare_commits.compare([turn(96.0), turn(50.0), turn(99.0)])
    slower = compare_commits.compare([turn(94.0), turn(50.0), turn(99.0)])
    assert compare_commits.verdict([within], 0.05) == 0
    assert compare_commits.verdict([within, slower], 0.05) == compare_commits.SLOWER == 3
    other = trained(compare_commits, losses=("2.5", "3"))
    different = compare_commits.compare([(trained(compare_commits), other)])
    assert compare_commits.verdict([different, slower], 0.05) == compare_commits.DIFFERENT == 1


def test_a_commit_that_differs_from_itself_is_told(compare_commits):
    same, other = trained(compare_commits), trained(compare_commits, losses=("2.5", "3"))
    assert "base differs from itself" in compare_commits.compare([(same, same), (other, same)])[0]
    assert (
        "new commit differs from itself"
        in compare_commits.compare([(same, same), (same, other)])[0]
    )


def test_a_run_is_read_from_its_folder_without_the_speed_of_its_first_step(
    compare_commits, tmp_path
):
    rows = ["step,loss,samples_per_s", "1,2.5,1", "2,2.25,90", "3,2,110", "4,1.5,100"]
    (tmp_path / "train.csv").write_text("\n".join(rows))
    (tmp_path / "last").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "last" / "model.safetensors")
    found = compare_commits.read_run(tmp_path)
    assert found.losses == ["2.5", "2.25", "2", "1.5"] and found.samples_per_s == 100
    assert found.weights["w"].tolist() == [1, 1]


def test_twins_has_a_row_for_every_attention_and_sampler_and_draws_them():
    script = load("twins")
    results = []
    for name in script.USUAL:
        count = 16 if name in script.LANDMARKS else 0
        model = script.build(name, count, seed=0)
        assert model(torch.randn(1, 64, 8)).shape == (1, 64, 2)
        results += [script.Result(name, n, 0, 60.0 + n) for n in ((8, 16) if count else (0,))]
    assert {a.partition(":")[0] for a in script.USUAL} == {*ATTENTIONS, "none"}
    axes = script.draw(results, "title").axes[0]
    assert len(axes.lines) == len(script.USUAL)


def test_in_twins_control_nothing_passes_from_cell_to_cell():
    model = load("twins").build("none", 0, seed=0)
    x = torch.randn(1, 64, 8)
    other = x.clone()
    other[:, 1:] = 0
    assert torch.equal(model(x)[:, 0], model(other)[:, 0])


def test_a_vit_is_measured_before_and_after_its_attention_is_replaced(monkeypatch):
    script = load("replaced_vit")
    few = (torch.randn(64, 1, 16, 16), torch.randint(10, (64,)))
    monkeypatch.setattr(script, "digits", lambda seed: (few, few))
    words = script.measure(epochs=1, further=1, seed=0)
    assert [word.split("%")[0].rpartition(" ")[0] for word in words] == [
        "softmax 1 epochs", "replaced", "1 epochs later", "softmax 1 epochs later",
        "1 epochs from random weights",
    ]  # fmt: skip
