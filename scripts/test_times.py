#!/usr/bin/env python3
"""Where the time of the tests went: test_times.py tests.xml (what ctest --output-junit wrote)."""
import collections
import sys
import xml.etree.ElementTree

suites = collections.Counter()
counts = collections.Counter()
tests = []
for case in xml.etree.ElementTree.parse(sys.argv[1]).getroot().iter("testcase"):
    name, seconds = case.get("name"), float(case.get("time", 0))
    suite = name.split(".")[0]  # LAYER/SUITE
    suites[suite] += seconds
    counts[suite] += 1
    tests.append((seconds, name))

print("\nSeconds of each suite over half a second, all its tests added up:")
for suite, seconds in suites.most_common():
    if seconds >= 0.5:
        print(f"{seconds:8.1f}  {suite} ({counts[suite]})")
print("\nThe slowest 20 tests:")
for seconds, name in sorted(tests, reverse=True)[:20]:
    print(f"{seconds:8.1f}  {name}")
print()
