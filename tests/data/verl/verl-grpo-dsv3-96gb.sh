# 12 nodes. Chooses a backend, submits through Ray, and lowers a name with ${X,,}.
BACKEND=MEGATRON
NNODES=${NNODES:-12}
if [[ "${BACKEND,,}" == "megatron" && -n "$NNODES" ]]; then
    CONFIG=ppo_megatron_trainer
    LAYOUT="actor_rollout_ref.actor.megatron"
else
    CONFIG=ppo_trainer
    LAYOUT="actor_rollout_ref.actor.fsdp_config"
fi
case "$CONFIG" in
    *megatron*) train_tp=${TP:-8}; train_pp=${PP:-12} ;;
    *) train_tp=1; train_pp=1 ;;
esac
length=$((1024 * 2 + 1204 * 8))

ray job submit --no-wait --runtime-env=env.yaml -- python3 -m verl.trainer.main_ppo --config-name $CONFIG \
    algorithm.adv_estimator=grpo data.train_batch_size=96 \
    data.max_prompt_length=2048 data.max_response_length=$((length - 2048)) \
    actor_rollout_ref.model.path="${DATA_ROOT:-/mnt}/models/DeepSeek-V3-config-verl" \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$length \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=32 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    $LAYOUT.tensor_model_parallel_size=$train_tp $LAYOUT.pipeline_model_parallel_size=$train_pp \
    $LAYOUT.expert_model_parallel_size=${EP:=8} $LAYOUT.expert_tensor_parallel_size=1 \
    ++$LAYOUT.param_offload=True ++$LAYOUT.optimizer_offload=True \
    +$LAYOUT.override_transformer_config.num_layers_in_last_pipeline_stage=${LAST_LAYER:-6} \
    +$LAYOUT.override_transformer_config.recompute_granularity=full \
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True \
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=1 \
    trainer.nnodes=$NNODES trainer.n_gpus_per_node=8
