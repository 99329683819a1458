"""DeepSpeed's own Adams (its classes; their kernels too with NEREUS_BUILD_OPS=1), and parameters in host memory."""

from __future__ import annotations

from typing import Any

import pytest
from frameworks.harness import run
from frameworks.test_deepspeed_move import At, _chain

pytest.importorskip("deepspeed")

#: DeepSpeed's own choice: FusedAdam, or DeepSpeedCPUAdam where the optimizer is offloaded.
OWN: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}
HOST = {"device": "cpu", "pin_memory": False}
OPTIMIZER = {**OWN, "zero_optimization": {"offload_optimizer": HOST}}
PARAMETERS = {**OWN, "zero_optimization": {"offload_param": HOST}}
BOTH = {**OWN, "zero_optimization": {"offload_optimizer": HOST, "offload_param": HOST, "sub_group_size": 300}}
LOW = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


def test_offloading_comes_and_goes() -> None:
    """DeepSpeedCPUAdam, FusedAdam with the parameters on the host, all of it there, FusedAdam."""
    chain = At(2, 3, OPTIMIZER), At(3, 2, PARAMETERS), At(3, 3, BOTH), At(1, 2, OWN)
    results = run(3, _chain, *chain, timeout=500)
    parameters, everything, nothing = (state for state, _ in results[0])
    assert {s.host for s in parameters.storages if s.dtype == "bf16"} == {True}
    assert {s.host for s in parameters.storages if s.dtype == "fp32"} == {False}
    assert all(s.host for s in everything.storages)
    assert not any(s.host for s in nothing.storages)
    for state in (parameters, everything, nothing):
        assert set(state.slots()) == {"weight", "master", "exp_avg", "exp_avg_sq"}
        assert {s.dtype for s in state.storages if "exp_avg" in s.name} == {"fp32"}


def test_fused_adam_of_many_tensors() -> None:
    """Without ZeRO it updates all tensors in one call, and counts the updates in the state of the last."""
    run(2, _chain, At(0, 2, OWN, accessors=False), At(1, 2, OWN), At(0, 1, OWN, accessors=False), timeout=500)


def test_masters_and_moments_in_16_bits() -> None:
    chain = At(2, 3, {**OPTIMIZER, **LOW}), At(3, 2, {**OPTIMIZER, **LOW}), At(1, 3, {**OWN, **LOW})
    results = run(3, _chain, *chain, timeout=500)
    for state, _ in results[0]:
        assert set(state.slots()) == {"weight", "master", "exp_avg", "exp_avg_sq"}
        assert {s.dtype for s in state.storages} == {"bf16"}
