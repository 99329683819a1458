# Split placement: actor and rollout on one half of the node, the critic on the other.
model=deepseek-ai/deepseek-llm-7b-chat
nohup python3 main_ppo_split.py algorithm.adv_estimator=gae \
  data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=512 \
  actor_rollout_ref.model.path=$model actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
  critic.model.path=$model critic.model.enable_gradient_checkpointing=False critic.ppo_micro_batch_size_per_gpu=8 \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 > split.log &
