"""Segmentation on the engine: recipes are the papers', mIoU is the data set's, a run's checkpoint is enough."""

from typing import ClassVar

import pytest
import torch
from torch import nn

pytest.importorskip("segmentation_models_pytorch")
pytest.importorskip("torchmetrics")

from softfree.commands.settings import resolve
from softfree.data import segmentation as data
from softfree.data.segmentation import IGNORE, SegmentationBatch, load_segmentation
from softfree.layers import attention
from softfree.models.views import Views
from softfree.training.classification import Normalize
from softfree.training.confusion import class_scores
from softfree.training.distributed import Processes
from softfree.training.engine import train
from softfree.training.segmentation import (
    RECIPES,
    Segmentation,
    SegmentationSettings,
    _cross_entropy,
    evaluate_segmenter,
    predict_classes,
)
from softfree.training.settings import override, settings_to_json

ALONE = Processes(0, 1, torch.device("cpu"))
TINY = ("embed_dims=16,32,48,64", "num_heads=1,2,3,4", "depths=1,1,1,1", "img_size=64")
UNCHANGED = Normalize((0.0, 0.0, 0.0), (1 / 255,) * 3)


def tiny(tmp_path, **optim) -> SegmentationSettings:
    return override(
        RECIPES["shapes"],
        {
            "data": dict(crop=64),
            "decoder": dict(width=16),
            "backbone": dict(model_kwargs=TINY),
            "optim": dict(dict(batch_size=2, steps=3, warmup_steps=1), **optim),
            "run": dict(output=tmp_path / "out", eval_every=0, log_interval=1),
        },
    )


def shapes(count=6):
    return load_segmentation(None, shapes=(count, 3), side=64)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_fits_the_settings(name):
    assert RECIPES[name].recipe == name


def test_the_recipes_are_those_of_the_paper():
    ade20k = RECIPES["ade20k"]
    cityscapes = RECIPES["cityscapes"]
    assert (ade20k.optim.steps, ade20k.data.crop) == (160_000, 512)
    assert (cityscapes.optim.steps, cityscapes.data.crop) == (40_000, 768)
    assert ade20k.optim.lr == cityscapes.optim.lr == 6e-4
    assert ade20k.data.scales == (1.0, 1.0)


def test_a_run_writes_a_checkpoint_that_scores_as_the_run_says(tmp_path):
    settings = tiny(tmp_path)
    task = Segmentation(settings, shapes())
    outcome = train(task, settings.optim, settings.run, settings_to_json(settings))
    assert {"preview.png", "predictions.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    model, metadata = Segmentation.load(tmp_path / "out" / "best")
    assert metadata["class_names"][0] == "ground"
    batches = [task.collate_eval([task.eval_data[index]]) for index in range(3)]
    with torch.no_grad():
        scores = task.evaluate(model, batches, ALONE)
    assert scores == pytest.approx({name: outcome.scores[name] for name in ("mIoU", "accuracy")})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(crop=0), "`crop` must be at least 1, got 0"),
        (dict(short_side=-1), "`short_side` must be at least 0, got -1"),
        (dict(window=-3), "`window` must be at least 0, got -3"),
        (
            dict(scales=(0.5, 2.0), short_side=0),
            "`scales` 0.5 2 multiply the short side, but with `short_side` 0 .*set it",
        ),
        (dict(scales=(2.0, 1.0)), "`scales` must be above 0 and in order, got 2 1"),
    ],
)
def test_sizes_that_no_picture_can_have_are_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        Segmentation(override(tiny(tmp_path), {"data": given}), shapes())


def test_a_decoder_without_channels_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`width` must be at least 2, got 0"):
        Segmentation(override(tiny(tmp_path), {"decoder": dict(width=0)}), shapes())


def test_batches_of_one_picture_are_refused_before_a_batch_norm_does(tmp_path):
    with pytest.raises(ValueError, match="`batch_size` must be at least 2, got 1"):
        Segmentation(tiny(tmp_path, batch_size=1), shapes())


def test_a_few_steps_on_one_batch_lower_the_loss(tmp_path):
    task = Segmentation(tiny(tmp_path), shapes(2))
    model = task.build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    batch = task.collate([task.train_data[0], task.train_data[1]])
    losses = []
    for _ in range(12):
        loss, _ = task.train_step(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_a_batch_without_a_single_class_gives_no_nan(tmp_path):
    task = Segmentation(tiny(tmp_path), shapes(2))
    model = task.build_model().train()
    batch = SegmentationBatch(
        torch.zeros(2, 3, 64, 64, dtype=torch.uint8), torch.full((2, 64, 64), IGNORE), []
    )
    loss, _ = task.train_step(model, batch)
    assert loss.item() == 0


def test_balanced_weights_count_in_the_loss_and_none_by_default(tmp_path):
    task = Segmentation(tiny(tmp_path), shapes(4))
    assert task.weights(torch.device("cpu")) is None
    balanced = override(tiny(tmp_path), {"data": dict(class_weights="balanced")})
    weights = Segmentation(balanced, shapes(4)).weights(torch.device("cpu"))
    # Of the ground there is most.
    assert weights.shape == (6,) and (weights[0] < weights[1:]).all()
    logits, classes = torch.randn(2, 6, 8, 8), torch.randint(0, 6, (2, 8, 8))
    classes[0, :2] = IGNORE
    each = nn.functional.cross_entropy(logits, classes, ignore_index=IGNORE, reduction="none")
    expected = (each * weights[classes.clamp(max=5)]).sum() / (classes != IGNORE).sum()
    torch.testing.assert_close(_cross_entropy(logits, classes, weights), expected)


class Reader(nn.Module):
    """Says the class that the picture's red channel holds, at a quarter of the size."""

    def forward(self, image):
        classes = image[:, 0, ::4, ::4].round().long()
        return nn.functional.one_hot(classes, 3).permute(0, 3, 1, 2).float()


def batch_of(*pairs):
    """Pairs of (predicted, true) class maps as a batch that ``Reader`` predicts so."""
    images = [torch.as_tensor(p, dtype=torch.uint8).expand(3, -1, -1) for p, _ in pairs]
    return SegmentationBatch(images, [torch.as_tensor(t) for _, t in pairs], [])


def test_intersections_and_unions_are_summed_over_all_pictures_before_dividing():
    zeros, ones = torch.zeros(16, 16).long(), torch.ones(16, 16).long()
    # Class 0: 256 of 512 in the union; class 1: 0 of 256; class 2 occurs nowhere and does not count.
    batch = batch_of((zeros, zeros), (zeros, ones))
    scores, counts = evaluate_segmenter(Reader(), [batch], UNCHANGED, 3, ALONE)
    of_class = class_scores(counts)["IoU"]
    assert scores["mIoU"] == pytest.approx(25)
    assert scores["accuracy"] == pytest.approx(50)
    assert of_class[:2] == pytest.approx([50, 0])
    assert of_class[2] != of_class[2]


def test_ignored_pixels_do_not_count():
    zeros = torch.zeros(16, 16).long()
    truth = zeros.clone()
    truth[:8] = IGNORE
    predicted = zeros.clone()
    predicted[:4] = 1
    scores, _ = evaluate_segmenter(Reader(), [batch_of((predicted, truth))], UNCHANGED, 3, ALONE)
    assert scores["mIoU"] == pytest.approx(100)


def test_pictures_of_different_sizes_are_evaluated_at_the_size_of_their_class_map():
    small, large = torch.zeros(16, 16).long(), torch.zeros(32, 48).long()
    scores, _ = evaluate_segmenter(
        Reader(), [batch_of((small, large), (large, small))], UNCHANGED, 3, ALONE
    )
    assert scores["accuracy"] == pytest.approx(100)


def test_pictures_of_one_size_are_evaluated_together():
    class Counting(Reader):
        batches: ClassVar[list] = []

        def forward(self, image):
            self.batches.append(tuple(image.shape))
            return super().forward(image)

    small, large = torch.zeros(16, 16).long(), torch.ones(32, 48).long()
    batch = batch_of((small, small), (large, large), (small + 2, small))
    scores, _ = evaluate_segmenter(Counting(), [batch], UNCHANGED, 3, ALONE)
    assert Counting.batches == [(2, 3, 16, 16), (1, 3, 32, 48)]
    assert scores["accuracy"] == pytest.approx(100 * (256 + 1536) / (512 + 1536))


def test_windows_give_a_class_for_every_pixel():
    image = torch.ones(1, 3, 40, 56)
    assert predict_classes(Reader(), image, (40, 56), window=16).unique().tolist() == [1]


class Painted(nn.Module):
    """Gives pixels of a picture's first two channels as logits, at a quarter of its size; the right half is doubted."""

    def __init__(self, doubt=0.0):
        super().__init__()
        self.doubt = doubt

    def forward(self, images):
        logits = nn.functional.avg_pool2d(images, 4)[:, :2].clone()
        logits[:, 0, :, logits.shape[-1] // 2 :] -= self.doubt
        return logits


def test_mirrored_views_of_a_symmetric_segmenter_change_nothing():
    image = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    plain = predict_classes(Painted(), image, (40, 60))
    assert 0.1 < plain.float().mean() < 0.9
    assert torch.equal(
        predict_classes(Painted(), image, (40, 60), views=Views(mirrored=True)), plain
    )


@pytest.mark.parametrize("doubt, expected", [(3.0, 1), (1.5, 0)])
def test_probabilities_of_views_are_averaged_at_their_places(doubt, expected):
    """The picture speaks for class 0 by 1; each half is doubted in one of the two views."""
    image = torch.zeros(1, 3, 32, 32)
    image[:, 0] = 1.0
    plain = predict_classes(Painted(doubt), image, (32, 32))
    outer = [*range(12), *range(20, 32)]  # interpolation has the middle
    assert plain[0, 0, outer].tolist() == [0] * 12 + [1] * 12
    merged = predict_classes(Painted(doubt), image, (32, 32), views=Views(mirrored=True))
    assert merged[..., outer].eq(expected).all()
    views = Views((0.5, 1.0, 2.0), mirrored=True)
    assert predict_classes(Painted(), image, (32, 32), views=views).eq(0).all()


def twins(*options) -> SegmentationSettings:
    return resolve(["--dataset", "twins", "--device", "cpu", *options], Segmentation)


def test_arguments_given_for_twins_are_added_to_those_of_the_recipe():
    usual = twins().backbone.model_kwargs
    assert "overlap=False" in usual
    assert twins("--model-kwargs", "attention=agent").backbone.model_kwargs == (
        *usual,
        "attention=agent",
    )
    replaced = twins(
        "--model", "softpp_tiny", "--model-kwargs", "depths=1,1,1,1"
    ).backbone.model_kwargs
    assert sorted(replaced) == sorted({*usual, "depths=1,1,1,1"} - {"depths=1,2,1,1"})
    other = twins("--model", "resnet18", "--model-kwargs", "drop_rate=0.1")
    assert other.backbone.model_kwargs == ("drop_rate=0.1",)


def test_twins_are_drawn_and_have_the_recipe_with_the_linear_head(tmp_path, monkeypatch):
    monkeypatch.setattr(data.twins, "COUNTS", (40, 4, 3))
    few = ["--steps", "1", "--batch-size", "1", "--output", str(tmp_path)]
    settings = twins(*few)
    assert (settings.recipe, settings.decoder.head) == ("twins", "linear")
    Segmentation.run(settings)
    model, metadata = Segmentation.load(tmp_path / "best")
    assert metadata["class_names"] == ["single", "twin"]
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 2, 16, 16)
    with pytest.raises(
        ValueError, match="`dataset` twins is generated and reads no files, got `data_dir` x"
    ):
        Segmentation(override(settings, {"data": dict(data_dir="x")}))
    metadata["arguments"]["head"] = "fpn"
    with pytest.raises(ValueError, match="head must be one of upernet, linear, got 'fpn'"):
        Segmentation.build(metadata)


def leave_attention_out(patch) -> None:
    patch.setattr(attention, "soft_attention", lambda q, k, v, *_, **__: torch.zeros_like(v))


@pytest.mark.parametrize("attends", [True, False])
def test_in_pictures_of_twins_nothing_but_the_attention_passes_from_cell_to_cell(
    attends, monkeypatch
):
    if not attends:
        leave_attention_out(monkeypatch)
    torch.manual_seed(0)
    model = Segmentation(twins()).build_model().eval()
    # Stages 3 and 4 see 2 x 2 and 4 x 4 cells at once.
    image = torch.randn(1, 3, 64, 64)
    other = image.clone()
    other[..., 32:] = 0
    first, second = (model(x)[..., :8] for x in (image, other))
    assert torch.allclose(first, second, atol=1e-6) != attends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "reached"), [(200, 80), pytest.param(400, 95, marks=pytest.mark.full)]
)
def test_twins_are_found_by_attention_and_by_nothing_without(tmp_path, steps, reached):
    def accuracy(name):
        options = "--steps", str(steps), "--eval-every", "0", "--output", str(tmp_path / name)
        return Segmentation.run(twins(*options)).scores["accuracy"]

    assert accuracy("softfree") > reached
    with pytest.MonkeyPatch.context() as patch:
        leave_attention_out(patch)
        assert 48 < accuracy("without") < 55
