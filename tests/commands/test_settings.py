"""Settings from the command line: a recipe sets defaults, a file gives all back, flags win."""

import dataclasses
import json

import pytest

from softfree.commands.settings import resolve
from softfree.training.classification import Classification, parse_model_kwargs
from softfree.training.settings import RunSettings, settings_to_json
from tests.commands.checkpoints import SHAPE, classifier_checkpoint
from tests.photos import write_photos


def parse(*argv):
    return resolve(argv, Classification)


def test_flags_win_over_the_recipe():
    settings = parse("--data-dir", "d", "--recipe", "short", "--lr", "0.5", "--epochs=3")
    assert (settings.optim.lr, settings.optim.epochs) == (0.5, 3)
    assert (settings.optim.batch_size, settings.model.img_size) == (512, 128)
    assert settings.recipe == "short"


def test_underscores_are_taken_in_flags_and_kept_in_values():
    given = parse("--data_dir=my_data", "--batch_size", "8", "--output=my_run")
    assert (given.data.data_dir, str(given.run.output)) == ("my_data", "my_run")
    assert given.optim.batch_size == 8


def test_without_data_the_digits_and_with_data_the_papers_recipe():
    assert parse().recipe == "digits"
    assert parse("--data-dir", "d").recipe == parse("--dataset=wds/x").recipe == "imagenet"


def test_little_data_has_a_recipe_of_its_own_and_batches_that_it_fills(tmp_path, caplog):
    caplog.set_level("INFO", "softfree")
    folder = str(write_photos(tmp_path / "photos", 60))
    settings = parse("--data-dir", folder)
    assert (settings.recipe, settings.data.val_split) == ("small", 0.2)
    assert settings.optim.batch_size == 16 and settings.optim.warmup_epochs == 5
    assert f"`val_split` 0.2, since {folder} has no val/" in caplog.text
    assert "`recipe` small, for fewer than 5,000 training pictures" in caplog.text
    caplog.clear()
    papers = parse("--data-dir", folder, "--recipe", "imagenet", "--epochs", "5", "--val-split=0.1")
    assert papers.optim.batch_size == 16 and papers.optim.warmup_epochs == 0.5
    assert papers.data.val_split == 0.1
    assert caplog.messages == ["`batch_size` 16 instead of 1024, for 54 training pictures"]
    assert parse("--data-dir", folder, "--batch-size", "40").optim.batch_size == 40


def test_the_warm_up_fits_the_length_of_the_run():
    data = "--data-dir", "d", "--recipe", "imagenet"
    assert parse(*data, "--epochs", "20").optim.warmup_epochs == 2
    steps = parse(*data, "--steps", "60").optim
    assert (steps.warmup_epochs, steps.warmup_steps) == (0, 2)
    given = parse(*data, "--epochs", "20", "--warmup-epochs", "7").optim
    assert given.warmup_epochs == 7


def test_a_checkpoint_to_start_from_says_what_the_model_is(tmp_path):
    start = str(classifier_checkpoint(tmp_path / "best", landmarks="average"))
    data = (
        "--data-dir",
        str(write_photos(tmp_path / "photos", 12)),
        "--pretrained-checkpoint",
        start,
    )
    settings = parse(*data)
    assert (settings.model.model, settings.model.img_size) == ("softpp_tiny", 64)
    assert parse_model_kwargs(settings.model.model_kwargs) == SHAPE | {"landmarks": "average"}
    slow = Classification.recipes["finetune"].optim
    assert (settings.recipe, settings.optim.lr) == ("small", slow.lr)
    assert (settings.optim.layer_decay, settings.optim.epochs) == (slow.layer_decay, slow.epochs)
    given = parse(*data, "--img-size", "96", "--model-kwargs", "landmarks=first", "--lr", "0.1")
    assert (given.model.img_size, given.optim.lr) == (96, 0.1)
    assert parse_model_kwargs(given.model.model_kwargs)["landmarks"] == "first"
    other = parse(*data, "--model", "softpp_small").model
    assert (other.model, other.img_size, other.model_kwargs) == ("softpp_small", 128, ())
    assert parse("--data-dir", "d", "--pretrained-checkpoint", "a.pth").recipe == "finetune"


def test_weights_of_timm_set_the_size_of_the_pictures(tmp_path):
    folder = str(write_photos(tmp_path, 12))
    settings = parse("--data-dir", folder, "--model", "resnet18", "--pretrained")
    assert settings.model.img_size == 224 and settings.model.pretrained


def test_the_imagenet_recipe_is_the_papers():
    settings = parse("--data-dir", "d", "--recipe", "imagenet")
    optim, augment = settings.optim, settings.augment
    assert (optim.batch_size, optim.epochs, optim.warmup_epochs) == (1024, 300, 10)
    assert (optim.lr, optim.min_lr, optim.weight_decay, optim.clip_grad) == (1e-3, 5e-5, 0.05, 1.0)
    assert optim.sched == "cosine" and augment.smoothing == 0.1 and augment.hflip == 0.5
    assert augment.mixup > 0 and augment.cutmix > 0
    assert settings.model.img_size == 224 and 224 / augment.crop_pct == 256


def test_the_short_recipe_is_the_table_s():
    settings = parse("--data-dir", "d", "--recipe", "short")
    optim, augment = settings.optim, settings.augment
    assert (optim.batch_size, optim.epochs, optim.lr) == (512, 20, 1e-3)
    assert optim.warmup_epochs / optim.epochs == 0.1 and optim.min_lr / optim.lr == 0.05
    assert (optim.weight_decay, optim.clip_grad) == (0.05, 1.0)
    assert augment.scale == (0.6**2, 1.0) and augment.ratio == (1.0, 1.0)
    assert augment.smoothing == 0.1 and augment.hflip == 0.5
    assert augment.mixup == augment.cutmix == augment.color_jitter == augment.reprob == 0


def test_a_recipe_s_batch_is_shared_out_among_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert parse("--data-dir", "d").optim.batch_size == 128
    assert parse("--data-dir", "d", "--batch-size", "5").optim.batch_size == 5
    monkeypatch.setenv("WORLD_SIZE", "7")
    with pytest.raises(ValueError, match="batch size of 1024 can't be divided among 7 processes"):
        parse("--data-dir", "d")


def test_a_written_file_gives_the_settings_back_and_flags_win_over_it(tmp_path):
    settings = parse("--recipe", "finetune", "--freeze", "stem.*", "a", "--data-dir", "d")
    file = tmp_path / "settings.json"
    file.write_text(settings_to_json(settings))
    assert parse("--config", str(file)) == settings
    changed = parse("--config", str(file), "--lr", "3")
    assert changed == dataclasses.replace(
        settings, optim=dataclasses.replace(settings.optim, lr=3.0)
    )


def test_a_file_does_not_say_where_a_run_writes(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"run": {"output": "elsewhere", "resume": "elsewhere", "seed": 7}}))
    run = parse("--config", str(file)).run
    assert (run.output, run.resume, run.seed) == (RunSettings.output, RunSettings.resume, 7)


def test_files_and_recipes_that_are_none_are_refused(tmp_path):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"optim": {"learning_rate": 1}}))
    with pytest.raises(
        ValueError,
        match="settings.json of this command: .*it has unknown settings: 'learning_rate'",
    ):
        parse("--config", str(file))
    with pytest.raises(FileNotFoundError, match="--config .*nowhere does not exist"):
        parse("--config", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="--recipe must be one of digits, imagenet"):
        parse("--recipe", "long")
    with pytest.raises(ValueError, match="can't be used together"):
        parse("--recipe", "short", "--config", str(file))
