"""From texts and images to token stores: frozen backbones of transformers and timm, batch by batch."""

from convexformer.embedding.activations import activations
from convexformer.embedding.embed import embed

__all__ = ["activations", "embed"]
