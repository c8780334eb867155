"""The classifier that "Private Set Generation" and dataset condensation train on synthetic images
(Zhao, Mopuri, Bilen 2021)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fedgen.errors import FedgenError


class ConvNet(nn.Module):
    """Three blocks of a 3x3 convolution, instance normalization, ReLU and 2x2 average pooling, and
    a linear layer. At width 128 on 28x28 images, which it pads to 32x32 if they have one channel,
    it has 317,706 parameters.

    Args:
        classes: number of labels.
        shape: (channels, height, width) of the images.
        width: channels of each convolution.

    Raises:
        FedgenError: for images that are too small to be pooled three times.
    """

    def __init__(self, classes: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, *sides = shape
        first = 3 if channels == 1 else 1
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inputs, width, 3, padding=padding)
            for inputs, padding in [(channels, first), (width, 1), (width, 1)]
        )
        self.norms = nn.ModuleList(nn.GroupNorm(width, width) for _ in range(3))
        high, wide = ((side + 2 * first - 2) // 8 for side in sides)
        if not high or not wide:
            raise FedgenError(
                "data",
                f"images of {sides[1]}x{sides[0]} are too small for three poolings",
                "take larger ones, from 8x8 (in grey 4x4) on",
            )
        self.logits = nn.Linear(width * high * wide, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """(n, channels, height, width), (n,) -> cross-entropy of each image (n,)."""
        features = images
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            features = F.avg_pool2d(F.relu(norm(convolution(features))), 2)
        log_probabilities = self.logits(features.flatten(1)).log_softmax(1)
        losses: Tensor = -log_probabilities.gather(1, labels[:, None])[:, 0]
        return losses
