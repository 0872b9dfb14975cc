#!/usr/bin/env bash
# The main job from one end to the other; './dev demo' sets up, builds and fetches what it needs first.
# Exits 1 unless the loss on the held-out dialogues falls by at least 10 %.
set -euo pipefail
cd "$(dirname "$0")/.."
tessera=build/tessera
run=runs/demo
prompt="My computer is slow. What should I do?"

say() { printf '\n\033[1m%s\033[0m\n' "$*" | { [ -t 1 ] && [ -z "${NO_COLOR:-}" ] && cat || sed 's/\x1b\[[0-9;]*m//g'; }; }

generate() { "$tessera" generate --model "$1" --chat --prompt "$prompt" --max-new-tokens 60; }

rm -rf "$run"
say "Before: SmolLM2-135M-Instruct answers \"$prompt\""
generate build/assets/smollm2

say "Training on $(wc -l <build/assets/text/dialogues.jsonl) dialogues, FSDP on 2 local ranks"
"$tessera" train recipes/demo.yaml --nproc 2

say "After: the fine-tuned model answers the same question"
generate "$run/model"

awk -F'"validation_loss":' '
  NF > 1 { split($2, part, /[,}]/); if (first == "") first = part[1]; last = part[1] }
  END {
    if (first == "") { print "no validation_loss in metrics.jsonl" > "/dev/stderr"; exit 1 }
    printf "\nHeld-out loss: %.4f before, %.4f after (%+.1f %%)\n", first, last, (last / first - 1) * 100
    if (last > 0.9 * first) { print "The held-out loss fell by less than 10 %." > "/dev/stderr"; exit 1 }
  }' "$run/metrics.jsonl"

cat <<EOF

The model is in $run/model, a Hugging Face folder. Go on with:
  $tessera generate --model $run/model --chat --prompt "..."
  $tessera train recipes/demo.yaml --nproc 2 train.steps=72 schedule.warmup_steps=4   # resumes from $run/checkpoints
  $tessera ckpt convert $run/model model.gguf                        # for llama.cpp
  $tessera train recipes/demo.yaml --print-config                    # every setting
  tensorboard --logdir $run                                          # the curves
EOF
