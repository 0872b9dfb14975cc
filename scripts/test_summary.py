#!/usr/bin/env python3
"""Prints the time of each test suite and the output of failed tests.

    test_summary.py tests.xml       the file that ctest --output-junit writes
"""
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

print("\nTotal seconds of each suite that took at least half a second:")
for suite, seconds in suites.most_common():
    if seconds >= 0.5:
        print(f"{seconds:8.1f}  {suite} ({counts[suite]})")
print("\nThe slowest 20 tests:")
for seconds, name in sorted(tests, reverse=True)[:20]:
    print(f"{seconds:8.1f}  {name}")

# Failures are printed again at the end. ctest prints them among thousands of lines, and logs may be cut at the front.
for name, lines in failed.items():
    print(f"\n{name} failed:")
    start = next((i for i, line in enumerate(lines) if ": Failure" in line), 0)
    shown = lines[start : start + 40]
    print("\n".join(line[:500] for line in shown))
    if start + len(shown) < len(lines):
        print(f"... {len(lines) - start - len(shown)} more lines above")
print()
