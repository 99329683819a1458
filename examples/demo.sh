#!/usr/bin/env bash
# The main job end to end: a public verl PPO launch becomes a plan, its variant is compared with it, and the change is
# executed on real tensors in local processes, every element checked. Then a small PPO job learns on local processes
# while its plan changes and one of them is killed. Needs nereusc and python on the PATH (make demo sees to it).
set -euo pipefail
cd "$(dirname "$0")/verl-qwen2-7b"

say() { printf '\n== %s\n' "$*"; }
run() { printf '$ %s\n' "$*"; "$@"; }

say "1/6  A verl launch script as a plan (facts of verl's run_qwen2-7b_rm_seq_balance.sh)"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
run nereusc import verl launch.sh --gpu h200-sxm-141gb -o "$out/imported.plan"
cmp -s base.plan "$out/imported.plan" && echo "equal to base.plan"

say "2/6  What every GPU needs in every stage"
run nereusc check base.plan

say "3/6  The variant: responses have doubled"
run cat longer.plan

say "4/6  What the change would move, cost and need"
run nereusc diff base.plan longer.plan

say "5/6  The change executed: 8 GPUs on 4 local processes over TCP, the model scaled down, there and back again"
run nereusc run base.plan longer.plan base.plan --procs 4 --scale auto

say "6/6  A living job: PPO on 4 processes; the plan changes, one process is killed, another takes its place"
cd ../..
run python -m examples.ppo.train examples/ppo/base.plan examples/ppo/longer.plan --steps 40 \
  --at 10 --kill 20 --fallback examples/ppo/pair.plan --curve "$out/curve.json"
echo "the same job without any change, in one process:"
python -m examples.ppo.fixed examples/ppo/base.plan --steps 40 --alone --against "$out/curve.json" | tail -n 1
