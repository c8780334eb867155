"""Text of the model card of a release (``README.md`` in ``public/``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedgen.reporting.privacy_statement import exceptions
from fedgen.reporting.progress import format_epsilon


def card(
    record: dict[str, Any],
    methods: Sequence[str],
    shape: Sequence[int],
    classes: int,
    labels: Sequence[str] | None,
) -> str:
    """Return the model card of a release in the format of model hubs: metadata, and limits of use.

    Args:
        methods: name of the method, and of its warm-up if any.
        shape: shape of images, (channels, height, width).
        classes: number of labels.
        labels: their names, if published.
    """
    named = f" ({', '.join(labels)})" if labels else ""
    release, (channels, height, width) = record["views"]["release"], shape
    kind = "grey" if channels == 1 else "colour"
    if release["epsilon"] is None:
        promise = f"There is no privacy bound: {release['reason']}."
    else:
        promise = (
            f"({format_epsilon(release['epsilon'])}, {record['delta']:g})-differential privacy "
            f"per {record['unit']}, against any reader of this folder: `PRIVACY.md` explains what "
            f"that means and what it does not cover.{exceptions(record)}"
        )
    tags = "".join(f"- {method}\n" for method in methods)
    warning = "**An experiment, not for release**: its noise is derived from a seed.\n\n"
    return (
        "---\nlibrary_name: fedgen\npipeline_tag: unconditional-image-generation\n"
        f"tags:\n- differential-privacy\n- synthetic-data\n{tags}---\n\n"
        f"# A private generator of images ({' after '.join(methods)})\n\n"
        "![Samples](samples.png)\n\n"
        f"{warning if record['noise'] == 'seeded' else ''}"
        f"Generates {kind} images of {width} x {height} pixels with {classes} "
        f"label{'s' if classes > 1 else ''}{named}. {promise}\n\n## Use\n\n"
        "With fedgen (see its README for installation): `fedgen sample run=FOLDER out=FILE.npz`, "
        "or in Python\n\n"
        "```python\nimport fedgen\n\nimages, labels = fedgen.load(FOLDER).samples(1000)\n```\n\n"
        "## Limits\n\n"
        "- Samples resemble the training data as a whole. Noise first hides rare kinds of images, "
        "and differences within a label.\n"
        "- This folder contains no measure of utility. Evaluate samples on your own data before "
        "you rely on them.\n"
        "- The generator may reproduce properties of groups in the training data.\n"
    )
