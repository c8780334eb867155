"""Whether samples give training rows away: memorization and membership inference, by distances
between pixels. Both look at private rows outside any mechanism, and say nothing about epsilon:
they can find a leak, and never that there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgen.evaluation.utility import Images

Distances = NDArray[np.float64]
_FALSE_ALARMS = 0.01


def nearest(queries: Images, base: Images) -> tuple[Distances, NDArray[np.int64]]:
    """Root mean squared difference of the pixels in [0, 1] of each query to the nearest row of
    ``base``, (n,), and which that is, (n,)."""
    from sklearn.metrics import pairwise_distances_argmin_min

    rows, found = (each.reshape(len(each), -1).astype(np.float32) / 255 for each in (queries, base))
    which, distances = pairwise_distances_argmin_min(rows, found)
    return distances.astype(np.float64) / np.sqrt(rows.shape[1]), which


def memorization(samples: Images, train: Images, test: Images) -> dict[str, Any]:
    """How many samples are at most half as far from a row of ``train`` as from all of ``test``, of
    which there are as many: ``copied``. As many the other way round would be ``by_chance``;
    ``p_value`` is that of more copies than that, for a generator to which both are alike.

    Raises:
        ValueError: unless there are as many rows of both.
    """
    from scipy.stats import binomtest

    if len(train) != len(test):
        raise ValueError(f"{len(train)} training rows are compared with {len(test)} others")
    (to_train, _), (to_test, _) = nearest(samples, train), nearest(samples, test)
    copied, chance = int((to_train <= to_test / 2).sum()), int((to_test <= to_train / 2).sum())
    both = int(((to_train <= to_test / 2) & (to_test <= to_train / 2)).sum())  # two of zero
    copied, chance = copied - both, chance - both
    p_value = 1.0
    if copied + chance:
        p_value = float(binomtest(copied, copied + chance, alternative="greater").pvalue)
    return {
        "copied": copied / len(samples),
        "by_chance": chance / len(samples),
        "p_value": p_value,
        "n": len(samples),
        "rows": len(train),
    }


def membership_inference(samples: Images, train: Images, test: Images) -> dict[str, Any]:
    """The black-box attack of "GAN-Leaks" (Chen, Yu, Zhang, Fritz 2020): a row that some sample is
    near to was a member. ``auc`` over members (``train``) and others (``test``), 0.5 by chance, and
    the true positive rate at 1 % false alarms, 0.01 by chance."""
    from sklearn.metrics import roc_auc_score, roc_curve

    (members, _), (others, _) = nearest(train, samples), nearest(test, samples)
    truth = np.repeat([1, 0], [len(members), len(others)])
    score = -np.concatenate([members, others])
    alarms, found, _ = roc_curve(truth, score)
    return {
        "auc": float(roc_auc_score(truth, score)),
        "tpr_at_1_percent_fpr": float(found[alarms <= _FALSE_ALARMS].max()),
        "members": len(members),
        "others": len(others),
        "samples": len(samples),
    }
