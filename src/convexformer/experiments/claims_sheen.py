"""The claims of Sheen et al. 2024, *Implicit Regularization of Gradient Flow on One-Layer Softmax Attention*."""

from __future__ import annotations

from functools import partial

from convexformer.experiments.claims_margins import (
    approximate_conditions,
    closed_form,
    gaussian_separability,
    loss_above_infimum,
    norm_diverges,
    score_gap_suffices,
    sparse_direction,
    zero_entries_stay,
)
from convexformer.experiments.claims_registry import QUOTED, Beyond, Check, Claim, Found

_claim = partial(Claim, "Sheen et al. 2024")
PATH = "The existence of the limit is assumed, as in the paper; time is rescaled ([margins](margins.md))"


def _flow(source: str, claim: str) -> Found:
    return Found("implicit-bias", source, claim)


SHEEN: tuple[Claim, ...] = (
    _claim(
        "theorem 1.1",
        "gradient flow on (K, Q) separates the optimal tokens and minimises the nuclear norm of K Q^T",
        _flow("general data", "separate K, Q from"),
        "On general data, which no theorem covers",
    ),
    _claim("section 3.1", "Gaussian data is separable when d is larger than L and n", Check(gaussian_separability)),
    _claim(
        "section 3.2",
        "the loss of finite weights is above its infimum, which it approaches",
        Check(loss_above_infimum, ("diagonal",)),
    ),
    _claim("section 3.2", "the attention SVM is convex for d_e >= d", _flow("duality", "nuclear SVM, solved")),
    _claim(
        "section 3.2",
        "the rank constraint is trivially satisfied when d_e is large enough",
        _flow("d_e < d", "does not bind"),
        "The paper says d_e >= d; the rank of the solution is enough here",
    ),
    _claim(
        "section 3.2",
        "for smaller d_e the problem is nonconvex (no theorem covers the flow)",
        _flow("d_e < d", "below it"),
        "So training solves the rank-constrained problem locally, not always globally",
    ),
    _claim(
        "remark on assumption 2",
        "it can be relaxed to small perturbations of the scores of other tokens",
        _flow("assumption 2", "relaxed"),
        "Diagonal weights; an instance, not a proof",
    ),
    _claim("lemma 4.1", "two parametrizations of diagonal weights move alike", _flow("lemma 4.1", "move alike")),
    _claim("lemma 4.2", "the norm of the weights diverges", Check(norm_diverges)),
    _claim("(5)", "an entry that starts at zero is stuck there", Check(zero_entries_stay)),
    _claim("assumption 3", "at zero weights it holds when the score gap is large", Check(score_gap_suffices)),
    _claim("assumption 3", "it rules out wrong tokens", _flow("^assumption 3", "wrong token|that satisfy it")),
    _claim(
        "theorem 4.1",
        "diagonal K, Q: the direction tends to the l1-SVM",
        _flow("^theorem 4.1", "tends to the l1-SVM"),
        PATH,
    ),
    _claim("theorem 4.1", "the same for draws as they come", _flow("^theorem 4.1", "draws as they come"), PATH),
    _claim("theorem 4.1", "the loss converges to its infimum", Check(loss_above_infimum, ("diagonal",)), PATH),
    _claim("theorem 4.1", "the direction of diagonal weights is sparse", Check(sparse_direction)),
    _claim(
        "theorem 4.1, proof",
        "the direction satisfies the optimality conditions ever better",
        Check(approximate_conditions),
    ),
    _claim("(6), lemma A.1", "diagonal weights are w0^2 sinh(q), since w+ w- is preserved", Check(closed_form)),
    _claim(
        "section 4.2",
        "training the product W goes to the Frobenius SVM (Tarzanagh et al.)",
        _flow("Tarzanagh", "tends to the Frobenius SVM"),
    ),
    _claim(
        "section 4.2",
        "the two norms give different solutions",
        _flow("general data", "nuclear and Frobenius SVM differ"),
    ),
    _claim(
        "section 4.2",
        "linear regression: gradient descent on b finds the least l2 norm",
        _flow("section 4.2", "least l2"),
    ),
    _claim(
        "section 4.2",
        "diagonal linear networks from a small start: like the least l1 norm",
        _flow("section 4.2", "diagonal linear network"),
    ),
    _claim(
        "section 4.2",
        "the nuclear norm encourages low rank",
        _flow("general data", "separate K, Q from"),
        "Rank 1 of 4, where the product W ends at rank 3",
    ),
    _claim("lemma 5.1", "gradient flow preserves alignment", _flow("lemma 5.1", "preserves alignment")),
    _claim(
        "theorem 5.1",
        "aligned K, Q: the direction tends to the nuclear SVM",
        _flow("theorem 5.1", "aligned K, Q"),
        PATH,
    ),
    _claim("theorem 5.1", "the loss converges to its infimum", Check(loss_above_infimum, ("aligned",)), PATH),
    _claim(
        "theorem 5.1",
        "its data cannot tell the nuclear from the Frobenius norm: both SVMs have one solution",
        _flow("theorem 5.1", "cannot tell"),
        "Our remark, not the paper's ([errata](errata.md))",
    ),
    _claim(
        "section 4.2",
        "weights of pretrained transformers tend to be low rank",
        Beyond(QUOTED),
    ),
)
