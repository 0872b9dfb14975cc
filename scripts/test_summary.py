#!/usr/bin/env python3
"""Prints the time of each suite and the output of failed tests: test_summary.py tests.xml (of ctest --output-junit)."""
import collections
import sys
import xml.etree.ElementTree

suites = collections.Counter()
counts = collections.Counter()
tests = []
failed = {}
for case in xml.etree.ElementTree.parse(sys.argv[1]).getroot().iter("testcase"):
    name, seconds = case.get("name"), float(case.get("time", 0))
    suite = name.split(".")[0]  # LAYER/SUITE
    suites[suite] += seconds
    counts[suite] += 1
    tests.append((seconds, name))
    if case.get("status") == "fail":
        failed[name] = (case.findtext("system-out") or "").splitlines()

print("\nSeconds of each suite over half a second, all its tests added up:")
for suite, seconds in suites.most_common():
    if seconds >= 0.5:
        print(f"{seconds:8.1f}  {suite} ({counts[suite]})")
print("\nThe slowest 20 tests:")
for seconds, name in sorted(tests, reverse=True)[:20]:
    print(f"{seconds:8.1f}  {name}")

# Failures are printed again at the end: after 2,000 tests their first output is far above, and a log may be cut at the front.
for name, lines in failed.items():
    print(f"\n{name} failed:")
    at = next((i for i, line in enumerate(lines) if ": Failure" in line), 0)
    shown = lines[at : at + 40]
    print("\n".join(line[:500] for line in shown))
    if at + len(shown) < len(lines):
        print(f"... {len(lines) - at - len(shown)} lines more above")
print()
