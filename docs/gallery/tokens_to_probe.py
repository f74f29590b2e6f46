# # Tokens to probe
#
# From tokens `(N, s, d)` and labels to a certified head, what it reads, and the ordinary network.

# %%
import torch

import convexformer as cf

X, y = cf.data.digits(patch=2)  # 16 patches of an 8 x 8 digit; 4 pixels and 2 coordinates each
print(X.shape, y.shape)
X_train, y_train, X_test, y_test = X[:600], y[:600], X[600:1200], y[600:1200]

# %% [markdown]
# A fit ends with its certificate: how far the training objective is from the global optimum, at most.

# %%
probe = cf.TokenClassifier(head="attention", beta_ratio=0.02).fit(X_train, y_train)
print(f"test accuracy {probe.score(X_test, y_test):.3f}")
probe.certificate_

# %% [markdown]
# Anyone can recompute it, from weights and data alone.

# %%
print(probe.certify(X_train, y_train))

# %% [markdown]
# Which patches the head reads: whole tokens come out exactly zero.

# %%
from matplotlib.figure import Figure

figure = Figure(figsize=(6, 2.6), layout="constrained")
left, right = figure.subplots(1, 2)
left.imshow(X_train[:, :, :4].mean((0, 2)).reshape(4, 4), cmap="gray_r")
left.set_title("mean of each patch")
shown = right.imshow(probe.token_importance_.reshape(4, 4), cmap="viridis", vmin=0)
right.set_title("weight of each patch")
figure.colorbar(shown, ax=right)
figure

# %% [markdown]
# The optimum as an ordinary network: same outputs, and `loss + beta * decay()` is the objective.

# %%
network = probe.network_
print(network)
with torch.no_grad():
    difference = network(X_test) - torch.from_numpy(probe.outputs(X_test))
print(f"largest difference of outputs {difference.abs().max():.1e}")
