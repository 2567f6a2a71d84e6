"""RetinaNet as a program that can be exported, and an exported program as a detector.

BoxProgram(detector)(image)                     # one normalised picture -> boxes, scores, labels, candidates
PreparedDetector(program, metadata)(images)     # as the detector: pictures in 0..1 -> detections
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import nms

DIVISOR = 32  # torchvision pads pictures to multiples of it
RESULTS = ("boxes", "scores", "labels")
OUTPUTS = (*RESULTS, "candidate_boxes", "candidate_scores")


class BoxProgram(nn.Module):
    """What a RetinaNet does between the preparation of a picture and the result, with tensors only.

    ``forward(image)`` takes one normalised picture (1, 3, H, W) at the size at which the detector sees it,
    and returns

        boxes (n, 4)                         x1, y1, x2, y2 in pixels of that picture
        scores (n), labels (n)               the highest scores first; label 0 is the background
        candidate_boxes (anchors, 4)         all boxes, before the selection
        candidate_scores (anchors, classes)
    """

    def __init__(self, detector: RetinaNet):
        super().__init__()
        self.detector = detector

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        boxes, scores = self.candidates(image)
        chosen = self.choose(boxes, scores, image.shape[2] + image.shape[3])
        return *chosen, torch.cat(boxes), torch.cat(scores)

    def candidates(self, image: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Boxes (anchors, 4) and scores (anchors, classes) of each map, starting with the finest."""
        detector: Any = self.detector
        height, width = image.shape[2:]
        padded = _fill_up(image)
        maps = list(detector.backbone(padded).values())
        generator = detector.anchor_generator
        generator.set_cell_anchors(image.dtype, image.device)
        strides = [
            [p // s for p, s in zip(padded.shape[2:], x.shape[2:], strict=True)] for x in maps
        ]
        anchors = generator.grid_anchors([x.shape[2:] for x in maps], strides)
        limit = torch.stack([torch.full((), side, dtype=image.dtype) for side in (width, height)])
        boxes, scores = [], []
        for features, own_anchors in zip(maps, anchors, strict=True):
            found = detector.head([features])
            decoded = detector.box_coder.decode_single(found["bbox_regression"][0], own_anchors)
            inside = torch.minimum(decoded.view(-1, 2, 2).clamp(min=0), limit)
            boxes.append(inside.view(-1, 4))
            scores.append(found["cls_logits"][0].sigmoid())
        return boxes, scores

    def choose(self, boxes: list[Tensor], scores: list[Tensor], sides: int) -> tuple[Tensor, ...]:
        """Boxes, scores and labels of the detections that torchvision would keep; ``sides`` is H + W.

        Every map contributes its highest-scoring candidates. Maps with fewer are padded with a score of 0, so
        that the number of candidates does not depend on the picture's size.
        """
        detector: Any = self.detector
        most, classes = detector.topk_candidates, scores[0].shape[1]
        picked: list[tuple[Tensor, Tensor, Tensor]] = []
        for own_boxes, own_scores in zip(boxes, scores, strict=True):
            best, place = F.pad(own_scores.flatten(), (0, most)).topk(most)
            rows = F.pad(own_boxes, (0, 0, 0, most))
            picked.append((rows[place // classes], best, place % classes))
        all_boxes, all_scores, labels = (torch.cat(parts) for parts in zip(*picked, strict=True))
        sure = (all_scores > detector.score_thresh).nonzero()[:, 0]
        all_boxes, all_scores, labels = all_boxes[sure], all_scores[sure], labels[sure]
        # Classes are shifted apart, in a square, so that they do not suppress each other. In a single row,
        # coordinates would lose digits.
        across = math.isqrt(classes - 1) + 1
        shift = torch.stack([labels % across, labels // across], 1).to(all_boxes.dtype) * sides
        kept = nms(all_boxes + shift.repeat(1, 2), all_scores, detector.nms_thresh)
        kept = kept[torch.arange(kept.shape[0]) < detector.detections_per_img]
        return all_boxes[kept], all_scores[kept], labels[kept]


class PreparedDetector(nn.Module):
    """A program that returns boxes, after the preparation of pictures; called like torchvision's detectors.

    ``program`` returns at least boxes, scores and labels. ``metadata`` contains ``arguments`` with
    ``min_size`` and ``max_size``, and ``mean`` and ``std``.
    """

    def __init__(self, program: nn.Module, metadata: dict[str, Any]):
        super().__init__()
        self.program = program
        sides = metadata["arguments"]
        self.transform = GeneralizedRCNNTransform(
            sides["min_size"], sides["max_size"], metadata["mean"], metadata["std"]
        )
        self.eval()

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        found = []
        for image in images:
            batch, _ = self.transform([image])
            height, width = batch.image_sizes[0]
            results = self.program(batch.tensors[:, :, :height, :width])
            own = dict(zip(RESULTS, results, strict=False))
            found += self.transform.postprocess([own], batch.image_sizes, [image.shape[1:]])
        return found


def _fill_up(image: Tensor) -> Tensor:
    """Pad a picture with zeros on the right and at the bottom to multiples of DIVISOR."""
    filled = F.pad(image, (0, DIVISOR - 1, 0, DIVISOR - 1))
    for dim in (2, 3):
        # With a slice, whether it leaves anything out would become a constant of the program.
        length = (image.shape[dim] + DIVISOR - 1) // DIVISOR * DIVISOR
        filled = filled.index_select(dim, torch.arange(length, device=image.device))
    return filled
