# 32 nodes. The command stands in a function; a reader must follow the call.
NODES=32
LLM="/share/ckpt/DeepSeek-V3-0324"
PP=16 TP=1 EP=16 ETP=1
INFER_TP=32
first=4
last=1

launch() {
    local strategy=ppo_megatron_trainer
    python3 -m verl.trainer.main_ppo --config-path=./config --config-name="$strategy" \
        algorithm.adv_estimator=grpo \
        data.train_batch_size=512 data.max_prompt_length=2048 data.max_response_length=4096 \
        actor_rollout_ref.model.path=$LLM \
        actor_rollout_ref.actor.ppo_mini_batch_size=128 \
        actor_rollout_ref.actor.use_dynamic_bsz=True \
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144 \
        actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=$((6144 * 3)) \
        actor_rollout_ref.actor.use_kl_loss=True \
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \
        actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
        actor_rollout_ref.rollout.tensor_model_parallel_size=$INFER_TP \
        +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage=$first \
        +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=$last \
        +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP \
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP \
        actor_rollout_ref.actor.megatron.expert_model_parallel_size=$EP \
        actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=$ETP \
        actor_rollout_ref.actor.megatron.param_offload=True \
        actor_rollout_ref.actor.megatron.optimizer_offload=True \
        actor_rollout_ref.ref.megatron.param_offload=True \
        trainer.n_gpus_per_node=8 trainer.nnodes=$NODES "$@"
}
launch "$@"
