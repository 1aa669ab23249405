"""``python -m moekit.doctor``: the same as ``moekit doctor``, flags and exit status included."""

from ._program import run

if __name__ == "__main__":
    run("doctor")
