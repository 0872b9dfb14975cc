"""Checks a wheel with Python's packaging tools: check_wheel.py WHEEL

Its name, tags and metadata must agree. RECORD must have every file with its hash and size. No program in it may need a
newer glibc than the tag names, or search for libraries outside its own folders.
"""
import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import tempfile
import zipfile

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

path = sys.argv[1]
name, version, _, tags = parse_wheel_filename(path.rsplit("/", 1)[1])
wheel = zipfile.ZipFile(path)
info = f"{name}-{version}.dist-info"
metadata, unparsed = parse_email(wheel.read(f"{info}/METADATA"))
assert not unparsed and metadata["name"] == name and metadata["version"] == str(version), (metadata, unparsed)
required = {requirement.name: requirement for requirement in map(Requirement, metadata["requires_dist"])}
assert re.fullmatch(r"==\d+\.\d+\.\d+", str(required["torch"].specifier)), required
assert f"Tag: {next(iter(tags))}" in wheel.read(f"{info}/WHEEL").decode(), tags
rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(wheel.read(f"{info}/RECORD").decode()))}
assert set(rows) == set(wheel.namelist()), set(rows) ^ set(wheel.namelist())
glibc = int(re.search(r"manylinux_2_(\d+)_", path).group(1))
for file, (digest, size) in rows.items():
    if file.endswith("/RECORD"):
        continue
    content = wheel.read(file)
    expected = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    assert digest == f"sha256={expected}" and int(size) == len(content), file
    if content[:4] != b"\x7fELF":
        continue
    with tempfile.NamedTemporaryFile() as program:
        program.write(content)
        program.flush()
        versions = subprocess.run(["readelf", "-V", program.name], capture_output=True, text=True, check=True).stdout
        dynamic = subprocess.run(["readelf", "-d", program.name], capture_output=True, text=True, check=True).stdout
    assert max([0] + [int(n) for n in re.findall(r"\bGLIBC_2\.(\d+)", versions)]) <= glibc, file
    for paths in re.findall(r"(?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic):
        assert all(path.startswith("$ORIGIN/") for path in paths.split(":")), (file, paths)
print("ok")
