"""Norms of gradients before clipping, during a run ("GS-WGAN", figure 2).

    python scripts/gradient_norms.py --out norms.png method=dpgan rounds=200 [KEY=VALUE ...]

Train in this process like ``fedgen train`` with the same settings, and record the input of every
clipping call. Print quantiles of the norms and the clipped share for the first, middle and last
tenth of the run; plot them before and after. A gradient penalty keeps the gradients of a critic
with respect to images near norm one, so that a clip norm of one changes little; weight gradients of
a discriminator have no such scale. For methods that clip throughout a run (DP-MERF clips once);
FedAvg-GAN's aggregator clips again what clients have clipped: both count.

The norms are private: no ε covers this output.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from fedgen.config.compose import compose
from fedgen.privacy import clipping
from fedgen.run.train import train

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TENTHS = 10


def observed(settings: list[str]) -> tuple[Path, list[NDArray[np.float64]], float]:
    """Train; return the run directory, the norms of each clipping call, and the clip norm."""
    norms: list[NDArray[np.float64]] = []
    clips: list[float] = []
    factors = clipping.clipping_factors

    def looking(found: Tensor, clip: float, *below: float) -> Tensor:
        if len(found):
            norms.append(found.detach().cpu().double().numpy())
            clips.append(clip)
        return factors(found, clip, *below)

    with mock.patch.object(clipping, "clipping_factors", looking):
        place = train(compose("config", [*settings, "runtime=in_process"]))
    if len(norms) < TENTHS:
        raise SystemExit(f"the run clipped {len(norms)} times, {TENTHS} are needed: more rounds")
    if len(set(clips)) > 1:
        raise SystemExit(f"the run clips at several norms: {sorted(set(clips))}")
    return place, norms, clips[0]


def draw(tenths: list[NDArray[np.float64]], clip: float, title: str, path: Path) -> None:
    """Plot median, quartiles and 90 % of the norms before and after clipping."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    share = (np.arange(TENTHS) + 0.5) / TENTHS
    axes = None
    for place, (name, most) in enumerate((("before clipping", np.inf), ("after clipping", clip))):
        axes = figure.add_subplot(1, 2, place + 1, sharey=axes)
        found = np.array([np.quantile(np.minimum(each, most), QUANTILES) for each in tenths]).T
        axes.fill_between(share, found[0], found[-1], alpha=0.2, color="C0", label="5 to 95 %")
        axes.fill_between(share, found[1], found[-2], alpha=0.4, color="C0", label="25 to 75 %")
        axes.plot(share, found[2], "C0", label="median")
        axes.axhline(clip, color="C3", linestyle="--", label="clip norm")
        axes.set_yscale("log")
        axes.set_title(name)
        axes.set_xlabel("share of the run")
        axes.grid(alpha=0.3)
    assert axes is not None
    axes.legend(fontsize=8)
    figure.suptitle(f"{title}: L2 norms of gradients (private)")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradient norms before and after clipping.")
    parser.add_argument("--out", type=Path, default=Path("gradient_norms.png"))
    options, settings = parser.parse_known_args()
    place, norms, clip = observed(settings)
    bounds = np.linspace(0, len(norms), TENTHS + 1).round().astype(int)
    tenths = [np.concatenate(norms[low:high]) for low, high in pairwise(bounds)]
    print(f"{place}: clip norm {clip:g}")
    for name, at in (("first", 0), ("middle", TENTHS // 2), ("last", TENTHS - 1)):
        low, median, high = np.quantile(tenths[at], (0.05, 0.5, 0.95))
        cut = (tenths[at] > clip).mean()
        print(
            f"{name:6} tenth: median {median:.3g} (5 %: {low:.3g}, 95 %: {high:.3g}), cut {cut:.1%}"
        )
    draw(tenths, clip, place.name, options.out)
    print(options.out)


if __name__ == "__main__":
    main()
