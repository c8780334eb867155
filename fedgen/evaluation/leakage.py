"""Whether samples give training rows away: memorization and membership inference, by distances
between pixels. Both look at private rows outside any mechanism, and say nothing about epsilon:
they can find a leak, and never show that there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgen.evaluation.utility import Images

Distances = NDArray[np.float64]
_FALSE_ALARMS = 0.01


def nearest(queries: Images, base: Images, count: int = 1) -> tuple[Distances, NDArray[np.int64]]:
    """Root mean squared differences of the pixels in [0, 1] of each query to its nearest rows of
    ``base``, (n, count), and which these are, (n, count)."""
    from sklearn.neighbors import NearestNeighbors

    rows, found = (each.reshape(len(each), -1).astype(np.float32) / 255 for each in (queries, base))
    index = NearestNeighbors(n_neighbors=count, algorithm="brute").fit(found)
    distances, which = index.kneighbors(rows)
    return distances.astype(np.float64) / np.sqrt(rows.shape[1]), which


def memorization(samples: Images, train: Images, test: Images) -> dict[str, Any]:
    """How many samples copy a row: they are less than half as far from it as from every other one.

    ``copied``: the share that copies a row of ``train``; ``by_chance``: one of ``test``, which no
    generator has seen. ``p_value``: of so many different training rows among those that are
    copied, if which rows were trained on made no difference (hypergeometric: rows are exchangeable
    then, whatever the samples are).
    """
    from scipy.stats import hypergeom

    rows = np.concatenate([train, test])
    distances, which = nearest(samples, rows, 2)
    copies = which[distances[:, 0] < distances[:, 1] / 2, 0]
    different = np.unique(copies)
    from_train = int((different < len(train)).sum())
    chance = hypergeom(len(rows), len(train), len(different)).sf(from_train - 1)
    return {
        "copied": float((copies < len(train)).sum() / len(samples)),
        "by_chance": float((copies >= len(train)).sum() / len(samples)),
        "p_value": float(chance) if len(different) else 1.0,
        "n": len(samples),
        "train": len(train),
        "test": len(test),
    }


def membership_inference(samples: Images, train: Images, test: Images) -> dict[str, Any]:
    """The black-box attack of "GAN-Leaks" (Chen, Yu, Zhang, Fritz 2020): a row that some sample is
    near to was a member. ``auc`` over members (``train``) and others (``test``), 0.5 by chance, and
    the true positive rate at 1 % false alarms, 0.01 by chance."""
    from sklearn.metrics import roc_auc_score, roc_curve

    members, others = (nearest(rows, samples)[0][:, 0] for rows in (train, test))
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
