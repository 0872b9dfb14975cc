#!/usr/bin/env python3
"""Writes the result tables of the benchmarks from the JSON lines in bench/results.

README.md and docs/performance.md have the rows that bench/table.txt lists. bench/results/README.md has all cases. A
subfolder of bench/results has the cases of another machine.

    bench_table.py [--check]      --check: writes no file, and fails if a table is out of date
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
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()]
            for file in sorted(folder.glob("*.json"))}


def ratio_of(value):
    return f"{value:.2f}" if value < 10 else number(value)


def cells(case):
    """Returns our figure, the peer's figure and their ratio as text, with notes in brackets."""
    unit, tuned = case["unit"], "tuned_peer" in case
    notes = [f"tuned {case['tuned_ratio']:.2f}"] if tuned else []
    if case["ratio"] < case["at_least"]:
        notes.append(f"required {case['at_least']:.3g}")
    if 0 < case["at_most"] < case["ours"]:
        notes.append(f"required at most {case['at_most']:g} {unit}")
    if not case["verified"]:
        notes.append("NOT VERIFIED")
    if case["disturbed_rounds"] and unit != "launches":  # launches are counted, not timed
        notes.append(f"{case['disturbed_rounds']} of {case['rounds']} rounds disturbed")
    peer = number(case["peer"]) + (f" (tuned {number(case['tuned_peer'])})" if tuned else "")
    ratio = ratio_of(case["ratio"]) + (f" ({', '.join(notes)})" if notes else "")
    return f"{number(case['ours'])} {unit}", f"{peer} {unit}", ratio


def environment_of(line):
    """Returns the machine and the library versions of a JSON line, as text."""
    return line["machine"] + (f", {line['versions']}" if line.get("versions") else "")


def environments_of(lines):
    return [environment for environment, _ in collections.Counter(map(environment_of, lines)).most_common()]


def case_of(results, bench, name):
    """Returns the result of a case, or None if this machine has not measured it."""
    case = next((case for case in results.get(bench, []) if case["case"] == name), None)
    if case is None and bench in results:  # expected for bf16 cases on a processor without bf16 instructions
        print(f"bench_table.py: bench/results/{bench}.json has no case '{name}'", file=sys.stderr)
    return case


def table_lines():
    """Yields the lines of bench/table.txt without its comments."""
    for line in (ROOT / "bench/table.txt").read_text().splitlines():
        if not line.startswith("# "):
            yield line


def readme_table(results):
    rows = ["| benchmark | unit | Tessera | peer | ratio | peer program |", "|---|---|---|---|---|---|"]
    for line in table_lines():
        fields = [field.strip() for field in line.split(" | ")]
        if fields[0] != "readme":
            continue
        _, title, peer, bench, name = fields
        case = case_of(results, bench, name)
        if case:
            rows.append(f"| {title} | {case['unit']} | {number(case['ours'])} | {number(case['peer'])} "
                        f"| {ratio_of(case['ratio'])} | {peer} |")
    return "\n".join(rows) + "\n"


def performance_sections(results):
    """Returns the text of docs/performance.md: the sections of bench/table.txt, each with its heading, text and
    table."""
    head = ["| case | unit | Tessera | peer | ratio | tuned peer | ratio to tuned peer | threads |",
            "|---|---|---|---|---|---|---|---|"]
    parts, in_table = [], False
    environments = environments_of([line for lines in results.values() for line in lines])
    parts += ["Machines:", ""] + [f"{index + 1}. {environment}" for index, environment in enumerate(environments)]
    for line in table_lines():
        fields = [field.strip() for field in line.split(" | ")]
        if fields[0] == "readme":
            continue
        if len(fields) != 2:
            if line or parts[-1]:
                parts.append(line)
            in_table = False
            continue
        bench, name = fields
        case = case_of(results, bench, name)
        if not case:
            continue
        if not in_table:
            parts += head
            in_table = True
        tuned = "tuned_peer" in case
        index = environments.index(environment_of(case))
        machine = f" (machine {index + 1})" if index else ""
        title = name.removesuffix(f" {case['unit']}").removesuffix(",")
        parts.append(f"| {title}{machine} | {case['unit']} | {number(case['ours'])} | {number(case['peer'])} "
                     f"| {ratio_of(case['ratio'])} | {number(case['tuned_peer']) if tuned else ''} "
                     f"| {ratio_of(case['tuned_ratio']) if tuned else ''} | {case['threads']} |")
    return "\n".join(parts) + "\n"


def whole_table(results):
    parts = ["# All results\n\n`./dev bench` writes this page from the JSON files in this folder. \"Tuned\" is the peer with "
             "tuned settings, usually with tcmalloc, which Tessera links. The brackets after a ratio have the 10 % and 90 % "
             "quantiles over the rounds. \"Required\" is a limit that the result misses.\n"]
    for bench, lines in results.items():
        parts.append(f"\n## {bench}\n\n`{lines[0]['command']}`, {'; '.join(environments_of(lines))}\n\n"
                     "| case | Tessera | peer | ratio (above 1: Tessera is better) | threads | rounds |\n"
                     "|---|---|---|---|---|---|\n")
        for line in lines:
            ours, peer, ratio = cells(line)
            spread = f"[{line['ratio_10']:.2f}, {line['ratio_90']:.2f}]"
            parts.append(f"| {line['case']} | {ours} | {peer} | {ratio} {spread} | {line['threads']} | {line['rounds']} |\n")
    return "".join(parts)


def with_table(file, table):
    """Returns the text of the file with `table` between the markers BEGIN and END."""
    head, rest = file.read_text().split(BEGIN)
    return head + BEGIN + "\n" + table + "\n" + END + rest.split(END)[1]


def main():
    results = read_results(RESULTS)
    readme, performance = ROOT / "README.md", ROOT / "docs/performance.md"
    written = {readme: with_table(readme, readme_table(results)),
               performance: with_table(performance, performance_sections(results)),
               RESULTS / "README.md": whole_table(results)}
    for folder in sorted({path.parent for path in RESULTS.glob("*/*.json")}):
        written[folder / "README.md"] = whole_table(read_results(folder))
    for file, text in written.items():
        if sys.argv[1:] != ["--check"]:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            sys.exit(f"bench_table.py: {file.relative_to(ROOT)} is out of date with bench/results and "
                     "bench/table.txt: run scripts/bench_table.py")


if __name__ == "__main__":
    main()
