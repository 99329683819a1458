# Arrays of settings, joined at the end; one is filled in two steps.
ACTOR=(
    actor_rollout_ref.model.path=Qwen/Qwen2-72B-Instruct
    actor_rollout_ref.actor.ppo_mini_batch_size=256     # prompts
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000
    actor_rollout_ref.actor.use_kl_loss=True
)
ACTOR+=(actor_rollout_ref.actor.fsdp_config.param_offload=True
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=True)
ROLLOUT=( "actor_rollout_ref.rollout.name=vllm" actor_rollout_ref.rollout.n=5
    actor_rollout_ref.rollout.tensor_model_parallel_size=16 actor_rollout_ref.rollout.gpu_memory_utilization=0.6 )
TRAINER=(trainer.n_gpus_per_node=8 trainer.nnodes=4)

python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=512 \
    "${ACTOR[@]}" "${ROLLOUT[@]}" \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    ${TRAINER[@]} "$@"
