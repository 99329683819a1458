# Four nodes, FSDP. A key is given twice (the later one wins) and some variables are for nobody.
MODEL=Qwen/Qwen2.5-32B-Instruct
unused_tp=16   # never used below

HYDRA_FULL_ERROR=1 python3 -m verl.trainer.main_ppo \
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024 \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.name='vllm' actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    critic.model.path=${MODEL} critic.model.enable_gradient_checkpointing=False \
    critic.ppo_micro_batch_size_per_gpu=8 \
    trainer.n_gpus_per_node=8 trainer.nnodes=4 2>&1 | tee run.log
