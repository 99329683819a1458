# Fully asynchronous: 4 nodes train, 12 generate.
rollout_mode="async"
if [ "$rollout_mode" = "async" ]; then
    return_raw_chat="True"
fi
MODEL_PATH=${MODEL_PATH:-"${RAY_DATA_HOME:-$HOME/verl}/models/Qwen3-30B-A3B-Base"}
COMMON_TP=${COMMON_TP:-2}
ACTOR_TP=${ACTOR_TP:-$COMMON_TP}
VPP=${VPP:-null}
prompts_len=$((1024 * 2)) ; answers_len=$((1024 * 8))
tokens=$(((prompts_len + answers_len)))
OFF=True

python -m verl.experimental.fully_async_policy.fully_async_main \
    --config-path=config --config-name='fully_async_ppo_megatron_trainer.yaml'\
    data.train_batch_size=0 data.max_prompt_length=${prompts_len} data.max_response_length=${answers_len} \
    actor_rollout_ref.rollout.n=16 algorithm.adv_estimator=grpo actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${tokens} \
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True \
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1. \
    actor_rollout_ref.actor.megatron.param_offload=$OFF actor_rollout_ref.actor.megatron.optimizer_offload=$OFF \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${ACTOR_TP} \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1 \
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=$VPP \
    actor_rollout_ref.actor.megatron.context_parallel_size=2 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=${rollout_mode} \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.hybrid_engine=False actor_rollout_ref.ref.megatron.param_offload=${OFF} \
    trainer.nnodes="${NNODES_TRAIN:-4}" trainer.n_gpus_per_node="${NGPUS:-8}" \
    rollout.nnodes="${NNODES_ROLLOUT:-12}" rollout.n_gpus_per_node="${NGPUS:-8}" \
    async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=1 async_training.partial_rollout=True \
