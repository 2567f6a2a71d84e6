"""Fig. 6b on synthetic features: the spectral norm grows with m, and not with the normalisation."""

import torch

from softfree.analysis.capture import capture_attention
from softfree.analysis.plots import COLOURS
from softfree.analysis.spectrum import draw_spectrum, spectral_norms
from tests.analysis.small import small


def fields(m: int, heads: int = 8, channels: int = 12) -> torch.Tensor:
    """Landmarks that fall into a few fields, as the papers assume of images: (heads, m, channels)."""
    generator = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(heads, 4, channels, generator=generator)
    member = torch.randint(4, (heads, m, 1), generator=generator).expand(-1, -1, channels)
    return centres.gather(1, member) + 0.35 * torch.randn(heads, m, channels, generator=generator)


def test_the_norm_grows_with_landmarks_without_normalisation_and_hardly_with_it():
    counts = (49, 144, 400)
    without, normalized = zip(
        *([norm.mean().item() for norm in spectral_norms(fields(m), 1.0)] for m in counts),
        strict=True,
    )
    assert without[0] < without[1] < without[2]
    assert without[2] > 5 * without[0]
    assert max(normalized) < 1.5 * min(normalized)
    assert max(normalized) < min(without)


def test_norms_are_those_of_the_pseudo_inverse():
    landmarks = torch.randn(3, 12, 4).double()
    a = torch.exp(-0.5 * 0.7 * torch.cdist(landmarks, landmarks).square())
    inverse = torch.linalg.pinv(a, hermitian=True)
    root = a.sum(-1).rsqrt()
    scaled = root[:, :, None] * inverse * root[:, None, :]
    without, normalized = spectral_norms(landmarks, 0.7)
    torch.testing.assert_close(without, torch.linalg.matrix_norm(inverse, 2))
    torch.testing.assert_close(normalized, torch.linalg.matrix_norm(scaled, 2))


def test_landmarks_that_coincide_leave_the_norm_finite():
    landmarks = torch.randn(1, 6, 4)
    landmarks[0, 1] = landmarks[0, 0]
    without, normalized = spectral_norms(landmarks, 1.0)
    assert without.isfinite().all() and normalized.isfinite().all() and without.max() < 1e3


def test_the_label_of_a_stage_says_how_many_eigenvalues_a_solve_inverts():
    layers = capture_attention(small("softfree_tiny"), torch.randn(3, 64, 64)).soft_layers
    norms = {layer.m: [spectral_norms(layer.landmarks, layer.scale)] for layer in layers}
    figure = draw_spectrum(layers, norms, "softfree_tiny, cats", COLOURS["softfree"])
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    means = [layer.kept_eigenvalues().double().mean().item() for layer in layers]
    assert texts == [
        f"stage {layer.stage}: {mean:.0f} of {layer.m} inverted"
        for layer, mean in zip(layers, means, strict=True)
    ]


def test_eigenvalues_are_numbered_by_whole_numbers_and_the_title_says_what_is_seen():
    layers = capture_attention(small("softpp_tiny"), torch.randn(3, 64, 64)).soft_layers
    norms = {layer.m: [spectral_norms(layer.landmarks, layer.scale)] for layer in layers}
    figure = draw_spectrum(layers, norms, "softpp_tiny, cats", COLOURS["softpp"])
    assert all(tick == int(tick) for tick in figure.axes[0].get_xticks())
    assert figure.get_suptitle() == "Spectrum of the kernel between landmarks, A: softpp_tiny, cats"
    without, normalized = (line for line in figure.axes[1].lines if line.get_linestyle() == "-")
    assert (without.get_color(), normalized.get_color()) == (COLOURS["soft"], COLOURS["softpp"])
