"""fedgen: private generative models of images, trained from clients' shards."""

__version__ = "0.1.0"
