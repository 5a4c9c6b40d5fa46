#!/usr/bin/env bash
# The runs of docs/results/protocol.md, stage by stage: tools/recipe_runs.sh STAGE DATA OUT
#
# DATA has tinyshakespeare/input.txt, wikitext-2, fashion-mnist, cifar10 and multi30k-de-en; OUT gets a folder per sweep.
# Each stage runs as two processes of one thread, which share its runs. Give the same command again to continue after an
# interruption; what is finished is not repeated. TASKS="text digits" tunes and searches for these alone. DRY=1 says what
# would be done. STEPS=2, and options in EXTRA, make it tiny, to try it out.
set -euo pipefail
stage=${1:-} data=${2:-} out=${3:-}
stages="tune search roles pilot confirm-text confirm-wikitext2 confirm-digits confirm-fashion confirm-cifar10"
stages+=" confirm-multi30k further pretrained tables"
if [[ $# -ne 3 || " $stages " != *" $stage "* ]]; then
  echo "usage: $0 STAGE DATA OUT, with STAGE one of: $stages" >&2
  exit 2
fi
multimax=${MULTIMAX:-multimax} python=${PYTHON:-python}
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
read -ra extra <<< "${EXTRA:-}"
if [[ -n ${STEPS:-} ]]; then extra+=(--steps "$STEPS"); fi
mkdir -p "$out"

declare -A place=(
  [text]=$data/tinyshakespeare/input.txt [wikitext2]=$data/wikitext-2 [digits]=digits
  [fashion]=$data/fashion-mnist [cifar10]=$data/cifar10 [multi30k]=$data/multi30k-de-en
)
declare -A kind=([text]=language [wikitext2]=language [cifar10]=vision [fashion]=vision [digits]=vision [multi30k]=translation)
# where the recipe of a task comes from: WikiText-2, Fashion-MNIST and the digits take that of another dataset
declare -A recipe=([text]=text [wikitext2]=text [cifar10]=cifar10 [fashion]=cifar10 [digits]=cifar10 [multi30k]=multi30k)

sweep() { # TABLE TASK FOLDER OPTIONS...: two processes side by side
  local table=$1 task=$2 folder=$3
  shift 3
  local command=($multimax sweep "$table" --data "${place[$task]}" --out "$out/$folder" --quiet --no-tensorboard "$@")
  command+=("${extra[@]}")
  if [[ -n ${DRY:-} ]]; then
    "${command[@]}" --dry-run
    return
  fi
  "${command[@]}" >> "$out/$folder.log" 2>&1 &
  local first=$!
  sleep "${STAGGER:-20}" # the first one lays the sweep out
  "${command[@]}" >> "$out/$folder.log" 2>&1 || { wait "$first" || true; tail -3 "$out/$folder.log" >&2; return 1; }
  wait "$first"
}

preset() { # TASK: as tuned, if it was
  if [[ -f $out/tune-$1/chosen.json ]]; then echo "$out/tune-$1/chosen.json"; else echo "recipe-$1"; fi
}

confirm() { # TASK SEEDS: with seeds that no search has used
  local methods=()
  if [[ $1 != text && $1 != digits ]]; then # the published recipe is confirmed on two tasks alone
    methods=(--methods softmax "trained temperature both, recipe" "MultiMax attention, recipe")
    methods+=("MultiMax output, recipe" "MultiMax both, recipe")
  fi
  sweep "$out/search-${recipe[$1]}/confirm.json" "$1" "confirm-$1" --preset "$(preset "$1")" \
    --seeds "${SEEDS:-$2}" --first-seed 100 "${methods[@]}"
}

roles() { # the table roles with the recipe that the search on Multi30k has found
  "$python" - "$out" << 'END'
import json, sys
from pathlib import Path
from multimax.experiments.sweep import load_table

out = Path(sys.argv[1])
recipe = json.loads((out / "search-multi30k/confirm.json").read_text())["methods"]["MultiMax attention, recipe"]
table = load_table("roles")
methods = {label: {**recipe, **changes} if changes else {} for label, changes in table.methods.items()}
content = {"about": table.about, "baseline": table.baseline, "seeds": table.seeds, "methods": methods}
(out / "roles-recipe.json").write_text(json.dumps(content, indent=2))
END
}

case $stage in
  tune)
    for task in ${TASKS:-text wikitext2 cifar10 fashion digits multi30k}; do
      sweep "tune-${kind[$task]}" "$task" "tune-$task" --preset "recipe-$task"
    done ;;
  search)
    for task in ${TASKS:-text cifar10 multi30k}; do
      sweep recipe "$task" "search-$task" --preset "$(preset "$task")"
    done ;;
  roles)
    sweep roles multi30k roles-published --preset "$(preset multi30k)" --no-test --epochs 4 --seeds "${SEEDS:-2}"
    roles
    sweep "$out/roles-recipe.json" multi30k roles-recipe --preset "$(preset multi30k)" --no-test --epochs 4 \
      --seeds "${SEEDS:-2}" ;;
  pilot)
    # a third of the full length; the other tasks have the last rungs of their searches
    sweep seeds wikitext2 pilot-wikitext2 --preset "$(preset wikitext2)" --no-test --epochs 1 --seeds "${SEEDS:-3}"
    sweep seeds fashion pilot-fashion --preset "$(preset fashion)" --no-test --epochs 2 --seeds "${SEEDS:-3}"
    sweep seeds digits pilot-digits --preset "$(preset digits)" --no-test --seeds "${SEEDS:-5}" ;;
  confirm-text | confirm-digits) confirm "${stage#confirm-}" 10 ;;
  confirm-*) confirm "${stage#confirm-}" 5 ;;
  further)
    for task in text fashion; do
      start=$out/confirm-$task/softmax/seed-{seed}/model
      if [[ $task == text ]]; then length=(--steps 250); else length=(--epochs 0.6); fi # a tenth
      common=(--preset "$(preset "$task")" --start "$start" --first-seed 100 --seeds "${SEEDS:-5}")
      for factor in 1 10; do
        sweep further "$task" "further-$task-x$factor" "${common[@]}" "${length[@]}" --multimax-lr-factor $factor
      done
      sweep retrofit "$task" "retrofit-$task" "${common[@]}" "${length[@]}" --learning-rate 0.01
    done ;;
  pretrained)
    for model in minilm smollm2; do
      for rate in 0.003 0.01 0.03; do
        "$python" "$(dirname "$0")/pretrained.py" $model --data "$data/wikitext-2" --out "$out/pretrained-$model-$rate" \
          --learning-rate $rate --no-test --seeds 1 "${extra[@]}" >> "$out/pretrained-$model.log" 2>&1
      done &
    done
    wait
    echo "choose the learning rate of each method by $multimax table $out/pretrained-*, then confirm it:"
    echo "$python tools/pretrained.py MODEL --data $data/wikitext-2 --learning-rate RATE --first-seed 100 --out $out/MODEL" ;;
  tables)
    for folder in "$out"/*/; do
      if [[ -f $folder/sweep.json || -d $folder/rung-1 ]]; then
        echo "## $(basename "$folder")"
        $multimax table "$folder" || true
        [[ -f $folder/sweep.json ]] && { $multimax table "$folder" --metrics loss | sed '/^$/,$d' || true; }
      fi
    done ;;
esac
