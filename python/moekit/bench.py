"""``python -m moekit.bench``: the same as ``moekit bench``, flags and exit status included."""

from ._program import run

if __name__ == "__main__":
    run("bench")
