"""`softfree quickstart`: it learns, draws, and goes on from what is there."""

import csv
import json

import pytest
import timm
import torch
from PIL import Image

from softfree.analysis.capture import capture_attention
from softfree.analysis.judgement import scale_maps
from softfree.commands import predict, quickstart
from softfree.data import load_images, open_image
from softfree.layers import SoftAttention


@pytest.mark.slow
def test_quickstart_reads_97_percent_of_the_digits_and_draws_them(tmp_path, capsys):
    output = tmp_path / "out"
    assert quickstart.main(["--output", str(output), "--device", "cpu"]) == 0
    with (output / "eval.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == quickstart.EPOCHS
    assert float(rows[-1]["top1"]) >= 97
    out = capsys.readouterr().out
    assert str(output / "quickstart.png") in out and "softfree predict" in out
    picture = open_image(output / "quickstart.png")
    assert picture.size == (1560, 864) and len(picture.getcolors(2**24)) > 1000

    written = (output / "best" / "model.safetensors").read_bytes()
    (output / "quickstart.png").unlink()
    assert quickstart.main(["--output", str(output), "--device", "cpu"]) == 0
    assert (output / "quickstart.png").is_file()
    assert (output / "best" / "model.safetensors").read_bytes() == written

    capsys.readouterr()
    digits = [str(output / "digits"), "--checkpoint", str(output / "best")]
    assert predict.main([*digits, "--device", "cpu", "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    right = [a["path"].endswith(f"is_a_{a['predictions'][0]['label']}.png") for a in answers]
    assert len(right) == 10 and sum(right) >= 9


def test_heat_maps_are_rows_of_the_attention_of_the_patch_on_the_digit():
    model = timm.create_model(
        "softfree_tiny", img_size=64, embed_dims=(32, 64, 96, 128), num_heads=(1, 2, 3, 4),
        depths=(1, 1, 1, 1), strides=(4, 2, 1, 1),
    ).eval()  # fmt: skip
    picture, _ = load_images(None).val.read(0)
    image = torch.randn(3, 64, 64)
    first, second = quickstart.heat_maps(model, image, picture)
    assert first.heat.shape == (16, 16) and second.heat.shape == (8, 8)
    token = int(second.y * 8) * 8 + int(second.x * 8)
    row = capture_attention(model, image).layer(2).row(token).mean(0)
    torch.testing.assert_close(torch.from_numpy(second.heat), scale_maps(row.view(8, 8)))
    assert second.note == f"{row.min():.3g} to {row.max():.3g}, total {row.abs().sum():.2g}"


def test_a_flat_layer_has_one_colour_in_the_picture_and_is_called_so():
    model = timm.create_model("softfree_tiny", img_size=64, depths=(1, 1, 1, 1)).eval()
    for module in model.modules():
        if isinstance(module, SoftAttention):
            torch.nn.init.constant_(module.log_bandwidth, 6)
    picture, _ = load_images(None).val.read(0)
    for heat_map in quickstart.heat_maps(model, torch.randn(3, 64, 64), picture):
        assert heat_map.heat.min() > 0.95 and heat_map.note.startswith("alike: ")


def test_brightest_pixel_is_found_across_and_down():
    picture = Image.new("RGB", (10, 4))
    picture.putpixel((7, 1), (200, 200, 200))
    assert quickstart.brightest(picture) == (0.75, 0.375)
