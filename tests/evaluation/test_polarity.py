"""The verdict on inverted pixels, for images whose bug is known."""

from __future__ import annotations

import numpy as np
from tiny import STREAMS

from fedgen.data.digits import digits
from fedgen.evaluation.polarity import Samples, _test, typical, verdict

DIGITS = digits(STREAMS)
LIKE = typical(DIGITS.images, DIGITS.labels, 10)
ALL = tuple(range(10))


def drawn(
    count: int, inverted: float, seed: int, labels: tuple[int, ...] = ALL, generators: int = 5
) -> list[Samples]:
    """Return real digits of these labels with noise, as of several generators, some of them
    inverted."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(generators):
        rows = rng.integers(0, len(DIGITS.labels), count)
        images, kinds = DIGITS.images[rows].astype(float), DIGITS.labels[rows]
        flip = (rng.random(count) < inverted) & np.isin(kinds, labels)
        images[flip] = 255 - images[flip]
        noisy = images + rng.normal(0, 30, images.shape)
        result.append((noisy.clip(0, 255).astype(np.uint8), kinds))
    return result


def plain(levels: list[float], count: int = 200) -> list[Samples]:
    """Return generators of constant images, one shade in [0, 1] each."""
    labels = np.arange(count) % 10
    return [(np.full((count, 1, 8, 8), 255 * level).astype(np.uint8), labels) for level in levels]


def test_a_bug_is_found_in_its_group() -> None:
    result = verdict(drawn(500, 0.8, 0), drawn(500, 0.0, 1), LIKE, 0.1)
    assert result.bug is True
    assert result.p_value == 1 / 252
    assert 0.6 < result.effect < 0.9
    assert result.classes == list(ALL)


def test_the_labels_affected_are_named() -> None:
    result = verdict(drawn(1000, 1.0, 0, labels=(3, 7)), drawn(1000, 0.0, 1), LIKE, 0.05)
    assert result.bug is True
    assert result.classes == [3, 7]


def test_equal_groups_have_no_bug() -> None:
    for seed in range(20):
        result = verdict(drawn(100, 0.0, seed), drawn(100, 0.0, 100 + seed), LIKE, 0.1)
        assert result.bug is False
        assert not result.classes


def test_a_small_difference_is_not_a_bug() -> None:
    assert verdict(drawn(500, 0.05, 0), drawn(500, 0.0, 1), LIKE, 0.1).bug is False


def test_an_insignificant_difference_is_inconclusive() -> None:
    suspect = [*drawn(200, 1.0, 0, generators=2), *drawn(200, 0.0, 1, generators=3)]
    result = verdict(suspect, drawn(200, 0.0, 2), LIKE, 0.1)
    assert result.p_value > 0.01
    assert result.effect > 0.3
    assert result.bug is None


def test_generators_driven_to_white_or_black_by_noise_are_exchangeable() -> None:
    """Each independently of its group: in 2,000 such trials the p-value is below 0.01 in about one
    of a hundred at most."""
    rng = np.random.default_rng(0)
    shares = rng.integers(0, 2, (2000, 10)).astype(float)
    wrong = sum(_test(each[:5], each[5:])[1] < 0.01 for each in shares)
    assert wrong <= 40


def test_weak_generators_decide_if_all_agree() -> None:
    def faint(seed: int, inverted: float) -> list[Samples]:
        clear = drawn(200, inverted, seed)
        return [((0.2 * images + 0.8 * 128).astype(np.uint8), kinds) for images, kinds in clear]

    result = verdict(faint(0, 1.0), drawn(200, 0.0, 1), LIKE, 0.1)
    assert result.bug is True
    assert result.p_value == 1 / 252
    assert verdict(faint(0, 0.0), drawn(200, 0.0, 1), LIKE, 0.1).bug is False
    assert verdict(faint(0, 0.0), faint(1, 0.0), LIKE, 0.1).effect < 0.01


def test_untrained_generators_are_inconclusive() -> None:
    grey = plain([0.5, 0.48, 0.52, 0.5, 0.45])
    assert verdict(grey, grey, LIKE, 0.1).bug is None
    assert verdict(grey, drawn(200, 0.0, 1), LIKE, 0.1).bug is None
    assert verdict(drawn(200, 1.0, 0), grey, LIKE, 0.1).bug is None


def test_an_inverted_normal_group_is_not_a_reference() -> None:
    white, black = plain([1.0] * 5), plain([0.0] * 5)
    assert verdict(black, white, LIKE, 0.1).bug is None
    assert verdict(white, black, LIKE, 0.1).bug is True


def test_labels_without_samples_are_ignored() -> None:
    some = [(images[labels != 4], labels[labels != 4]) for images, labels in drawn(200, 0.0, 0)]
    assert verdict(drawn(200, 0.0, 2), some, LIKE, 0.1).bug is False
    assert not typical(DIGITS.images[:0], DIGITS.labels[:0], 10).any()
