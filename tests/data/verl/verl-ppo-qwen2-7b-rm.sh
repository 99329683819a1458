#!/bin/bash
# PPO with a reward model on one node. Plain continuation lines, a model below $HOME, a download before, "$@" behind.
set -x
DATA=$HOME/data/mixed

huggingface-cli download Qwen/Qwen2-7B-Instruct --local-dir $HOME/models/Qwen2-7B-Instruct &
wait

python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae \
  data.train_files="['$DATA/train.parquet', '$DATA/more.parquet']" \
  data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=512 \
  actor_rollout_ref.model.path="$HOME/models/Qwen2-7B-Instruct" \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
  critic.model.path="$HOME/models/Qwen2-7B-Instruct" \
  critic.model.enable_gradient_checkpointing=True \
  critic.ppo_micro_batch_size_per_gpu=32 \
  reward_model.enable=True reward_model.model.path="$HOME/models/FsfairX-LLaMA3-RM-v0.1" \
  reward_model.rollout.name=vllm reward_model.rollout.tensor_model_parallel_size=1 \
  reward_model.rollout.gpu_memory_utilization=0.8 \
  algorithm.use_kl_in_reward=False trainer.logger='["console","wandb"]' \
  trainer.nnodes=1 trainer.n_gpus_per_node=8 trainer.total_epochs=15 "$@"
