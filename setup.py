"""The CPU kernels. Everything else about the package is in pyproject.toml."""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from torch.utils.cpp_extension import include_paths, library_paths
except ImportError:
    include_paths = library_paths = None

CSRC = sorted(str(path) for path in Path("csrc").rglob("*") if path.suffix in (".h", ".cpp"))
BINDINGS = [path for path in CSRC if path.startswith("csrc/bindings/") and path.endswith(".cpp")]
# Longest first, so that no core is left with a long one at the end.
KERNELS = ["csrc/rows/rows.cpp", "csrc/attention/attention.cpp", "csrc/loss/loss.cpp", "csrc/entmax/entmax.cpp"]
ONCE = ["csrc/attention/attention.cpp"]  # for all dtypes

# The kernels are compiled for each instruction set and dtype, and the best set is chosen at run time. avx512_bf16 has
# kernels of its own for bfloat16 alone: the others would be those of avx512 again.
X86_64 = platform.machine().lower() in ("x86_64", "amd64")
ISAS = {"baseline": []}
if X86_64:
    ISAS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    ISAS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
    ISAS["avx512_bf16"] = [*ISAS["avx512"], "-mavx512bf16"]
DTYPES = {isa: ("bf16",) if isa == "avx512_bf16" else ("f32", "f64", "bf16", "f16") for isa in ISAS}

if os.environ.get("MULTIMAX_NATIVE") and sys.platform == "linux":  # for this machine alone, in a third of the time
    has = set(Path("/proc/cpuinfo").read_text().replace("_", "").split())
    best = {
        dtype: isa
        for isa, flags in ISAS.items()
        if has.issuperset(flag.removeprefix("-m") for flag in flags)
        for dtype in DTYPES[isa]
    }
    DTYPES = {isa: [dtype for dtype in best if best[dtype] == isa] for isa in ISAS}


def kernel_jobs() -> list[tuple[str, str, list[str]]]:
    """What is to be compiled: the source, a folder for the result, flags."""
    jobs = []
    for source in KERNELS:
        for isa, dtypes in DTYPES.items():
            for dtype in dtypes:
                if source not in ONCE:
                    flags = [f"-DMULTIMAX_ISA={isa}", f"-DMULTIMAX_DTYPE={dtype}"]
                    jobs.append((source, f"{isa}/{dtype}", [*ISAS[isa], *flags]))
                elif dtype == dtypes[0]:
                    jobs.append((source, isa, [*ISAS[isa], f"-DMULTIMAX_ISA={isa}"]))
    return jobs


FLAGS = ["-Icsrc", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra", "-ffp-contract=fast"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math"]  # nobody reads errno or the exception flags; NaN and inf stay
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # false alarms inside GCC 12's own AVX-512 header
FLAGS += ["-Wno-unknown-warning-option"]  # Clang knows but one of the two
FLAGS += ["-Wno-psabi"]  # nothing that has vectors for arguments is called from elsewhere
LINK = ["-ltorch_cpu", "-ltorch"]
if os.environ.get("MULTIMAX_SANITIZE"):
    SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    FLAGS += ["-O1", *SANITIZE]
    LINK += SANITIZE
else:
    FLAGS += ["-O3", "-g0"]  # Python's own flags have -g, which takes a third longer
    LINK += ["-Wl,-x" if sys.platform == "darwin" else "-Wl,-s"]  # without names that nobody asks for


class BuildKernels(build_ext):
    """One extension without Python in it: loaded by torch, good for every Python and every torch from 2.10 on."""

    def build_extension(self, ext: Extension) -> None:
        temp = Path(self.build_temp)
        bindings = [*FLAGS, "-DTORCH_TARGET_VERSION=0x020a000000000000"]  # 2.10
        bindings += [f"-isystem{path}" for path in include_paths()]
        jobs = [(source, name, FLAGS + flags) for source, name, flags in kernel_jobs()]
        jobs += [(source, "bindings", bindings) for source in BINDINGS]

        def compile_one(job: tuple[str, str, list[str]]) -> list[str]:
            source, name, flags = job
            return self.compiler.compile([source], output_dir=str(temp / name), extra_postargs=flags)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [item for group in pool.map(compile_one, jobs) for item in group]
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            library_dirs=library_paths(),
            extra_postargs=LINK,
            target_lang="c++",
        )


def main() -> None:
    """Sets up, with the kernels where they can be built."""
    if os.environ.get("MULTIMAX_PURE"):
        setup()
    elif include_paths is None:
        print(
            "multimax: torch is not importable here, so the wheel has no CPU kernels (--no-build-isolation builds them)"
        )
        setup()
    elif sys.platform not in ("linux", "darwin"):
        print("multimax: CPU kernels are built on Linux and macOS only; this wheel uses the reference implementation")
        setup()
    else:
        setup(
            ext_modules=[Extension("multimax.ops._kernels", CSRC, depends=CSRC, py_limited_api=True)],
            cmdclass={"build_ext": BuildKernels},
            options={"bdist_wheel": {"py_limited_api": "cp310"}},
        )


if __name__ == "__main__":  # tools/selftest.py builds the kernels, too
    main()
