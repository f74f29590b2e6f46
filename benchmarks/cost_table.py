"""Print the sizes of models: table 2 of Ergen et al. (2022) corrected, and appendix B of Sahiner et al. (2022).

python benchmarks/cost_table.py
"""

import convexformer as cf

# table 2 of Sahiner et al., appendix B: CIFAR-100, s = 196 tokens of size d = 100, c = 100 classes
PRINTED = {
    "self_attention": (cf.heads.SelfAttention(), 50.5e6),
    "mlp_mixer": (cf.heads.MLPMixer(), 98.9e6),
    "fno": (cf.heads.FNO(), 1.96e6),
    "block_fno, 5 blocks": (cf.heads.BlockFNO(blocks=5), 392e3),
    "mlp": (cf.heads.MLP(), 1.96e6),
    "linear": (cf.heads.Linear(), 10e3),
}


def main() -> None:
    for options in ({}, {"per_token": True}):
        for head in (cf.heads.Attention(), cf.heads.Attention(stochastic="independent"))[: 1 + len(options)]:
            print(cf.cost(head, s=48, d=384, c=384, heads=12, **options), end="\n\n")
    print("Convex weights of the linear heads of Sahiner et al., in units of 1e6: s = 196, d = 100, c = 100\n")
    print(
        "| head | printed | pooled, as solved here | an output per token, as the theorems have it |\n|---|---|---|---|"
    )
    for name, (head, printed) in PRINTED.items():
        pooled = cf.cost(head, 196, 100, 100)["convex"].parameters
        tokenwise = (
            f"{cf.cost(head, 196, 100, 100, per_token=True)['convex'].parameters / 1e6:.4g}" if head.per_token else ""
        )
        print(f"| {name} | {printed / 1e6:.4g} | {pooled / 1e6:.4g} | {tokenwise} |")


if __name__ == "__main__":
    main()
