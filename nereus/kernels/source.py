"""Compiles ``regions.cu`` for one GPU architecture: nvcc or NVRTC for NVIDIA's, hipcc, hipRTC or clang for AMD's.

None of them needs a GPU, and the result (a cubin or a code object) is loaded by the driver alone.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from nereus.kernels.cache import cached, source

_BUILD_S = 120.0
#: Names under which runtime compilers are found, newest first; {} is what the loader's search leaves open.
_NVRTC = ("libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2")
_HIPRTC = ("libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5")


class BuildError(RuntimeError):
    """No compiler made the kernel; the text says what each of them said, or that it is not there."""


class _Absent(Exception):
    pass


def build(arch: str, *, only: str | None = None) -> bytes:
    """Binary of ``nereus_regions`` for ``arch``: sm_80, gfx942, ... ``only``: one compiler by name. Raises
    BuildError."""
    said = []
    for name, compile_ in compilers(arch).items():
        if only not in (None, name):
            continue
        try:
            image = compile_(arch)
            if image:
                return image
            said.append(f"{name}: nothing came of it")
        except _Absent as error:
            said.append(f"{name}: {error}")
        except (OSError, subprocess.SubprocessError, BuildError) as error:
            output = getattr(error, "stderr", None) or str(error)
            text = output.decode(errors="replace") if isinstance(output, bytes) else output
            said.append(f"{name}: {text.strip()[:500]}")
    raise BuildError(f"regions.cu was not compiled for {arch}: " + ("; ".join(said) or f"no compiler {only!r}"))


def compilers(arch: str) -> dict[str, Callable[[str], bytes]]:
    """By name, in the order in which they are tried."""
    if arch.startswith("sm_"):
        return {"nvcc": _nvcc, "nvrtc": lambda arch: _runtime_compiled("nvrtc", arch)}
    return {"hipcc": _hipcc, "hiprtc": lambda arch: _runtime_compiled("hiprtc", arch), "clang": _clang}


@functools.cache
def image(arch: str) -> bytes:
    """``build``, kept in the user's cache folder."""

    def make(work: Path) -> Path:
        (work / "image").write_bytes(build(arch))
        return work / "image"

    try:
        path = cached(f"regions-{arch}", ".bin", source("regions.cu") + arch.encode(), make)
        if path is not None:
            return path.read_bytes()
    except OSError:
        pass
    return build(arch)


def _nvcc(arch: str) -> bytes:
    return _command(["nvcc", f"-arch={arch}", "--cubin", "-O3", "-std=c++17"], "nvcc")


def _hipcc(arch: str) -> bytes:
    return _command(["hipcc", f"--offload-arch={arch}", "--genco", "-O3", "-std=c++17"], "hipcc")


def _clang(arch: str) -> bytes:
    """Plain clang with its AMDGPU target and lld: the source needs none of ROCm's headers and libraries."""
    for name in ("clang++", *(f"clang++-{version}" for version in range(24, 16, -1))):
        if shutil.which(name):
            options = ["-x", "hip", f"--offload-arch={arch}", "--cuda-device-only", "--no-gpu-bundle-output"]
            return _command([name, *options, "-nogpulib", "-nogpuinc", "-O3", "-std=c++17"], name)
    raise _Absent("not found")


def _command(command: list[str], name: str) -> bytes:
    if shutil.which(name) is None:
        raise _Absent("not found")
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "regions.cu").write_bytes(source("regions.cu"))
        command = [*command, "-o", "image", "regions.cu"]
        subprocess.run(command, cwd=work, check=True, capture_output=True, timeout=_BUILD_S)
        return (Path(work) / "image").read_bytes()


def _runtime_compiled(kind: str, arch: str) -> bytes:
    """By NVRTC or hipRTC, whose functions differ in their prefix and in what the result is called."""
    library = _library(_NVRTC if kind == "nvrtc" else _HIPRTC)
    code = "CUBIN" if kind == "nvrtc" else "Code"
    options = [
        f"--{'gpu' if kind == 'nvrtc' else 'offload'}-arch{'itecture' if kind == 'nvrtc' else ''}={arch}",
        "-std=c++17",
    ]
    program = ctypes.c_void_p()

    def call(name: str, *arguments: object) -> None:
        code = getattr(library, kind + name)(*arguments)
        if code:
            raise BuildError(f"{kind}{name} returned {code}{_log(library, kind, program)}")

    call("CreateProgram", ctypes.byref(program), source("regions.cu"), b"regions.cu", 0, None, None)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        call("CompileProgram", program, len(options), given)
        size = ctypes.c_size_t()
        call(f"Get{code}Size", program, ctypes.byref(size))
        out = ctypes.create_string_buffer(size.value)
        call(f"Get{code}", program, out)
        return out.raw
    finally:
        getattr(library, kind + "DestroyProgram")(ctypes.byref(program))


def _log(library: ctypes.CDLL, kind: str, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    if not program or getattr(library, kind + "GetProgramLogSize")(program, ctypes.byref(size)) or size.value < 2:
        return ""
    text = ctypes.create_string_buffer(size.value)
    getattr(library, kind + "GetProgramLog")(program, text)
    return ": " + text.value.decode(errors="replace")


def _library(names: tuple[str, ...]) -> ctypes.CDLL:
    """Where the loader looks, and where pip's packages of NVIDIA and ROCm put it."""
    site = sysconfig.get_paths()["purelib"]
    found = [
        path
        for name in names
        for root in (f"{site}/nvidia/*/lib", f"{site}/torch/lib", "/opt/rocm/lib", "/usr/local/cuda/lib64")
        for path in glob.glob(f"{root}/{name}")
    ]
    for name in (*names, *found):
        try:
            # NVRTC asks for its builtins by name alone, which finds what is loaded already.
            for needed in (
                glob.glob(os.path.join(os.path.dirname(name), "libnvrtc-builtins.so*")) if "/" in name else ()
            ):
                ctypes.CDLL(needed)
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise _Absent("not found")
