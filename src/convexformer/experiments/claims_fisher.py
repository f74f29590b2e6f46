"""The claims of Fisher et al., *Convex Self-Attention Mechanisms*."""

from __future__ import annotations

from functools import partial

from convexformer.experiments.claims_ergen import ERRATA
from convexformer.experiments.claims_kernels import (
    chi_against_gaussian,
    dual_program,
    kernel_approximated,
    kernel_functions,
    log_linear_operations,
    optimality_conditions,
    positive_offset,
    positive_variance,
    sign_flips,
    unbounded_restatement,
)
from convexformer.experiments.claims_networks import duality, equivalence, half_on_the_loss, rescaled
from convexformer.experiments.claims_registry import QUOTED, Beyond, Check, Claim, Found
from convexformer.experiments.claims_structure import softmax_is_stochastic

CLOCK = "Seconds of our CPU, theirs of a T4: a verdict on times holds for the machine"
TUNED = "difficulty prevents"  # the claim that models tuned by us answer, not those of the report
_claim = partial(Claim, "Fisher et al.")


def _found(experiment: str, source: str, claim: str, beyond: str = "") -> Found:
    preset = "tuned" if claim == TUNED else "report"
    return Found(experiment, f"^Fisher et al\\., {source}", claim, beyond, preset)


def _spectra(figure: int) -> tuple[Claim, ...]:
    """Section 7 on one task: division (figure 3) or periodicity (figure 4)."""

    def one(statement: str, pattern: str) -> Claim:
        return _claim(f"section 7, figure {figure}", statement, _found("spectra", f"figure {figure}", pattern))

    return (
        one(
            "convex: singular values of the first layer grow and spread early",
            "^convex: the first layer's singular values grow",
        ),
        one(
            "convex: the second layer's effective rank collapses",
            "^convex: the second layer's effective rank collapses",
        ),
        one("convex: the spectral norm jumps with the training accuracy", "^convex: .*spectral norm jumps"),
        one("convex: magnitudes decrease as the model generalises", "^convex: .*shrink while generalising"),
        one(
            "kernel: magnitudes grow while memorising and decrease while generalising",
            "^kernel: .*singular values (grow|shrink) while",
        ),
        one("kernel: the effective rank does not collapse", "^kernel: .*effective rank does not collapse"),
        one("kernel: the second layer's spectrum is anisotropic at first", "^kernel: .*anisotropic at first"),
        one("kernel: the first layer grows isotropically", "^kernel: .*grow isotropically"),
        one("kernel: the second layer's effective rank increases with training", "^kernel: .*rises after memorising"),
        one("kernel: effective ranks increase past generalisation", "^kernel: .*past generalisation"),
        one("kernel: random projections regularise the spectra", "^kernel: the map regularises the spectra"),
        one("kernel: generalises without rank collapse, against rank minimisation", "^kernel: generalises"),
    )


FISHER: tuple[Claim, ...] = (
    _claim("section 3.2", "softmax is relaxed to the unit simplex", Check(softmax_is_stochastic)),
    _claim("lemma 1, (3)", "the decay of (2) is an l1 norm", Check(rescaled)),
    _claim(
        "theorem 2, (5)",
        "the primal (5) is equivalent to the network (3)",
        Check(equivalence, ("attention", "linear", "vector")),
    ),
    _claim("section 3.3, (8)", "the dual program, derived from the primal", Check(dual_program)),
    _claim("section 3.3", "no duality gap, softmax cross-entropy", Check(duality, ("attention", "labels"))),
    _claim("section 3.4", "optimality conditions", Check(optimality_conditions), ERRATA),
    _claim("appendix B", "the last line of theorem 1: a factor 1/2 on the loss", Check(half_on_the_loss), ERRATA),
    _claim(
        "appendix C", "the problem restated without a bound on w2 is equivalent", Check(unbounded_restatement), ERRATA
    ),
    _claim("section 4", "the feature map costs O(n d log d)", Check(log_linear_operations)),
    _claim("section 4", "phi_cvx approximates a Gaussian kernel", Check(kernel_approximated, ("chi",)), ERRATA),
    _claim(
        "section 4",
        "chi variables approximate Gaussian ones as the number of random features increases",
        Check(chi_against_gaussian),
        "With the degrees of freedom, which the report does not state",
    ),
    _claim("section 4", "chi variables in place of Gaussian ones avoid flips of sign", Check(sign_flips), ERRATA),
    _claim("section 4", "Fastfood features approximate the Gaussian kernel", Check(kernel_approximated, ("gaussian",))),
    _claim("section 4", "positive features with the printed offset", Check(positive_offset), ERRATA),
    _claim("section 2.1", "positive features have the lower variance for the softmax kernel", Check(positive_variance)),
    _claim(
        "section 4, (9)", "preconditioning by phi_cvx makes the model more expressive", Check(kernel_functions), ERRATA
    ),
    _claim(
        "figure 1",
        "division: grokking is diminished in the convex case",
        _found(
            "grokking",
            "figure 1",
            "diminished in the convex case",
            "Where it stopped the softmax model had not learned the training data: no gap to compare with, none in sight",
        ),
    ),
    _claim("figure 1", "division: it still occurs", _found("grokking", "figure 1", "still occurs")),
    _claim("figure 1", "the kernel map narrows the gap", _found("grokking", "figure 1", "narrows the grokking gap")),
    _claim(
        "section 6",
        "division: kernel before convex before softmax, in iterations",
        _found("grokking", "section 6", "needs fewer iterations"),
    ),
    _claim(
        "section 6",
        "division: smoother convergence of the convex models",
        _found("grokking", "section 6", "^division: both .*smoothly"),
    ),
    _claim("table 1", "epochs to convergence: 1,556, 1,475, 1,662", _found("grokking", "table 1", "^epochs")),
    _claim("table 1", "seconds an epoch: 0.088, 0.38, 0.23", _found("grokking", "table 1", "^seconds an epoch"), CLOCK),
    _claim("table 1", "seconds in all: 136, 568, 391", _found("grokking", "table 1", "^seconds to 99%"), CLOCK),
    _claim(
        "section 5.2",
        "the softmax transformer trains with Adam and weight decay 1",
        _found("grokking", "section 5.2", "Adam and weight decay 1"),
    ),
    _claim(
        "figure 2",
        "periodicity: no model reaches perfect validation accuracy",
        _found("periodicity", "figure 2", "no model reaches"),
    ),
    _claim(
        "section 6",
        "because the task is too hard for models of that size",
        _found("periodicity", "section 6", TUNED),
    ),
    _claim(
        "figure 2",
        "both convex models reach a higher validation accuracy than softmax",
        _found("periodicity", "figure 2", "higher validation accuracy than the softmax|both convex models reach"),
    ),
    _claim(
        "figure 2",
        "the kernel model reaches a higher one than the convex model",
        _found("periodicity", "figure 2", "kernel model reaches a higher .* than the convex"),
    ),
    _claim(
        "figure 2",
        "train and validation accuracy of the kernel model converge at once",
        _found("periodicity", "figure 2", "at the same time|converge together"),
    ),
    _claim(
        "section 6",
        "periodicity: smoother convergence of the convex models",
        _found("periodicity", "section 6", "smoothly"),
    ),
    *_spectra(3),
    *_spectra(4),
    _claim(
        "section 7",
        "hypothesis: rank minimisation is an artifact of training, not a cause of generalisation",
        Beyond("no test is proposed; the rows above have both: the two tasks disagree"),
    ),
    _claim(
        "section 8",
        "the problem with matrix weights has a similar convex program",
        Check(equivalence, ("row_attention", "linear", "tokens")),
        "Row-stochastic attention with matrices W1 and W2, [errata](errata.md)",
    ),
    _claim(
        "section 5.1", "MNIST does not fit into their GPU memory", Beyond("their hardware and code; digits fit here")
    ),
    _claim(
        "section 5.1",
        "no model improves on another synthetic data set in 30,000 epochs",
        Beyond("the data set is not described"),
    ),
    _claim(
        "section 2.1",
        "attention by random features in O(n log d); learned kernels outperform attention in text retrieval",
        Beyond(QUOTED),
    ),
)
