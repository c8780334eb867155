"""Inception score by the data set's own classifier (Salimans et al. 2016; on MNIST as in "GS-WGAN"
and "Differentially Private Generation of Small Images"): features, statistics, number.

The judge is trained on real training rows, outside any mechanism.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedgen.evaluation.utility import Images, Labels, trained_cnn
from fedgen.files import digest, write_whole
from fedgen.models.classifiers import small_cnn

_EPOCHS, _SPLITS = 12, 10


def inception_score(probabilities: NDArray[np.float64]) -> tuple[float, float]:
    """exp(mean KL(p(y|x) || p(y))) of classes' probabilities (n, classes), each row summing to 1:
    mean and standard deviation over ten parts, between 1 and the number of classes.

    Raises:
        ValueError: for fewer rows than parts.
    """
    if len(probabilities) < _SPLITS:
        raise ValueError(f"an inception score takes at least {_SPLITS} images")
    scores = []
    for part in np.array_split(probabilities, _SPLITS):
        marginal = part.mean(0, keepdims=True)
        ratio = np.log(np.maximum(part, 1e-12)) - np.log(np.maximum(marginal, 1e-12))
        scores.append(np.exp((part * ratio).sum(1).mean()))
    return float(np.mean(scores)), float(np.std(scores))


def judge(images: Images, labels: Labels, classes: int, cache: Path) -> nn.Module:
    """The data set's classifier: trained once, then found in ``cache`` by the rows' digest."""
    name = digest(images.tobytes(), labels.tobytes(), f"{classes} {_EPOCHS}".encode())
    path = cache / f"judge-{name[:16]}.safetensors"
    if path.exists():
        net = small_cnn(images.shape[1:], classes)
        net.load_state_dict(safetensors.torch.load(path.read_bytes()))
        return net.eval()
    net = trained_cnn(images, labels, classes, 0, _EPOCHS)
    write_whole(path, safetensors.torch.save(net.state_dict()))
    return net


def probabilities(net: nn.Module, images: Images) -> NDArray[np.float64]:
    """What the judge says of images: (n, classes)."""
    with torch.no_grad():
        found: list[Tensor] = [
            net(part.float() / 255).double().softmax(1)
            for part in torch.split(torch.from_numpy(images), 512)
        ]
    return torch.cat(found).numpy()
