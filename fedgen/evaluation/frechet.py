"""Fréchet distance of two Gaussians fitted to features (Heusel et al. 2017): FID in the features of
pytorch-fid's InceptionV3, FCD in those of a classifier of the data set."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Statistics = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Mean (d,) and covariance (d, d)."""


def statistics(features: NDArray[np.float32]) -> Statistics:
    """Return mean and covariance of features (n, d).

    Raises:
        ValueError: for fewer than two rows.
    """
    if len(features) < 2:
        raise ValueError("a covariance takes at least two images")
    rows = features.astype(np.float64)
    return rows.mean(0), np.atleast_2d(np.cov(rows, rowvar=False))


def frechet_distance(first: Statistics, second: Statistics) -> float:
    """Return |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)).

    The trace of the root is computed from R C2 R, with R the root of C1: it has the eigenvalues of
    C1 C2 and is symmetric, so that none is complex.
    """
    (mean_1, covariance_1), (mean_2, covariance_2) = first, second
    values, vectors = np.linalg.eigh(covariance_1)
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    cross = np.sqrt(np.linalg.eigvalsh(root @ covariance_2 @ root).clip(min=0)).sum()
    apart = np.square(mean_1 - mean_2).sum()
    return float(max(0.0, apart + np.trace(covariance_1) + np.trace(covariance_2) - 2 * cross))
