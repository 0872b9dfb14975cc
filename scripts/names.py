#!/usr/bin/env python3
"""Reads the declarations of tessera/ with ctags and reports vague names.

Rules (names_allowed.txt lists exceptions with their reasons):
  parameter  no parameter or member is called `what`, `how`, ...: the name does not say what the value is
  type       no type at namespace level is called `State`, `Part`, ...: such a name fits many types
  twice      no two files declare a type of the same name at namespace level

usage: names.py [FOLDER ...]     default: tessera. Exits with 1 if a name breaks a rule.
"""
import collections
import json
import pathlib
import subprocess
import sys

VAGUE_PARAMETERS = {"what", "how", "given", "wanted", "most", "rest", "thing", "things", "those", "that", "said", "told"}
VAGUE_TYPES = {"State", "Place", "Part", "Piece", "Share", "Step", "Source", "Kind", "Entry", "Slot", "Frame", "Thing",
               "Item", "Node", "Element", "Arrival", "Choice", "Reading", "Answer", "Draw", "Cut", "Travel", "Trouble"}
TYPE_KINDS = {"class", "struct", "union", "enum"}


def declarations(folders):
    """Yields a dict for each declaration: name, kind, path, line, scope, scopeKind."""
    command = ["ctags", "--output-format=json", "--languages=C++", "--langmap=C++:.h.cc.cu.cuh", "--kinds-C++=+pz",
               "--fields=+nKsZ", "--recurse", "-o", "-", *folders]
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        tag = json.loads(line)
        if tag.get("_type") == "tag":
            yield tag


def is_of_namespace(tag):
    return tag.get("scopeKind", "namespace") == "namespace"


def allowed(path):
    """Returns the exceptions {(rule, name, file)} in the file `path`. A line is `rule name file  # reason`."""
    result = set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words, _, reason = line.partition("#")
        if not words.strip():
            continue
        fields = words.split()
        if len(fields) != 3 or not reason.strip():
            sys.exit(f"{path}:{number}: expected `rule name file  # reason`, found: {line}")
        result.add(tuple(fields))
    return result


def findings(tags):
    """Yields (rule, name, file, line, message) for each declaration that breaks a rule."""
    files_of_type = collections.defaultdict(dict)
    for tag in tags:
        name, kind, path, line = tag["name"], tag["kind"], tag["path"], tag["line"]
        if kind in ("parameter", "member") and name.rstrip("_") in VAGUE_PARAMETERS:
            yield "parameter", name, path, line, f"the {kind} `{name}` does not say what it holds"
        if kind in TYPE_KINDS and is_of_namespace(tag) and not name.startswith("__anon"):
            files_of_type[name].setdefault(path, line)
            if name in VAGUE_TYPES:
                yield "type", name, path, line, f"the type `{name}` needs a more specific name"
    for name, files in files_of_type.items():
        if len(files) > 1:
            for path, line in files.items():
                others = ", ".join(sorted(set(files) - {path}))
                yield "twice", name, path, line, f"the type `{name}` is also declared in {others}"


def main():
    root = pathlib.Path(__file__).resolve().parent
    exceptions = allowed(root / "names_allowed.txt")
    found, used = 0, set()
    for rule, name, path, line, message in findings(declarations(sys.argv[1:] or ["tessera"])):
        if (rule, name, path) in exceptions:
            used.add((rule, name, path))
            continue
        found += 1
        print(f"{path}:{line}: [{rule}] {message}")
    for rule, name, path in sorted(exceptions - used):
        found += 1
        print(f"scripts/names_allowed.txt: [{rule}] {name} in {path} breaks no rule: remove the line")
    print(f"names: {found} findings, {len(used)} exceptions")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
