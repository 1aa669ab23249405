"""Small random layers as NumPy arrays, and what they compute in float64."""

import numpy as np

E, K, H, I = 6, 2, 64, 32  # noqa: E741


def weights(seed=0, experts=E, hidden=H, inter=I):
    """gate_up [E, 2I, H], down [E, H, I] and router [E, H], float32."""
    rng = np.random.default_rng(seed)
    gate_up = rng.standard_normal((experts, 2 * inter, hidden)).astype(np.float32) / np.float32(hidden**0.5)
    down = rng.standard_normal((experts, hidden, inter)).astype(np.float32) / np.float32(inter**0.5)
    router = rng.standard_normal((experts, hidden)).astype(np.float32)
    return gate_up, down, router


def rows(tokens, hidden=H, seed=1):
    return np.random.default_rng(seed).standard_normal((tokens, hidden)).astype(np.float32)


def reference(x, gate_up, down, ids, topk_weights):
    """silu(gate) * up through the chosen experts, in float64."""
    x, gate_up, down = x.astype(np.float64), gate_up.astype(np.float64), down.astype(np.float64)
    out = np.zeros_like(x)
    inter = gate_up.shape[1] // 2
    for t in range(x.shape[0]):
        for expert, weight in zip(ids[t], topk_weights[t]):
            if expert < 0:
                continue
            gate, up = np.split(gate_up[expert] @ x[t], [inter])
            out[t] += float(weight) * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def relative(y, wanted):
    return float(np.linalg.norm(y.astype(np.float64) - wanted) / np.linalg.norm(wanted))
