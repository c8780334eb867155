"""The data set's own classifier: what an inception score is made of on MNIST (as in "GS-WGAN" and
"Differentially Private Generation of Small Images"), and the features of FCD, precision and recall.

It is trained on real training rows, outside any mechanism.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray

from fedgen.evaluation.utility import LEAST_BATCHES, Images, Labels, outputs, trained
from fedgen.files import digest, write_shared
from fedgen.models.classifiers import JudgeNet
from fedgen.version import VERSION

_EPOCHS = 15


def judge(images: Images, labels: Labels, classes: int, cache: Path) -> JudgeNet:
    """The classifier of these rows: trained once, then found in ``cache`` by their digest."""
    rule = f"{_EPOCHS} {LEAST_BATCHES}"
    facts = f"{classes} {images.shape} {rule} {VERSION}"
    name = digest(images.tobytes(), labels.tobytes(), facts.encode())
    path = cache / f"judge-{name[:16]}.safetensors"
    net = JudgeNet(images.shape[1:], classes)
    if path.exists():
        net.load_state_dict(safetensors.torch.load(path.read_bytes()))
        return net.eval()
    found = trained(lambda: JudgeNet(images.shape[1:], classes), images, labels, 0, _EPOCHS)
    weights = {name: value.contiguous() for name, value in found.state_dict().items()}
    write_shared(path, safetensors.torch.save(weights))
    net.load_state_dict(found.state_dict())
    return net.eval()


def seen(net: JudgeNet, images: Images) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Features (n, 128) of images, and the classes' probabilities (n, classes)."""
    features = outputs(net.features, images)
    with torch.no_grad():
        odds = net.head(torch.from_numpy(features)).double().softmax(1)
    return features, odds.numpy()
