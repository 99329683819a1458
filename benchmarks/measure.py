"""One transition measured: compiled, held against its bounds, and against every baseline in the simulator."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from transitions import Case

from nereus.ir.diagnostic import DiagnosticError
from nereus.ir.transition import INTER
from nereus.models.priors import MESSAGE_S
from nereus.passes.compiled import Transition
from nereus.passes.flow_bound import diff_flow_bound
from nereus.passes.links import Links
from nereus.passes.memory import PHASES
from nereus.passes.pipeline import compile_transition
from nereus.sim.baselines import BASELINES, Answer, build_problem, job_of
from nereus.sim.engine import coarse_quantum_s, simulate
from nereus.sim.from_transition import job_of as job_of_transition
from nereus.sim.job import Job

#: Jobs of more operations are not simulated: the load of the busiest port is taken instead, which is less.
MOST_OPS = 60_000


@dataclass(frozen=True, kw_only=True)
class BaselineRow:
    """``transfer_s``: None where the system restarts or never ends; ``overflows``: some memory may not hold what it
    asks for; ``simulated``: False where only ports were added up."""

    stop_s: float | None = None
    transfer_s: float | None = None
    moved_bytes: int | None = None
    peak_bytes: int | None = None
    overflows: bool = False
    simulated: bool = True
    cannot: str | None = None
    altered: str | None = None
    fails: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    group: str
    num_gpus: int
    mode: str
    safe: bool
    compile_cpu_s: float
    measure_cpu_s: float
    transfer_s: float
    bound_s: float  # the larger of the certificate's bound and the flow programme's
    moved_bytes: int
    bound_bytes: int
    busiest_nic_s: float
    peak_bytes: int  # of the fullest space, as in the certificate
    bound_peak_bytes: int
    transfer_peak_bytes: int  # fullest GPU while state moves, for comparison with baselines
    predicted_stop_s: float
    stop_s: float  # simulated
    simulated_transfer_s: float | None
    baselines: dict[str, BaselineRow] = field(default_factory=dict)

    @property
    def transfer_ratio(self) -> float:
        return self.transfer_s / self.bound_s if self.bound_s else 1.0

    @property
    def bytes_ratio(self) -> float:
        return self.moved_bytes / self.bound_bytes if self.bound_bytes else 1.0

    @property
    def nic_ratio(self) -> float:
        """Of ports alone: the bound has one message beside them."""
        return self.busiest_nic_s / (self.bound_s - MESSAGE_S) if self.bound_s else 1.0

    @property
    def peak_ratio(self) -> float:
        return self.peak_bytes / self.bound_peak_bytes if self.bound_peak_bytes else 1.0


@dataclass(frozen=True, kw_only=True)
class Refused:
    name: str
    group: str
    num_gpus: int
    reason: str


def measure(case: Case) -> Row | Refused:
    started = time.process_time()
    old, new = case.make()
    before = time.process_time()
    try:
        transition = compile_transition(old, new, allow_destroy=True, verify=False)
    except DiagnosticError as error:
        reason = f"{error.diagnostics[0].code}: {error.diagnostics[0].headline}"
        return Refused(name=case.name, group=case.group, num_gpus=case.num_gpus, reason=reason)
    compile_s = time.process_time() - before
    certificate = transition.certificate
    links = Links(transition.topology)
    flow_s = diff_flow_bound(transition.diff, links).transfer_s
    stop_s, transfer_s = _simulate_own(transition)
    problem = build_problem(old, new)
    rows = {baseline.name: _baseline_row(baseline.solve(problem)) for baseline in BASELINES}
    return Row(
        name=case.name,
        group=case.group,
        num_gpus=case.num_gpus,
        mode=certificate.mode,
        safe=certificate.safe,
        compile_cpu_s=compile_s,
        measure_cpu_s=time.process_time() - started,
        transfer_s=certificate.transfer_s,
        bound_s=max(flow_s + MESSAGE_S if flow_s else 0.0, certificate.bound_transfer_s),
        moved_bytes=certificate.moved_bytes,
        bound_bytes=certificate.bound_moved_bytes,
        busiest_nic_s=_busiest_nic_s(transition, links),
        peak_bytes=certificate.peak_bytes_max,
        bound_peak_bytes=certificate.bound_peak_bytes_max,
        transfer_peak_bytes=_transfer_peak(transition),
        predicted_stop_s=certificate.downtime_s,
        stop_s=stop_s,
        simulated_transfer_s=transfer_s,
        baselines=rows,
    )


def _transfer_peak(transition: Transition) -> int:
    memory, num_devices = transition.memory, transition.topology.num_devices
    if transition.certificate.mode == "tight":
        return transition.certificate.peak_bytes_max
    return int(memory.reversible[PHASES[2]][:num_devices].max())


def _simulate_own(transition: Transition) -> tuple[float, float | None]:
    """(seconds stopped, seconds of the transfer); the certificate's prediction where the job is too large."""
    certificate = transition.certificate
    own = job_of_transition(transition)
    if own.job.num_ops > MOST_OPS:
        return certificate.downtime_s, None
    outcome = simulate(own.job, quantum_s=coarse_quantum_s(own.job))
    return own.stopped_s(outcome), own.transfer_s(outcome)


def _busiest_nic_s(transition: Transition, links: Links) -> float:
    load = np.zeros((2, len(links.rail)))
    for move in transition.schedule.moves:
        if move.link == INTER:
            src, dst = links.rail_number(move.src), links.rail_number(move.dst)
            load[0, src] += move.num_bytes * links.rail[src]
            load[1, dst] += move.num_bytes * links.rail[dst]
    return float(load.max())


def _baseline_row(answer: Answer) -> BaselineRow:
    if answer.cannot is not None:
        return BaselineRow(cannot=answer.cannot)
    job = job_of(answer)
    simulated = job.num_ops <= MOST_OPS
    fails = answer.fails
    transfer_s: float | None
    if simulated:
        outcome = simulate(job, quantum_s=coarse_quantum_s(job))
        transfer_s = outcome.makespan_s
        if outcome.deadlock is not None:
            fails = fails or "deadlock"
            transfer_s = None
    else:
        transfer_s = _port_load_s(job) + sum(step.fixed_s for step in answer.steps if step.chain == 0)
    return BaselineRow(
        stop_s=None if transfer_s is None else answer.outside_s + transfer_s,
        transfer_s=None if any(step.fixed_s for step in answer.steps) else transfer_s,
        moved_bytes=answer.moved_bytes,
        peak_bytes=answer.gpu_peak_bytes,
        overflows=answer.overflows,
        simulated=simulated,
        altered=answer.altered,
        fails=fails,
    )


def _port_load_s(job: Job) -> float:
    used = job.ports >= 0
    weights = np.ones(job.ports.shape) if job.weights is None else job.weights
    load = np.zeros(len(job.resources.port_bytes_per_s))
    np.add.at(load, job.ports[used], (weights * job.num_bytes[:, None])[used])
    return float((load / job.resources.port_bytes_per_s).max(initial=0.0))
