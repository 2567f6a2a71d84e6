"""Settings: values that can't be meant are refused."""

import json

import pytest

from softfree.training.classification import ClassificationSettings
from softfree.training.settings import (
    OptimSettings,
    RunSettings,
    check_settings,
    parse_interval,
    read_settings,
    settings_to_json,
)


@pytest.mark.parametrize("text", ["", "e", "0", "-1", "2m", "1.5e"])
def test_intervals_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="`save_every` must be"):
        parse_interval(text)


@pytest.mark.parametrize(
    "changes, flag",
    [
        (dict(batch_size=0), "`batch_size`"),
        (dict(epochs=0), "`epochs`"),
        (dict(lr=float("nan")), "`lr`"),
        (dict(layer_decay=1.5), "`layer_decay`"),
        (dict(model_ema_decay=1.0), "`model_ema_decay`"),
        (dict(clip_grad=-1.0), "`clip_grad`"),
        (dict(betas=(2.0, 3.0)), "`betas`"),
    ],
)
def test_invalid_values_are_refused_by_their_flag(changes, flag):
    with pytest.raises(ValueError, match=f"{flag} must"):
        check_settings(OptimSettings(**changes), RunSettings())


@pytest.mark.parametrize(
    "part, name, value",
    [
        ("augment", "ratio", [[None], 1.0]),
        ("augment", "ratio", [1.0]),
        ("data", "dataset", True),
        ("data", "data_dir", 3),
        ("model", "img_size", {"x": {}}),
        ("model", "img_size", "224"),
        ("model", "model_kwargs", "depths=1"),
        ("optim", "lr", None),
        ("optim", "lr", float("inf")),
        ("optim", "sched", ["cosine"]),
        ("run", "channels_last", 1),
    ],
)
def test_a_setting_of_another_kind_is_refused_by_its_name(tmp_path, part, name, value):
    settings = json.loads(settings_to_json(ClassificationSettings()))
    assert read_settings(ClassificationSettings, write(tmp_path, settings))
    settings[part][name] = value
    with pytest.raises(ValueError, match=f"settings.json .*{part!r}: {name!r} must be "):
        read_settings(ClassificationSettings, write(tmp_path, settings))
    settings[part] = value
    with pytest.raises(ValueError, match="settings.json of this command: "):
        read_settings(ClassificationSettings, write(tmp_path, settings))


def write(folder, settings):
    (folder / "settings.json").write_text(json.dumps(settings))
    return folder / "settings.json"
