"""A generator of two hidden layers, for methods that compare each pixel by itself ("Hermite
Polynomial Features for Private Data Generation", Vinaroz et al. 2022, appendix: its generator for
MNIST), with virtual batch normalization in place of batch normalization.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgen.models.dcgan import with_one_hot

_OF_A_LABEL = 20  # latents of each label in the reference batch
_SEED = 0  # of these latents, which are the same in all runs


class Generator(nn.Module):
    """Latent and label to an image in [0, 1]: two hidden layers, normalized, ReLU, sigmoid.

    Normalized by the mean and the variance over a reference batch (virtual batch normalization:
    Salimans et al., "Improved Techniques for Training GANs", 2016, section 3.4), which is the same
    always: an image follows from its own latent alone, whatever is drawn beside it.

    Args:
        latent: latent dimensions.
        classes: number of labels.
        shape: (channels, height, width) of the images.
        width: of the hidden layers.
    """

    def __init__(self, latent: int, classes: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        self.latent, self.classes, self.shape = latent, classes, shape
        self.first = nn.Linear(latent + classes, width)
        self.second = nn.Linear(width, width)
        self.image = nn.Linear(width, math.prod(shape))

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        """(n, latent), (n,) -> (n, channels, height, width)."""
        source = torch.Generator().manual_seed(_SEED)
        reference = torch.randn(_OF_A_LABEL * self.classes, self.latent, generator=source)
        each = torch.arange(self.classes, device=labels.device).repeat(_OF_A_LABEL)
        hidden = with_one_hot(
            torch.cat([reference.to(latents), latents]), torch.cat([each, labels]), self.classes
        )
        for layer in (self.first, self.second):
            hidden = F.relu(_normalized(layer(hidden), len(each)))
        return torch.sigmoid(self.image(hidden[len(each) :])).view(-1, *self.shape)


def _normalized(features: Tensor, size: int) -> Tensor:
    """By the mean and the variance of the first ``size`` rows."""
    reference = features[:size]
    return (features - reference.mean(0)) * torch.rsqrt(reference.var(0) + 1e-5)
