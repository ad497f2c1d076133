"""Run the kernel tests under NVIDIA's compute-sanitizer: out-of-bounds accesses and races.

Each test file runs once a tool, in processes of its own, several files at a time. memcheck runs
without torch's caching allocator, so that an access behind a tensor is one behind an allocation.
Exits with 1 if a tool found anything or a test failed.

    python tests/gpu/sanitize.py
    python tests/gpu/sanitize.py --tools racecheck --files test_mxfp8 test_nvfp4
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
TOOLS = ("memcheck", "racecheck", "synccheck")
# The files whose tests launch kernels one by one.
FILES = (
    "test_arithmetic",
    "test_block_scaling",
    "test_chain_stores",
    "test_fp8_scaling",
    "test_hardware",
    "test_mxfp8",
    "test_norm_stores",
    "test_normalization",
    "test_nvfp4",
    "test_permutation",
    "test_pointwise",
    "test_probe",
    "test_rowwise_scaling",
)
# Tests of sizes that a tool would take hours for, of what it changes itself, and of what fails on
# purpose: a symbol that is not there, kernels that do not compile (racecheck breaks torch's GEMMs).
LEFT_OUT = (
    "large or two_to_the_31 or whole_range or capture or stream or GRAPH or cache "
    "or missing_kernel or does_not_compile"
)
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


@dataclass(frozen=True)
class Finding:
    """What one tool said of one test file."""

    tool: str
    file: str
    seconds: float
    tests: str
    findings: int | None
    log: str

    @property
    def is_clean(self) -> bool:
        """Whether all tests passed and the tool found nothing."""
        return self.findings == 0 and " passed" in self.tests and " failed" not in self.tests


def run(tool: str, file: str, sanitizer: str, limit: float, left_out: str, workers: int) -> Finding:
    """One test file under one tool, shared out among some processes."""
    command = [sanitizer, "--tool", tool, "--kernel-name", "kernel_substring=fuser_"]
    command += ["--target-processes", "all", sys.executable, "-m", "pytest"]
    command += ["-p", "no:cacheprovider", "-n", str(workers)]
    command += [str(FOLDER / f"{file}.py"), "-k", f"not ({left_out})"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        log = done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        log = f"{(late.stdout or b'').decode(errors='replace')}\nnot done after {limit:.0f} s"
    counts = [int(a or b) for a, b in ERRORS.findall(log)]
    tests = re.findall(r"^.*(?:passed|failed|error).* in [\d.]+s.*$", log, flags=re.MULTILINE)
    seconds = time.monotonic() - begin
    summary = tests[-1].strip("= ") if tests else log.strip().splitlines()[-1][:80]
    return Finding(tool, file, seconds, summary, sum(counts) if counts else None, log)


def main(argv: list[str] | None = None) -> int:
    """Run everything, print a table, and write the logs of what is not clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--files", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 4))
    parser.add_argument("--workers", type=int, default=2, help="processes for each file")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for each file")
    parser.add_argument("--left-out", default=LEFT_OUT, help="tests that do not run, for pytest -k")
    parser.add_argument("--logs", type=Path, default=Path("out/sanitizer"))
    options = parser.parse_args(argv)
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        parser.error("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit.")
    pairs = [(tool, file) for file in options.files for tool in options.tools]
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [
            pool.submit(
                run, tool, file, sanitizer, options.limit, options.left_out, options.workers
            )
            for tool, file in pairs
        ]
        found = []
        for future in waiting:
            finding = future.result()
            found.append(finding)
            count = "no summary" if finding.findings is None else f"{finding.findings} findings"
            line = f"{finding.tool:<10} {finding.file:<20} {finding.seconds:>6.0f} s  {count:<12}"
            print(line, finding.tests, flush=True)
    unclean = [finding for finding in found if not finding.is_clean]
    for finding in unclean:
        options.logs.mkdir(parents=True, exist_ok=True)
        (options.logs / f"{finding.tool}_{finding.file}.log").write_text(finding.log)
    if unclean:
        print(f"{len(unclean)} of {len(found)} runs are not clean; logs in {options.logs}.")
    return 1 if unclean else 0


if __name__ == "__main__":
    raise SystemExit(main())
