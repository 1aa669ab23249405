#!/usr/bin/env python3
"""Holds libmoekit.so to its exports: every function of c_api.h, and nothing outside moekit's own names.

check_symbols.py NM READELF LIBRARY C_API_HEADER
"""

import re
import subprocess
import sys


def main():
    nm, readelf, library, header = sys.argv[1:]
    text = open(header, encoding="utf-8").read()
    declared = set(re.findall(r"\b(moekit_\w+)\(", re.sub(r"/\*.*?\*/", "", text, flags=re.S)))
    lines = subprocess.run([nm, "-D", "-C", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    exported = [re.sub(r"@.*", "", line.split(maxsplit=2)[2]) for line in lines.splitlines()]
    errors = [f"{name} is declared in c_api.h but not exported" for name in sorted(declared - set(exported))]
    own = re.compile(r"^((__tvm_ffi_)?moekit_\w+|MOEKIT_\d+|((typeinfo|vtable|typeinfo name) for )?moekit::.*)$")
    errors += [f"{name} is exported but is none of moekit's names" for name in exported if not own.match(name)]
    major = re.search(r"#define MOEKIT_ABI_MAJOR (\d+)", text).group(1)
    dynamic = subprocess.run([readelf, "-d", library], check=True, capture_output=True, text=True).stdout
    if f"[libmoekit.so.{major}]" not in dynamic:
        errors.append(f"SONAME is not libmoekit.so.{major}")
    for needed in re.findall(r"NEEDED.*\[(.*?)\]", dynamic):
        if re.match(r"lib(fmt|spdlog|CLI)", needed):
            errors.append(f"{needed} is needed at run time but is meant to be private")
    if not any(name.startswith("moekit::Layer::open") for name in exported):
        errors.append("moekit::Layer::open is not exported")
    for error in errors:
        print(f"error: {error}")
    print(f"{len(exported)} exported symbols, {len(declared)} C functions, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
