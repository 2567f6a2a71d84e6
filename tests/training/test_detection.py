"""Detection on the engine: recipes are the papers', a run learns, and its checkpoint is enough to go on."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("faster_coco_eval")

from softfree.data.detection import load_detection
from softfree.data.drawing import objects_tile
from softfree.models.views import Views
from softfree.training.detection import (
    RECIPES,
    Detection,
    DetectionSettings,
    detect,
    for_evaluation,
)
from softfree.training.distributed import Processes
from softfree.training.engine import train
from softfree.training.settings import override, settings_to_json

ALONE = Processes(0, 1, torch.device("cpu"))
TINY = ("embed_dims=16,32,48,64", "num_heads=1,2,3,4", "depths=1,1,1,1", "img_size=64")


def tiny(tmp_path, detector="retinanet", **optim) -> DetectionSettings:
    return override(
        RECIPES["shapes"],
        {
            "data": dict(short_sides=(64,), short_side=64),
            "detector": dict(detector=detector, width=16, anchor_size=10, proposals=16),
            "backbone": dict(model_kwargs=TINY),
            "optim": dict(dict(batch_size=2, steps=3, warmup_steps=1), **optim),
            "run": dict(output=tmp_path / "out", eval_every=0, log_interval=1),
        },
    )


def shapes(detector="retinanet", count=6):
    return load_detection(None, masks=detector == "mask-rcnn", shapes=(count, 3), side=64)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_fits_the_settings(name):
    assert RECIPES[name].recipe == name


def test_the_recipes_are_those_of_the_paper():
    one = RECIPES["1x"]
    three = RECIPES["3x"]
    assert (one.optim.epochs, one.optim.decay_milestones) == (12, (8, 11))
    assert (three.optim.epochs, three.optim.decay_milestones) == (36, (27, 33))
    for settings in (one, three):
        assert (settings.optim.lr, settings.optim.weight_decay, settings.optim.batch_size) == (
            1e-4,
            0.01,
            16,
        )
        assert (settings.data.short_side, settings.data.max_size) == (800, 1333)
    assert one.data.short_sides == (800,)
    assert (min(three.data.short_sides), max(three.data.short_sides)) == (480, 800)


def test_without_a_recipe_the_data_decide():
    assert Detection.usual_recipe({"data_dir": "coco"}) == "1x"
    assert Detection.usual_recipe({}) == "shapes"


def test_balanced_epochs_show_pictures_of_rare_classes_again(tmp_path):
    data = shapes(count=40)
    data.train.labels = lambda index: [2] if index == 7 else [1]
    for balance, least, most in ((0.0, 1, 1), (0.4, 2, 4)):
        task = Detection(override(tiny(tmp_path), {"data": dict(balance=balance)}), data)
        order = task.order(40, 2, torch.Generator().manual_seed(0))
        assert len(set(order.tolist())) == 40
        assert least <= (order % 40 == 7).sum() <= most


@pytest.mark.parametrize("detector", ["retinanet", "mask-rcnn"])
def test_a_run_writes_a_checkpoint_that_scores_as_the_run_says(tmp_path, detector):
    settings = tiny(tmp_path, detector)
    task = Detection(settings, shapes(detector))
    outcome = train(task, settings.optim, settings.run, settings_to_json(settings))
    assert outcome.position.step == 3
    assert task.metric in outcome.scores
    assert {"preview.png", "predictions.png"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    model, metadata = Detection.load(tmp_path / "out" / "best")
    assert metadata["class_names"] == ["circle", "square", "triangle", "star", "cross"]
    assert metadata["detector"] == detector
    batches = [task.collate_eval([task.eval_data[index] for index in range(3)])]
    with torch.no_grad():
        scores = task.evaluate(model, batches, Processes(0, 1, torch.device("cpu")))
    assert scores == pytest.approx({name: outcome.scores[name] for name in scores})
    assert (
        json.loads((tmp_path / "out" / "best" / "metadata.json").read_text())["task"] == "detection"
    )


@pytest.mark.parametrize("detector", ["retinanet", "mask-rcnn"])
def test_what_is_found_in_a_picture_does_not_depend_on_the_others_of_its_batch(tmp_path, detector):
    torch.manual_seed(1)
    model = Detection(tiny(tmp_path, detector), shapes(detector)).build_model().eval()
    model.score_thresh = 0.0  # of RetinaNet, which is sure of nothing yet
    sizes = [(64, 90), (80, 64), (64, 95), (128, 190), (100, 100)]
    pictures = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]
    with torch.no_grad():
        calls = []
        handle = model.backbone.register_forward_hook(lambda *call: calls.append(call[1][0].shape))
        together = detect(model, pictures)
        handle.remove()
        assert [*map(tuple, calls)] == [(3, 3, 64, 96), (1, 3, 96, 64), (1, 3, 64, 64)]
        alone = [detect(model, [picture])[0] for picture in pictures]
    for a, b in zip(together, alone, strict=True):
        assert a["scores"].numel() > 0
        torch.testing.assert_close(a["scores"], b["scores"])
        # Scores that are alike but for rounding may come in either order.
        apart = torch.cdist(a["boxes"], b["boxes"], p=torch.inf)
        assert max(apart.amin(0).max(), apart.amin(1).max()) < 1e-2


def test_pictures_that_the_detector_sees_at_one_size_follow_each_other_in_an_evaluation():
    data = shapes("mask-rcnn", 1).val
    for image, size in zip(data.images, [(64, 90), (80, 64), (128, 190)], strict=True):
        image["height"], image["width"] = size
    assert for_evaluation(data, 64, 192).indices == [0, 2, 1]


def test_an_evaluation_reads_pictures_and_ids_alone():
    data = shapes("mask-rcnn").val
    pictures = for_evaluation(data, 64, 192)
    for index in range(3):
        (image, target), (expected, truth) = pictures[index], data[index]
        assert type(image) is torch.Tensor
        assert torch.equal(image, expected)
        assert target == {"image_id": truth["image_id"]}
    assert data.masks


def test_a_run_goes_on_where_it_stopped(tmp_path):
    settings = tiny(tmp_path)
    # The rate of a step must not depend on the length of the run.
    full = dataclasses.replace(settings.optim, sched="multistep")
    half = dataclasses.replace(full, steps=2)
    parts = dataclasses.replace(settings.run, output=tmp_path / "parts")
    straight = dataclasses.replace(settings.run, output=tmp_path / "straight")
    for optim, run in (
        (full, straight),
        (half, parts),
        (full, dataclasses.replace(parts, resume="auto")),
    ):
        train(Detection(settings, shapes()), optim, run, "{}")
    one, _ = Detection.load(tmp_path / "straight" / "last")
    other, _ = Detection.load(tmp_path / "parts" / "last")
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], msg=name)


@pytest.mark.parametrize("detector", ["retinanet", "mask-rcnn"])
def test_a_few_steps_on_one_batch_lower_the_loss(tmp_path, detector):
    torch.manual_seed(1)
    task = Detection(tiny(tmp_path, detector), shapes(detector, 2))
    task.train_data.transform = None
    model = task.build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    batch = task.collate([task.train_data[0], task.train_data[1]])
    losses = []
    for _ in range(12):
        loss, numbers = task.train_step(model, batch)
        assert loss.item() == pytest.approx(
            sum(value.item() for value in numbers.values()), rel=1e-4
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-3:]) < 0.8 * losses[0]


def test_the_order_of_an_epoch_keeps_wide_and_tall_apart(tmp_path):
    data = shapes(count=8)
    for index, image in enumerate(data.train.images):
        image["width"], image["height"] = (80, 64) if index % 2 else (64, 80)
    generator = torch.Generator().manual_seed(0)
    order = Detection(tiny(tmp_path), data).order(8, 2, generator).tolist()
    pairs = [{index % 2 for index in order[i : i + 2]} for i in range(0, 8, 2)]
    assert all(len(pair) == 1 for pair in pairs)


def test_a_batch_without_a_readable_picture_is_filled_with_the_first_of_the_set(tmp_path):
    from softfree.data.images import Unreadable

    task = Detection(tiny(tmp_path), shapes())
    bad = [Unreadable("a.jpg", "the file is empty"), Unreadable("b.jpg", "the file is empty")]
    batch = task.collate(bad)
    assert batch.image_ids == [task.train_data[0][1]["image_id"]] * 2
    assert len(batch.images) == len(batch.targets) == 2
    assert batch.unreadable == bad


def test_an_unknown_model_is_refused_before_anything_is_read(tmp_path):
    settings = override(tiny(tmp_path), {"backbone": dict(model="softpp_tinny")})
    with pytest.raises(ValueError, match="did you mean 'softpp_tiny'"):
        Detection.run(settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(short_sides=()), "`short_sides` must be at least 1, got none"),
        (dict(short_side=0), "`short_side` must be at least 1, got 0"),
        (dict(max_size=-1), "`max_size` must be at least 1, got -1"),
    ],
)
def test_sizes_that_no_picture_can_have_are_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        Detection(override(tiny(tmp_path), {"data": given}), shapes())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(width=0), "`width` must be at least 1, got 0"),
        (dict(width=7), "`width` must be a multiple of 8 where the heads have GroupNorm, got 7"),
        (dict(width=260), "`width` must be a multiple of 32 where"),
        (dict(width=0, detector="mask-rcnn"), "`width` must be at least 1, got 0"),
        (dict(anchor_size=-4), "`anchor_size` must be at least 1, got -4"),
        (dict(proposals=-3, detector="mask-rcnn"), "`proposals` must be at least 2, got -3"),
        (dict(proposals=1, detector="mask-rcnn"), "`proposals` must be at least 2, got 1"),
    ],
)
def test_detectors_that_cannot_be_built_or_trained_are_refused(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        Detection(override(tiny(tmp_path), {"detector": given}), shapes())


def test_a_checkpoint_of_another_task_is_refused(tmp_path):
    settings = tiny(tmp_path)
    train(Detection(settings, shapes()), settings.optim, settings.run, "{}")
    path = tmp_path / "out" / "best" / "metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "task": "classification"}))
    with pytest.raises(ValueError, match="is a checkpoint of classification, not of detection"):
        Detection.load(path.parent)


@pytest.mark.parametrize(
    ("detector", "names"),
    [
        ("retinanet", {"class", "box"}),
        ("mask-rcnn", {"class", "box", "mask", "object", "rpn_box"}),
    ],
)
def test_losses_have_short_names_in_the_log(tmp_path, detector, names):
    task = Detection(tiny(tmp_path, detector), shapes(detector, 2))
    batch = task.collate([task.train_data[0], task.train_data[1]])
    total, losses = task.train_step(task.build_model(), batch)
    assert losses.keys() == names
    torch.testing.assert_close(total, sum(losses.values()))


class Finder(torch.nn.Module):
    """Finds one object, where the picture is not black; sure of it by how far to the left it lies."""

    nms_thresh, detections_per_img = 0.5, 2

    def __init__(self):
        super().__init__()
        self.transform = SimpleNamespace(min_size=(40,), max_size=80)
        self.seen = []

    def forward(self, images):
        self.seen.append((*self.transform.min_size, self.transform.max_size))
        return [self.find(image[0] > 0) for image in images]

    def find(self, there):
        top, left = there.nonzero().amin(0).tolist()
        bottom, right = (1 + there.nonzero().amax(0)).tolist()
        return {
            "boxes": torch.tensor([[left, top, right, bottom]]).float(),
            "labels": torch.tensor([1]),
            "scores": torch.tensor([1 - left / there.shape[1]]),
            "masks": there[None, None].float(),
        }


@pytest.fixture
def spot():
    image = torch.zeros(3, 30, 50, dtype=torch.uint8)
    image[:, 4:9, 30:41] = 255
    return image


def test_what_is_found_in_a_mirror_image_lies_where_it_is(spot):
    model = Finder()
    [plain] = detect(model, [spot])
    [merged] = detect(model, [spot], Views(mirrored=True))
    # Once, and as sure as in the view that was surest: the object is 9 pixels from the right.
    assert merged["scores"].tolist() == pytest.approx([1 - 9 / 50])
    assert plain["scores"].tolist() == pytest.approx([1 - 30 / 50])
    for name in ("boxes", "labels", "masks"):
        assert torch.equal(merged[name], plain[name]), name


def test_views_of_other_sizes_leave_the_detector_as_it_was(spot):
    model = Finder()
    detect(model, [spot, spot], Views((0.5, 1.0), mirrored=True))
    assert model.seen == [(20, 40), (20, 40), (40, 80), (40, 80)] * 2
    assert (model.transform.min_size, model.transform.max_size) == ((40,), 80)


def test_no_more_objects_are_kept_of_all_views_than_of_one(spot):
    class Restless(Finder):
        def find(self, there):
            found = super().find(there)
            found["boxes"] += 100 * len(self.seen)
            return found

    [merged] = detect(Restless(), [spot], Views((0.5, 1.0, 2.0)))
    assert len(merged["boxes"]) == 2


def test_predictions_are_drawn_below_the_truth(tmp_path):
    data = shapes("mask-rcnn")
    task = Detection(tiny(tmp_path, "mask-rcnn"), data)
    truth = dict(data.val[1][1], scores=torch.tensor(1.0))

    class Seer(torch.nn.Module):
        """Finds in each picture the objects of one, the last of them with little certainty."""

        transform = task.build_model().transform

        def forward(self, images):
            scores = torch.ones(len(truth["labels"]))
            scores[-1] = 0.1
            found = dict(
                boxes=truth["boxes"], labels=truth["labels"], scores=scores,
                masks=truth["masks"][:, None].float(),
            )  # fmt: skip
            return [found for _ in images]

    tiles = task.draw_predictions(Seer(), [0, 1], torch.device("cpu"))
    assert [tile.caption.split(",")[0] for tile in tiles] == ["truth", "truth", "", "", "predicted", "predicted", "", ""]  # fmt: skip
    names, image = task.data.class_names, data.val[1][0]
    sure = {
        name: value[:-1] for name, value in truth.items() if name in ("boxes", "labels", "masks")
    }
    expected = objects_tile(image, {**sure, "scores": torch.ones(len(sure["labels"]))}, names)
    assert tiles[5].picture.tobytes() == expected.picture.tobytes()
    assert tiles[1].picture.tobytes() != tiles[5].picture.tobytes()
