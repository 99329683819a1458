#!/usr/bin/env bash
# Arithmetic (with the 1204 that stands for 1024 upstream), flags that count embedding and loss as layers.
set -xeuo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
[ -f "${HERE}/env.sh" ] && source "${HERE}/env.sh"

prompt_len=$((1024 * 2))
response_len=$((1204 * 8))
budget=$(((prompt_len + response_len) * 10 / 10))
ROOT=${ROOT:-"${HOME}/verl"}
MODEL=$ROOT/models/Qwen3-235B-A22B
NNODES=${NNODES:-4}
offload=True
last_layer=${LAST_LAYER:-10}   # defined, used nowhere
A=actor_rollout_ref.actor
M=$A.megatron

python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=grpo data.train_batch_size=${BATCH:-32} \
    data.max_prompt_length=${prompt_len} data.max_response_length=${response_len} \
    actor_rollout_ref.model.path="${MODEL}" \
    $A.ppo_mini_batch_size=16 $A.use_dynamic_bsz=True $A.ppo_max_token_len_per_gpu=${budget} $A.use_kl_loss=True \
    $A.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 actor_rollout_ref.rollout.gpu_memory_utilization=0.85 \
    $M.tensor_model_parallel_size=${TP:-4} $M.pipeline_model_parallel_size=${PP:-8} \
    $M.expert_model_parallel_size=${EP:-4} $M.expert_tensor_parallel_size=1 $M.context_parallel_size=1 \
    $M.param_offload=${offload} $M.optimizer_offload=${offload} $M.grad_offload=${offload} \
    +$A.optim.override_optimizer_config.optimizer_cpu_offload=True \
    +$A.optim.override_optimizer_config.optimizer_offload_fraction=${FRACTION:-1.} \
    +$M.override_transformer_config.account_for_embedding_in_pipeline_split=True \
    +$M.override_transformer_config.account_for_loss_in_pipeline_split=True \
    trainer.nnodes=${NNODES} trainer.n_gpus_per_node=8
