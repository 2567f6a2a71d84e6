"""Any timm backbone with four maps serves dense models, and starts from a checkpoint of its own."""

import pytest
import timm
import torch
from safetensors.torch import save_file

from softfree.models.features import (
    PyramidFeatures,
    backbone_arguments,
    pretrained_arguments,
)
from tests.models.small import PYRAMID, small


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("softpp_tiny", PYRAMID),
        ("soft_tiny_release", PYRAMID),
        ("swin_tiny_patch4_window7_224", dict(embed_dim=24, depths=(1, 1, 1, 1))),
        ("pvt_v2_b0", {}),
        ("resnet10t", {}),
    ],
)
def test_every_kind_of_backbone_gives_maps_at_the_four_reductions(name, kwargs):
    features = PyramidFeatures(name, **kwargs)
    maps = features(torch.randn(1, 3, 64, 96))
    sizes = [(64 // r, 96 // r) for r in (4, 8, 16, 32)]
    assert [tuple(x.shape) for x in maps] == [
        (1, channels, *size) for channels, size in zip(features.channels, sizes, strict=True)
    ]


def test_soft_backbones_get_a_fixed_number_of_landmarks_unless_told_otherwise():
    assert backbone_arguments("softpp_tiny") == {"landmarks": "conv:49"}
    assert backbone_arguments("softfree_tiny") == {"landmarks": "average:128"}
    swapped = backbone_arguments("softfree_tiny", attention="softpp")
    assert swapped == {"landmarks": "conv:49", "attention": "softpp"}
    assert backbone_arguments("softpp_tiny", landmarks="conv") == {"landmarks": "conv"}
    assert backbone_arguments("resnet18") == {}


def test_landmarks_do_not_grow_with_the_image():
    features = PyramidFeatures("softpp_tiny", **PYRAMID)
    seen = []
    for module in features.modules():
        if type(module).__name__ == "ConvLandmarks":
            module.register_forward_hook(lambda m, args, out: seen.append(out[0].shape[2]))
    features(torch.randn(1, 3, 320, 512))
    assert len(seen) == 4
    # 49, and the class token of stage 4.
    assert max(seen) <= 50


def test_frozen_batch_norms_do_not_move_in_training():
    features = PyramidFeatures("softpp_tiny", frozen_bn=True, **PYRAMID).train()
    before = {name: tensor.clone() for name, tensor in features.named_buffers()}
    features(10 + torch.randn(2, 3, 64, 64))
    assert before
    for name, tensor in features.named_buffers():
        torch.testing.assert_close(tensor, before[name])
    assert not any("bn" in name for name, _ in features.named_parameters())


def test_a_backbone_without_four_maps_is_refused_by_name():
    with pytest.raises(ValueError, match="softpp_vit_small has maps at"):
        PyramidFeatures("softpp_vit_small")


def test_an_unknown_backbone_is_refused():
    with pytest.raises(ValueError, match="no model is called 'softpp_huge'"):
        backbone_arguments("softpp_huge")


@pytest.mark.parametrize("average", [False, True])
def test_a_classifiers_checkpoint_folder_starts_the_backbone(tmp_path, average):
    classifier = small("softpp_tiny")
    save_file(classifier.state_dict(), tmp_path / "model.safetensors")
    if average:
        torch.nn.init.constant_(classifier.stem[0].conv.weight, 0.5)
        save_file(classifier.state_dict(), tmp_path / "ema.safetensors")
    features = PyramidFeatures("softpp_tiny", checkpoint=tmp_path, img_size=64, **PYRAMID)
    started = features.body.model.state_dict()
    trained = classifier.state_dict()
    assert started
    for name, tensor in started.items():
        torch.testing.assert_close(tensor, trained[name])


def test_positions_of_another_size_are_resized_to_the_backbones(tmp_path):
    save_file(small("softpp_tiny", img_size=32).state_dict(), tmp_path / "model.safetensors")
    features = PyramidFeatures("softpp_tiny", checkpoint=tmp_path, img_size=64, **PYRAMID)
    assert features.body.model.stages[0].pos_embed.weight.shape[1] == 16 * 16


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    save_file(timm.create_model("resnet10t").state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="is no checkpoint of softpp_tiny"):
        pretrained_arguments("softpp_tiny", tmp_path / "weights.safetensors", **PYRAMID)


def test_a_file_without_weights_is_refused_in_one_line(tmp_path):
    (tmp_path / "street.jpg").write_bytes(b"\xff\xd8\xff\xe0 no weights")
    with pytest.raises(ValueError, match="^`backbone_checkpoint`: .*street.jpg") as error:
        pretrained_arguments("softpp_tiny", tmp_path / "street.jpg", **PYRAMID)
    assert "\n" not in str(error.value) and "weights_only" not in str(error.value)


def test_a_checkpoint_of_another_task_is_refused(tmp_path):
    (tmp_path / "metadata.json").write_text('{"task": "detection"}')
    with pytest.raises(ValueError, match="is a checkpoint of detection; give one of class"):
        pretrained_arguments("softpp_tiny", tmp_path, **PYRAMID)


def test_an_argument_the_backbone_does_not_know_is_named():
    with pytest.raises(ValueError, match="`model` resnet10t does not take .*embed_dims"):
        PyramidFeatures("resnet10t", embed_dims=(1, 2, 3, 4))
