"""Slices of every fixture's experts: near one rank's output, or refused with the reason."""

import numpy as np
import pytest

from moekit_program import FIXTURES, moekit
from tensor_files import read_safetensors, row_errors

# Why a fixture can't be split in two.
REFUSED = {
    "deepseekv3-hf-fp8": "1 whole block(s) of 128 columns",
    "llama4-ct-fp8dynamic": "needs the whole intermediate row",
    "mixtral-ct-fp8dynamic": "needs the whole intermediate row",
    "mixtral-ctfree-fp8dynamic": "needs the whole intermediate row",
    "qwen2moe-ct-fp8dynamic": "needs the whole intermediate row",
    "qwen3moe-ct-fp8block": "1 whole block(s) of 128 columns",
    "qwen3moe-ct-mxfp8": "1 whole block(s) of 32 columns",
    "qwen3moe-hf-fp8-ue8m0": "1 whole block(s) of 128 columns",
    "qwen3moe-modelopt-fp8block": "1 whole block(s) of 128 columns",
    "qwen3moe-modelopt-fp8pc": "needs the whole intermediate row",
    "qwen3moe-modelopt-mxfp8": "1 whole block(s) of 32 columns",
}
MODELS = sorted(p.name for p in FIXTURES.iterdir() if (p / "config.json").exists())


def run(model, path, *flags):
    return moekit("run", "--model", FIXTURES / model, "--random", 9, "--output", path, *flags)


@pytest.mark.parametrize("model", MODELS)
def test_two_slices(model, tmp_path):
    whole, sliced, spread = (tmp_path / f"{name}.safetensors" for name in ["whole", "sliced", "spread"])
    done = run(model, sliced, "--ranks", 2, "--tp", 2)
    if model in REFUSED:
        assert done.returncode == 3 and REFUSED[model] in done.stderr
        assert not sliced.exists()
        return
    assert done.returncode == 0, done.stderr
    assert run(model, whole).returncode == 0
    one, two = read_safetensors(whole), read_safetensors(sliced)
    for name in ["topk_ids", "topk_weights", "router_logits"]:
        np.testing.assert_array_equal(one[name], two[name])
    # The order of an fp32 sum, nothing else: no intermediate value changes.
    assert row_errors(two["output"], one["output"]).max() < 2e-6
    assert run(model, spread, "--ranks", 6, "--tp", 2).returncode == 0
    np.testing.assert_array_equal(read_safetensors(spread)["output"], two["output"])
