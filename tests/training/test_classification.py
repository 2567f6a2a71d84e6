"""Classification: what a step computes, what a checkpoint can do, where weights come from."""

import dataclasses
import json
import os
import signal

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

from softfree.data.images import Batch, Unreadable
from softfree.training.checkpoint import read_weights
from softfree.training.classification import (
    AugmentSettings,
    Classification,
    ClassificationSettings,
    DataSettings,
    ModelSettings,
    Normalize,
    create_network,
    eval_transform,
    evaluate_classifier,
    format_model_kwargs,
    load_pretrained,
    parse_model_kwargs,
    smoothed_cross_entropy,
)
from softfree.training.distributed import Processes
from softfree.training.engine import train
from softfree.training.parameters import freeze
from softfree.training.sampling import seed_all
from softfree.training.settings import OptimSettings, RunSettings
from softfree.training.tasks import load_for_inference

SMALL = ("embed_dims=16,16,16,16", "num_heads=1,1,1,1", "depths=1,1,1,1", "mlp_ratio=1.0")
ALONE = Processes(0, 1, torch.device("cpu"))


def settings(output=None, model=None, augment=None, optim=None, **run):
    return ClassificationSettings(
        model=ModelSettings(**{"img_size": 32, "model_kwargs": SMALL, **(model or {})}),
        augment=AugmentSettings(**(augment or {})),
        optim=OptimSettings(**{"batch_size": 16, "steps": 2, "warmup_epochs": 0, **(optim or {})}),
        run=RunSettings(
            **{"output": output, "workers": 0, "device": "cpu", "log_interval": 1, **run}
        ),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    output = tmp_path_factory.mktemp("trained")
    Classification.run(settings(output))
    return output


def test_a_checkpoint_is_enough_to_use_the_model(trained):
    model, metadata = Classification.load(trained / "best")
    assert metadata["class_names"] == [str(digit) for digit in range(10)]
    assert metadata["model_kwargs"]["embed_dims"] == [16, 16, 16, 16]
    task = Classification(settings())
    image = eval_transform(metadata)(task.eval_data.read(0)[0])
    assert image.dtype == torch.uint8 and image.shape == (3, 32, 32)
    normalize = Normalize(metadata["mean"], metadata["std"])
    logits = model(normalize(image[None]))
    assert logits.shape == (1, 10) and not model.training
    again, _ = load_for_inference(trained / "best")
    assert torch.equal(again(normalize(image[None])), logits)


def test_scores_of_the_loaded_model_are_those_of_the_run(trained):
    model, _ = Classification.load(trained / "best")
    task = Classification(settings())
    items = [task.eval_data[index] for index in range(len(task.eval_data))]
    batches = [task.collate_eval(items[:100]), task.collate_eval(items[100:])]
    with torch.no_grad():
        scores = evaluate_classifier(model, batches, task.normalize, ALONE)
    saved = json.loads((trained / "best" / "metadata.json").read_text())["run"]["best"]
    assert scores["top1"] == pytest.approx(saved) and scores["samples"] == 360


def test_a_run_shows_its_samples_and_predictions_and_another_begins_without_them(trained, tmp_path):
    def page(folder, name):
        with Image.open(folder / name) as opened:
            return opened.convert("RGB")

    task = Classification(settings())
    seed, device = RunSettings().seed, torch.device("cpu")
    assert task.preview(seed, device).tobytes() == page(trained, "preview.png").tobytes()
    model, _ = Classification.load(trained / "best")
    with torch.no_grad():
        seen = task.predictions(model, 2, device)
    assert seen.tobytes() == page(trained, "predictions.png").tobytes()
    for name in ("preview.png", "predictions.png"):
        (tmp_path / name).write_bytes(b"of an earlier run")
    Classification.run(settings(tmp_path, eval_every=1000, overwrite=True, optim={"steps": 1}))
    assert page(tmp_path, "preview.png").tobytes() == page(trained, "preview.png").tobytes()


@pytest.mark.parametrize("augment", [dict(mixup=0.8), dict(reprob=1.0), dict(smoothing=0.1)])
def test_what_is_drawn_is_what_the_model_is_given(augment):
    task = Classification(settings(augment=augment))
    batch = task.collate([task.train_data[index] for index in range(4)])
    seed_all(0)
    given = task.prepare(batch)
    images = given.images if "smoothing" not in augment else task.normalize(batch.images)
    seed_all(0)
    tiles = task.draw_batch(batch)
    for tile, image in zip(tiles, images, strict=True):
        # A pixel of 32 x 32 is a square of the tile.
        shown = task.normalize(pil_to_tensor(tile.picture)[:, 5::10, 5::10])
        least, most = (task.normalize(torch.full((3, 1, 1), level)) for level in (0, 255))
        torch.testing.assert_close(shown, image.clamp(least, most), rtol=0, atol=0.01)
    if "mixup" in augment:
        assert all("%" in tile.caption for tile in tiles)
    else:
        assert [tile.caption for tile in tiles] == [str(label) for label in batch.labels.tolist()]


def test_scores_count_hits_among_the_first_and_the_first_five():
    logits = torch.eye(8)[:6] + 0.1 * torch.arange(8) / 8
    # Rows 0 to 5 rank their own number first, then 7, 6, 5, 4 (fewer own): labels one hit, four near, one far.
    labels = torch.tensor([0, 7, 6, 7, 6, 0])
    batches = [Batch(logits[:4], labels[:4], []), Batch(logits[4:], labels[4:], [])]
    batches.append(
        Batch(torch.empty(0, 8), torch.empty(0, dtype=torch.int64), [Unreadable("a", "b")])
    )
    identity = torch.nn.Identity()
    scores = evaluate_classifier(identity, batches, identity, ALONE)
    assert scores["top1"] == pytest.approx(100 / 6) and scores["top5"] == pytest.approx(500 / 6)
    assert scores["loss"] == pytest.approx(F.cross_entropy(logits, labels).item())
    assert scores["samples"] == 6


def test_pictures_are_normalised_as_timm_does():
    image = torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    expected = (image / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(Normalize(mean, std)(image), expected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_normalised_pictures_have_the_layout_asked_for_and_the_same_bits(layout):
    pictures = torch.rand(2, 5, 3, 5).mul(255).transpose(1, 2)
    normalize = Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])
    found = normalize(pictures, layout)
    assert found.is_contiguous(memory_format=layout)
    assert torch.equal(found, normalize(pictures.contiguous(memory_format=layout)))


@pytest.mark.parametrize("channels_last", [False, True])
def test_crops_on_the_device_have_the_layout_of_the_run(channels_last):
    given = settings(augment={"color_jitter": 0.0})
    run = dataclasses.replace(given.run, channels_last=channels_last)
    task = Classification(
        dataclasses.replace(given, data=DataSettings(data_on_device=True), run=run)
    )
    seed_all(0)
    plan = task.plan_epoch(torch.arange(6))
    images, labels = task.look_up(plan)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert images.shape == (6, 3, 32, 32) and images.is_contiguous(memory_format=layout)
    assert torch.equal(images, task.normalize(task.crops(plan[1:]).contiguous()))
    assert labels.tolist() == [task.files[0].read(index)[1] for index in range(6)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_smoothed_cross_entropy_is_that_of_torch(smoothing):
    logits, labels = torch.randn(6, 10, requires_grad=True), torch.tensor([3, 9, 0, 3, 1, 2])
    ours = smoothed_cross_entropy(logits, labels, smoothing)
    theirs = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def test_smoothed_cross_entropy_of_half_precision_is_computed_in_float32():
    logits, labels = torch.randn(64, 100).bfloat16(), torch.randint(100, (64,))
    with torch.autocast("cpu", torch.bfloat16):
        ours = smoothed_cross_entropy(logits, labels, 0.1)
    torch.testing.assert_close(ours, F.cross_entropy(logits.float(), labels, label_smoothing=0.1))


def test_mixed_labels_are_smoothed_once(monkeypatch):
    images, labels = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8), torch.arange(4)
    logits = torch.randn(4, 10)
    plain = Classification(settings(augment={"smoothing": 0.2}))
    loss, _ = plain.train_step(lambda x: logits, Batch(images, labels, []))
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, label_smoothing=0.2))
    mixed = Classification(settings(augment={"smoothing": 0.2, "mixup": 0.8}))
    probabilities = torch.eye(10)[labels]
    monkeypatch.setattr(mixed, "mixup", lambda images, labels: (images, probabilities))
    loss, _ = mixed.train_step(lambda x: logits, mixed.prepare(Batch(images, labels, [])))
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels))


def on_device(output=None, **changes):
    given = settings(output, augment={"color_jitter": 0.0}, **changes)
    return dataclasses.replace(given, data=DataSettings(data_on_device=True))


def test_pictures_on_the_device_give_the_same_crops_after_a_resume(tmp_path):
    Classification.run(on_device(tmp_path / "once"))
    Classification.run(on_device(tmp_path / "again"))
    once, again = (read_weights(tmp_path / name / "last") for name in ("once", "again"))
    assert all(torch.equal(once[name], again[name]) for name in once)

    class Stopped(Classification):
        def train_step(self, model, batch):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().train_step(model, batch)

    given = on_device(tmp_path / "stopped")
    assert train(Stopped(given), given.optim, given.run, "{}").position.step == 1
    assert Classification.run(on_device(tmp_path / "stopped", resume="auto")).position.step == 2
    resumed = read_weights(tmp_path / "stopped" / "last")
    assert all(torch.equal(once[name], resumed[name]) for name in once)
    crops = []
    for _ in range(2):  # a new task reads the pictures anew, as a run that goes on does
        task = Classification(on_device())
        seed_all(0, 5)
        plan = task.plan_epoch(torch.tensor([3, 1]))
        crops.append(task.crops(plan[1:]))
    assert torch.equal(*crops)
    assert plan[0].tolist() == [task.files[0].read(index)[1] for index in (3, 1)]


def test_pictures_on_the_device_refuse_what_is_done_on_the_cpu():
    given = dataclasses.replace(settings(), data=DataSettings(data_on_device=True))
    with pytest.raises(ValueError, match="`color_jitter` 0 and no `aa` .*got `color_jitter` 0.4"):
        Classification(given)
    with pytest.raises(ValueError, match="`train_interpolation` bilinear, bicubic, random"):
        Classification(
            dataclasses.replace(
                given, augment=AugmentSettings(color_jitter=0.0, train_interpolation="nearest")
            )
        )


def test_positions_can_be_laid_out_for_another_size_and_a_checkpoint_remembers_it(tmp_path):
    Classification.run(settings(tmp_path, model={"positions_at": 64}))
    model, metadata = Classification.load(tmp_path / "best")
    assert metadata["img_size"] == 32
    assert model.stages[0].pos_embed.weight.shape[1] == (64 // 4) ** 2
    others = Classification(
        settings(model={"positions_at": 64, "model": "resnet18", "model_kwargs": ()})
    )
    assert others.model_kwargs == {}


def test_digits_are_not_mirrored():
    assert "Flip" not in str(Classification(settings(augment={"hflip": 0.5})).train_data.transform)


def test_a_batch_of_bad_files_alone_is_filled_with_another_picture():
    task = Classification(settings())
    batch = task.collate([Unreadable("a.jpg", "empty"), Unreadable("b.jpg", "empty")])
    assert len(batch.images) == len(batch.labels) == 2
    assert [file.path for file in batch.unreadable] == ["a.jpg", "b.jpg"]


def test_random_erasing_works_on_the_device_of_the_pictures():
    task = Classification(settings(augment={"reprob": 1.0}))
    batch = task.collate([task.train_data[index] for index in range(4)])
    changed = task.prepare(batch).images != task.normalize(batch.images)
    assert changed.flatten(1).any(1).all()


def test_models_without_stochastic_depth_can_be_trained():
    given = {"model": "vgg11", "model_kwargs": (), "img_size": 32}
    assert Classification(settings(model=given)).build_model().num_classes == 10


def test_data_without_a_readable_picture_stops_the_run():
    task = Classification(settings())
    bad = Unreadable("a.jpg", "the file is empty")
    task.train_data = [bad] * 4
    with pytest.raises(
        ValueError, match="none of the training pictures .* a.jpg: the file is empty"
    ):
        task.collate([bad, bad])


def test_mixup_refuses_odd_batches():
    with pytest.raises(ValueError, match="even `batch_size`, got 15"):
        Classification(settings(augment={"cutmix": 1.0}, optim={"batch_size": 15}))


def test_fine_tuning_takes_the_body_and_a_new_head(trained):
    kwargs = dict(embed_dims=(16,) * 4, num_heads=(1,) * 4, depths=(1,) * 4, mlp_ratio=1.0)
    source, _ = Classification.load(trained / "best")
    same = create_network("softfree_tiny", 10, 32, kwargs)
    loaded = load_pretrained(same, trained / "best", "softfree_tiny", list(map(str, range(10))))
    assert str(loaded) == f"{len(same.state_dict())} tensors loaded"
    assert torch.equal(same.head.weight, source.head.weight)
    other = create_network("softfree_tiny", 3, 64, kwargs)  # another size, too
    head = other.head.weight.clone()
    loaded = load_pretrained(other, trained / "best", "softfree_tiny")
    assert loaded.replaced == ("head.weight", "head.bias") and not loaded.new
    assert loaded.resized == tuple(f"stages.{n}.pos_embed.weight" for n in range(4))
    assert "4 resized (stages.0.pos_embed.weight" in str(loaded)
    assert len(loaded.taken) == len(other.state_dict()) - 6
    assert torch.equal(other.head.weight, head)
    assert torch.equal(other.stem[0].conv.weight, source.stem[0].conv.weight)
    with pytest.raises(ValueError, match="another architecture than softfree_tiny"):
        load_pretrained(
            create_network("softfree_tiny", 3, 32, {}), trained / "best", "softfree_tiny"
        )


def test_as_many_classes_of_other_names_get_a_new_head(trained):
    kwargs = dict(embed_dims=(16,) * 4, num_heads=(1,) * 4, depths=(1,) * 4, mlp_ratio=1.0)
    model = create_network("softfree_tiny", 10, 32, kwargs)
    head = model.head.weight.clone()
    loaded = load_pretrained(model, trained / "best", "softfree_tiny", list("abcdefghij"))
    assert loaded.replaced == ("head.weight", "head.bias") and torch.equal(model.head.weight, head)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"depths": [1, 1, 2, 1], "landmarks": "conv:49", "a": "3", "b": [4], "c": None}],
)
def test_arguments_of_a_model_can_be_written_as_they_are_typed(arguments):
    expected = {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
    assert parse_model_kwargs(format_model_kwargs(arguments)) == expected


@pytest.mark.parametrize("aa", ["rand-m10-inc1", "rand-m10", "original", "v0"])
def test_augmentations_never_ask_for_pictures_of_no_bits(aa):
    transform = Classification(settings(augment={"aa": aa})).train_data.transform
    step = next(step for step in transform.transforms if "Augment" in type(step).__name__)
    ops = step.ops if hasattr(step, "ops") else [op for policy in step.policy for op in policy]
    posterize = [op for op in ops if op.name.startswith("Posterize")]
    assert posterize or aa == "rand-m10"
    for op in posterize:
        op.prob = 1.0
        assert op(Image.new("RGB", (4, 4), (250, 130, 90))).getpixel((0, 0)) != (0, 0, 0)


def test_weights_that_timm_fetches_are_no_part_of_a_checkpoint(tmp_path, monkeypatch):
    source = create_network("resnet10t", 1000, 32, {})
    path = tmp_path / "resnet10t.pth"
    torch.save(source.state_dict(), path)
    create, fetched = timm.create_model, []

    def fetch(name, pretrained=False, **kwargs):
        fetched.append(pretrained)
        overlay = {"pretrained_cfg_overlay": {"file": str(path)}} if pretrained else {}
        return create(name, pretrained=pretrained, **overlay, **kwargs)

    monkeypatch.setattr(timm, "create_model", fetch)
    start = {"model": "resnet10t", "model_kwargs": (), "pretrained": True}
    still = settings(tmp_path / "out", model=start, optim={"lr": 0.0, "min_lr": 0.0})
    Classification.run(still)
    assert any(fetched)
    fetched.clear()
    model, metadata = Classification.load(tmp_path / "out" / "best")
    assert torch.equal(model.conv1[0].weight, source.conv1[0].weight) and model.num_classes == 10
    assert metadata["model_kwargs"] == {} and not any(fetched)
    more = dataclasses.replace(still.optim, steps=3)
    Classification.run(
        dataclasses.replace(still, optim=more, run=dataclasses.replace(still.run, resume="auto"))
    )
    assert not any(fetched)


def test_weights_that_cannot_be_fetched_are_said_so_in_a_line(monkeypatch):
    with pytest.raises(ValueError, match="`pretrained`: timm has no weights of softfree_tiny"):
        Classification(settings(model={"pretrained": True}))
    task = Classification(
        settings(model={"model": "resnet10t", "model_kwargs": (), "pretrained": True})
    )

    def unreachable(*_, **__):
        raise ConnectionError("no way there")

    monkeypatch.setattr(timm, "create_model", unreachable)
    with pytest.raises(ValueError, match=r"of resnet10t can't be fetched \(no way there\)"):
        task.build_model()
    with pytest.raises(ValueError, match="can't be used together"):
        Classification(settings(model={"pretrained": True, "pretrained_checkpoint": "a"}))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_come_from_files_of_timm_too(tmp_path, suffix):
    from safetensors.torch import save_file

    kwargs = dict(embed_dim=16, depth=1, num_heads=1, patch_size=16)
    source = create_network("vit_tiny_patch16_224", 5, 32, kwargs)
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": source.state_dict()}, path)
    else:
        save_file(source.state_dict(), path)
    model = create_network("vit_tiny_patch16_224", 7, 32, kwargs)
    assert load_pretrained(model, path, "vit_tiny_patch16_224").replaced
    assert torch.equal(model.blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight)


def test_frozen_parameters_stay_and_the_others_move(tmp_path):
    task_settings = settings(tmp_path, model={"freeze": ("stem.*", "stages.0.*")})
    torch.manual_seed(0)
    Classification.run(task_settings)
    moved, _ = Classification.load(tmp_path / "last")
    still = dataclasses.replace(task_settings, optim=OptimSettings(batch_size=16, steps=1, lr=0.0))
    still = dataclasses.replace(still, run=dataclasses.replace(still.run, output=tmp_path / "0"))
    Classification.run(still)
    start, _ = Classification.load(tmp_path / "0" / "last")
    for (name, before), after in zip(start.named_parameters(), moved.parameters(), strict=True):
        if name == "stages.3.blocks.0.attn.log_bandwidth":
            continue  # of one token, which has no distance to others
        frozen = name.startswith(("stem.", "stages.0."))
        assert torch.equal(before, after) == frozen, name


def test_globs_that_match_nothing_are_refused():
    with pytest.raises(ValueError, match="`freeze` 'body.*' matches no parameter; names look like"):
        freeze(torch.nn.Linear(2, 2), ["body.*"])


def test_later_layers_learn_faster_with_layer_decay():
    task = Classification(settings())
    optim = OptimSettings(layer_decay=0.5)
    model = task.build_model()
    scales = {
        id(parameter): group["lr_scale"]
        for group in task.parameter_groups(model, optim)
        for parameter in group["params"]
    }
    assert scales[id(model.head.weight)] == 1.0
    assert scales[id(model.stem[0].conv.weight)] < 0.1


def test_norms_and_positions_have_no_weight_decay():
    task = Classification(settings())
    model = task.build_model()
    groups = task.parameter_groups(model, OptimSettings(weight_decay=0.05))
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    named = dict(model.named_parameters())
    assert decay[id(named["stages.0.pos_embed.weight"])] == decay[id(named["head.bias"])] == 0
    assert decay[id(named["head.weight"])] == 0.05


def test_unknown_models_get_advice():
    with pytest.raises(ValueError, match="no model 'softpp_tinny'; did you mean 'softpp_tiny'"):
        Classification(settings(model={"model": "softpp_tinny"}))
    with pytest.raises(ValueError, match="`model_kwargs`: softfree_tiny takes no argument 'wings'"):
        Classification(settings(model={"model_kwargs": ("wings=2",)}))
    with pytest.raises(ValueError, match="`model_kwargs`: embed_dims must have 4 values"):
        Classification(settings(model={"model_kwargs": ("embed_dims=32,64",)}))
    with pytest.raises(ValueError, match="`attention`: attention must be one of"):
        Classification(settings(model={"attention": "linear"}))
    with pytest.raises(ValueError, match="`img_size` must be at least 1, got 0"):
        Classification(settings(model={"img_size": 0}))
