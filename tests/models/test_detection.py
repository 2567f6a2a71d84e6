"""The detectors take torchvision's inputs, give its outputs, and keep boxes exact in half precision."""

import pytest
import torch
from torchvision.models.detection.roi_heads import paste_masks_in_image

from softfree.models.detection import mask_rcnn, padded_size, place_masks, retinanet
from tests.models.small import PYRAMID

DETECTORS = [retinanet, mask_rcnn]
# So that detectors with new weights find something.
ALL_SCORES = {retinanet: dict(score_thresh=0.0), mask_rcnn: dict(box_score_thresh=0.0)}
SMALL = dict(min_size=64, max_size=128, width=16, anchor_size=8, backbone_kwargs=PYRAMID)


def targets(*counts: int) -> list[dict]:
    return [
        dict(
            boxes=torch.tensor([[8.0, 8.0, 40.0, 48.0]]).repeat(n, 1),
            labels=torch.ones(n, dtype=torch.int64),
            masks=torch.ones(n, 64, 80, dtype=torch.uint8),
        )
        for n in counts
    ]


@pytest.mark.parametrize("create", DETECTORS)
@pytest.mark.parametrize("amp", [False, True])
def test_training_gives_finite_losses_also_for_an_image_without_objects(create, amp):
    model = create("softfree_tiny", 4, **SMALL).train()
    images = [torch.rand(3, 64, 80), torch.rand(3, 64, 80)]
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        losses = model(images, targets(2, 0))
    assert all(loss.isfinite() for loss in losses.values())
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("create", DETECTORS)
def test_detections_lie_inside_images_of_different_sizes(create):
    model = create("softpp_tiny", 4, **ALL_SCORES[create], **SMALL).eval()
    images = [torch.rand(3, 60, 90), torch.rand(3, 100, 70)]
    with torch.no_grad():
        detections = model(images)
    for image, found in zip(images, detections, strict=True):
        height, width = image.shape[1:]
        assert len(found["boxes"])
        assert found["boxes"].min() >= 0
        limits = torch.tensor([width, height, width, height])
        assert (found["boxes"].amax(0) <= limits + 1e-3).all()
        if create is mask_rcnn:
            assert found["masks"].shape[-2:] == (height, width)


@pytest.mark.parametrize("create", DETECTORS)
def test_maps_boxes_and_scores_are_float32_under_autocast(create):
    model = create("softpp_tiny", 4, **ALL_SCORES[create], **SMALL).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        maps = model.backbone(torch.rand(1, 3, 64, 64))
        [found] = model([torch.rand(3, 64, 64)])
    assert {x.dtype for x in maps.values()} == {torch.float32}
    assert len(found["boxes"])
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32


def test_the_pyramids_have_the_levels_of_the_papers():
    image = torch.rand(1, 3, 128, 128)
    one = retinanet("softpp_tiny", 4, **SMALL).backbone(image)
    assert {name: x.shape[-1] for name, x in one.items()} == {
        "1": 16, "2": 8, "3": 4, "p6": 2, "p7": 1,
    }  # fmt: skip
    other = mask_rcnn("softpp_tiny", 4, **SMALL).backbone(image)
    assert {name: x.shape[-1] for name, x in other.items()} == {
        "0": 32, "1": 16, "2": 8, "3": 4, "pool": 2,
    }  # fmt: skip


# Tables 4 and 5 of the IJCV paper, in millions, for backbones whose architecture is beyond doubt.
@pytest.mark.parametrize(
    ("name", "retina", "mask"),
    [
        ("resnet18", 21, 31),
        ("resnet50", 38, 44),
        ("swin_tiny_patch4_window7_224", 38, 48),
        ("softpp_tiny_release", 23, 33),
    ],
)
def test_parameters_are_those_of_the_papers_tables(name, retina, mask):
    with torch.device("meta"):
        counts = [
            sum(p.numel() for p in create(name, 81).parameters()) / 1e6 for create in DETECTORS
        ]
    assert [round(count) for count in counts] == [retina, mask]


@pytest.mark.parametrize("create", DETECTORS)
def test_recomputing_the_backbones_activations_changes_no_gradient(create):
    model = create("softpp_tiny", 4, **SMALL).train()
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        torch.manual_seed(0)
        sum(model([torch.ones(3, 64, 80)], targets(1)).values()).backward()
        gradients.append([p.grad.clone() for p in model.backbone.parameters()])
    checkpointed = [m for m in model.modules() if getattr(m, "grad_checkpointing", False)]
    assert len(checkpointed) == 4
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize("size", [(50, 70), (7, 200)], ids=str)
def test_masks_are_placed_as_torchvision_places_them(size):
    torch.manual_seed(0)
    height, width = size
    ends = torch.rand(40, 2, 2).sort(1).values * torch.tensor([width, height])
    boxes = ends.flatten(1)
    boxes[0] = torch.tensor([0, 0, width, height])  # all of the picture
    boxes[1] = torch.tensor([3.2, 2.1, 3.3, 2.2])  # less than a pixel
    boxes[2] = torch.tensor([width - 1, height - 1, width, height])
    masks = torch.rand(40, 1, 28, 28)
    [found] = place_masks([masks], [boxes], [size])
    torch.testing.assert_close(found, paste_masks_in_image(masks, boxes, size))
    [nothing] = place_masks([masks[:0]], [boxes[:0]], [size])
    assert nothing.shape == (0, 1, height, width)


def test_masks_are_placed_in_float32_under_autocast():
    torch.manual_seed(0)
    boxes = torch.tensor([[3.0, 5.0, 41.0, 33.0], [0.0, 0.0, 60.0, 50.0]])
    masks = torch.rand(2, 1, 28, 28)
    with torch.autocast("cpu", torch.bfloat16):
        [found] = place_masks([masks], [boxes], [(50, 60)])
    [expected] = place_masks([masks], [boxes], [(50, 60)])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("create", [retinanet, mask_rcnn])
def test_pictures_that_are_resized_already_stay_so(create):
    model = create("softpp_tiny", 3, _skip_resize=True, backbone_kwargs=PYRAMID)
    images, _ = model.train().transform([torch.rand(3, 96, 128)])
    assert images.image_sizes == [(96, 128)]


@pytest.mark.parametrize("create", [retinanet, mask_rcnn])
@pytest.mark.parametrize("name", ["num_classes", "width", "anchor_size"])
def test_sizes_of_none_are_refused_by_name(create, name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        create("softpp_tiny", **{name: 0})


@pytest.mark.parametrize("width", [7, 28, 260])
def test_channels_that_the_heads_norm_cannot_share_out_are_refused(width):
    with pytest.raises(ValueError, match="`width` must be a multiple of"):
        retinanet("softpp_tiny", width=width, head_norm=True)


def test_the_size_of_a_padded_picture_is_torchvisions():
    model = retinanet("softpp_tiny", 3, min_size=100, max_size=160, backbone_kwargs=PYRAMID).eval()
    generator = torch.Generator().manual_seed(0)
    for height, width in torch.randint(20, 400, (60, 2), generator=generator).tolist():
        images, _ = model.transform([torch.empty(3, height, width)])
        assert images.tensors.shape[2:] == padded_size((height, width), 100, 160)
