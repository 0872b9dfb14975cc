#!/usr/bin/env python3
"""Prints the share of comment lines for each layer of tessera/: of the lines that are not blank, those with only a
comment.

usage: comments.py [FOLDER ...]     default: the folders of tessera/
"""
import pathlib
import sys

HEADERS, SOURCES = {".h", ".cuh"}, {".cc", ".cu"}


def count_lines(files):
    """Returns the number of lines that are not blank, of comment lines, and of files without a comment line."""
    lines = comments = uncommented = 0
    for file in files:
        texts = [line.strip() for line in file.read_text().splitlines()]
        file_comments = sum(text.startswith("//") for text in texts)
        lines += sum(bool(text) for text in texts)
        comments += file_comments
        uncommented += file_comments == 0
    return lines, comments, uncommented


def row(name, folder):
    cells = [name]
    for suffixes in (HEADERS, SOURCES):
        files = [file for file in folder.rglob("*") if file.suffix in suffixes]
        lines, comments, uncommented = count_lines(files)
        cells += [str(len(files)), f"{100 * comments / lines:.1f} %" if lines else "-", str(uncommented)]
    return cells


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    folders = [pathlib.Path(name) for name in sys.argv[1:]] or sorted(path for path in (root / "tessera").iterdir() if path.is_dir())
    rows = [["folder", "headers", "comments", "none", "sources", "comments", "none"]]
    rows += [row(folder.name, folder) for folder in folders]
    if not sys.argv[1:]:
        rows.append(row("all", root / "tessera"))
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(rows[0]))]
    for cells in rows:
        print("  ".join(cell.ljust(width) if column == 0 else cell.rjust(width)
                        for column, (cell, width) in enumerate(zip(cells, widths))))
    print('"none": number of files without a comment line')


if __name__ == "__main__":
    main()
