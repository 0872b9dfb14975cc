#!/usr/bin/env python3
"""Prints a header with its comments in Doxygen's syntax: doxygen_filter.py HEADER

Each `//` comment becomes `///`, or `///<` after a declaration. The first comment describes the file. Lines that are
indented by three spaces become code examples.
"""
import re
import sys

ESCAPED = re.compile(r"([\\@<>&#%\"$])")


def text_of(comment):
    text = ESCAPED.sub(r"\\\1", comment)
    return re.sub(r"`([^`]+)`", lambda match: "<tt>" + match.group(1) + "</tt>", text)


def block(lines, indent, is_file):
    out = [indent + "/// \\file"] if is_file else []
    in_code = False
    for line in lines:
        is_code = line.startswith("   ") or (in_code and not line.strip())
        if is_code != in_code:
            out.append(indent + ("/// \\code{.cpp}" if is_code else "/// \\endcode"))
            in_code = is_code
        out.append((indent + "/// " + (line if is_code else text_of(line.strip()))).rstrip())
    if in_code:
        out.append(indent + "/// \\endcode")
    return out


def main():
    lines = open(sys.argv[1], encoding="utf-8").read().split("\n")
    out, index, is_file = [], 0, True
    while index < len(lines):
        match = re.match(r"^( *)//( .*|)$", lines[index])
        if match:
            comment = []
            while index < len(lines) and (match := re.match(r"^( *)//( .*|)$", lines[index])):
                indent = match.group(1)
                comment.append(match.group(2)[1:])
                index += 1
            out += block(comment, indent, is_file)
            is_file = False
            continue
        behind = re.match(r"^([^\"]*[;,{]|[^\"/]*\w)  // (.*)$", lines[index])
        if behind and not behind.group(1).lstrip().startswith(("}", "#", "return")):
            out.append(behind.group(1) + "  ///< " + text_of(behind.group(2)))
        else:
            out.append(lines[index])
        index += 1
    print("\n".join(out))


main()
