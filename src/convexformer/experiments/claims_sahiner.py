"""The claims of Sahiner et al. 2022, *Unraveling Attention via Convex Duality*, and of their poster of the same title."""

from __future__ import annotations

from functools import partial

from convexformer.experiments.claims_counterexamples import (
    cell_count,
    equal_parameters,
    factorised,
    gated_and_relu,
    gated_heads,
    parameter_counts,
    plain_cells,
    relu_heads,
    spurious_minimum,
)
from convexformer.experiments.claims_ergen import ERRATA
from convexformer.experiments.claims_networks import duality, equivalence, printed_heads, rescaled, trained_certificates
from convexformer.experiments.claims_programs import (
    gated_token_weighted,
    mixer_is_smaller,
    outputs_share_weights,
    uncorrelated_weights,
    weights_follow_correlation,
    whitened_relu,
)
from convexformer.experiments.claims_registry import QUOTED, Beyond, Check, Claim
from convexformer.experiments.claims_structure import (
    block_fourier_lemma,
    constrained_norm,
    fourier_lemma,
    frank_wolfe_rate,
    gram_weighted,
    heads_on_digits,
    inverse_map,
    local_correlation,
    low_rank,
    mixer_vectorisation,
    pooled_fourier,
    proximal_rate,
    relu_without_decay,
    token_weighted,
    uncorrelated_blocks,
    without_decay,
)

_claim = partial(Claim, "Sahiner et al. 2022")
BACKBONE = "needs a gMLP-S or ViT backbone trained on ImageNet and 70 epochs of CIFAR-100 on GPUs"
SEVERAL = "With several heads a gate ([errata](errata.md))"


def _equivalence(head: str, activation: str) -> Check:
    return Check(equivalence, (head, activation, "tokens"))


SAHINER: tuple[Claim, ...] = (
    _claim("(5)", "ReLU MLP: the optimum of a convex program over arrangements", _equivalence("mlp", "relu")),
    _claim("(6)", "linear MLP: the optimum of a nuclear-norm program", _equivalence("mlp", "linear")),
    _claim("(8)", "gated ReLU MLP: the optimum of a convex program", _equivalence("mlp", "gated_relu"), SEVERAL),
    _claim("(3)", "at most 2 r (e (n - 1) / r)^r arrangements, rows the samples", Check(plain_cells)),
    _claim(
        "section 2.1",
        "a small gap between gated ReLU and ReLU; ReLU networks are formed from gated solutions",
        Check(gated_and_relu),
        "Small between function classes, not between optima",
    ),
    _claim("section 2.1", "accelerated proximal gradient: O(1/sqrt(epsilon)) iterations", Check(proximal_rate)),
    _claim(
        "section 2.1", "Frank-Wolfe: O(1/epsilon) iterations", Check(frank_wolfe_rate), "On row-stochastic attention"
    ),
    _claim(
        "section 3", "softmax self-attention is intractable for direct convex analysis", Beyond("a statement of scope")
    ),
    _claim(
        "theorem 3.1",
        "linear self-attention: the optimum of a convex program",
        _equivalence("self_attention", "linear"),
    ),
    _claim("theorem 3.1", "min(d^2, dc) heads suffice", Check(printed_heads, ("self_attention",))),
    _claim("(13)", "outputs are linear models weighted by the entries of the Gram matrix", Check(gram_weighted)),
    _claim(
        "section 3",
        "features of high correlation have weights of larger norm",
        Check(weights_follow_correlation),
        "A tendency: what the targets ask for counts as well",
    ),
    _claim("appendix A.2", "networks map to convex weights by vec(W1) vec(W2)^T", Check(inverse_map), ERRATA),
    _claim(
        "section 3",
        "at beta = 0 linear self-attention is the linear MLP",
        Check(without_decay, ("self_attention",)),
        ERRATA,
    ),
    _claim("sections 1, 3", "the nuclear norm promotes low rank", Check(low_rank)),
    _claim("corollary 3.2", "uncorrelated blocks of features separate the program", Check(uncorrelated_blocks)),
    _claim("corollary 3.2", "weights between uncorrelated features are zero", Check(uncorrelated_weights)),
    _claim(
        "abstract",
        "self-attention implicitly clusters the tokens by their similarity",
        Beyond("no measure is given, and the program (13) groups features, not tokens (corollary 3.2)"),
    ),
    _claim(
        "theorem 3.3", "ReLU self-attention: the optimum of a convex program", _equivalence("self_attention", "relu")
    ),
    _claim("theorem 3.3", "n min(d^2, dc) heads suffice", Check(relu_heads, ("self_attention",)), ERRATA),
    _claim(
        "theorem 3.3", "the number of arrangements is bounded with n", Check(cell_count, ("self_attention",)), ERRATA
    ),
    _claim("section 3", "at beta = 0 ReLU self-attention is not the ReLU MLP", Check(relu_without_decay)),
    _claim("(16)", "G^(k,l) is a correlation weighted by arrangements", Check(local_correlation)),
    _claim("theorem 4.1", "linear MLP-Mixer: the optimum of a convex program", _equivalence("mlp_mixer", "linear")),
    _claim("theorem 4.1", "min(s^2, dc) heads suffice", Check(printed_heads, ("mlp_mixer",))),
    _claim("(18)", "outputs are Z^(p) vec(X)", Check(mixer_vectorisation), ERRATA),
    _claim("(19)", "outputs are predictions weighted by the entries of X", Check(token_weighted)),
    _claim("section 4.1", "the nuclear norm makes the outputs' weights alike", Check(outputs_share_weights)),
    _claim(
        "section 4.1",
        "the mixer's program is smaller than self-attention's, since typically s < d",
        Check(mixer_is_smaller),
        "Their experiments have s > d",
    ),
    _claim("section 4.1", "at beta = 0 a linear mixer is not the linear MLP", Check(without_decay, ("mlp_mixer",))),
    _claim(
        "section 4.1",
        "a linear mixer has s^2 times the degrees of freedom",
        Check(without_decay, ("mlp_mixer",)),
        "Ranks of the maps from weights to outputs, s = 3",
    ),
    _claim("theorem 4.2", "ReLU MLP-Mixer: the optimum of a convex program", _equivalence("mlp_mixer", "relu")),
    _claim("(21)", "outputs are predictions weighted by X and by the arrangements", Check(gated_token_weighted)),
    _claim("theorem 4.2", "n min(s^2, dc) heads suffice", Check(relu_heads, ("mlp_mixer",)), ERRATA),
    _claim("theorem 4.2", "the number of arrangements is bounded with n", Check(cell_count, ("mlp_mixer",)), ERRATA),
    _claim("lemma 4.3", "the FNO block is a convolution, one dimension", Check(fourier_lemma, ("4x1",))),
    _claim("lemma 4.3", "the same for a transform in two dimensions", Check(fourier_lemma, ("2x3",)), ERRATA),
    _claim("theorem 4.4", "linear FNO: the optimum of a convex program", _equivalence("fno", "linear")),
    _claim("theorem 4.4", "min(sd, c) heads suffice", Check(printed_heads, ("fno",))),
    _claim("theorem 4.5", "ReLU FNO: the optimum of a convex program", _equivalence("fno", "relu")),
    _claim("theorem 4.5", "n min(sd, c) heads suffice", Check(relu_heads, ("fno",)), ERRATA),
    _claim("theorem 4.5", "the number of arrangements is bounded with n", Check(cell_count, ("fno",)), ERRATA),
    _claim("lemma 4.6", "B-FNO is a group convolution", Check(block_fourier_lemma)),
    _claim("theorem 4.7", "linear B-FNO: the optimum of a convex program", _equivalence("block_fno", "linear")),
    _claim("theorem 4.7", "min(sd, c) / B heads suffice", Check(printed_heads, ("block_fno",)), "Heads of each block"),
    _claim("theorem 4.8", "ReLU B-FNO: the optimum of a convex program", _equivalence("block_fno", "relu")),
    _claim("theorem 4.8", "n min(sd, c) / B heads suffice", Check(relu_heads, ("block_fno",)), ERRATA),
    _claim("theorem 4.8", "the number of arrangements is bounded with n", Check(cell_count, ("block_fno",)), ERRATA),
    _claim("lemma A.1", "weight decay is a norm of the products of heads", Check(rescaled)),
    _claim("lemma A.2", "strong duality", Check(duality, ("fno", "tokens"))),
    _claim("(121)", "factors with more columns than the rank have the optimum of (120)", Check(factorised)),
    _claim(
        "appendix B",
        "no spurious local minima once the factors have more columns than the rank",
        Check(spurious_minimum),
        ERRATA,
    ),
    _claim("(122)", "stationary points that satisfy it are global optima", Check(trained_certificates)),
    _claim("appendix C.1, figure 2", "the constrained norm differs from the nuclear norm", Check(constrained_norm)),
    _claim("appendix C.1", "on whitened data the ReLU MLP is a linear model under that norm", Check(whitened_relu)),
    _claim(
        "theorem C.1",
        "gated self-attention: the optimum of a convex program",
        _equivalence("self_attention", "gated_relu"),
        SEVERAL,
    ),
    _claim(
        "theorem C.2",
        "gated MLP-Mixer: the optimum of a convex program",
        _equivalence("mlp_mixer", "gated_relu"),
        SEVERAL,
    ),
    _claim("theorem C.3", "gated FNO: the optimum of a convex program", _equivalence("fno", "gated_relu"), SEVERAL),
    _claim(
        "theorem C.4", "gated B-FNO: the optimum of a convex program", _equivalence("block_fno", "gated_relu"), SEVERAL
    ),
    _claim("theorem C.1", "one head for each gate suffices", Check(gated_heads, ("self_attention",)), ERRATA),
    _claim("theorem C.2", "one head for each gate suffices", Check(gated_heads, ("mlp_mixer",)), ERRATA),
    _claim("theorem C.3", "one neuron for each gate suffices", Check(gated_heads, ("fno",)), ERRATA),
    _claim("theorem C.4", "one neuron for each gate suffices", Check(gated_heads, ("block_fno",)), ERRATA),
    _claim("(8)", "one neuron for each gate suffices", Check(gated_heads, ("mlp",)), ERRATA),
    _claim("theorem C.5", "linear PoolFormer: the optimum of a convex program", _equivalence("poolformer", "linear")),
    _claim(
        "theorem C.5",
        "linear FNet: the optimum of a convex program",
        _equivalence("fnet", "linear"),
        "With its real part",
    ),
    _claim("theorem C.5", "min(d, c) heads suffice", Check(printed_heads, ("poolformer",))),
    _claim("theorem C.6", "ReLU PoolFormer: the optimum of a convex program", _equivalence("poolformer", "relu")),
    _claim("theorem C.6", "ReLU FNet: the optimum of a convex program", _equivalence("fnet", "relu")),
    _claim("theorem C.6", "n min(d, c) heads suffice", Check(relu_heads, ("mlp",)), ERRATA),
    _claim("theorem C.6", "the number of arrangements is bounded with n", Check(cell_count, ("mlp",)), ERRATA),
    _claim(
        "theorem C.7",
        "gated PoolFormer: the optimum of a convex program",
        _equivalence("poolformer", "gated_relu"),
        SEVERAL,
    ),
    _claim("theorem C.7", "one neuron for each gate suffices", Check(gated_heads, ("poolformer",)), ERRATA),
    _claim("table 1", "accuracies on CIFAR-100 with a gMLP backbone, top 1 and top 5", Beyond(BACKBONE)),
    _claim(
        "table 1, section 5",
        "attention variants outperform the convex MLP and linear heads",
        Check(heads_on_digits),
        "On pooled digits, in place of CIFAR-100; a pooled linear FNO is the linear head on the mean token",
    ),
    _claim("table 1", "FNO gains over the linear head, both linear and pooled", Check(pooled_fourier), ERRATA),
    _claim(
        "table 1",
        "a marginal gap between linear and ReLU for self-attention, FNO, mixer, a large one for B-FNO",
        Beyond(BACKBONE),
    ),
    _claim("table 2", "numbers of parameters", Check(parameter_counts), ERRATA),
    _claim("appendix B", "the ReLU heads have roughly equal numbers of parameters", Check(equal_parameters), ERRATA),
    _claim(
        "table 3", "accuracies on CIFAR-100 with a ViT backbone, mixer and self-attention equivalent", Beyond(BACKBONE)
    ),
    _claim(
        "sections 3, 4, 5",
        "linear and ReLU attention are on par with softmax; blocks improve the FNO; nonconvex fine-tuning is unstable",
        Beyond(QUOTED),
    ),
)

POSTER: tuple[Claim, ...] = (
    Claim(
        "Sahiner et al., poster",
        "theorem, (5)-(6)",
        "linear multi-head self-attention has the optimum of a convex program, m* <= min(d^2, dc)",
        _equivalence("self_attention", "linear"),
    ),
    Claim(
        "Sahiner et al., poster",
        "contributions",
        "self-attention, MLP-Mixer and FNO with ReLU can be solved to their global optima",
        _equivalence("self_attention", "relu"),
        "Certified where all arrangements are known; elsewhere within an interval ([exact ReLU](relu.md))",
    ),
    Claim(
        "Sahiner et al., poster",
        "contributions, conclusion",
        "convex vision transformers perform better than baseline convex methods",
        Check(heads_on_digits),
        "On pooled digits, in place of CIFAR-100",
    ),
)
