# Settings collected in strings, cut into words where they are used; comments between.
set -euo pipefail
estimator="grpo"
common="algorithm.adv_estimator=$estimator data.train_batch_size=512"
common="$common data.max_prompt_length=4096 data.max_response_length=2048"
common+=" trainer.nnodes=1 trainer.n_gpus_per_node=8"
gen="actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5
     actor_rollout_ref.rollout.gpu_memory_utilization=0.7"

if [ "$estimator" = "gae" ]; then
    common="$common actor_rollout_ref.actor.ppo_mini_batch_size=1"
else
    common="$common actor_rollout_ref.actor.ppo_mini_batch_size=128"
fi

cat > notes.txt <<EOF
python3 -m verl.trainer.main_ppo trainer.nnodes=99 actor_rollout_ref.model.path=not/this
EOF

python3 -m verl.trainer.main_ppo $common $gen \
    actor_rollout_ref.model.path=mistralai/Mistral-Nemo-Instruct-2407 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=10 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    reward_model.enable=True reward_model.model.path=Skywork/Skywork-Reward-Llama-3.1-8B \
    reward_model.rollout.name=vllm reward_model.rollout.tensor_model_parallel_size=1 \
    reward_model.rollout.gpu_memory_utilization=0.8
