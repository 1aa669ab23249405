"""Loads a transformers model, runs its experts on moekit, and shows where the time goes.

    python examples/python/transformers_swap.py                    a small random Qwen3-MoE
    python examples/python/transformers_swap.py --model DIR        a model of your own
    python examples/python/transformers_swap.py --plot times.svg   needs matplotlib
"""

# %% The model
import argparse
import collections
import time

import moekit.transformers  # registers experts_implementation="moekit"
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--model", help="directory of a model with experts (default: a random one)")
parser.add_argument("--prompt", default="The experts of a layer")
parser.add_argument("--new-tokens", type=int, default=16)
parser.add_argument("--plot", help="file of the plot of time per layer")
args = parser.parse_args()

torch.manual_seed(0)
if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model, experts_implementation="eager")
    ids = AutoTokenizer.from_pretrained(args.model)(args.prompt, return_tensors="pt").input_ids
else:
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        head_dim=32, moe_intermediate_size=128, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    ids = torch.randint(1, 512, (1, 16))
model.eval()

# %% Time of each experts module, by layer
layers = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
times: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * len(layers))
started = [0.0] * len(layers)
current = "eager"


def watch(number: int, module: torch.nn.Module) -> None:
    def before(*_: object) -> None:
        started[number] = time.perf_counter()

    def after(*_: object) -> None:
        times[current][number] += time.perf_counter() - started[number]

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


for number, module in enumerate(layers):
    watch(number, module)


# %% Generate with both
def generate(implementation: str) -> tuple[torch.Tensor, float]:
    global current
    current = implementation
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        model(ids)  # moekit packs the weights at the first call
        times.pop(current, None)
        start = time.perf_counter()
        tokens = model.generate(ids, max_new_tokens=args.new_tokens, do_sample=False, pad_token_id=0)
    return tokens, time.perf_counter() - start


results = {name: generate(name) for name in ("eager", "moekit")}
same = torch.equal(results["eager"][0], results["moekit"][0])
print(f"{len(layers)} layers of experts; greedy tokens {'are the same' if same else 'differ'}")
for name, (tokens, seconds) in results.items():
    experts = sum(times[name])
    made = tokens.shape[1] - ids.shape[1]
    print(f"{name:7} {made / seconds:8.1f} tokens/s, {experts / seconds:4.0%} of the time in experts")
print(f"experts alone: {sum(times['eager']) / sum(times['moekit']):.1f}x faster")

# %% Plot
if args.plot:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for shift, name in ((-0.2, "eager"), (0.2, "moekit")):
        positions = [n + shift for n in range(len(layers))]
        axes.bar(positions, [1e3 * t for t in times[name]], width=0.4, label=name)
    axes.set(xlabel="layer", ylabel="ms in experts", title=f"{args.new_tokens} tokens")
    axes.legend()
    figure.savefig(args.plot)
    print(f"plot written to {args.plot}")
