"""Experts of a transformers model: moekit against "eager" and "grouped_mm", in one process, in turns.

    python bench/python/transformers_experts.py [--layers 2] [--hidden 2048 --inter 768 --experts 128 --top-k 8]

The model is a random Qwen3-MoE in bfloat16, by default of Qwen3-30B-A3B's shape with fewer layers: 1.2 GB of experts a
layer, and the same again packed. For decode (batch 1, 64 cached tokens) and prefill (512 tokens) it prints the median
time in experts modules and of the whole forward pass, the speed-ups, and Amdahl's ceiling: the speed-up of the forward
pass if experts took no time at all.
"""

import argparse
import json
import statistics
import time

import moekit.transformers
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

IMPLEMENTATIONS = ("eager", "grouped_mm", "moekit")


def make_model(args):
    config = Qwen3MoeConfig(
        vocab_size=1024, hidden_size=args.hidden, num_hidden_layers=args.layers, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, moe_intermediate_size=args.inter, num_experts=args.experts,
        num_experts_per_tok=args.top_k, norm_topk_prob=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="eager").eval()


class ExpertsClock:
    """Seconds spent in experts modules since the last reset."""

    def __init__(self, model):
        self.seconds = self.started = 0.0
        for module in model.modules():
            if type(module).__name__.endswith("Experts"):
                module.register_forward_pre_hook(self.start)
                module.register_forward_hook(self.stop)

    def start(self, *_):
        self.started = time.perf_counter()

    def stop(self, *_):
        self.seconds += time.perf_counter() - self.started


def time_calls(model, clock, call, repeat):
    """{implementation: (experts, forward) medians in seconds}, implementations in turns."""
    samples = {name: [] for name in IMPLEMENTATIONS}
    for turn in range(repeat + 1):
        for name in IMPLEMENTATIONS:
            model.set_experts_implementation(name)
            clock.seconds = 0.0
            start = time.perf_counter()
            call()
            if turn > 0:  # the first turn packs and warms up
                samples[name].append((clock.seconds, time.perf_counter() - start))
    return {name: tuple(statistics.median(s[i] for s in times) for i in (0, 1)) for name, times in samples.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inter", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one JSON line a case")
    args = parser.parse_args()
    model = make_model(args)
    clock = ExpertsClock(model)
    moekit.transformers.configure(strict=True, max_tokens=args.prefill)
    with torch.no_grad():
        prompt = torch.randint(1, 1024, (1, 64))
        cache = model(prompt, use_cache=True).past_key_values
        long = torch.randint(1, 1024, (1, args.prefill))

        def decode():
            model(prompt[:, :1], past_key_values=cache, use_cache=True)
            cache.crop(-1)

        for case, call in (("decode", decode), ("prefill", lambda: model(long, use_cache=False))):
            times = time_calls(model, clock, call, args.repeat)
            experts, forward = times["moekit"]
            for name in IMPLEMENTATIONS:
                row = {
                    "case": case,
                    "implementation": name,
                    "experts_ms": 1e3 * times[name][0],
                    "forward_ms": 1e3 * times[name][1],
                    "experts_speedup": times[name][0] / experts,
                    "forward_speedup": times[name][1] / forward,
                    "amdahl_ceiling": times[name][1] / (times[name][1] - times[name][0]),
                }
                if args.json:
                    print(json.dumps(row))
                else:
                    print(
                        f"{case:8}{name:11} experts {row['experts_ms']:9.2f} ms, forward {row['forward_ms']:9.2f} ms; "
                        f"moekit is {row['experts_speedup']:5.2f}x and {row['forward_speedup']:5.2f}x faster "
                        f"(ceiling {row['amdahl_ceiling']:.2f}x)"
                    )


if __name__ == "__main__":
    main()
