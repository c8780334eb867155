"""Figures of a run: sample grids, curves, histograms."""

from __future__ import annotations

import io
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fedgen.privacy.guarantee import FALSE_POSITIVE_RATES, Guarantee

DIGITAL_SOURCE_TYPE = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
"""IPTC's term for media created by a model that was trained on sampled content."""

_XMP = f"""<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description rdf:about="" xmlns:Iptc4xmpExt="http://iptc.org/std/Iptc4xmpExt/2008-02-29/"
Iptc4xmpExt:DigitalSourceType="{DIGITAL_SOURCE_TYPE}"/></rdf:RDF></x:xmpmeta>
<?xpacket end="r"?>"""


def sample_grid(
    images: NDArray[np.uint8], columns: int, path: Path | IO[bytes], synthetic: bool = True
) -> None:
    """Write images (n, channels, h, w) row by row, enlarged to at least 28 pixels each, separated
    by thin lines; see ``write_image``."""
    count, channels, height, width = images.shape
    scale = max(1, -(-28 // height))
    tiles = images.repeat(scale, axis=2).repeat(scale, axis=3)
    rows = -(-count // columns)
    tall, wide = height * scale + 2, width * scale + 2
    sheet = np.full((rows * tall, columns * wide, channels), 64, dtype=np.uint8)
    for number, tile in enumerate(tiles):
        top, left = number // columns * tall + 1, number % columns * wide + 1
        sheet[top : top + tall - 2, left : left + wide - 2] = tile.transpose(1, 2, 0)
    write_image(sheet.transpose(2, 0, 1), path, synthetic)


def write_image(image: NDArray[np.uint8], to: Path | IO[bytes], synthetic: bool = True) -> None:
    """Write one image (channels, h, w) with one or three channels as a PNG.

    Args:
        synthetic: whether its XMP metadata mark it as generated, with IPTC's digital source type;
            False for pictures with real images.
    """
    pixels, metadata = image.transpose(1, 2, 0), PngInfo()
    if synthetic:
        metadata.add_itxt("XML:com.adobe.xmp", _XMP)
    file = Image.fromarray(pixels[:, :, 0] if len(image) == 1 else pixels)
    file.save(to, "PNG", pnginfo=metadata)


def contact_sheet(
    images: NDArray[np.uint8], rows: list[str], columns: list[str], path: Path
) -> None:
    """Write generated images (rows, columns, channels, h, w) as a grid with titles; see
    ``write_image``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    down, across, channels, height, width = images.shape
    cell = 0.5
    size = (cell * across * width / height + 3.6, cell * down + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    margin = 1 + height // 14
    tall, wide = height + margin, width + margin
    sheet = np.full((down * tall, across * wide, channels), 255, dtype=np.uint8)
    for row, column in np.ndindex(down, across):
        top, left = row * tall, column * wide
        sheet[top : top + height, left : left + width] = images[row, column].transpose(1, 2, 0)
    axes.imshow(sheet[:, :, 0] if channels == 1 else sheet, cmap="gray", vmin=0, vmax=255)
    axes.set_yticks([row * tall + height / 2 for row in range(down)], rows)
    axes.set_xticks([column * wide + width / 2 for column in range(across)], columns)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, bbox_inches="tight")  # titles of any length
    write_image(np.asarray(Image.open(picture).convert("RGB")).transpose(2, 0, 1), path)


def lower_bounds(
    panels: dict[str, list[tuple[int, float, float | None]]],
    delta: float,
    confidence: float,
    path: Path,
) -> None:
    """Write the figure of an audit.

    Args:
        panels: name -> (releases or rounds, lower bound, proven ε).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    nonempty = {name: points for name, points in panels.items() if points}
    figure = Figure(figsize=(4.5 * len(nonempty), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (name, points) in enumerate(nonempty.items()):
        axes = figure.add_subplot(1, len(nonempty), place + 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        after = [point[0] for point in points]
        label = f"lower bound, confidence {confidence:g}"
        axes.plot(after, [point[1] for point in points], "o-", label=label)
        proven = [(point[0], point[2]) for point in points if point[2] is not None]
        if proven:
            axes.plot(*zip(*proven, strict=True), "s-", label="proven ε")
        axes.set_xlabel(name)
        axes.set_ylabel(f"ε at δ = {delta:g}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def epsilon_against_rounds(
    rounds: list[int], curves: dict[str, list[float | None]], delta: float, path: Path
) -> None:
    """Write the figure of ε against rounds, for each adversary and the claim of the paper."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 4))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lanes = {
        name: [(r, v) for r, v in zip(rounds, values, strict=True) if v is not None]
        for name, values in curves.items()
    }
    for name, points in _plot_curves(lanes).items():
        style = "--" if name.startswith("claimed") else "-"
        axes.plot(*zip(*points, strict=True), style, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("rounds")
    axes.set_ylabel(f"ε at δ = {delta:g}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=120)


def _plot_curves(lanes: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the curves with points; equal curves are merged under all their names, as the last
    would hide the others."""
    curves: dict[str, list[Any]] = {}
    for name, points in lanes.items():
        same = next(
            (other for other, other_points in curves.items() if other_points == points), None
        )
        if same is not None:
            curves[f"{same}, {name}"] = curves.pop(same)
        elif points:
            curves[name] = points
    return curves


def curves_over_rounds(lanes: dict[str, list[tuple[float, float]]], y: str, path: Path) -> None:
    """Write a figure with a line per name -> [(rounds, y)]; a single point is a dot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in _plot_curves(lanes).items():
        axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=_plain(name))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("rounds")
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def privacy_against_utility(
    panels: dict[str, dict[str, list[list[tuple[float, float, float]]]]],
    x: str,
    y: str,
    path: Path,
) -> None:
    """Write a figure with one panel per key and one colour per series: panel -> series -> its
    runs, each a list of points (x, mean, standard deviation). Lines are runs; dashes join their end
    points, which have error bars. The x axis is logarithmic if its values allow it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(4.5 * len(panels), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    first, handles = None, {}
    colours = {name: f"C{n}" for n, name in enumerate(dict.fromkeys(chain(*panels.values())))}
    for place, (panel, methods) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1, sharey=first)
        first = first or axes
        for method, runs in methods.items():
            curves = [points for points in runs if points]
            for points in curves:
                along, means, _ = zip(*points, strict=True)
                axes.plot(along, means, "-", linewidth=1, color=colours[method])
            if curves:
                ends = sorted(points[-1] for points in curves)
                at, means, bars = zip(*ends, strict=True)
                axes.errorbar(at, means, bars, fmt="none", capsize=3, color=colours[method])
                line = axes.plot(at, means, "o--", color=colours[method])
                handles[_plain(method)] = line[0]
        axes.set_title(_plain(panel) or "")
        x_values = [x for x, *_ in chain(*chain(*methods.values()))]
        if x_values and 0 < min(x_values) * _MIN_LOG_RATIO <= max(x_values):
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(x)
        axes.grid(alpha=0.3)
        if place == 0:
            axes.set_ylabel(_plain(y) or "")
    if any(handles):
        names = [name or "" for name in handles]
        figure.legend(handles.values(), names, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=120)


_MIN_LOG_RATIO = 3  # of the ends of a logarithmic axis, which has ticks at 1, 2 and 5


def _plain(name: str) -> str | None:
    """Return a label without special meaning: matplotlib parses formulas between dollars, and hides
    names with a leading _."""
    return name.replace("$", r"\$").replace("_", " ") or None


def histograms(lanes: dict[str, NDArray[np.float64]], x: str, path: Path) -> None:
    """Write a figure with a histogram per name -> values: shares, with common bins."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bins = np.histogram_bin_edges(np.concatenate(list(lanes.values())), 50)
    for name, values in lanes.items():
        weights = np.full(len(values), 1 / len(values))
        axes.hist(values, bins.tolist(), weights=weights, alpha=0.5, label=name)
    axes.set_xlabel(x)
    axes.set_ylabel("share")
    axes.legend()
    figure.savefig(path, dpi=120)


def trade_off(curves: Mapping[str, Guarantee], path: Path) -> None:
    """Write the figure of trade-off curves, an SVG that is equal for equal curves: the largest true
    positive rate of a membership test against its false positive rate, for each adversary, with
    marks at the rates that reports state."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    rates = np.geomspace(1e-4, 1, 200)
    lanes = {name: [(fpr, curve.tpr(fpr)) for fpr in rates] for name, curve in curves.items()}
    for name, points in _plot_curves(lanes).items():
        [line] = axes.plot(*zip(*points, strict=True), label=name)
        curve = curves[name.partition(",")[0]]
        stated = [(fpr, curve.tpr(fpr)) for fpr in FALSE_POSITIVE_RATES]
        axes.plot(*zip(*stated, strict=True), "o", color=line.get_color())
    axes.plot(rates, rates, "--", color="grey", label="random guessing")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("false positive rate")
    axes.set_ylabel("true positive rate, at most")
    axes.grid(alpha=0.3)
    axes.legend()
    with matplotlib.rc_context({"svg.hashsalt": "fedgen"}):
        figure.savefig(path, metadata={"Date": None})


def roc_curves(panels: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Plot the ROC curves of attacks on logarithmic axes, with the proven bounds.

    Args:
        panels: title -> ``curves`` of ``attack.json``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(panels), 3)
    figure = Figure(
        figsize=(max(7.0, 4.5 * columns), 4.5 * -(-len(panels) // columns)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    for number, (title, curves) in enumerate(panels.items(), 1):
        axes, rates = figure.add_subplot(-(-len(panels) // columns), columns, number), curves["fpr"]
        for name, tpr in curves["attacks"].items():
            axes.plot(rates, tpr, label=name)
        if curves["proven"] is not None:
            axes.plot(rates, curves["proven"], color="black", label="proven upper bound")
            axes.fill_between(rates, curves["proven"], 1, color="black", alpha=0.06)
        axes.plot(rates, rates, "--", color="grey", label="random guessing")
        axes.set(xscale="log", yscale="log", xlim=(1e-3, 1), ylim=(1e-3, 1.05), title=title)
        axes.set_xlabel("false positive rate")
        axes.set_ylabel("true positive rate")
        axes.grid(alpha=0.3)
        if number == 1:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def histogram_of_clients(values: list[float], x: str, path: Path) -> None:
    """Write a histogram of clients by value."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.hist(values, bins=min(40, len(set(values)) + 1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x)
    axes.set_ylabel("clients")
    figure.savefig(path, dpi=120)


def partition(counts: NDArray[np.int64], path: Path) -> None:
    """Write a figure of the number of images per label (columns) and client (rows), counts
    (clients, classes); clients are sorted by their number of images, largest first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 4))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.12, 0.13, 0.7, 0.83))
    order = np.argsort(-counts.sum(1), kind="stable")
    image = axes.imshow(counts[order], aspect="auto", cmap="viridis", interpolation="nearest")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("label")
    axes.set_ylabel("clients, ranked by number of images")
    place, ticks = figure.add_axes((0.85, 0.13, 0.03, 0.83)), MaxNLocator(integer=True)
    figure.colorbar(image, cax=place, label="images", ticks=ticks)
    figure.savefig(path, dpi=120)
