#!/usr/bin/env bash
# PPO on Qwen2-7B-Instruct with a reward model, sequences up to 8k, one node of 8 GPUs. The values are those of verl's
# public example run_qwen2-7b_rm_seq_balance.sh (volcengine/verl, examples/ppo_trainer); data and logging left out.
set -x

policy=Qwen/Qwen2-7B-Instruct
prompt_length=4096
response_length=4096
gen_tp=${GEN_TP:-2}
tokens_per_gpu=24000   # one GPU's budget while sequences are packed

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    algorithm.use_kl_in_reward=False \
    data.train_batch_size=4096 \
    data.max_prompt_length=$prompt_length \
    data.max_response_length=$response_length \
    actor_rollout_ref.model.path=$policy \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=512 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$tokens_per_gpu \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$gen_tp \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$tokens_per_gpu \
    critic.model.path=$policy \
    critic.model.enable_gradient_checkpointing=True \
    critic.use_dynamic_bsz=True \
    critic.ppo_max_token_len_per_gpu=98304 \
    critic.model.fsdp_config.param_offload=False \
    critic.model.fsdp_config.optimizer_offload=False \
    reward_model.enable=True \
    reward_model.model.path=sfairXC/FsfairX-LLaMA3-RM-v0.1\
    reward_model.rollout.name=vllm \
    reward_model.rollout.tensor_model_parallel_size=1 \
    reward_model.rollout.gpu_memory_utilization=0.8 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 "$@"
