"""Weights of a live Megatron model to another layout, beside megatron-core's own resharding, in one run.

    FRAMEWORKS_VENV/bin/python benchmarks/transfer_megatron.py [--hidden 768] [--layers 6] [--turns 5]

Four processes hold the same model in two layouts (TP2 x PP2 -> TP4, TP2 -> TP4, PP2 -> PP1). In turns megatron-core's
``swap_model_weights`` over its gloo service (planned at its first call, like ours compiled), our move over gloo, and
our move with reads between processes of one host bring the weights from one to the other; every result is compared with
Megatron's, bit for bit. Megatron verifies nothing, ours every message. megatron-core needs CUDA in places; the tests'
shim answers for it (``tests/frameworks/cpu_shim.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the shim; processes that are spawned get it too

from transfer import free_port

PROCS = 4
#: ((tp, pp) before, after)
PAIRS = (((2, 2), (4, 1)), ((2, 1), (4, 1)), ((1, 2), (1, 1)))


def model_of(tp: int, pp: int, hidden: int, layers: int) -> Any:
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.nn.functional import silu

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(1234)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=16,
        num_query_groups=8,
        ffn_hidden_size=4 * hidden,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    made = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=4096,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    made.pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return made


def process(rank: int, folder: str, hidden: int, layers: int, turns: int) -> None:
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(PROCS), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=PROCS,
        timeout=timedelta(seconds=120),
    )
    store: Any = dist.TCPStore(
        "127.0.0.1", int(os.environ["NEREUS_BENCH_PORT"]), PROCS, rank == 0, timedelta(seconds=120)
    )
    from frameworks import cpu_shim

    cpu_shim.install()
    from megatron.core.resharding.copy_services.gloo_copy_service import GlooCopyService
    from megatron.core.resharding.refit import swap_model_weights

    from nereus.ir.arch import Arch
    from nereus.models.naming.megatron import MegatronNaming
    from nereus.models.tensors import logical_tensors
    from nereus.runtime.adapters.megatron import MegatronAdapter
    from nereus.runtime.live import ALL, Connections, prepare_among

    arch = Arch(
        family="llama",
        num_layers=layers,
        hidden=hidden,
        num_heads=16,
        num_kv_heads=8,
        head_dim=hidden // 16,
        ffn=4 * hidden,
        vocab=4096,
        tied_embeddings=False,
    )

    def bound(made: Any) -> Any:
        return MegatronAdapter([made], MegatronNaming(arch=arch)).bind()

    def timed(work: Callable[[], object]) -> tuple[float, float]:
        dist.barrier()
        begin, used = time.perf_counter(), time.process_time()
        work()
        mine = torch.tensor([time.process_time() - used])
        dist.barrier()
        wall = time.perf_counter() - begin
        dist.all_reduce(mine)
        return wall, float(mine)

    found = {}
    for number, (before, after) in enumerate(PAIRS):
        source = model_of(*before, hidden, layers)
        held = bound(source)  # while Megatron's groups are those of its layout
        theirs, ours = (model_of(*after, hidden, layers) for _ in range(2))
        wanted = bound(ours)
        with torch.no_grad():
            for made in (theirs, ours):
                for parameter in made.parameters():
                    parameter.zero_()
        service = GlooCopyService()
        works: dict[str, Callable[[], object]] = {
            "megatron-core": lambda a=source, b=theirs, s=service: swap_model_weights([a], [b], s)  # type: ignore[misc]
        }
        begin = time.perf_counter()
        for name, switch in (("gloo", "0"), ("same host", "1")):
            move = prepare_among(
                held,
                wanted,
                logical_tensors(arch),
                store=store,
                name=f"prepare/{number}/{name}",
                rank=rank,
                size=PROCS,
                drop=(ALL,),
            )
            calls, connections = iter(range(1 << 30)), Connections()

            def run(move: Any = move, switch: str = switch, calls: Any = calls, at: Any = connections) -> None:
                os.environ["NEREUS_SAME_HOST"] = switch
                report = move.run(store, f"run/{number}/{switch}/{next(calls)}", 120.0, at)  # noqa: B023
                assert report.within_promise, report

            works[name] = run
        compiled_s = time.perf_counter() - begin
        seconds = [{name: timed(work) for name, work in works.items()} for _ in range(turns + 1)]
        for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
            assert torch.equal(a, b)
            assert bool(a.any())
        num_bytes = torch.tensor([sum(p.numel() * 4 for p in ours.parameters())])
        dist.all_reduce(num_bytes)
        label = f"TP{before[0]} PP{before[1]} -> TP{after[0]} PP{after[1]}"
        found[label] = {
            "bytes": int(num_bytes),
            "first": seconds[0],
            "turns": seconds[1:],
            "compiled_s": compiled_s / 2,
        }
    if rank == 0:
        Path(folder, "results").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    import torch.multiprocessing as mp

    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    os.environ["NEREUS_BENCH_PORT"] = str(free_port())
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, args=(folder, args.hidden, args.layers, args.turns), nprocs=PROCS)
        found = json.loads(Path(folder, "results").read_text())
    print("| weights, 4 processes | MB | megatron-core | TCP | same host | TCP, times as fast | same host |")
    print("|---|---|---|---|---|---|---|")
    for label, said in found.items():
        medians = {n: [statistics.median(t[n][i] for t in said["turns"]) for i in (0, 1)] for n in said["turns"][0]}
        ratios = {
            n: [statistics.median(t["megatron-core"][i] / t[n][i] for t in said["turns"]) for i in (0, 1)]
            for n in ("gloo", "same host")
        }
        cells = [f"{medians[n][1]:.3f} / {medians[n][0]:.3f}" for n in ("megatron-core", "gloo", "same host")]
        cells += [f"{ratios[n][1]:.2f} / {ratios[n][0]:.2f}" for n in ("gloo", "same host")]
        print(f"| {label} | {said['bytes'] / 1e6:,.0f} | {' | '.join(cells)} |")
    print("\nSeconds and ratios: of the processors, all processes together / between barriers.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
