#!/bin/sh
# Compiles a C program with nothing but what pkg-config says about the installed package, and runs it.
#   pkg_config_consumer.sh PKG_CONFIG CC LIBDIR SOURCE PROGRAM ARGUMENT
set -eu
export PKG_CONFIG_PATH="$3/pkgconfig"
flags=$("$1" --cflags --libs moekit)
# shellcheck disable=SC2086  # the flags are words
"$2" -std=c11 -Wall -Wextra -pedantic-errors "$4" -o "$5" $flags -lm -Wl,-rpath,"$3"
"$5" "$6"
