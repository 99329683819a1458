# MoE with a critic on Megatron. One switch feeds many through chains of defaults.
OFFLOAD_ALL=${OFFLOAD_ALL:-False}
OFFLOAD_PARAMS=${OFFLOAD_PARAMS:-$OFFLOAD_ALL}
ACTOR_OFFLOAD=${ACTOR_OFFLOAD:-${OFFLOAD_PARAMS}}
export PP=2 TP=8
EP=8; ETP=1
GEN_TP=${GEN_TP:-4}
CKPT=/data/models/moonshotai/Moonlight-16B-A3B-Instruct

python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer'\
    algorithm.adv_estimator=gae data.train_batch_size=1024 \
    data.max_prompt_length=1024 data.max_response_length=512 \
    actor_rollout_ref.model.path=$CKPT critic.model.path=$CKPT \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2 critic.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=$GEN_TP \
    +actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=13 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP critic.megatron.pipeline_model_parallel_size=$PP \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP critic.megatron.tensor_model_parallel_size=$TP \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=$EP critic.megatron.expert_model_parallel_size=$EP \
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=$ETP critic.megatron.expert_tensor_parallel_size=$ETP \
    actor_rollout_ref.actor.megatron.param_offload=${ACTOR_OFFLOAD} \
    actor_rollout_ref.actor.use_kl_loss=False algorithm.use_kl_in_reward=False \
    trainer.n_gpus_per_node=8 trainer.nnodes=4 $@
