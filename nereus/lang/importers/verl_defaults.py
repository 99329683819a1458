"""What verl assumes where a launch does not say (its ppo_trainer and ppo_megatron_trainer files); layout keys only."""

from __future__ import annotations

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"

_COMMON = {
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": "false",
    "data.train_batch_size": "1024",
    "data.max_prompt_length": "512",
    "data.max_response_length": "512",
    "trainer.nnodes": "1",
    "trainer.n_gpus_per_node": "8",
    "trainer.device": "cuda",
    "actor_rollout_ref.model.path": "~/models/deepseek-llm-7b-chat",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "true",
    "actor_rollout_ref.model.lora_rank": "0",
    "actor_rollout_ref.model.lora_alpha": "16",
    "actor_rollout_ref.model.target_modules": "all-linear",
    f"{_ACTOR}.ppo_mini_batch_size": "256",
    f"{_ACTOR}.ppo_epochs": "1",
    f"{_ACTOR}.use_dynamic_bsz": "false",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "16384",
    f"{_ACTOR}.use_kl_loss": "false",
    f"{_ACTOR}.ulysses_sequence_parallel_size": "1",
    f"{_REF}.log_prob_use_dynamic_bsz": f"${{oc.select:{_ACTOR}.use_dynamic_bsz,false}}",
    f"{_REF}.log_prob_max_token_len_per_gpu": f"${{oc.select:{_ACTOR}.ppo_max_token_len_per_gpu,16384}}",
    f"{_REF}.ulysses_sequence_parallel_size": f"${{oc.select:{_ACTOR}.ulysses_sequence_parallel_size,1}}",
    f"{_ROLLOUT}.n": "1",
    f"{_ROLLOUT}.tensor_model_parallel_size": "2",
    f"{_ROLLOUT}.pipeline_model_parallel_size": "1",
    f"{_ROLLOUT}.data_parallel_size": "1",
    f"{_ROLLOUT}.expert_parallel_size": "1",
    f"{_ROLLOUT}.gpu_memory_utilization": "0.5",
    f"{_ROLLOUT}.free_cache_engine": "true",
    f"{_ROLLOUT}.log_prob_use_dynamic_bsz": f"${{oc.select:{_ACTOR}.use_dynamic_bsz,false}}",
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": f"${{oc.select:{_ACTOR}.ppo_max_token_len_per_gpu,16384}}",
    "critic.model.path": "~/models/deepseek-llm-7b-chat",
    "critic.model.enable_gradient_checkpointing": "true",
    "critic.model.lora_rank": "0",
    "critic.model.lora_alpha": "16",
    "critic.model.target_modules": "all-linear",
    "critic.ppo_mini_batch_size": f"${{oc.select:{_ACTOR}.ppo_mini_batch_size,256}}",
    "critic.ppo_micro_batch_size_per_gpu": "${oc.select:.ppo_micro_batch_size,null}",
    "critic.ppo_epochs": f"${{oc.select:{_ACTOR}.ppo_epochs,1}}",
    "critic.use_dynamic_bsz": f"${{oc.select:{_ACTOR}.use_dynamic_bsz,false}}",
    "critic.ppo_max_token_len_per_gpu": "32768",
    "critic.forward_micro_batch_size_per_gpu": "${oc.select:.ppo_micro_batch_size_per_gpu,null}",
    "critic.forward_max_token_len_per_gpu": "${.ppo_max_token_len_per_gpu}",
    "critic.ulysses_sequence_parallel_size": "1",
    "reward_model.enable": "false",
    "reward_model.enable_resource_pool": "false",
    "reward_model.nnodes": "0",
    "reward_model.n_gpus_per_node": "8",
    "reward_model.model.path": "~/models/FsfairX-LLaMA3-RM-v0.1",
    "reward_model.rollout.tensor_model_parallel_size": "2",
    "reward_model.rollout.gpu_memory_utilization": "0.5",
    "reward_model.rollout.free_cache_engine": "true",
    "reward_model.use_dynamic_bsz": "${critic.use_dynamic_bsz}",
    "reward_model.forward_max_token_len_per_gpu": "${critic.forward_max_token_len_per_gpu}",
    # Of the asynchronous trainers.
    "rollout.nnodes": "1",
    "rollout.n_gpus_per_node": "8",
    "async_training.staleness_threshold": "0.1",
    "async_training.trigger_parameter_sync_step": "4",
    "async_training.require_batches": "1",
    "async_training.partial_rollout": "true",
}


def _fsdp(role: str) -> dict[str, str]:
    return {
        f"{role}.param_offload": "false",
        f"{role}.optimizer_offload": "false",
        f"{role}.offload_policy": "false",
        f"{role}.fsdp_size": "-1",
        f"{role}.model_dtype": "fp32",
    }


def _megatron(role: str, like: str | None = None) -> dict[str, str]:
    """Degrees default to 1, or for the reference to the actor's."""
    keys = {
        "param_offload": "false",
        "tensor_model_parallel_size": "1",
        "pipeline_model_parallel_size": "1",
        "virtual_pipeline_model_parallel_size": "null",
        "context_parallel_size": "1",
        "expert_model_parallel_size": "1",
        "expert_tensor_parallel_size": "null",
    }
    transformer = (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "recompute_granularity",
    )
    keys |= {f"override_transformer_config.{name}": "null" for name in transformer}
    found = {f"{role}.{k}": v if like is None else f"${{oc.select:{like}.{k},{v}}}" for k, v in keys.items()}
    own = {"grad_offload": "false", "optimizer_offload": "false"}
    own |= {"sequence_parallel": "true", "use_distributed_optimizer": "true"}
    return found | {f"{role}.{k}": v for k, v in own.items()}


FSDP_DEFAULTS = {
    **_COMMON,
    f"{_ACTOR}.strategy": "fsdp",
    f"{_REF}.strategy": f"${{{_ACTOR}.strategy}}",
    "critic.strategy": "fsdp",
    "reward_model.strategy": "fsdp",
    **_fsdp(f"{_ACTOR}.fsdp_config"),
    **_fsdp(f"{_REF}.fsdp_config"),
    **_fsdp("critic.model.fsdp_config"),
    **_fsdp("reward_model.model.fsdp_config"),
}
MEGATRON_DEFAULTS = {
    **_COMMON,
    f"{_ACTOR}.strategy": "megatron",
    f"{_REF}.strategy": "megatron",
    "critic.strategy": "megatron",
    "reward_model.strategy": "megatron",
    **_megatron(f"{_ACTOR}.megatron"),
    **_megatron(f"{_REF}.megatron", like=f"{_ACTOR}.megatron"),
    **_megatron("critic.megatron"),
    **_megatron("reward_model.megatron"),
}
