#!/usr/bin/env bash
# The main job end to end: a public verl PPO launch becomes a plan, its variant is compared with it, and the change is
# executed on real tensors in local processes, every element checked. Needs nereusc on the PATH (make demo sees to it).
set -euo pipefail
cd "$(dirname "$0")/verl-qwen2-7b"

say() { printf '\n== %s\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$@"; }

say "1/5  A verl launch script as a plan (facts of verl's run_qwen2-7b_rm_seq_balance.sh)"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
run nereusc import verl launch.sh --gpu h200-sxm-141gb -o "$out/imported.plan"
cmp -s base.plan "$out/imported.plan" && echo "equal to base.plan"

say "2/5  What every GPU needs in every stage"
run nereusc check base.plan

say "3/5  The variant: responses have doubled"
run cat longer.plan

say "4/5  What the change would move, cost and need"
run nereusc diff base.plan longer.plan

say "5/5  The change executed: 8 GPUs on 4 local processes over gloo, the model scaled down, there and back again"
run nereusc run base.plan longer.plan base.plan --procs 4 --scale auto
