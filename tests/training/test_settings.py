"""Settings: values that can't be meant are refused."""

import pytest

from softfree.training.settings import OptimSettings, RunSettings, check_settings, parse_interval


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
