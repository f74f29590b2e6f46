# # Margins
#
# Softmax attention with a fixed head, trained by gradient flow on separable data: the weights diverge, and what training
# chooses is their direction. Sheen et al. (2024) say which; here it is followed far beyond plain training time. All of it
# is in [margins](../margins.md).

# %%
import convexformer as cf

data = cf.margin.sample_data("general", n=4, L=4, d=6)
nuclear = cf.margin.AttentionSVM("nuclear").fit(*data)
frobenius = cf.margin.AttentionSVM("frobenius").fit(*data)
nuclear.certificate_

# %% [markdown]
# Keys and queries go to the nuclear norm, their product to the Frobenius norm: distances of directions, relative.

# %%
flows = {
    name: cf.margin.gradient_flow(*data, parametrization=name, log_time=1e3, records=25)
    for name in ("separate", "combined")
}
for name, flow in flows.items():
    to_nuclear, to_frobenius = flow.distance_to(nuclear), flow.distance_to(frobenius)
    print(f"{name:9s} to the nuclear SVM {to_nuclear:.3f}, to the Frobenius SVM {to_frobenius:.3f}")

# %%
from matplotlib.figure import Figure

figure = Figure(figsize=(5.2, 3), layout="constrained")
axis = figure.subplots()
for (name, flow), svm in zip(flows.items(), (nuclear, frobenius), strict=True):
    axis.plot(flow.log_time, flow.distance_to(svm, along=True), label=f"{name}, to the {svm.norm} SVM")
axis.set_xscale("log")
axis.set_yscale("log")
axis.set_xlabel("log t")
axis.set_ylabel("distance of directions")
axis.legend()
figure
