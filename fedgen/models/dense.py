"""A generator with two hidden layers, for methods that compare pixels individually ("Hermite
Polynomial Features for Private Data Generation", Vinaroz et al. 2022, appendix: its generator for
MNIST), with virtual batch normalization instead of batch normalization."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgen.models.dcgan import with_one_hot

_OF_A_LABEL = 20  # latents per label in the reference batch
_SEED = 0  # seed of these latents, equal in all runs


class Generator(nn.Module):
    """Latent and label to an image in [0, 1]: two hidden layers, normalized, ReLU, sigmoid.

    Normalization uses mean and variance over a fixed reference batch (virtual batch normalization:
    Salimans et al., "Improved Techniques for Training GANs", 2016, section 3.4): an image depends
    only on its own latent.

    Args:
        latent: latent dimensions.
        classes: number of labels.
        shape: (channels, height, width) of the images.
        width: width of the hidden layers.
    """

    def __init__(self, latent: int, classes: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        self.latent, self.classes, self.shape = latent, classes, shape
        self.first = nn.Linear(latent + classes, width)
        self.second = nn.Linear(width, width)
        self.image = nn.Linear(width, math.prod(shape))
        # sampled here, because vmap (warm starts) forbids random operations in ``forward``
        source = torch.Generator().manual_seed(_SEED)
        reference_shape = (_OF_A_LABEL * classes, latent)
        self.reference = torch.randn(reference_shape, generator=source, device="cpu")

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """(n, latent), (n,) -> (n, channels, height, width)."""
        reference_labels = torch.arange(self.classes, device=labels.device).repeat(_OF_A_LABEL)
        hidden = with_one_hot(
            torch.cat([self.reference.to(latents), latents]),
            torch.cat([reference_labels, labels]),
            self.classes,
        )
        for layer in (self.first, self.second):
            hidden = F.relu(_normalized(layer(hidden), len(reference_labels)))
        return torch.sigmoid(self.image(hidden[len(reference_labels) :])).view(-1, *self.shape)


def _normalized(features: Tensor, size: int) -> Tensor:
    """Normalize by mean and variance of the first ``size`` rows."""
    reference = features[:size]
    return (features - reference.mean(0)) * torch.rsqrt(reference.var(0) + 1e-5)
