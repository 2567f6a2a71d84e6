"""A model that is examined sees photos as it saw them in training, if it takes any."""

from pathlib import Path

import pytest
from PIL import Image
from torch import nn

from softfree.analysis.subject import Subject


def test_a_model_of_sequences_refuses_photos():
    subject = Subject("model", nn.Identity(), {"task": "longrange"}, Path("OUT/best"))
    message = "`checkpoint` OUT/best is for the task 'longrange', which has no photos"
    with pytest.raises(ValueError, match=message):
        subject.check_photos()
    with pytest.raises(ValueError, match=message):
        subject.look(Image.new("RGB", (64, 64)))
