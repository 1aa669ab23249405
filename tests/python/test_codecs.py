"""The number formats against ml_dtypes and NumPy: all codes, all bf16 and f16 inputs, random fp32
bits, and the activation chains of docs/numerics.md written a second time.

The codecs are reached through the program codec_dump (tests/tools), found in build/tests or named by
the environment variable MOEKIT_CODEC_DUMP.
"""

import os
import pathlib
import subprocess

import ml_dtypes
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

FORMATS = {
    "f16": (np.float16, None),
    "bf16": (ml_dtypes.bfloat16, None),
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
}


def dump(*args, stdin=b""):
    program = os.environ.get("MOEKIT_CODEC_DUMP", str(ROOT / "build" / "tests" / "codec_dump"))
    if not os.access(program, os.X_OK):
        pytest.fail(f"{program} is missing: build the target codec_dump or set MOEKIT_CODEC_DUMP")
    done = subprocess.run([program, *map(str, args)], input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def codes_of(name, count):
    dtype = FORMATS[name][0] if name in FORMATS else ml_dtypes.float8_e8m0fnu
    raw = np.arange(count, dtype=np.uint16 if count > 256 else np.uint8)
    return raw.view(dtype)


def same_values(got, want):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    both_nan = np.isnan(got) & np.isnan(want)
    return np.array_equal(np.where(both_nan, 0, got).view(np.uint32),
                          np.where(both_nan, 0, want).view(np.uint32))


@pytest.mark.parametrize("name,count", [("f16", 65536), ("bf16", 65536), ("e4m3", 256),
                                        ("e5m2", 256), ("e2m1", 16), ("e8m0", 256)])
def test_decode_every_code(name, count):
    got = np.frombuffer(dump("decode", name), np.float32)
    with np.errstate(invalid="ignore"):
        assert same_values(got, codes_of(name, count).astype(np.float32))


def inputs():
    every_bf16 = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        every_f16 = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    random_bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 19, np.uint32).view(np.float32)
    near_one = np.random.default_rng(1).normal(0, 4, 1 << 18).astype(np.float32)
    return np.concatenate([every_bf16, every_f16, random_bits, near_one])


@pytest.mark.parametrize("name", FORMATS)
def test_encode(name):
    x = inputs()
    x = x[~np.isnan(x)]
    dtype, largest = FORMATS[name]
    raw = np.frombuffer(dump("encode", name, stdin=x.tobytes()),
                        np.uint16 if largest is None else np.uint8)
    with np.errstate(over="ignore"):
        want = (x if largest is None else np.clip(x, -largest, largest)).astype(dtype)
    assert np.array_equal(raw, want.view(raw.dtype))


@pytest.mark.parametrize("name", ["f16", "bf16", "e4m3", "e5m2"])
def test_nan_stays_nan(name):
    bits = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
    dtype, largest = FORMATS[name]
    raw = np.frombuffer(dump("encode", name, stdin=bits.tobytes()),
                        np.uint16 if largest is None else np.uint8)
    assert np.isnan(raw.view(dtype).astype(np.float32)).all()


# The chains, in float32 throughout.
F = np.float32


def e4m3(x):
    return np.clip(x, F(-448), F(448)).astype(ml_dtypes.float8_e4m3fn).astype(F)


def e2m1(x):
    return np.clip(x, F(-6), F(6)).astype(ml_dtypes.float4_e2m1fn).astype(F)


def amax(x):
    return np.abs(x).max(axis=-1, keepdims=True)


def up_to_power_of_two(s):
    mantissa, exponent = np.frexp(s)
    return np.ldexp(F(1), np.where(mantissa == 0.5, exponent - 1, exponent)).astype(F)


def fp8(x, scale):
    return e4m3(x / scale) * scale


def mx(x, emax, element):
    mantissa, exponent = np.frexp(amax(x))
    exponent = exponent - 1 + (mantissa >= 0.875) - emax
    return np.ldexp(element(np.ldexp(x, -exponent)), exponent).astype(F)


def nvfp4_multiplier(x, g):
    s = e4m3(amax(x) / F(6) / g)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(s == 0, F(0), e2m1(x / (s * g)) * s * g)


def nvfp4_divisor(x, g):
    s = e4m3(amax(x) / F(6) * g)
    s = np.where(s == 0, F(0.125), s)
    return e2m1(x * (g / s)) * s * (F(1) / g)


def blocks(x, size):
    return x.reshape(x.shape[0], -1, size)


CHAINS = {
    "f32": (1, lambda x, s: x),
    "bf16": (1, lambda x, s: x.astype(ml_dtypes.bfloat16).astype(F)),
    "fp8_tensor": (0.0123, lambda x, s: fp8(x, s)),
    "fp8_token": (1, lambda x, s: fp8(x, amax(x) / F(448))),
    "fp8_token_ue8m0": (1, lambda x, s: fp8(x, up_to_power_of_two(amax(x) / F(448)))),
    "fp8_block": (1, lambda x, s: fp8(blocks(x, 128), amax(blocks(x, 128)) / F(448))),
    "fp8_block_ue8m0": (1, lambda x, s: fp8(blocks(x, 128),
                                            up_to_power_of_two(amax(blocks(x, 128)) / F(448)))),
    "mxfp8": (1, lambda x, s: mx(blocks(x, 32), 8, e4m3)),
    "mxfp4": (1, lambda x, s: mx(blocks(x, 32), 2, e2m1)),
    "nvfp4": (1, lambda x, s: nvfp4_multiplier(blocks(x, 16), (amax(x) / F(2688))[:, None])),
    "nvfp4_static": (0.0017, lambda x, s: nvfp4_multiplier(blocks(x, 16), s)),
    "nvfp4_static_divisor": (660.0, lambda x, s: nvfp4_divisor(blocks(x, 16), s)),
}


@pytest.mark.parametrize("scheme", CHAINS)
def test_activation_chain(scheme):
    width = 384
    rng = np.random.default_rng(2)
    x = rng.normal(0, 1, (200, width)) * np.exp2(rng.integers(-6, 6, (200, width // 16)).repeat(16, 1))
    x = x.astype(F)
    x[3, 40] = 1000
    x[4, :16] *= F(1e-4)
    scale, chain = CHAINS[scheme]
    got = np.frombuffer(dump("row", scheme, scale, width, stdin=x.tobytes()), F).reshape(x.shape)
    want = np.asarray(chain(x, F(scale)), F).reshape(x.shape)
    assert np.array_equal(got, want)
