# # Grokking, small
#
# Division mod 31 with two layers of equation (12) of Ergen et al. (2022) on learned embeddings. Such a stack is **not**
# convex: AdamW trains it, and there is no certificate. Mod 97, five seeds and the softmax transformers are in
# [grokking](../grokking.md).

# %%
import convexformer as cf

task = cf.data.modular_division(31)
recipe = cf.deep.recipe("convex-2")
model = recipe.model(task, seeds=2)
run = cf.deep.train(model, task, recipe.training, iterations=150, train_fraction=0.7, target=None, device="cpu")
print("iterations to 90% train", run.iterations_to(0.9, part="train"), "and test accuracy", run.iterations_to(0.9))

# %%
from matplotlib.figure import Figure

figure = Figure(figsize=(5.2, 3), layout="constrained")
axis = figure.subplots()
history = run.history
for k, seed in enumerate(model.seeds):
    axis.plot(history.iteration, history.train_accuracy[:, k], "--", color=f"C{k}", label=f"train, seed {seed}")
    axis.plot(history.iteration, history.test_accuracy[:, k], color=f"C{k}", label=f"test, seed {seed}")
axis.set_xlabel("iteration of AdamW")
axis.set_ylabel("accuracy")
axis.legend()
figure

# %% [markdown]
# The last layer, given the rest, is a convex problem: here it is solved to a certified optimum.

# %%
for layer in cf.deep.certify_last_layer(model, task, train_fraction=0.7):
    print(f"seed {layer.seed}: {layer.certificate}")
    print(f"   test accuracy {layer.test_accuracy:.3f}, of the trained layer {layer.trained_test_accuracy:.3f}")
