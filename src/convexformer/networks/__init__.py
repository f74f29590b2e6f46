"""The ordinary networks that solutions map to and from."""

from convexformer.networks.attention import AttentionNetwork
from convexformer.networks.base import Network
from convexformer.networks.combined import SumNetwork
from convexformer.networks.feature import FeatureNetwork, KernelNetwork
from convexformer.networks.fourier import FourierNetwork
from convexformer.networks.mlp import LinearNetwork, MLPNetwork
from convexformer.networks.selfattention import MixerNetwork, SelfAttentionNetwork
from convexformer.networks.simplex import train_in_simplex
from convexformer.networks.softmax_attention import SoftmaxAttentionNetwork
from convexformer.networks.standardized import StandardizedNetwork
from convexformer.networks.token_attention import PositionAttentionNetwork, StochasticAttentionNetwork

NETWORKS: dict[str, type[Network]] = {
    kind.__name__: kind
    for kind in (
        AttentionNetwork,
        FeatureNetwork,
        FourierNetwork,
        KernelNetwork,
        LinearNetwork,
        MLPNetwork,
        MixerNetwork,
        PositionAttentionNetwork,
        SelfAttentionNetwork,
        SoftmaxAttentionNetwork,
        StandardizedNetwork,
        StochasticAttentionNetwork,
        SumNetwork,
    )
}


__all__ = ["NETWORKS", "Network", "train_in_simplex", *NETWORKS]
