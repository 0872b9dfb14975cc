#!/usr/bin/env python3
"""Makes the packages of a build: a wheel that requires torch's wheel with libtorch, and an archive that contains
libtorch.

    scripts/package.py --build build --torch .venv/lib/python3.11/site-packages/torch --out build/package [--only wheel|archive]

Neither package has Python code. pip installs the executable of the wheel into the folder of scripts, and the executable
finds libtorch in the site-packages of the same Python. docs/design/package.md explains the decisions.
"""
import argparse
import base64
import glob
import gzip
import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# C and C++ run-time libraries. Every Linux system that can run libtorch has them, so they are not packaged.
SYSTEM = re.compile(r"^(ld-linux.*|libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+)\.so\.\d+$")
DLOPENED = ["libonig.so.5"]  # loaded with dlopen, so ldd does not list them
# Header-only libraries: {library: Debian package}. Their licences are packaged.
HEADER_ONLY = {"nlohmann-json": "nlohmann-json3-dev", "CLI11": "libcli11-dev"}
# (N, M): distributions with the symbol version GLIBCXX_3.4.N have at least glibc 2.M, as in the manylinux policies.
GLIBC_OF_GLIBCXX = [(25, 28), (28, 31), (29, 34), (30, 35), (31, 38), (32, 38), (33, 39)]
MODIFIED_AT = int(os.environ.get("SOURCE_DATE_EPOCH", "1577836800"))


def die(text):
    sys.exit(f"./dev package: {text}")


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed(path):
    return re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", path))


def run_path(path):
    found = re.search(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", output("readelf", "-d", path))
    return found.group(1) if found else ""


def set_run_path(path, new_path):
    """Replaces the run path in the file. `new_path` must not be longer than the path that the linker wrote."""
    before, data = run_path(path).encode(), pathlib.Path(path).read_bytes()
    after = new_path.encode()
    if data.count(before + b"\0") != 1 or len(after) > len(before):
        die(f"{path}: cannot replace its run path: it occurs more than once, or the new one is longer")
    pathlib.Path(path).write_bytes(data.replace(before + b"\0", after.ljust(len(before), b"\0") + b"\0"))


class Libraries:
    """The libraries that the program loads, as {name: real path}: of torch, of pyarrow, and of the system."""

    def __init__(self, program, torch):
        found = dict(re.findall(r"(\S+) => (/.*) \(0x", output("ldd", program)))
        missing = re.findall(r"(\S+) => not found", output("ldd", program))
        if missing:
            die(f"{program} does not find its libraries {', '.join(missing)}")
        site = pathlib.Path(torch).resolve().parent
        self.torch, self.arrow, self.system = {}, {}, {}
        for name, path in found.items():
            real = pathlib.Path(path).resolve()
            if SYSTEM.match(name):
                continue
            of_torch = real.is_relative_to(pathlib.Path(torch).resolve()) or real.is_relative_to(site / "nvidia")
            origin = self.torch if of_torch else self.arrow if real.parent.name == "pyarrow" else self.system
            origin[name] = real
        cache = output("/sbin/ldconfig", "-p")
        for name in DLOPENED:
            path = re.search(rf"^\s*{re.escape(name)} .*=> (\S+)$", cache, re.M)
            if not path:
                die(f"the program needs {name}, which is not on this machine")
            self.system[name] = pathlib.Path(path.group(1)).resolve()


def debian_licence(package):
    """Returns a Debian package's copyright file, with the texts of the common licences that it refers to by their
    path."""
    path = pathlib.Path(f"/usr/share/doc/{package}/copyright")
    if not path.is_file():
        die(f"found no licence of {package}: {path} does not exist")
    text = path.read_bytes()
    word = rb"[A-Za-z0-9]+(?:-[0-9]+(?:\.[0-9]+)*)?"
    named = set(re.findall(rb"/usr/share/common-licenses/(" + word + rb")", text))
    for several in re.findall(rb"/usr/share/common-licenses/\{([^}]*)\}", text):
        named.update(re.findall(word, several))
    for name in sorted(named):
        common = pathlib.Path("/usr/share/common-licenses", name.decode())
        if not common.is_file():
            die(f"found no licence of {package}: {path} names {common}, which does not exist")
        text += b"\n\n%s:\n\n" % str(common).encode() + common.read_bytes()
    return text


def owner(path):
    for candidate in {str(path), str(path).removeprefix("/usr")}:
        found = subprocess.run(["dpkg", "-S", candidate], capture_output=True, text=True)
        if found.returncode == 0:
            return found.stdout.split(":")[0]
    die(f"{path}: no Debian package owns this file, so its licence is unknown")


def wheel_version_and_licence(folder, name):
    """Returns the version of an installed Python distribution and the texts of its licences."""
    infos = glob.glob(f"{pathlib.Path(folder).resolve().parent}/{name}-*.dist-info")
    if len(infos) != 1:
        die(f"expected one {name}-*.dist-info next to {folder}, found {len(infos)}. Use the libtorch of a wheel.")
    info = pathlib.Path(infos[0])
    version = re.search(r"^Version: (\S+)$", (info / "METADATA").read_text(), re.M).group(1)
    texts = [p for p in sorted(info.rglob("*")) if p.is_file() and re.match("(?i)licen|notice|copying", p.name)]
    return version, b"\n\n".join(p.read_bytes() for p in texts)


class Tree:
    """The files of both packages, under one prefix: bin, lib/tessera, libexec/tessera, share."""

    def __init__(self, build, torch, stage):
        for component in ("program", "demo"):
            subprocess.run(["cmake", "--install", build, "--component", component, "--prefix", stage, "--strip"],
                           check=True, stdout=subprocess.DEVNULL)
        self.root = pathlib.Path(stage)
        program = self.root / "bin/tessera"
        self.libraries = Libraries(program, torch)
        set_run_path(program, ":".join(p for p in run_path(program).split(":") if p.startswith("$ORIGIN")))
        for name, path in self.libraries.system.items():
            self.put(f"lib/tessera/{name}", path.read_bytes(), 0o755)
            self.licence(owner(path), debian_licence(owner(path)))
        for name, package in HEADER_ONLY.items():
            self.licence(name, debian_licence(package))
        for recipe in sorted((ROOT / "recipes").glob("*.yaml")):
            self.put(f"share/tessera/recipes/{recipe.name}", recipe.read_bytes())
        self.put("share/tessera/demo/recipes/demo.yaml", (ROOT / "recipes/demo.yaml").read_bytes())
        self.put("share/tessera/demo/fetch.sh", (ROOT / "scripts/package/fetch.sh").read_bytes(), 0o755)

    def put(self, name, content, mode=0o644):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)

    def licence(self, name, text):
        self.put(f"share/doc/tessera/licences/{name}", text)

    def files(self):
        return sorted(p for p in self.root.rglob("*") if p.is_file())

    def programs(self):
        return [p for p in self.files() if p.read_bytes()[:4] == b"\x7fELF"]

    def check_needs(self, from_wheels):
        """Fails unless each needed library is in the package, in a required wheel (`from_wheels`), or part of the
        system."""
        available = {p.name for p in self.programs()} | set(from_wheels)
        for path in self.programs():
            for name in needed(path):
                if name not in available and not SYSTEM.match(name):
                    die(f"{path.relative_to(self.root)} needs {name}, which is in no package or required wheel")
            if any(not entry.startswith("$ORIGIN") for entry in run_path(path).split(":") if entry):
                die(f"{path.relative_to(self.root)} searches for libraries outside the package: {run_path(path)}")

    def glibc(self):
        """Returns N of the oldest glibc 2.N that has the symbols that all files need."""
        minor = 17
        for path in self.programs():
            versions = output("readelf", "-V", path)
            minor = max([minor] + [int(n) for n in re.findall(r"\bGLIBC_2\.(\d+)", versions)])
            cxx = max([0] + [int(n) for n in re.findall(r"\bGLIBCXX_3\.4\.(\d+)", versions)])
            candidates = [glibc for newest, glibc in GLIBC_OF_GLIBCXX if cxx <= newest]
            if not candidates:
                die(f"{path.name}: needs GLIBCXX_3.4.{cxx}; no manylinux policy with this version is known")
            minor = max(minor, candidates[0])
        return minor


def make_wheel(tree, version, torch, arrow, out):
    tree.check_needs([*tree.libraries.torch, *tree.libraries.arrow])
    tag = f"py3-none-manylinux_2_{tree.glibc()}_{platform.machine()}"
    info, data = f"tessera-{version}.dist-info", f"tessera-{version}.data"
    requires = [f"torch=={torch.split('+')[0]}"] + ([f"pyarrow=={arrow}"] if arrow else [])
    metadata = "Metadata-Version: 2.1\nName: tessera\n" + f"Version: {version}\n" + \
        "Summary: Trains and fine-tunes Hugging Face language models across processes and GPUs, natively\n" + \
        "Requires-Python: >=3.10,<3.15\n" + "".join(f"Requires-Dist: {name}\n" for name in requires)
    records = []
    path = out / f"tessera-{version}-{tag}.whl"
    with zipfile.ZipFile(path.with_suffix(".part"), "w", zipfile.ZIP_DEFLATED) as wheel:
        def add(name, content, mode=0o644):
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr, entry.compress_type = (0o100000 | mode) << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(entry, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            records.append(f"{name},sha256={digest},{len(content)}")
        for file in tree.files():
            name = str(file.relative_to(tree.root))
            path_in_wheel = f"{data}/scripts/tessera" if name == "bin/tessera" else f"{data}/data/{name}"
            add(path_in_wheel, file.read_bytes(), file.stat().st_mode & 0o777)
        add(f"{info}/METADATA", metadata.encode())
        add(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: tessera\nRoot-Is-Purelib: false\nTag: {tag}\n".encode())
        records.append(f"{info}/RECORD,,")
        entry = zipfile.ZipInfo(f"{info}/RECORD", (2020, 1, 1, 0, 0, 0))
        entry.external_attr = 0o100644 << 16
        wheel.writestr(entry, "\n".join(records) + "\n")
    path.with_suffix(".part").rename(path)
    return path


def make_archive(tree, version, torch_licence, arrow_licence, out):
    if any("cuda" in name for name in tree.libraries.torch):
        die("an archive needs the CPU build of libtorch; with the CUDA build, make only the wheel (--only wheel)")
    for name, path in {**tree.libraries.torch, **tree.libraries.arrow}.items():
        tree.put(f"lib/tessera/{name}", path.read_bytes(), 0o755)
    tree.licence("libtorch", torch_licence)
    if tree.libraries.arrow:
        tree.licence("arrow", arrow_licence)
    tree.check_needs([])
    folder = f"tessera-{version}-linux-{platform.machine()}"
    path = out / f"{folder}.tar.gz"

    def without_owner(member):
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.mtime = MODIFIED_AT
        return member
    with open(f"{path}.part", "wb") as raw, gzip.GzipFile("", "wb", 3, raw, MODIFIED_AT) as packed, \
            tarfile.open(fileobj=packed, mode="w") as archive:
        for file in tree.files():
            archive.add(file, f"{folder}/{file.relative_to(tree.root)}", filter=without_owner)
    os.rename(f"{path}.part", path)
    return path


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build", help="CMake build folder")
    parser.add_argument("--torch", required=True, help="folder of the torch package that the build links")
    parser.add_argument("--out", default="build/package", help="folder for the packages")
    parser.add_argument("--only", choices=["wheel", "archive"], help="make only this package")
    arguments = parser.parse_args()
    out = pathlib.Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    version = re.search(r"^CMAKE_PROJECT_VERSION:STATIC=(\S+)$",
                        pathlib.Path(arguments.build, "CMakeCache.txt").read_text(), re.M).group(1)
    with tempfile.TemporaryDirectory(dir=out) as stage:
        tree = Tree(arguments.build, arguments.torch, stage)
        torch, torch_licence = wheel_version_and_licence(arguments.torch, "torch")
        arrow, arrow_licence = None, b""
        if tree.libraries.arrow:
            folder = next(iter(tree.libraries.arrow.values())).parent
            arrow, arrow_licence = wheel_version_and_licence(folder, "pyarrow")
        made = []
        if arguments.only != "archive":
            made.append(make_wheel(tree, version, torch, arrow, out))
        if arguments.only != "wheel":
            made.append(make_archive(tree, version, torch_licence, arrow_licence, out))
    for path in made:
        print(f"{path}  {path.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
