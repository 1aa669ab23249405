"""A MoE layer inside torch.compile, without graph breaks.

    python examples/python/torch_compile.py [--backend inductor]
"""

import argparse

import moekit.torch
import torch

import moekit

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--backend", default="inductor", help="of torch.compile; aot_eager needs no C++ compiler")
backend = parser.parse_args().backend

EXPERTS, TOP_K, HIDDEN, INTER = 16, 4, 256, 128
torch.manual_seed(0)
layer = moekit.MoELayer(
    gate_up=torch.randn(EXPERTS, 2 * INTER, HIDDEN) * HIDDEN**-0.5,
    down=torch.randn(EXPERTS, HIDDEN, INTER) * INTER**-0.5,
    router_weight=torch.randn(EXPERTS, HIDDEN),
    top_k=TOP_K,
)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(HIDDEN)
        self.moe = moekit.torch.MoEModule(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))


block = Block().eval()
compiled = torch.compile(block, backend=backend, fullgraph=True)
x = torch.randn(2, 8, HIDDEN)
with torch.no_grad():
    difference = (compiled(x) - block(x)).abs().max().item()
print(f"compiled by {backend}: largest difference to eager {difference:.2e}")
assert difference < 1e-4
