"""A MoE layer with NumPy alone: from weights in memory, in fp4, and over two ranks.

    python examples/python/numpy_only.py
"""

import numpy as np

import moekit

EXPERTS, TOP_K, HIDDEN, INTER, TOKENS = 16, 4, 256, 128, 10

rng = np.random.default_rng(0)
gate = rng.standard_normal((EXPERTS, INTER, HIDDEN), np.float32) / np.float32(HIDDEN**0.5)
up = rng.standard_normal((EXPERTS, INTER, HIDDEN), np.float32) / np.float32(HIDDEN**0.5)
down = rng.standard_normal((EXPERTS, HIDDEN, INTER), np.float32) / np.float32(INTER**0.5)
router = rng.standard_normal((EXPERTS, HIDDEN), np.float32)
hidden = rng.standard_normal((TOKENS, HIDDEN), np.float32)

# The layer routes by itself, or takes ids and weights.
layer = moekit.MoELayer(
    gate_up=np.concatenate([gate, up], axis=1), down=down, router_weight=router, top_k=TOP_K, max_tokens=TOKENS
)
output = layer(hidden)
ids, weights = moekit.route(hidden @ router.T, TOP_K)
assert np.array_equal(layer(hidden, ids, weights).shape, output.shape)
chosen = layer.explain()["chosen"]
print(f"{layer} on {chosen['backend']}: output rms {np.sqrt(np.mean(output**2)):.4f}")

# The same in mxfp4: a quarter of bf16's bytes.
small = moekit.MoELayer(
    moekit.MoEConfig(top_k=TOP_K, gate_up_weights="mxfp4", down_weights="mxfp4"),
    gate=[moekit.quantize(w, "mxfp4") for w in gate],
    up=[moekit.quantize(w, "mxfp4") for w in up],
    down=[moekit.quantize(w, "mxfp4") for w in down],
    router_weight=router,
    max_tokens=TOKENS,
)
error = np.linalg.norm(small(hidden) - output) / np.linalg.norm(output)
print(f"mxfp4 weights: relative error {error:.3f}")


# Two ranks, a thread each: half of the tokens and half of the experts. The bits are the same.
def work(rank: moekit.Rank) -> np.ndarray:
    own = moekit.MoELayer(
        gate_up=np.concatenate([gate, up], axis=1),
        down=down,
        router_weight=router,
        top_k=TOP_K,
        max_tokens=TOKENS,
        rank=rank,
    )
    return own(np.array_split(hidden, rank.size)[rank.index])


spread = np.concatenate(moekit.thread_ranks(2).run(work))
assert np.array_equal(spread, output)
print("two ranks: the same bits")
