"""Synthetic problems of known structure; ``SUITES`` names the ones that a run takes."""

from datasets.attention import Attention
from datasets.gated import Gated
from datasets.softmax import Softmax

SUITES = {
    "full": [
        Attention(2000, 196, 64, beta_ratio=0.1),
        Attention(2000, 196, 64, beta_ratio=0.01),
        Attention(5000, 196, 128, beta_ratio=0.1),
        Softmax(2000, 64, 64, 10, beta_ratio=0.1),
        Gated(1000, 32, 32, 16, beta_ratio=0.1),
        Attention(200, 20, 8, beta_ratio=0.1),  # small enough for interior points and SCS
    ],
    "quick": [
        Attention(400, 49, 16, beta_ratio=0.1),
        Attention(400, 49, 16, beta_ratio=0.01),
        Softmax(300, 16, 16, 4, beta_ratio=0.1),
        Gated(200, 8, 8, 4, beta_ratio=0.1),
        Attention(100, 10, 4, beta_ratio=0.1),
    ],
    "tiny": [
        Attention(60, 6, 4, beta_ratio=0.1),
        Softmax(60, 6, 4, 3, beta_ratio=0.1),
        Gated(60, 4, 4, 2, beta_ratio=0.1),
    ],
}

__all__ = ["SUITES", "Attention", "Gated", "Softmax"]
