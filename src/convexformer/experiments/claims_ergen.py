"""The claims of Ergen, Neyshabur and Mehta 2022, *Convexifying Transformers*."""

from __future__ import annotations

from functools import partial

from convexformer.experiments.claims_counterexamples import (
    attention_counts,
    one_head_a_gate,
    rank_one_value_matrices,
    row_stochastic,
)
from convexformer.experiments.claims_networks import (
    attention_heads,
    direct_training,
    duality,
    equivalence,
    half_on_the_loss,
    rescaled,
    token_sparsity,
)
from convexformer.experiments.claims_registry import QUOTED, Beyond, Check, Claim, Found
from convexformer.experiments.claims_structure import decay_of_outputs, gates_on_products, softmax_is_stochastic

_claim = partial(Claim, "Ergen et al. 2022")
ERRATA = "See [errata](errata.md)"
MODULI = "Softmax with one layer, its faster depth; p = 15 with four layers is figure 6"
TEACHER = "teacher: MiniLM, layer 3, in place of BERT, layer 6"


def _grokking(source: str, claim: str, preset: str = "") -> Found:
    return Found("grokking", source, claim, preset=preset)


def _mod15(claim: str) -> Found:
    return Found("mod15", "figure 6", claim, preset="paper")


ERGEN: tuple[Claim, ...] = (
    _claim(
        "section 3.1", "for any scores there is W in the simplex with softmax(U) X = W X", Check(softmax_is_stochastic)
    ),
    _claim("lemma 1", "the decay of (6) is the l1 norm of (7): equivalent problems", Check(rescaled)),
    _claim(
        "theorem 1",
        "the network (6), one output, has the optimum of a convex program (group norm of token rows)",
        Check(equivalence, ("attention", "linear", "scalar")),
        "Without the printed factor 1/2",
    ),
    _claim("theorem 1, (8)", "with a factor 1/2 on the loss", Check(half_on_the_loss), ERRATA),
    _claim("section 3.2", "the penalty uses as few tokens as possible", Check(token_sparsity)),
    _claim("section 3.2", "SGD and Adam can train the convex program directly", Check(direct_training)),
    _claim(
        "proposition 1",
        "an optimal network is recovered from the convex solution, heads on the nonzero tokens",
        Check(equivalence, ("attention", "linear", "scalar")),
        "Heads belong to the nonzero rows; the map is not one-to-one ([errata](errata.md))",
    ),
    _claim("appendix A.2, A.4", "at most N + 1 heads are needed", Check(attention_heads)),
    _claim("appendix A.3, A.4", "strong duality, one output", Check(duality, ("attention", "scalar"))),
    _claim(
        "theorem 2",
        "several outputs, l1 norm on w3: the optimum of a convex program that is separable over outputs",
        Check(equivalence, ("attention", "linear", "vector")),
    ),
    _claim(
        "theorem 2",
        "the same with softmax cross-entropy, an arbitrary convex loss",
        Check(equivalence, ("attention", "linear", "labels")),
        "With a joint loss of all outputs, not the printed sum over them",
    ),
    _claim("appendix A.5", "strong duality, several outputs", Check(duality, ("attention", "labels"))),
    _claim("section 3.3", "the l1 norm on w3 does not impact the performance in practice", Check(decay_of_outputs)),
    _claim(
        "section 3.4",
        "without a fully connected layer the model is linear in the tokens and fails on some tasks; gates help",
        Check(gates_on_products),
    ),
    _claim(
        "theorem 3",
        "gated ReLU layer: the optimum of a convex program",
        Check(equivalence, ("attention", "gated_relu", "vector")),
        "With several heads a gate",
    ),
    _claim("theorem 3", "as many heads as gates suffice", Check(one_head_a_gate), ERRATA),
    _claim("theorem A.1", "row-stochastic attention has the optimum of (37)", Check(row_stochastic), ERRATA),
    _claim("remark A.2", "heads w2 w3^T lead to (37) as well", Check(rank_one_value_matrices)),
    _claim("table 2", "weights and FLOPs of the three models", Check(attention_counts), ERRATA),
    _claim(
        "sections 1, 5",
        "convexity needs no heuristics (normalisation, skips) to reach the global optimum",
        Check(equivalence, ("attention", "linear", "labels")),
        "For one layer on fixed embeddings; deeper stacks are not convex ([grokking](grokking.md))",
    ),
    _claim(
        "figure 2",
        "the convex objective is almost an order of magnitude below that of standard training",
        Found("student-teacher", "figure 2", "order of magnitude"),
        TEACHER,
    ),
    _claim(
        "figure 2",
        "the convex program has a lower test error than standard training",
        Found("student-teacher", "figure 2", "lower test error"),
        TEACHER,
    ),
    _claim(
        "figure 2",
        "training of the nonconvex alternative (9) may end above the convex optimum",
        Found("student-teacher", "theorem 2", "training it may end above"),
        TEACHER,
    ),
    _claim(
        "figure 3",
        "the convex attention map is close to the teacher's",
        Found("student-teacher", "figure 3", "convex attention map"),
        TEACHER,
    ),
    _claim(
        "figure 3",
        "standard training ends in a uniform attention map",
        Found("student-teacher", "figure 3", "uniform attention map"),
        TEACHER,
    ),
    _claim(
        "figure 4",
        "the softmax transformer learns the training data long before it generalises (grokking)",
        _grokking("figure 4", "^grokking", "paper"),
    ),
    _claim(
        "figure 4a",
        "the softmax transformer has 100% training accuracy at about 10^3",
        _grokking("4a", "10\\^3", "paper"),
    ),
    _claim("figure 4b", "and needs more than 10^5 iterations to generalise", _grokking("4b", "10\\^5", "paper")),
    _claim(
        "figure 4b",
        "convex generalises 10 times faster than the softmax transformer of Power et al.",
        _grokking("4b", "Power et al", "paper"),
    ),
    _claim("figure 4b", "the same at an equal learning rate", _grokking("4b", "equal learning rate", "paper")),
    _claim("figure 4b", "the same with both families tuned by one sweep", _grokking("4b", "both tuned", "tuned")),
    _claim("figure 4c", "convex has the lower test loss", _grokking("4c", "test loss")),
    _claim("figure 5", "a second layer speeds up the convex model", _grokking("figure 5", "speeds up")),
    _claim("figure 5", "it makes no difference to softmax", _grokking("figure 5", "no difference to the softmax")),
    _claim(
        "(12), stacked",
        "gates as printed (rank one, all channels) generalise on modular division: one setting, learning rate 1e-3",
        _grokking("equation \\(12\\)", "gates as printed .*learning rate of Power", "printed"),
    ),
    _claim(
        "(12), stacked",
        "the same, tuned by a sweep of 18 settings, one layer",
        _grokking("equation \\(12\\)", "gates as printed, tuned .*L=1", "dense"),
    ),
    _claim(
        "(12), stacked",
        "the same, tuned by a sweep of 18 settings, two layers",
        _grokking("equation \\(12\\)", "gates as printed, tuned .*L=2", "dense"),
    ),
    _claim(
        "theorem 3, section 4",
        "the convex problem itself (fixed embedding, one layer) generalises on modular division",
        _grokking("theorem 3", "convex problem itself", "printed"),
        "The paper does not say whether its embedding is trained",
    ),
    _claim("figure 6", "mod 15, one layer fails to reach 99%", _mod15("^one layer fails")),
    _claim(
        "figure 6",
        "one layer: convex generalises better, in accuracy and test loss",
        _mod15("^one layer: convex"),
    ),
    _claim("figure 6", "four layers reach perfect generalisation", _mod15("^four layers reach")),
    _claim("figure 6", "four layers: convex gets there much faster", _mod15("much faster")),
    _claim(
        "figure 6",
        "four layers: convex yields a lower test loss",
        _mod15("^four layers: convex reaches a lower test loss"),
    ),
    _claim(
        "figure 7a", "fewer iterations to 99%, for every p and L", _grokking("7a", "fewer iterations", "moduli"), MODULI
    ),
    _claim(
        "figure 7b",
        "a smaller amount of grokking, for every p and L",
        _grokking("7b", "amount of grokking", "moduli"),
        MODULI,
    ),
    _claim(
        "section 4",
        "conjecture: grokking is mostly due to the nonconvex structure of standard transformers",
        Beyond(
            "no test is proposed; the gap all but vanishes for both families once they are tuned ([grokking](grokking.md))"
        ),
    ),
    _claim(
        "sections 1, 3",
        "attention without fully connected layers and skips degenerates to rank one; most heads can be pruned",
        Beyond(QUOTED),
    ),
    _claim(
        "section 1",
        "the formulations of Sahiner et al. are too complex to be solved in practice",
        Beyond(
            "a judgement; here they are solved and certified in seconds at the sizes of [benchmarks](benchmarks.md)"
        ),
    ),
)
