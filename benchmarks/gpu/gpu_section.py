"""The section of docs/benchmarks.md that tells what benchmarks/gpu/gpu.py has measured, made of its raw figures alone.

python -m benchmarks.gpu.gpu_section benchmarks/results/gpu-NAME.json docs/benchmarks.md
"""

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- benchmarks/gpu/gpu.py: begin -->", "<!-- benchmarks/gpu/gpu.py: end -->"
EXACT, FLOAT = "torusgd, exact sums", "torusgd, float32 sums"
RUN = "torusgd, exact sums, deterministic"
GRAPHS = "torusgd, CUDA graphs, deterministic"
GRAPHS_COMPILED = "torusgd, CUDA graphs, deterministic, compiled"
RUN_COMPILED = "torusgd, exact sums, deterministic, compiled"
PEER, COMPILED = "plain loop", "plain loop, compiled"
CEILINGS = {
    "copy_gb_per_s": "GB/s copied",
    "bfloat16_tflops": "TFLOP/s in bfloat16",
    "launch_us": "us a launch",
    "launch_in_graph_us": "us a launch in a graph",
}
AIMS = {"H100": {32: 3400, 64: 4200, 256: 5200}, "H200": {32: 3600, 64: 4500, 256: 5600}}
"""images/s of ResNet-50 at 224 px by images of a pass: predicted from the ceilings of each layer, with fused kernels"""
TRIAL = (
    "This was a trial of the script on a CPU. It proves that each part of the script "
    "that needs no GPU runs to its end in the time it has, that its figures become this section, and that the weights "
    "have one hash on 1, 2 and 4 ranks. It proves nothing of a GPU's speed, of CUDA graphs, of NCCL or of kernels: "
    "none of them runs here, and the times below are those of a small network on one core of a busy machine."
)
"""the first line after a run with --device cpu"""


def aims(result: dict[str, Any]) -> list[str]:
    """What was aimed at, and what was seen, one line each; the speeds where GPU and network are those of the aims."""
    about, lines = result["speed"], list[str]()
    gpu = next((name for name in AIMS if name in str(result["machine"].get("gpu"))), None)
    for images, programs in about["seconds"].items():
        rates = {name: int(images) / statistics.median(times) for name, times in programs.items()}
        best = max((RUN, RUN_COMPILED, GRAPHS, GRAPHS_COMPILED), key=lambda name: rates.get(name, 0.0))
        aim = AIMS[gpu].get(int(images)) if gpu and (about["network"], about["pixels"]) == ("resnet50", 224) else None
        if aim is not None:
            seen = "reached" if rates[best] >= aim else "missed"
            lines.append(f"- {images} images: aim {aim:,} images/s, {seen}: {rates[best]:,.0f} ({best})")
        peer = max((PEER, COMPILED), key=lambda name: rates.get(name, 0.0))
        seen = "reached" if rates[best] >= rates[peer] else "missed"
        lines.append(f"- {images} images: aim, at least the {peer}, {seen}: {rates[best] / rates[peer]:.3f} of it")
    return lines


def without(seconds: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    """What a step takes without one of the parts of CUDA graphs, or with another part in a plain one."""
    for images, programs in seconds.items():
        for name, times in programs.items():
            whole = GRAPHS if "graphs" in name.lower() else RUN
            more = statistics.median(times) / statistics.median(programs[whole]) - 1
            yield f"- {images} images, {name}: {1e3 * statistics.median(times):.2f} ms a step, {more:+.1%}"


def section(result: dict[str, Any]) -> str:
    """The section of docs/benchmarks.md, from the raw figures alone."""
    about, lines, is_gpu = result.get("machine", {}), ["## One GPU", ""], result["device"] == "cuda"
    if not is_gpu:
        lines += [TRIAL, ""]
    where = about.get("gpu") or about.get("cpu") or "unknown"
    versions = ", ".join(f"{key} {about[key]}" for key in ("torch", "cuda", "cudnn", "nccl") if about.get(key))
    lines += [f"{where}, {versions}; {result['date']}: `{result['command']}`. Medians, with the range.", ""]
    lines += [f"- {statistics.median(about[key]):.4g} {unit}" for key, unit in CEILINGS.items() if key in about]
    for name, runs in result.get("hashes", {}).items():
        if isinstance(runs, dict):
            one = "one hash" if len(set(runs.values())) == 1 else "DIFFERENT HASHES"
            steps = "" if "steps" in name else f" after {result['hashes']['steps']} steps"
            lines.append(f"- {name}, weights{steps}, {'; '.join(runs)}: {one}")
    if "seconds" in result.get("speed", {}):
        about = result["speed"]
        network = f"{about['network']}, {about['pixels']} px, {about['precision']}"
        rounds = max(len(times) for programs in about["seconds"].values() for times in programs.values())
        lines += ["", f"Images/s of {network}, one pass a step, n = {rounds}, in turn:", ""]
        lines += ["| images | program | images/s | range | to the plain loop |", "| --- | --- | --- | --- | --- |"]
        for images, programs in about["seconds"].items():
            for name, times in programs.items():
                rates = sorted(int(images) / each for each in times)
                ratio = statistics.median(b / t for b, t in zip(programs[PEER], times, strict=True))
                lines.append(
                    f"| {images} | {name} | {statistics.median(rates):,.1f} | {rates[0]:,.1f} - {rates[-1]:,.1f} "
                    f"| {ratio:.3f} |"
                )
        lines += ["", *(aims(result) if is_gpu else ())]
        for images, programs in about["seconds"].items() if is_gpu else ():  # else they are of noise
            exact, repeatable = (
                statistics.median(a / b for a, b in zip(programs[one], programs[other], strict=True)) - 1
                for one, other in ((EXACT, FLOAT), (RUN, EXACT))
            )
            lines.append(
                f"- {images} images: exact sums cost {exact:+.1%} of a step, deterministic algorithms {repeatable:+.1%}"
            )
    lines += without(result.get("parts", {}).get("seconds", {}))
    if is_gpu and "faster" in result.get("precision", {}):
        seconds = result["precision"]["seconds"]
        lines.append(
            f"- {result['precision']['faster']} is the faster precision at {result['precision']['images']} images: "
            + ", ".join(f"{each} {1e3 * statistics.median(times):.2f} ms a step" for each, times in seconds.items())
        )
    if "seconds" in result.get("streams", {}):
        one, two = result["streams"]["seconds"].values()
        gain = statistics.median(a / b for a, b in zip(one, two, strict=True))
        lines.append(
            f"- two passes of {result['streams']['images']} images at once: {gain:.3f} times as fast as in turn"
        )
    forms = {"plain": "a plain step", "graphs": "a step as CUDA graphs", "graphs, compiled": "the same, compiled"}
    for form, title in forms.items():
        if form not in result.get("step", {}):
            continue
        found = result["step"][form]
        of_gpu = ("kernels", "launches", "graphs", "copies", "clears", "synchronisations")
        names = ("operators", *(of_gpu if is_gpu else ()))
        lines.append(
            f"- {title}: {', '.join(f'{found[name]} {name}' for name in names)}; {1e3 * found['host_seconds']:.2f} ms "
            "of the host"
        )
    parts = {name: part for name, part in result.items() if isinstance(part, dict)}
    lines += [f"- {name} failed: {part['error']}" for name, part in parts.items() if "error" in part]
    return "\n".join(lines) + "\n"


def put_section(document: str, text: str) -> str:
    """The document with the section in place of the one before, or at its end."""
    block = f"{BEGIN}\n\n{text}\n{END}\n"
    if BEGIN not in document:
        return f"{document.rstrip()}\n\n{block}".lstrip()
    head, _, rest = document.partition(BEGIN)
    return head + block + rest.partition(END)[2].removeprefix("\n")


if __name__ == "__main__":
    found, document = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    document.write_text(put_section(document.read_text(), section(found)))
