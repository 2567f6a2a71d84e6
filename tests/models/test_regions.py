"""Steps of Mask R-CNN and RetinaNet for all pictures at once give what torchvision's give one by one."""

import copy

import pytest
import torch
from torchvision.models.detection import MaskRCNN, RetinaNet
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, Matcher
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import MultiScaleRoIAlign, box_iou

from softfree.models import regions
from softfree.models.detection import mask_rcnn, retinanet
from softfree.models.regions import match, pad_targets, sample
from tests.models.small import PYRAMID

# All regions are drawn: what torchvision draws at random is then the same.
ALL = 100_000
SIZES = [(64, 90), (80, 64), (70, 70)]
HAS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, HAS_GPU])]


@pytest.fixture(autouse=True)
def full_float32(monkeypatch):
    """Convolutions of a GPU in float32: TF32 has errors of 1e-3, and others for other regions beside."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def random_boxes(count: int, height: int, width: int) -> torch.Tensor:
    corners = torch.rand(count, 2, 2) * torch.tensor([width - 8, height - 8])
    boxes = corners.sort(1).values.flatten(1)
    boxes[:, 2:] += 8
    return boxes


def pictures(*counts: int, device="cpu"):
    images, targets = [], []
    for count, (height, width) in zip(counts, SIZES, strict=True):
        images.append(torch.rand(3, height, width).to(device))
        masks = (torch.rand(count, height, width) > 0.5).to(torch.uint8)
        labels = torch.randint(1, 4, (count,))
        target = dict(boxes=random_boxes(count, height, width), labels=labels, masks=masks)
        targets.append({name: value.to(device) for name, value in target.items()})
    return images, targets


def ours_and_torchvisions(device="cpu", **kwargs):
    torch.manual_seed(0)
    ours = mask_rcnn(
        "softpp_tiny", 4, min_size=64, max_size=128, width=16, anchor_size=8,
        backbone_kwargs=PYRAMID, box_score_thresh=0.0, box_detections_per_img=30, **kwargs,
    )  # fmt: skip
    # Regions that differ in their scores and offsets, as those of a trained detector do.
    torch.nn.init.normal_(ours.rpn.head.cls_logits.weight, std=0.3)
    torch.nn.init.normal_(ours.rpn.head.bbox_pred.weight, std=0.03)
    ours.to(device)
    other = copy.deepcopy(ours)
    other.__class__ = MaskRCNN
    other.transform.__class__ = GeneralizedRCNNTransform
    other.rpn.__class__ = RegionProposalNetwork
    other.roi_heads.__class__ = RoIHeads
    other.roi_heads.box_roi_pool.__class__ = MultiScaleRoIAlign
    other.roi_heads.mask_roi_pool.__class__ = MultiScaleRoIAlign
    return ours, other


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", [(3, 1, 5), (2, 0, 1), (0, 0, 0)], ids=str)
def test_losses_and_gradients_are_torchvisions(counts, device):
    sampling = dict(box_batch_size_per_image=ALL, rpn_batch_size_per_image=ALL)
    ours, other = ours_and_torchvisions(device, _skip_resize=True, **sampling)
    images, targets = pictures(*counts, device=device)
    losses, expected = ours.train()(images, targets), other.train()(images, targets)
    assert losses.keys() == expected.keys()
    for name, loss in expected.items():
        torch.testing.assert_close(losses[name], loss, msg=name)
    for each in (losses, expected):
        sum(each.values()).backward()
    for (name, one), two in zip(ours.named_parameters(), other.parameters(), strict=True):
        # A GPU adds up the regions' gradients in another order each time.
        noise = 0.0 if device == "cpu" else 1e-3 * two.grad.abs().max().item()
        torch.testing.assert_close(one.grad, two.grad, atol=1e-5 + noise, rtol=1e-4, msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_detections_are_torchvisions(device):
    ours, other = ours_and_torchvisions(device)
    images, _ = pictures(0, 0, 0, device=device)
    with torch.no_grad():
        found, expected = ours.eval()(images), other.eval()(images)
    for one, two in zip(found, expected, strict=True):
        assert one.keys() == two.keys()
        assert len(one["labels"]) == 30
        assert torch.equal(one["labels"], two["labels"])
        for name in ("boxes", "scores", "masks"):
            atol = 1e-4 if device == "cpu" else 1e-3
            torch.testing.assert_close(one[name], two[name], atol=atol, rtol=1e-4)


@pytest.mark.parametrize("part", ["rpn", "roi_heads"])
def test_a_picture_without_proposals_or_detections_is_one_as_torchvisions(part):
    ours, other = ours_and_torchvisions()
    for model in (ours, other):
        getattr(model, part).score_thresh = 1.0
    images, _ = pictures(0, 0, 0)
    with torch.no_grad():
        found, expected = ours.eval()(images), other.eval()(images)
    for one, two in zip(found, expected, strict=True):
        assert {k: x.shape for k, x in one.items()} == {k: x.shape for k, x in two.items()}


def test_proposals_without_sides_are_left_out_as_torchvision_leaves_them_out():
    ours, other = ours_and_torchvisions()
    torch.manual_seed(1)
    proposals = torch.stack([random_boxes(60, 64, 64) for _ in range(2)])
    proposals[0, ::2, 2:] = proposals[0, ::2, :2]
    proposals[1] += 70  # past the border of that picture
    objectness = torch.randn(120, 1)
    arguments = (proposals, objectness, [(64, 64), (64, 64)], [40, 20])
    found = ours.rpn.eval().filter_proposals(*arguments)
    expected = other.rpn.eval().filter_proposals(*arguments)
    assert [len(boxes) for boxes in expected[0]][1] == 0 < len(expected[0][0]) <= 30
    for one, two in zip(found, expected, strict=True):
        for mine, theirs in zip(one, two, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_proposal_that_is_no_number_leaves_the_others_as_they_are():
    ours, _ = ours_and_torchvisions()
    torch.manual_seed(1)
    proposals, objectness = random_boxes(60, 64, 64)[None], torch.randn(60, 1)
    arguments = (objectness, [(64, 64)], [40, 20])
    proposals[0, 5, 2:] = proposals[0, 5, :2]
    expected = ours.rpn.eval().filter_proposals(proposals, *arguments)[0][0]
    proposals[0, 5, 2] = torch.nan
    found = ours.rpn.filter_proposals(proposals, *arguments)[0][0]
    assert torch.equal(found, expected) and len(found) < 59


def test_boxes_may_be_of_another_precision_than_the_network():
    ours, _ = ours_and_torchvisions(_skip_resize=True)
    images, targets = pictures(3, 1, 5)
    for target in targets:
        target["boxes"] = target["boxes"].double()
    assert all(loss.isfinite() for loss in ours.train()(images, targets).values())


@pytest.mark.parametrize("counts", [(2, 0, 3), (1,), (0, 0)], ids=str)
def test_objects_are_padded_to_the_picture_with_most(counts):
    targets = [dict(boxes=random_boxes(n, 64, 64), labels=torch.arange(1, n + 1)) for n in counts]
    boxes, labels = pad_targets(targets)
    assert labels.shape == boxes.shape[:2] == (len(counts), max(1, *counts))
    for number, target in enumerate(targets):
        real = labels[number] >= 0
        assert torch.equal(labels[number][real], target["labels"])
        assert torch.equal(boxes[number][real], target["boxes"])


@pytest.mark.parametrize("low_quality", [False, True])
@pytest.mark.parametrize("at_a_time", [2**25, 1])
def test_matches_are_torchvisions(monkeypatch, low_quality, at_a_time):
    monkeypatch.setattr(regions, "OVERLAPS", at_a_time)
    torch.manual_seed(0)
    matcher = Matcher(0.5, 0.3, allow_low_quality_matches=low_quality)
    counts = (4, 0, 1)
    truth = [random_boxes(n, 64, 64) for n in counts]
    labels = [torch.ones(n, dtype=torch.int64) for n in counts]
    candidates = torch.stack([random_boxes(80, 64, 64) for _ in counts])
    boxes, padded = pad_targets(
        [dict(boxes=b, labels=x) for b, x in zip(truth, labels, strict=True)]
    )
    index, kinds = match(boxes, padded >= 0, candidates, matcher)
    assert (kinds[1] == 0).all()
    for number in (0, 2):
        expected = matcher(box_iou(truth[number], candidates[number]))
        assert set(expected.clamp(max=0).tolist()) == {0, -1, -2}
        hit = expected >= 0
        assert torch.equal(kinds[number] == 1, hit)
        assert torch.equal(kinds[number] == 0, expected == Matcher.BELOW_LOW_THRESHOLD)
        assert torch.equal(index[number][hit], expected[hit])


@pytest.mark.parametrize("objects", [0, 3, 40])
@pytest.mark.parametrize("background", [2, 50])
def test_samples_are_of_the_sizes_that_torchvision_draws(objects, background):
    labels = torch.tensor([7] * objects + [0] * background + [-1] * 8)[None].repeat(2, 1)
    labels[1] = labels[1].flip(0)
    sampler = BalancedPositiveNegativeSampler(20, 0.25)
    index, kinds = sample(labels, sampler)
    expected = [[chosen.sum().item() for chosen in kind] for kind in sampler([*labels])]
    assert [(kinds > 0).sum(1).tolist(), (kinds == 0).sum(1).tolist()] == expected
    assert torch.equal(labels.gather(1, index)[kinds >= 0], kinds[kinds >= 0])
    assert all(len(set(row.tolist())) == index.shape[1] for row in index)
    # Objects, background, nothing.
    order = kinds.sign().tolist()
    assert order == [sorted(row, reverse=True) for row in order]


def test_every_object_and_every_background_is_as_likely_drawn():
    torch.manual_seed(0)
    labels = torch.tensor([1] * 10 + [0] * 20).repeat(2000, 1)
    index, _ = sample(labels, BalancedPositiveNegativeSampler(10, 0.5))
    share = index.flatten().bincount(minlength=30) / 2000
    torch.testing.assert_close(share, torch.tensor([0.5] * 10 + [0.25] * 20), atol=0.05, rtol=0)


def test_a_box_without_an_area_is_refused():
    ours, _ = ours_and_torchvisions()
    images, targets = pictures(1, 1, 2)
    targets[2]["boxes"][1, 2] = targets[2]["boxes"][1, 0]
    with pytest.raises(ValueError, match="boxes must have a width and a height, got"):
        ours.train()(images, targets)


def dense_detectors(device):
    """Our RetinaNet, and torchvision's with its weights."""
    ours = retinanet(
        "softpp_tiny", 4, min_size=64, max_size=128, width=16, anchor_size=16,
        backbone_kwargs=PYRAMID, score_thresh=0.0, detections_per_img=30,
    )  # fmt: skip
    torch.nn.init.normal_(ours.head.classification_head.cls_logits.weight, std=0.5)
    torch.nn.init.normal_(ours.head.regression_head.bbox_reg.weight, std=0.1)
    ours.to(device)
    other = copy.deepcopy(ours)
    other.__class__, other.transform.__class__ = RetinaNet, GeneralizedRCNNTransform
    return ours, other


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("counts", [(3, 1, 5), (2, 0, 4), (0, 0, 0)])
def test_dense_losses_and_gradients_are_torchvisions(counts, device):
    images, targets = pictures(*counts, device=device)
    found = []
    for model in dense_detectors(device):
        losses = model.train()(images, copy.deepcopy(targets))
        sum(losses.values()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append((losses, gradients))
    (ours, our_gradients), (theirs, their_gradients) = found
    assert ours.keys() == theirs.keys() and our_gradients.keys() == their_gradients.keys()
    for name, loss in theirs.items():
        torch.testing.assert_close(ours[name], loss, rtol=1e-4, atol=1e-6)
    for name, gradient in their_gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


def test_dense_detections_are_torchvisions():
    images, _ = pictures(1, 1, 1)
    ours, theirs = (model.eval()(images) for model in dense_detectors("cpu"))
    for own, other in zip(ours, theirs, strict=True):
        assert own.keys() == other.keys() and len(own["boxes"]) == 30
        for name in own:
            torch.testing.assert_close(own[name], other[name], rtol=1e-4, atol=1e-4)


def test_other_losses_of_boxes_are_torchvisions_own():
    ours, _ = dense_detectors("cpu")
    ours.head.regression_head._loss_type = "giou"
    images, targets = pictures(3, 1, 5)
    assert all(loss.isfinite() for loss in ours.train()(images, targets).values())
