"""Mask R-CNN's steps between its networks, and RetinaNet's losses, for all pictures of a batch at once.

torchvision's versions process the pictures one by one, in dozens of small operations each, and wait for the
GPU after many of them, so that an idle GPU waits for the host. These give the same results. Where torchvision
draws random samples, they draw different ones by the same rule.

    RegionProposals   anchors to proposals, and their losses
    RegionHeads       proposals to objects, and their losses
    RegionAlign       features of regions, from the level that fits each
    dense_losses      RetinaNet's, of every anchor
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchvision.models.detection._utils import (
    BalancedPositiveNegativeSampler,
    BoxCoder,
    Matcher,
)
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss, maskrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import MultiScaleRoIAlign, batched_nms, nms, roi_align
from torchvision.ops.poolers import _setup_scales

Targets = list[dict[str, Tensor]]
# Overlaps to compute at a time; more would take gigabytes.
OVERLAPS = 2**25
SMALLEST_OBJECT = 1e-2
FOCAL_SHARE = 0.25  # weight of classes that are present in the focal loss, as in torchvision


class RegionProposals(RegionProposalNetwork):
    """torchvision's region proposal network; only the suppression of overlaps runs picture by picture."""

    def filter_proposals(
        self,
        proposals: Tensor,
        objectness: Tensor,
        image_shapes: list[tuple[int, int]],
        num_anchors_per_level: list[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        objectness = objectness.detach().reshape(len(proposals), -1)
        index = self._get_top_n_idx(objectness, num_anchors_per_level)
        counts = [min(self.pre_nms_top_n(), anchors) for anchors in num_anchors_per_level]
        level = torch.cat([index.new_full((n,), number) for number, n in enumerate(counts)])
        scores = objectness.gather(1, index).sigmoid()
        limits = _limits(proposals, image_shapes)[:, None]
        boxes = torch.minimum(_take(proposals, index).clamp(min=0), limits)
        sound = _has_sides(boxes, self.min_size) & (scores >= self.score_thresh)
        # Invalid boxes come last and suppress nothing.
        scores = scores.masked_fill(~sound, -1)
        # No box extends beyond its picture, so shifted boxes of different levels do not touch.
        apart = boxes + (level * (limits.max() + 1))[:, None]
        kept = [
            nms(own, own_scores, self.nms_thresh)[: self.post_nms_top_n()] + number * len(level)
            for number, (own, own_scores) in enumerate(zip(apart, scores, strict=True))
        ]
        keep = torch.cat(kept)
        keep = keep[scores.flatten()[keep] >= 0]
        lengths = _counts(keep // len(level), len(proposals))
        boxes, scores = boxes.flatten(0, 1)[keep], scores.flatten()[keep]
        return list(boxes.split(lengths)), list(scores.split(lengths))

    def assign_targets_to_anchors(
        self, anchors: list[Tensor], targets: Targets
    ) -> tuple[list[Tensor], list[Tensor]]:
        boxes, labels = pad_targets(targets)
        # All pictures have the same anchors.
        matched, kinds = match(boxes, labels >= 0, anchors[0][None], self.proposal_matcher)
        return list(kinds), list(_take(boxes, matched))

    def compute_loss(
        self,
        objectness: Tensor,
        pred_bbox_deltas: Tensor,
        labels: list[Tensor],
        regression_targets: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        kinds = torch.stack(labels)
        index, kinds = sample(kinds, self.fg_bg_sampler)
        count = (kinds >= 0).sum()
        logits = objectness.reshape(len(labels), -1).gather(1, index)
        losses = F.binary_cross_entropy_with_logits(
            logits, kinds.clamp(min=0).to(logits), reduction="none"
        )
        deltas = _take(pred_bbox_deltas.reshape(len(labels), -1, 4), index)
        wanted = _take(torch.stack(list(regression_targets)), index)
        # Samples that are not objects have no box loss.
        wanted = torch.where(kinds[..., None] > 0, wanted, deltas.detach())
        box_loss = F.smooth_l1_loss(deltas, wanted, beta=1 / 9, reduction="sum")
        return losses.masked_fill(kinds < 0, 0).sum() / count, box_loss / count


class RegionHeads(RoIHeads):
    """torchvision's heads for boxes and masks."""

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
        targets: Targets | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        if not self.training:
            return super().forward(features, proposals, image_shapes, targets)
        self.check_targets(targets)
        assert targets is not None
        regions, matched, labels, truth = self.draw_regions(proposals, targets)
        # Objects come first, then the background, then padding.
        lengths, objects = torch.stack([(labels >= 0).sum(1), (labels > 0).sum(1)]).tolist()
        regions_of = _first(regions, lengths)
        box_features = self.box_head(self.box_roi_pool(features, regions_of, image_shapes))
        class_loss, box_loss = fastrcnn_loss(
            *self.box_predictor(box_features),
            _first(labels, lengths),
            self.box_coder.encode(_first(truth, lengths), regions_of),
        )
        objects_of = _first(regions, objects)
        mask_features = self.mask_head(self.mask_roi_pool(features, objects_of, image_shapes))
        mask_loss = maskrcnn_loss(
            self.mask_predictor(mask_features),
            objects_of,
            [target["masks"] for target in targets],
            [target["labels"] for target in targets],
            _first(matched, objects),
        )
        return [], dict(loss_classifier=class_loss, loss_box_reg=box_loss, loss_mask=mask_loss)

    def draw_regions(
        self, proposals: list[Tensor], targets: Targets
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Regions to train on, the objects that they match, their labels, and the objects' boxes.

        Regions and boxes are (n, S, 4). Label 0 is the background. Label -1 means that there is no region,
        because a picture may have too few.
        """
        boxes, labels = pad_targets(targets)
        boxes = boxes.to(proposals[0].dtype)
        # No coordinate of a proposal is below 0.
        padded = pad_sequence(proposals, batch_first=True, padding_value=-1)
        regions = torch.cat([padded, boxes], dim=1)
        there = torch.cat([padded[..., 0] >= 0, labels >= 0], dim=1)
        matched, kinds = match(boxes, labels >= 0, regions, self.proposal_matcher)
        found = torch.where(kinds > 0, labels.gather(1, matched), kinds)
        index, found = sample(found.masked_fill(~there, -1), self.fg_bg_sampler)
        matched = matched.gather(1, index)
        return _take(regions, index), matched, found, _take(boxes, matched)

    def postprocess_detections(
        self,
        class_logits: Tensor,
        box_regression: Tensor,
        proposals: list[Tensor],
        image_shapes: list[tuple[int, int]],
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        picture = _picture_of(proposals)
        # The background's column is left out.
        scores = class_logits.softmax(-1)[:, 1:]
        # Reshaped explicitly, because the result lacks an axis if there are no boxes.
        boxes = self.box_coder.decode(box_regression, proposals)
        boxes = boxes.reshape(*class_logits.shape, 4)[:, 1:]
        limits = _limits(boxes, image_shapes)[picture][:, None]
        boxes = torch.minimum(boxes.clamp(min=0), limits)
        good = (scores > self.score_thresh) & _has_sides(boxes, SMALLEST_OBJECT)
        row, column = good.nonzero(as_tuple=True)
        lengths = _counts(picture[row], len(proposals))
        candidates = (boxes[row, column], scores[row, column], column + 1)
        found = []
        for own in zip(*(x.split(lengths) for x in candidates), strict=True):
            keep = batched_nms(*own, self.nms_thresh)[: self.detections_per_img]
            found.append([x[keep] for x in own])
        own_boxes, own_scores, own_labels = map(list, zip(*found, strict=True))
        return own_boxes, own_scores, own_labels


class RegionAlign(MultiScaleRoIAlign):
    """torchvision's ``MultiScaleRoIAlign``, but the host learns the region counts of all levels at once."""

    def forward(
        self, x: dict[str, Tensor], boxes: list[Tensor], image_shapes: list[tuple[int, int]]
    ) -> Tensor:
        maps = [x[name] for name in self.featmap_names]
        if self.scales is None or self.map_levels is None:  # type: ignore[has-type]
            self.scales, self.map_levels = _setup_scales(
                maps, image_shapes, self.canonical_scale, self.canonical_level
            )
        flat = torch.cat(boxes)
        regions = torch.cat([_picture_of(boxes)[:, None].to(flat), flat], dim=1)
        levels = self.map_levels([flat])
        order = levels.argsort()
        parts = regions[order].split(_counts(levels, len(maps)))
        pooled = torch.cat(
            [
                roi_align(features, part, self.output_size, scale, self.sampling_ratio)
                for features, part, scale in zip(maps, parts, self.scales, strict=True)
            ]
        )
        return torch.empty_like(pooled).index_copy(0, order, pooled)


def dense_losses(
    targets: Targets,
    outputs: dict[str, Tensor],
    anchors: Tensor,
    matcher: Matcher,
    coder: BoxCoder,
) -> dict[str, Tensor]:
    """RetinaNet's losses: ``cls_logits`` (n, P, classes) and ``bbox_regression`` (n, P, 4) at anchors (P, 4).

    They are the focal loss of the classes and the L1 distance of the boxes, each divided by a picture's
    number of matched anchors, averaged over the pictures. Anchors that match neither an object nor the
    background clearly count in neither loss.
    """
    boxes, labels = pad_targets(targets)
    matched, kinds = match(boxes, labels >= 0, anchors[None], matcher)
    found = kinds > 0
    count = found.sum(1).clamp(min=1)
    logits, deltas = outputs["cls_logits"], outputs["bbox_regression"]
    # First the loss as if no class were present, which needs no target tensor of that size; then the change
    # due to the classes that are present.
    absent = _focal(logits, 1 - FOCAL_SHARE).sum(2).masked_fill(kinds < 0, 0).sum(1)
    own = logits.gather(2, labels.gather(1, matched).clamp(min=0)[..., None])[..., 0]
    change = _focal(-own, FOCAL_SHARE) - _focal(own, 1 - FOCAL_SHARE)
    classes = (absent + torch.where(found, change, 0).sum(1)) / count
    wanted = coder.encode_single(
        _take(boxes, matched).flatten(0, 1), anchors.repeat(len(targets), 1)
    ).view_as(deltas)
    # Anchors that match no object have no box loss.
    wanted = torch.where(found[..., None], wanted, deltas.detach())
    distances = (deltas - wanted).abs().sum((1, 2)) / count
    return {"classification": classes.mean(), "bbox_regression": distances.mean()}


def _focal(logits: Tensor, share: float) -> Tensor:
    """The focal loss of classes that are absent; with -logits, that of classes that are present."""
    return share * F.softplus(logits) * logits.sigmoid().square()


def pad_targets(targets: Targets) -> tuple[Tensor, Tensor]:
    """Boxes (n, G, 4) and labels (n, G) of pictures with up to G objects; label -1 means no object."""
    boxes = [target["boxes"] for target in targets]
    labels = [target["labels"] for target in targets]
    # One extra entry, so that G is at least 1.
    boxes.append(boxes[0].new_zeros(1, 4))
    labels.append(labels[0].new_zeros(1))
    padded = pad_sequence(boxes, batch_first=True)
    return padded[:-1], pad_sequence(labels, batch_first=True, padding_value=-1)[:-1]


def match(
    boxes: Tensor, real: Tensor, candidates: Tensor, matcher: Matcher
) -> tuple[Tensor, Tensor]:
    """The object that each candidate matches best, (n, P), and whether it matches: 1 yes, 0 no, -1 unclear.

    Args:
        boxes: objects (n, G, 4); only those that are True in ``real`` (n, G) count.
        candidates: (n, P, 4), or (1, P, 4) if all pictures have the same.
        matcher: torchvision's matcher, whose thresholds decide.
    """
    candidates = candidates.expand(len(boxes), -1, -1)
    step = max(1, OVERLAPS // (boxes.shape[1] * candidates.shape[1]))
    if len(boxes) > step:
        parts = zip(boxes.split(step), real.split(step), candidates.split(step), strict=True)
        matched, kinds = zip(*(match(*part, matcher) for part in parts), strict=True)
        return torch.cat(matched), torch.cat(kinds)
    overlaps = _overlaps(boxes, candidates).masked_fill(~real[..., None], -1)
    best, index = overlaps.max(1)
    hits = best >= matcher.high_threshold
    if matcher.allow_low_quality_matches:
        most = overlaps.amax(2, keepdim=True)
        hits |= ((overlaps == most) & real[..., None]).any(1)
    unclear = best >= matcher.low_threshold
    return index, unclear.long().neg().masked_fill(hits, 1)


def sample(labels: Tensor, sampler: BalancedPositiveNegativeSampler) -> tuple[Tensor, Tensor]:
    """Positions and labels (n, S) of a sample from labels (n, P): objects (> 0) first, then background (0).

    It has as many objects as the sampler wants, or as there are, and background in the remaining positions.
    If there is too little of it, the remaining labels are -1.
    """
    size, most = (
        min(int(wanted), labels.shape[1])
        for wanted in (
            sampler.batch_size_per_image,
            sampler.batch_size_per_image * sampler.positive_fraction,
        )
    )
    chance = torch.rand(labels.shape, device=labels.device)
    first = chance.masked_fill(labels <= 0, -1).topk(most).indices
    drawn = torch.zeros_like(labels, dtype=torch.bool).scatter(1, first, True) & (labels > 0)
    rank = chance.masked_fill(labels != 0, -1).masked_fill(drawn, 2)
    rank, index = rank.topk(size)
    return index, labels.gather(1, index).masked_fill(rank < 0, -1)


def _overlaps(boxes: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of boxes (n, G, 4) with others (n, P, 4), (n, G, P)."""
    a, b = boxes[:, :, None], others[:, None]
    shared = (torch.minimum(a, b)[..., 2:] - torch.maximum(a, b)[..., :2]).clamp(min=0).prod(-1)
    areas = [(x[..., 2:] - x[..., :2]).prod(-1) for x in (a, b)]
    return shared / (areas[0] + areas[1] - shared)


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows (n, P, 4) at index (n, S)."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[2]))


def _first(padded: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return [own[:length] for own, length in zip(padded, lengths, strict=True)]


def _limits(like: Tensor, image_shapes: Sequence[tuple[int, int]]) -> Tensor:
    """The largest coordinates of boxes in each picture, (n, 4)."""
    return like.new_tensor([(width, height, width, height) for height, width in image_shapes])


def _has_sides(boxes: Tensor, length: float) -> Tensor:
    """Whether both sides are at least this long; False for NaN."""
    return (boxes[..., 2:] - boxes[..., :2] >= length).all(-1)


def _picture_of(boxes: Sequence[Tensor]) -> Tensor:
    """The index of the picture that each box belongs to."""
    lengths = torch.tensor([len(own) for own in boxes])
    return torch.arange(len(boxes)).repeat_interleave(lengths).to(boxes[0].device)


def _counts(numbers: Tensor, limit: int) -> list[int]:
    """How often each number below ``limit`` occurs; this waits for the device once."""
    return (numbers[:, None] == torch.arange(limit, device=numbers.device)).sum(0).tolist()
