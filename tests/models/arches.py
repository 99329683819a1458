"""Random small architectures of every family."""

from __future__ import annotations

from hypothesis import strategies as st

from nereus.ir.arch import Arch, Lora, Mla, Moe


@st.composite
def archs(draw: st.DrawFn, *, families: tuple[str, ...] = ("llama", "qwen2", "qwen3", "moe", "mixtral", "mla")) -> Arch:
    """Heads, widths and layers vary; widths are sometimes whole blocks of 128 and sometimes not."""
    family = draw(st.sampled_from(families))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = kv_heads * draw(st.integers(1, 4))
    width = st.sampled_from([16, 48, 64, 128, 192, 256, 384, 768])
    layers = draw(st.integers(1, 3))
    moe = mla = None
    if family in ("moe", "mixtral", "mla"):
        shared = draw(st.integers(0, 2)) if family == "mla" else 0
        ffn = draw(width)
        experts = draw(st.sampled_from([2, 4, 8]))
        moe = Moe(
            num_experts=experts,
            experts_per_token=draw(st.integers(1, 2)),
            expert_ffn=ffn,
            num_shared_experts=shared,
            shared_expert_ffn=shared * ffn,
            first_dense_layers=draw(st.integers(0, layers)) if family == "mla" else 0,
            router_bias=family == "mla" and draw(st.booleans()),
        )
    if family == "mla":
        mla = Mla(
            q_lora_rank=draw(st.sampled_from([None, 96, 128])),
            kv_lora_rank=draw(st.sampled_from([64, 128])),
            qk_nope_head_dim=draw(st.sampled_from([32, 128])),
            qk_rope_head_dim=draw(st.sampled_from([16, 64])),
            v_head_dim=draw(st.sampled_from([32, 128])),
        )
    names = {"moe": "qwen3_moe", "mla": "deepseek_v3"}
    return Arch(
        family=names.get(family, family),
        num_layers=layers,
        hidden=draw(st.sampled_from([64, 96, 128, 256])),
        num_heads=heads,
        num_kv_heads=heads if mla else kv_heads,
        head_dim=draw(st.sampled_from([16, 32, 64, 128])),
        ffn=draw(width),
        vocab=draw(st.sampled_from([128, 320])),
        tied_embeddings=draw(st.booleans()),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "moe"),
        moe=moe,
        mla=mla,
    )


@st.composite
def loras(draw: st.DrawFn, kinds: tuple[str, ...]) -> Lora:
    """Over all or some of ``kinds``."""
    rank = draw(st.integers(1, 8))
    targets = draw(st.lists(st.sampled_from(kinds), unique=True))
    return Lora(rank=rank, alpha=draw(st.sampled_from([1.0, 16.0, 32.0])), targets=tuple(targets))
