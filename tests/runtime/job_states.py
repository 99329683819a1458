"""A job state with something in every field."""

from __future__ import annotations

from nereus.runtime.data_position import DataPosition
from nereus.runtime.job_state import JobState, MinibatchPosition, ModelProgress, RngRule, Schedule


def example() -> JobState:
    schedule = Schedule(kind="LambdaLR", state={"last_epoch": 31, "base_lrs": [1e-6, 1e-5]}, lrs=(1e-6 / 3, 1e-5 / 3))
    return JobState(
        step=7,
        models=(
            ModelProgress(
                model="actor",
                num_updates=31,
                weight_version=31,
                schedule=schedule,
                trainer={"param_groups": [{"step": 31, "betas": (0.9, 0.95)}], "loss_scale": 65536.0},
            ),
            ModelProgress(model="critic", num_updates=21, weight_version=0),
        ),
        data=DataPosition(seed=17, size=1000, epoch=2, index=40, consumed=2032, dropped=8),
        minibatch=MinibatchPosition(epoch=0, num_epochs=2, index=3, num_minibatches=4),
        rng=RngRule(seed=17, derived_step=4, declared=(("my-dropout", "alike"),)),
    )
