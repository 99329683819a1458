"""Every GPU kernel compiles for every architecture that is meant, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nereus.kernels import source  # noqa: E402

NVIDIA, AMD = ("sm_80", "sm_90"), ("gfx90a", "gfx942")

# A process of its own: in this one Triton's library was imported to be interpreted.
COMPILE = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from nereus.kernels import triton_regions as module

signature = dict.fromkeys(("table", "region_of", "number_of", "bases", "sums"), "*i64") | {"BLOCK": "constexpr"}
what = ASTSource(fn=module.run_tile, signature=signature, constexprs={"BLOCK": module.BLOCK})
found = {}
for arch in sys.argv[1:]:
    target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)
    asm = compile(what, target=target, options={"num_warps": module.NUM_WARPS}).asm
    text, image = (asm["ptx"], asm["cubin"]) if "ptx" in asm else (asm["amdgcn"], asm["hsaco"])
    found[arch] = [arch in text, image[:4].hex(), b"run_tile" in image]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("triton")
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-W", "ignore", "-c", COMPILE, *NVIDIA, *AMD]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", [*NVIDIA, *AMD])
def test_triton(arch: str, compiled: Any) -> None:
    assert compiled[arch] == [True, b"\x7fELF".hex(), True]


@pytest.mark.parametrize(
    ("arch", "compiler"), [(arch, name) for arch in (*NVIDIA, *AMD) for name in source.compilers(arch)]
)
def test_cuda_and_hip(arch: str, compiler: str) -> None:
    try:
        image = source.build(arch, only=compiler)
    except source.BuildError as error:
        if str(error).endswith("not found"):
            pytest.skip(f"{compiler} is not on this machine")
        raise
    packed = image[:4] == b"CCOB"  # a compressed bundle, which newer hipcc make
    assert packed or image[:4] in (b"\x7fELF", b"__CL")
    assert packed or b"nereus_regions" in image


def test_without_compilers_the_error_says_which_were_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(source, "_NVRTC", ("libnvrtc-of-nobody.so",))
    with pytest.raises(source.BuildError, match="for sm_90: nvcc: not found; nvrtc: not found"):
        source.build("sm_90")
    with pytest.raises(source.BuildError, match="for gfx942: hipcc: not found; hiprtc: not found; clang: not found"):
        source.build("gfx942")


def test_what_a_compiler_says_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho 'no such arch' >&2; exit 1\n")
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(source.BuildError, match="nvcc: no such arch"):
        source.build("sm_12345", only="nvcc")
