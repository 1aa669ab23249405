#!/usr/bin/env python3
"""Holds the source tree to its layers: include direction, cycles, and a few calls that a library may not make.

Run it from anywhere; it reads the tree it stands in. Exit status 1 when a rule is broken. Sizes over the
thumbs are printed as warnings: a reviewer decides, not the script.

Self test: tools/check_layers.py --self-test
"""

import argparse
import bisect
import pathlib
import re
import sys
import tempfile

# Layers from the bottom to the top; a layer sees the layers before it, siblings of one entry never see each other.
ORDER = [
    {"base"},
    {"trace"},
    {"tensor"},
    {"device"},
    {"quant", "comm"},
    {"problem"},
    {"linear"},
    {"router", "prepare", "experts", "reduce", "mega"},
    {"select"},
    {"engine"},
    {"api"},
]
# Layers beside the chain, with the whole list of what they see. `api` joins them with the chain.
BESIDE = {
    "tune": {"base"},
    "checkpoint": {"base", "tensor", "quant", "problem"},
}
# Folders that see the installed headers only. Micro-benchmarks of single members (bench/cpu) look inside, as tests do.
FRONT = ("cli", "python", "bench", "examples")
MICRO_BENCHES = ("bench", "cpu")
# The layer that owns a public header: a layer may include the public headers of itself and of the layers below it.
# A public header may include only public headers of its owner or below.
PUBLIC_OWNER = {
    "export.h": "base",
    "version.h": "base",  # written by CMake
    "error.h": "base",
    "allocator.h": "base",
    "dtype.h": "base",
    "trace.h": "trace",
    "tensor.h": "tensor",
    "quant.h": "tensor",
    "config.h": "tensor",
    "communicator.h": "comm",
    "placement.h": "problem",
    "plan.h": "problem",
    "checkpoint.h": "checkpoint",
    "tensor_file.h": "checkpoint",
    "layer.h": "engine",
}
# Every other public header belongs to the layer on top: nothing below it may include it.


def owner_of(header):
    return PUBLIC_OWNER.get(header, "api")


# What no file of src/ may do, with the reason.
FORBIDDEN = [
    (r"\bgetenv\s*\(", "reads the environment: only base/env.cc does", {"base/env.cc"}),
    (r"\bstd::(cout|cerr|clog)\b", "prints: library code never prints", set()),
    (r"(?<![\w:.>])(?:std::|::)?(?:printf|puts|putchar|fprintf|vprintf|perror)\s*\(", "prints: library code never prints", set()),
    (r"\bfmt::print(ln)?\s*\(", "prints: library code never prints", set()),
    (r"(?<![\w:.>])(?:std::|::)?(?:(?:_Exit|_exit|exit|quick_exit)\s*\(|(?:abort|terminate)\s*\(\s*\))", "ends the process: throw an Error", set()),
]
SOURCE_SUFFIXES = {".h", ".hpp", ".cc", ".cpp", ".c", ".cu", ".cuh"}
# The thumbs of HACKING.md.
FUNCTION_LINES = 80
FILE_LINES = 400
PUBLIC_HEADER_LINES = 250

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.M)


def ranks():
    return {layer: i for i, layers in enumerate(ORDER) for layer in layers}


RANK = ranks()


def visible(layer):
    """The layers that `layer` may include, itself among them."""
    if layer in BESIDE:
        return BESIDE[layer] | {layer}
    if layer == "api":
        return set(RANK) | set(BESIDE)
    return {other for other in RANK if RANK[other] < RANK[layer]} | {layer}


def public_visible(layer):
    """The public headers that a layer may include."""
    if layer == "checkpoint":  # fills what the public vocabulary describes
        return set(PUBLIC_OWNER) - {"layer.h"}
    return {name for name, owner in PUBLIC_OWNER.items() if owner in visible(layer)}


def strip(text, keep_strings=False):
    """Blanks comments (and strings) but keeps every newline, so that offsets still name lines."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"([^(\s"\\]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)

    def blank(match):
        piece = match.group(0)
        if keep_strings and not piece.startswith("/"):
            return piece
        # A digit separator is no character literal: 1'000'000.
        if piece.startswith("'") and match.start() and text[match.start() - 1].isalnum():
            return piece
        if not piece.startswith("/"):  # the quotes stay: f("x") has an argument
            return piece[0] + re.sub(r"[^\n]", " ", piece[1:-1]) + piece[-1]
        return re.sub(r"[^\n]", " ", piece)

    return pattern.sub(blank, text)


def line_of(starts, offset):
    return bisect.bisect_right(starts, offset)


def line_starts(text):
    return [0] + [m.end() for m in re.finditer("\n", text)]


def functions(text):
    """(name, first line, lines) of every function body: a brace scanner, good enough for a size report."""
    code = re.sub(r"^[ \t]*#(?:[^\n\\]|\\\n|\\.)*", lambda m: re.sub(r"[^\n]", " ", m.group(0)), strip(text), flags=re.M)
    starts = line_starts(code)
    position, head, found = 0, 0, []
    while position < len(code):
        c = code[position]
        if c in ";}":
            head = position + 1
        elif c == "{":
            before = code[head:position].strip()
            before = re.sub(r"^(public|private|protected)\s*:", "", before).strip()
            is_scope = re.match(r"(template\s*<.*>\s*)?(inline\s+)?(namespace|class|struct|union|enum|extern)\b", before, re.S)
            if (is_scope and "(" not in re.sub(r"__attribute__\s*\(\(.*?\)\)|alignas\s*\(.*?\)", "", before)) or not before:
                head = position + 1
            else:
                end = closing_brace(code, position)
                if "(" in before:
                    name = re.search(r"([\w:~]+|operator\W+)\s*\(", before)
                    first = line_of(starts, head + len(code[head:position]) - len(code[head:position].lstrip()))
                    found.append((name.group(1) if name else "?", first, line_of(starts, end) - first + 1))
                position = end
                if "(" in before:
                    head = end + 1
        position += 1
    return found


def closing_brace(code, position):
    depth = 0
    for match in re.compile(r"[{}]").finditer(code, position):
        depth += 1 if match.group(0) == "{" else -1
        if depth == 0:
            return match.start()
    return len(code) - 1


class Tree:
    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.errors, self.warnings = [], []
        self.edges = {}  # file -> files of this tree that it includes
        self.files = 0

    def sources(self, folder):
        base = self.root / folder
        if not base.is_dir():
            return []
        return sorted(p for p in base.rglob("*") if p.suffix in SOURCE_SUFFIXES and p.is_file())

    def error(self, path, line, message):
        self.errors.append(f"{path.relative_to(self.root)}:{line}: {message}")

    def resolve(self, path, name):
        """The file of this tree that an include names, or None for anything outside it."""
        for base in (path.parent, self.root / "src", self.root / "include", self.root):
            candidate = base / name
            if candidate.is_file():
                return candidate.resolve()
        return None

    def check_file(self, path, rule):
        text = path.read_text(encoding="utf-8", errors="replace")
        self.files += 1
        code = strip(text, keep_strings=True)
        starts = line_starts(code)
        targets = []
        for match in INCLUDE.finditer(code):
            name, line = match.group(2), line_of(starts, match.start(2))
            target = self.resolve(path, name) if match.group(1) == '"' or name.startswith("moekit/") else None
            if target:
                targets.append((target, line))
            if ".." in pathlib.PurePosixPath(name).parts:
                self.error(path, line, f'includes "{name}": name the folder from the root, not through ..')
            message = rule(path, name, match.group(1), target)
            if message:
                self.error(path, line, f'includes "{name}": {message}')
        self.edges[path.resolve()] = targets
        self.own_header(path, code)
        self.sizes(path, text)

    def own_header(self, path, code):
        """A file of src/ includes the header of its name first, so that building it alone proves the header complete
        (cmake/CheckHeaders.cmake compiles the others)."""
        if path.relative_to(self.root).parts[0] != "src":
            return
        if path.suffix == ".h" and not path.stem.endswith("-inl") and "#pragma once" not in code:
            self.error(path, 1, "has no #pragma once")
        own = path.with_suffix(".h")
        if path.suffix != ".cc" or not own.is_file():
            return
        first = INCLUDE.search(code)
        if not first or self.resolve(path, first.group(2)) != own.resolve():
            self.error(path, line_of(line_starts(code), first.start(2)) if first else 1, f"includes something before {own.name}")

    def sizes(self, path, text):
        count = text.count("\n")
        limit = PUBLIC_HEADER_LINES if "include" in path.relative_to(self.root).parts[:1] else FILE_LINES
        relative = path.relative_to(self.root)
        if count > limit:
            self.warnings.append(f"{relative}: {count} lines (thumb {limit})")
        for name, line, length in functions(text):
            if length > FUNCTION_LINES and not re.match(r"(TEST|TEST_F|TEST_P|INSTANTIATE\w*)$", name):
                self.warnings.append(f"{relative}:{line}: {name}() has {length} lines (thumb {FUNCTION_LINES})")

    def layer_rule(self, layer):
        allowed, public = visible(layer), public_visible(layer)

        def rule(path, name, quote, target):
            del path
            first = pathlib.PurePosixPath(name).parts[0]
            if first == "moekit":
                header = name[len("moekit/"):]
                if layer == "api" or header in public:
                    return None
                return f"a header of {owner_of(header)} is above {layer}"
            if quote != '"' or target is None:
                if first in RANK or first in BESIDE:
                    return "no such file"
                return None
            parts = target.relative_to(self.root.resolve()).parts
            if parts[0] != "src":
                if parts[0] == "kernels":
                    return None if target.name == "api.h" or parts[1] == "common" else "only a drop's api.h may be included"
                return f"src/ may not see {parts[0]}/"
            if parts[1] not in allowed:
                return f"{layer} may not see {parts[1]}"
            return None

        return rule

    def public_rule(self, path, name, quote, target):
        own = owner_of(path.name)
        if name.startswith("moekit/"):
            header = name[len("moekit/"):]
            if target is None and header != "version.h":
                return "no such public header"
            if owner_of(header) not in visible(own):
                return f"a header of {owner_of(header)} is above {own}"
            return None
        if quote == '"':
            return "a public header sees public headers and the standard library only"
        if "/" in name and not name.startswith("sys/"):
            return "a public header may need nothing that is not installed with it"
        if path.name == "c_api.h" and name not in ("stddef.h", "stdint.h"):
            return "the C header needs stddef.h and stdint.h only"
        return None

    def front_rule(self, path, name, quote, target):
        if target is None:
            first = pathlib.PurePosixPath(name).parts[0]
            return "sees include/moekit only" if quote == '"' and (first in RANK or first in BESIDE) else None
        parts = target.relative_to(self.root.resolve()).parts
        own = path.relative_to(self.root).parts[0]
        if parts[0] == own or parts[:2] == ("include", "moekit"):
            return None
        # Kernel benches time one kernel or one chain of them: they see what the engine sees of those.
        if own == "bench" and "cuda" in path.relative_to(self.root).parts:
            if parts[0] == "kernels" and (target.name == "api.h" or parts[1] == "common"):
                return None
            if parts[0] == "src" and "cuda" in parts:
                return None
        if path.relative_to(self.root).parts[:2] == MICRO_BENCHES and parts[0] == "src":
            return None
        return f"{own}/ sees include/moekit only"

    def test_rule(self, path, name, quote, target):
        if target is None:
            return None
        parts = target.relative_to(self.root.resolve()).parts
        return None if parts[0] in ("tests", "src", "include", "cli", "kernels") else f"tests may not see {parts[0]}/"

    def kernel_rule(self, path, name, quote, target):
        """kernels/ sees its own drop, kernels/common, and the host/device headers of tensor/ and problem/."""
        if target is None:
            return None
        parts = target.relative_to(self.root.resolve()).parts
        own = path.relative_to(self.root).parts
        if parts[0] == "include" or (parts[0] == "src" and parts[1] in ("tensor", "problem")):
            return None
        if parts[0] != "kernels":
            return f"kernels/ may not see {'/'.join(parts[:2])}"
        if parts[1] not in (own[1], "common"):
            return f"drop {own[1]} may not see drop {parts[1]}"
        if len(own) > 3 and own[2] == "src" and len(parts) > 2 and parts[2] == "shim":
            return "src/ of a drop may not see its shim"
        if path.name == "api.h" and len(parts) > 2 and parts[2] in ("src", "shim"):
            return "api.h may not see what it hides"
        return None

    def cycles(self):
        state, trail = {}, []
        shown = set()

        def visit(path):
            state[path] = 1
            trail.append(path)
            for target, _ in self.edges.get(path, []):
                if state.get(target) == 1:
                    loop = trail[trail.index(target):] + [target]
                    key = frozenset(loop)
                    if key not in shown:
                        shown.add(key)
                        names = " -> ".join(str(p.relative_to(self.root.resolve())) for p in loop)
                        self.errors.append(f"include cycle: {names}")
                elif target not in state and target in self.edges:
                    visit(target)
            trail.pop()
            state[path] = 2

        for path in list(self.edges):
            if path not in state:
                visit(path)

    def forbidden(self, path):
        code = strip(path.read_text(encoding="utf-8", errors="replace"))
        starts = line_starts(code)
        relative = str(path.relative_to(self.root / "src"))
        for pattern, reason, exempt in FORBIDDEN:
            if relative in exempt:
                continue
            for match in re.finditer(pattern, code):
                before = re.search(r"(\w+)[ \t&*]+$", code[max(0, match.start() - 80):match.start()])
                if before and before.group(1) not in ("return", "else", "do"):
                    continue  # a type stands before it: a member of that name is declared
                self.error(path, line_of(starts, match.start()), f"{match.group(0).strip()}: {reason}")

    def listed(self, path):
        """A source that no CMakeLists.txt names is compiled by nobody. The nearest list counts."""
        layer = path.relative_to(self.root / "src").parts[0]
        lists = path.parent / "CMakeLists.txt"
        if not lists.is_file():
            lists = self.root / "src" / layer / "CMakeLists.txt"
        if path.suffix != ".cc" or not lists.is_file():
            return
        name = path.relative_to(lists.parent).as_posix()
        if not re.search(rf"(?<![\w/]){re.escape(name)}(?![\w])", lists.read_text(encoding="utf-8")):
            self.error(path, 1, f"src/{layer}/CMakeLists.txt does not name it")

    def run(self):
        for path in self.sources("src"):
            layer = path.relative_to(self.root / "src").parts[0]
            if layer not in RANK and layer not in BESIDE:
                self.error(path, 1, f"src/{layer} is no layer of tools/check_layers.py")
                continue
            self.check_file(path, self.layer_rule(layer))
            self.forbidden(path)
            self.listed(path)
        for path in self.sources("include/moekit"):
            self.check_file(path, self.public_rule)
        for folder in FRONT:
            for path in self.sources(folder):
                self.check_file(path, self.front_rule)
        for path in self.sources("tests"):
            self.check_file(path, self.test_rule)
        for path in self.sources("kernels"):
            self.check_file(path, self.kernel_rule)
        self.cycles()
        return self


def self_test():
    """Every rule must catch its own example: a checker that never fires is worse than none."""
    cases = [
        ({"src/base/a.h": '#include "tensor/b.h"\n', "src/tensor/b.h": ""}, "base may not see tensor"),
        ({"src/router/a.h": '#include "experts/b.h"\n', "src/experts/b.h": ""}, "router may not see experts"),
        ({"src/tune/a.h": '#include "tensor/b.h"\n', "src/tensor/b.h": ""}, "tune may not see tensor"),
        ({"src/checkpoint/a.h": '#include "comm/b.h"\n', "src/comm/b.h": ""}, "checkpoint may not see comm"),
        ({"src/engine/a.h": '#include "checkpoint/b.h"\n', "src/checkpoint/b.h": ""}, "engine may not see checkpoint"),
        ({"src/base/a.h": '#include "moekit/layer.h"\n', "include/moekit/layer.h": ""}, "is above base"),
        ({"include/moekit/error.h": '#include "moekit/tensor.h"\n', "include/moekit/tensor.h": ""}, "is above base"),
        ({"include/moekit/error.h": "#include <fmt/format.h>\n"}, "not installed with it"),
        ({"include/moekit/c_api.h": "#include <string>\n"}, "stddef.h and stdint.h only"),
        ({"cli/a.cc": '#include "base/b.h"\n', "src/base/b.h": ""}, "sees include/moekit only"),
        ({"bench/a.cc": '#include "base/b.h"\n', "src/base/b.h": ""}, "sees include/moekit only"),
        ({"examples/a.cc": '#include "base/missing.h"\n'}, "sees include/moekit only"),
        ({"src/base/a.h": '#include "base/b.h"\n', "src/base/b.h": '#include "base/a.h"\n'}, "include cycle"),
        ({"src/base/a.cc": 'auto x = std::getenv("X");\n'}, "reads the environment"),
        ({"src/base/a.cc": "void f() { std::cout << 1; }\n"}, "never prints"),
        ({"src/base/a.cc": 'void f() { printf("x"); }\n'}, "never prints"),
        ({"src/base/a.cc": "void f() { std::abort(); }\n"}, "ends the process"),
        ({"src/base/a.cc": "void f() { exit(1); }\n"}, "ends the process"),
        ({"src/base/a.cc": "void f() { if (x) return ::abort(); }\n"}, "ends the process"),
        ({"src/other/a.cc": ""}, "is no layer"),
        ({"src/base/a.cc": '#include <vector>\n#include "base/a.h"\n', "src/base/a.h": "#pragma once\n"}, "before a.h"),
        ({"src/base/a.cc": "int x;\n", "src/base/a.h": "#pragma once\n"}, "before a.h"),
        ({"src/base/a.h": "int f();\n"}, "no #pragma once"),
        ({"src/base/a.cc": "", "src/base/CMakeLists.txt": "target_sources(x PRIVATE ba.cc)"}, "does not name it"),
        ({"kernels/x/src/a.h": '#include "kernels/x/shim/b.h"\n', "kernels/x/shim/b.h": ""}, "may not see its shim"),
        ({"src/experts/a.cc": '#include "kernels/x/shim/b.h"\n', "kernels/x/shim/b.h": ""}, "only a drop's api.h"),
    ]
    clean = [
        {"bench/cpu/a.cc": '#include "base/b.h"\n', "src/base/b.h": "#pragma once\n"},
        {"src/base/a.cc": '// a\n#include "base/a.h"\n#include <vector>\n', "src/base/a.h": "#pragma once\n"},
        {"src/base/env.cc": 'auto x = std::getenv("X");\n'},
        {"src/base/a.cc": '// printf("x")\nauto s = "abort()"; void f(B b) { b.exit(); snprintf(p, 1, "x"); }\n'},
        {"src/comm/a.cc": "void abort(int); void h() { abort(\"why\"); } void A::abort(int) {} void g() { c->abort(1); }\n"},
        {"src/api/a.cc": '#include "checkpoint/b.h"\n#include "engine/c.h"\n', "src/checkpoint/b.h": "#pragma once\n",
         "src/engine/c.h": "#pragma once\n"},
    ]
    bad = 0
    for files, expected in cases + [(files, None) for files in clean]:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            errors = Tree(root).run().errors
        if expected is None and errors:
            print(f"self test: clean tree {sorted(files)} gave {errors}")
            bad += 1
        if expected and not any(expected in e for e in errors):
            print(f"self test: {sorted(files)} should say '{expected}', said {errors}")
            bad += 1
    found = functions("namespace a {\nint f(int x) {\n  if (x) {\n  }\n  return 1'000;\n}\nstruct S {\n  void g() {\n  }\n};\n}\n")
    if found != [("f", 2, 5), ("g", 8, 2)]:
        print(f"self test: function scanner found {found}")
        bad += 1
    print(f"self test: {len(cases) + len(clean) + 1 - bad} of {len(cases) + len(clean) + 1} cases hold")
    return bad


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=pathlib.Path(__file__).resolve().parent.parent, help="tree to check")
    parser.add_argument("--self-test", action="store_true", help="check the checker")
    arguments = parser.parse_args()
    if arguments.self_test:
        return 1 if self_test() else 0
    tree = Tree(pathlib.Path(arguments.root).resolve()).run()
    for message in tree.errors:
        print(f"error: {message}")
    for message in tree.warnings:
        print(f"warning: {message}")
    print(f"check_layers: {tree.files} files, {len(tree.errors)} errors, {len(tree.warnings)} size warnings")
    return 1 if tree.errors else 0


if __name__ == "__main__":
    sys.exit(main())
