#!/usr/bin/env python3
"""Writes the tables of measured figures from the JSON lines in bench/results: README's, of the rows that bench/table.txt
lists, and bench/results/README.md, of all cases; a folder in bench/results holds those of another machine.

    bench_table.py [--check]      --check: writes nothing, fails where a table is not that of the results
"""
import collections
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
BEGIN, END = "<!-- ./dev bench writes this table -->\n", "<!-- end of the table -->\n"


def number(value):
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 1 else f"{value:.2g}"


def read_results(folder):
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.glob("*.json"))}


def cells(cases):
    """What ours, the peer and their ratio come to, of one case or of several of a row."""
    unit = cases[0]["unit"] if len({case["unit"] for case in cases}) == 1 else None
    shown = lambda value, case: number(value) + ("" if unit else f" {case['unit']}")
    ours = "; ".join(shown(case["ours"], case) for case in cases)
    peers, ratios = [], []
    for case in cases:
        tuned = "tuned_peer" in case
        peers.append(shown(case["peer"], case) + (f" (tuned {number(case['tuned_peer'])})" if tuned else ""))
        ratio = f"{case['ratio']:.2f}" if case["ratio"] < 10 else number(case["ratio"])
        notes = [f"tuned {case['tuned_ratio']:.2f}"] if tuned else []
        if case["ratio"] < case["at_least"]:
            notes.append(f"wanted {case['at_least']:.3g}")
        if 0 < case["at_most"] < case["ours"]:
            notes.append(f"wanted at most {case['at_most']:g} {case['unit']}")
        if not case["verified"]:
            notes.append("NOT VERIFIED")
        if case["disturbed_rounds"] and case["unit"] != "launches":  # which are counted, not timed
            notes.append(f"{case['disturbed_rounds']} of {case['rounds']} rounds disturbed")
        ratios.append(ratio + (f" ({', '.join(notes)})" if notes else ""))
    after = f" {unit}" if unit else ""
    return ours + after, "; ".join(peers) + after, "; ".join(ratios)


def where_of(line):
    """Machine and versions of a line, in words."""
    return line["machine"] + (f", {line['versions']}" if line.get("versions") else "")


def places_of(lines):
    return [place for place, _ in collections.Counter(map(where_of, lines)).most_common()]


def readme_table(results):
    rows = ["| what | Tessera | peer | times better | threads | by |", "|---|---|---|---|---|---|"]
    places = places_of([line for lines in results.values() for line in lines])
    marks = {place: f"{index + 1}" for index, place in enumerate(places)} if len(places) > 1 else {}
    for line in (ROOT / "bench/table.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        title, bench, names = (part.strip() for part in line.split(" | "))
        if bench not in results:
            continue  # not measured on this machine
        known = {case["case"]: case for case in results[bench]}
        cases = [known[name.strip()] for name in names.split(";") if name.strip() in known]
        for name in names.split(";"):
            if name.strip() not in known:  # bf16 is measured only where the processor has it
                print(f"bench_table.py: bench/results/{bench}.json has no case '{name.strip()}'", file=sys.stderr)
        if not cases:
            continue
        machines = "".join(sorted({marks.get(where_of(case), "") for case in cases}))
        threads = "; ".join(sorted({str(case["threads"]) for case in cases}))
        rows.append(f"| {title} | {' | '.join(cells(cases))} | {threads} | `./dev bench {bench}`{f' [{machines}]' if machines else ''} |")
    said = "Measured on " + "; ".join(f"{f'[{marks[place]}] ' if marks else ''}{place}" for place in places) + ".\n\n"
    return said + "\n".join(rows) + "\n"


def whole_table(results):
    parts = ["# All figures\n\nWritten by `./dev bench` from the JSON lines beside it. \"Tuned\" is the peer with the allocator that "
             "Tessera links. Brackets of a ratio: the 10 % and 90 % quantiles of its rounds.\n"]
    for bench, lines in results.items():
        parts.append(f"\n## {bench}\n\n`{lines[0]['command']}`, {'; '.join(places_of(lines))}\n\n"
                     "| case | Tessera | peer | times better | threads | rounds |\n|---|---|---|---|---|---|\n")
        for line in lines:
            ours, peer, ratio = cells([line])
            spread = f"[{line['ratio_10']:.2f}, {line['ratio_90']:.2f}]"
            parts.append(f"| {line['case']} | {ours} | {peer} | {ratio} {spread} | {line['threads']} | {line['rounds']} |\n")
    return "".join(parts)


def main():
    results = read_results(RESULTS)
    readme = (ROOT / "README.md").read_text()
    head, rest = readme.split(BEGIN)
    tail = rest.split(END)[1]
    wanted = {ROOT / "README.md": head + BEGIN + "\n" + readme_table(results) + "\n" + END + tail,
              RESULTS / "README.md": whole_table(results)}
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        wanted[folder / "README.md"] = whole_table(read_results(folder))
    for file, text in wanted.items():
        if sys.argv[1:] != ["--check"]:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            sys.exit(f"bench_table.py: {file.relative_to(ROOT)} is not what bench/results and bench/table.txt come to: run "
                     "scripts/bench_table.py")


if __name__ == "__main__":
    main()
