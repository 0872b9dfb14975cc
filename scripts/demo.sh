#!/usr/bin/env bash
# Fine-tunes a model and prints its answers before and after. './dev demo' first sets up, builds, and fetches the
# assets. Exits with 1 unless the loss on the held-out dialogues falls by at least 10 %. An earlier run in runs/demo is
# continued. A folder runs/demo that is not a run is renamed. No file is removed.
set -euo pipefail
cd "$(dirname "$0")/.."
tessera=${TESSERA_PROGRAM:-build/tessera}
run=${TESSERA_DEMO_RUN:-runs/demo}
base=build/assets/smollm2
held_out=build/assets/text/dialogues-held-out.jsonl
dialogues=3

say() { printf '\n\033[1m%s\033[0m\n' "$*" | { [ -t 1 ] && [ -z "${NO_COLOR:-}" ] && cat || sed 's/\x1b\[[0-9;]*m//g'; }; }

# Prints the questions (1) or the answers (2) of the first short held-out dialogues with different questions, one per
# line. A dialogue is {"messages":[{"role":...,"content":QUESTION?},{"role":...,"content":ANSWER}]}.
field() {  # field 1|2
  awk -F'"content":"' -v n="$1" -v most="$dialogues" '
    NF == 3 && !/\\/ && $2 ~ /\?"/ && length($0) < 220 && !seen[$2]++ { text = $(n + 1); sub(/".*/, "", text); print text; if (++count == most) exit }
  ' "$held_out"
}

answer() {  # answer MODEL QUESTION: prints the model's answer on one line
  "$tessera" generate --model "$1" --chat --prompt "$2" --max-new-tokens 40 | tr '\n' ' ' | cut -c1-300
}

if [ -e "$run" ] && [ ! -e "$run/.tessera/run.json" ]; then
  aside=$run-before-$(date +%Y%m%d-%H%M%S)
  [ ! -e "$aside" ] || aside=$aside-$$
  mv -nT "$run" "$aside"
  say "What was in $run is now in $aside"
elif [ -e "$run/checkpoints/LATEST" ]; then
  say "Going on with $run, from $(cat "$run/checkpoints/LATEST")"
fi

mapfile -t questions < <(field 1)
mapfile -t data < <(field 2)
say "Before: SmolLM2-135M-Instruct answers ${#questions[@]} questions of held-out dialogues"
before=()
for question in "${questions[@]}"; do before+=("$(answer "$base" "$question")"); done

say "Training on $(wc -l <build/assets/text/dialogues.jsonl) dialogues, FSDP on 2 local ranks"
"$tessera" train recipes/demo.yaml --nproc 2 checkpoint.dir="$run"

say "Answers before and after the training, and the answer in the held-out data"
for i in "${!questions[@]}"; do
  printf '\n  question  %s\n  before    %s\n  after     %s\n  data      %s\n' \
    "${questions[i]}" "${before[i]}" "$(answer "$run/model" "${questions[i]}")" "${data[i]}"
done

awk -F'"validation_loss":' '
  NF > 1 { split($2, part, /[,}]/); if (first == "") first = part[1]; last = part[1] }
  END {
    if (first == "") { print "no validation_loss in metrics.jsonl" > "/dev/stderr"; exit 1 }
    printf "\nHeld-out loss: %.4f before, %.4f after (%+.1f %%)\n", first, last, (last / first - 1) * 100
    if (last > 0.9 * first) { print "The held-out loss fell by less than 10 %." > "/dev/stderr"; exit 1 }
  }' "$run/metrics.jsonl"

cat <<END

The model is in $run/model, a Hugging Face folder. Go on with:
  $tessera generate --model $run/model --chat --prompt "..."
  $tessera train recipes/demo.yaml --nproc 2 train.steps=72 schedule.warmup_steps=4   # resumes from $run/checkpoints
  $tessera ckpt convert $run/model model.gguf                        # for llama.cpp
  $tessera train recipes/demo.yaml --print-config                    # prints every setting
  tensorboard --logdir $run                                          # the curves
END
