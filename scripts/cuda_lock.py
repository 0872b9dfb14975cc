#!/usr/bin/env python3
"""Makes a lock file of torch for CUDA and its CUDA packages, from pip's report of the packages that it would install.

    pip install --dry-run --ignore-installed --report a.json 'torch===2.13.0' 'cuda-toolkit[nvcc,cccl,crt,nvvm]'
    scripts/cuda_lock.py a.json [MORE.json] >scripts/cuda-2.13.0.lock

Further reports, made with pip's --python-version, add the hashes of torch's wheels for other Python versions. Packages
that torch needs only in Python are left out, because the build does not run Python.
"""
import json
import sys

hashes = {}
for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    for package in report["install"]:
        name, version = package["metadata"]["name"], package["metadata"]["version"]
        if name == "torch" or name.startswith("nvidia-"):
            digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
            hashes.setdefault(f"{name}=={version}", set()).add(digest)
names = [each.split("==")[0] for each in hashes]
if "torch" not in names or "nvidia-cuda-nvcc" not in names or len(set(names)) != len(names):
    sys.exit("cuda_lock.py: expected torch, nvidia-cuda-nvcc and one version of each package; "
             f"found {' '.join(sorted(hashes))}")
for requirement in sorted(hashes):
    print(" \\\n    --hash=sha256:".join([requirement, *sorted(hashes[requirement])]))
