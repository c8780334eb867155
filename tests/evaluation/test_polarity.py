"""The verdict on a pixel flip, on images whose bug is known."""

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
    """Real digits with noise, as of several generators, some of them inverted: of these labels."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(generators):
        rows = rng.integers(0, len(DIGITS.labels), count)
        images, kinds = DIGITS.images[rows].astype(float), DIGITS.labels[rows]
        flip = (rng.random(count) < inverted) & np.isin(kinds, labels)
        images[flip] = 255 - images[flip]
        noisy = images + rng.normal(0, 30, images.shape)
        found.append((noisy.clip(0, 255).astype(np.uint8), kinds))
    return found


def plain(levels: list[float], count: int = 200) -> list[Samples]:
    """Generators that draw nothing but one shade each, in [0, 1]."""
    labels = np.arange(count) % 10
    return [(np.full((count, 1, 8, 8), 255 * level).astype(np.uint8), labels) for level in levels]


def test_a_bug_is_found_where_it_is() -> None:
    found = verdict(drawn(500, 0.8, 0), drawn(500, 0.0, 1), LIKE, 0.1)
    assert found.bug is True
    assert found.p_value == 1 / 252
    assert 0.6 < found.effect < 0.9
    assert found.classes == list(ALL)


def test_the_labels_affected_are_named() -> None:
    found = verdict(drawn(1000, 1.0, 0, labels=(3, 7)), drawn(1000, 0.0, 1), LIKE, 0.05)
    assert found.bug is True
    assert found.classes == [3, 7]


def test_two_groups_alike_have_none() -> None:
    for seed in range(20):
        found = verdict(drawn(100, 0.0, seed), drawn(100, 0.0, 100 + seed), LIKE, 0.1)
        assert found.bug is False
        assert not found.classes


def test_a_small_difference_is_none() -> None:
    assert verdict(drawn(500, 0.05, 0), drawn(500, 0.0, 1), LIKE, 0.1).bug is False


def test_a_difference_that_may_be_luck_is_not_called_none() -> None:
    suspect = [*drawn(200, 1.0, 0, generators=2), *drawn(200, 0.0, 1, generators=3)]
    found = verdict(suspect, drawn(200, 0.0, 2), LIKE, 0.1)
    assert found.p_value > 0.01
    assert found.effect > 0.3
    assert found.bug is None


def test_generators_that_noise_drove_to_white_or_black_are_exchangeable() -> None:
    """Each by a coin of its own, whatever its group: over 2,000 of such trials the p-value is below
    0.01 at most about as often."""
    rng = np.random.default_rng(0)
    shares = rng.integers(0, 2, (2000, 10)).astype(float)
    wrong = sum(_test(each[:5], each[5:])[1] < 0.01 for each in shares)
    assert wrong <= 40


def test_generators_that_have_learnt_little_tell_if_they_all_lean_to_their_side() -> None:
    def faint(seed: int, inverted: float) -> list[Samples]:
        clear = drawn(200, inverted, seed)
        return [((0.2 * images + 0.8 * 128).astype(np.uint8), kinds) for images, kinds in clear]

    found = verdict(faint(0, 1.0), drawn(200, 0.0, 1), LIKE, 0.1)
    assert found.bug is True
    assert found.p_value == 1 / 252
    assert verdict(faint(0, 0.0), drawn(200, 0.0, 1), LIKE, 0.1).bug is False
    assert verdict(faint(0, 0.0), faint(1, 0.0), LIKE, 0.1).effect < 0.01


def test_generators_that_learnt_nothing_tell_nothing() -> None:
    grey = plain([0.5, 0.48, 0.52, 0.5, 0.45])
    assert verdict(grey, grey, LIKE, 0.1).bug is None
    assert verdict(grey, drawn(200, 0.0, 1), LIKE, 0.1).bug is None
    assert verdict(drawn(200, 1.0, 0), grey, LIKE, 0.1).bug is None


def test_a_normal_group_that_is_inverted_is_no_reference() -> None:
    white, black = plain([1.0] * 5), plain([0.0] * 5)
    assert verdict(black, white, LIKE, 0.1).bug is None
    assert verdict(white, black, LIKE, 0.1).bug is True


def test_a_label_without_samples_is_no_trouble() -> None:
    some = [(images[labels != 4], labels[labels != 4]) for images, labels in drawn(200, 0.0, 0)]
    assert verdict(drawn(200, 0.0, 2), some, LIKE, 0.1).bug is False
    assert not typical(DIGITS.images[:0], DIGITS.labels[:0], 10).any()
