"""Types of the functions by which a method builds its networks.

Each protocol lists the arguments that the method passes. All other parameters of a network are
settings. A network is compatible if it accepts every passed argument and its other required
parameters are set (``fedgen/config/parameters.py``).
"""

from __future__ import annotations

from typing import Protocol

from torch import nn

Shape = tuple[int, int, int]
"""Channels, height, width of an image."""


class GeneratorFactory(Protocol):
    """Factory of generators: latents (n, latent) and labels (n,) to images (n, channels, height,
    width)."""

    def __call__(self, *, latent: int, classes: int, shape: Shape) -> nn.Module:
        """Return the generator."""


class CodeGeneratorFactory(Protocol):
    """Factory of generators: latents (n, latent) and labels (n,) to codes (n, code)."""

    def __call__(self, *, latent: int, classes: int, code: int) -> nn.Module:
        """Return the generator."""


class AutoencoderFactory(Protocol):
    """Factory of autoencoders of images with codes (n, code)."""

    def __call__(self, *, code: int, shape: Shape) -> nn.Module:
        """Return the autoencoder."""


class ImageNetworkFactory(Protocol):
    """Factory of critics, discriminators, classifiers and denoisers of labelled images."""

    def __call__(self, *, classes: int, shape: Shape) -> nn.Module:
        """Return the network."""
