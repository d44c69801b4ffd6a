"""What notes/published.md says of rows that the plan misses: where sources disagree, and what is not understood."""

from collections.abc import Sequence

from torusgd.plan.published import Prediction, Row, predict_row
from torusgd.text import change, number

_RATES = {
    "das_vgga_128": "das_vgga_128_rate",
    "das_vgga_64": "das_vgga_64_rate",
    "das_overfeat_64": "das_overfeat_rate",
    "das_cddnn_16": "das_cddnn_16_rate",
    "das_vgga_aws": "das_vgga_aws_rate",
}
"""a published speed-up over one node: the published rate of the same run"""

_OF_DAS = (
    "So four of the five rates are as good as the speed-up and the one node together. The AWS rate is not: a VGG-A",
    "image is 45.7 GFLOP, so the 28.0 images/s a node that the paper has on both machines are 1,278 GFLOP/s, 54 %",
    "of the 2,355 of Cori's node but 77 % of the 1,670 that the paper's own balance gives the AWS node (64 % at its",
    "turbo, which the cluster file takes). No one efficiency of the program gives both: the rate is short by the",
    "ratio of the peaks. OverFeat's one node is 63 % of the peak by the paper, where VGG-A's is 54; its rate is",
    "recalled as 3,600 to 3,800.",
)

_OPEN = (
    "`you_skx_1024`: the paper has 48 minutes on 1,024 CPUs and 31 on 1,600 (32 in its fifth version), which are",
    "49,152 and 49,600 (51,200) CPU-minutes. So a CPU has 39 images/s at 32 images a step as at 10, where the plan",
    "gains from more images: one row is 4 % too fast, the other as much too slow.",
    "",
    "Of systems with two rows or more Sony's first program is the worst without its rows, 18 % too fast: half the",
    "device speed of the second one is all that was stated, and no source of that time has a figure of one GPU.",
    "",
    "`nvidia_a100_527_time`: start and evaluations are 1.7 s of 19.2 by the logs. Steps take 10.6 ms there, planned",
    "9.4, and 11.1 of 15 images on 540 nodes, planned 9.1; 35 images on 128 nodes fit. Both large runs share batch",
    "norm's statistics between 2 GPUs, priced at two messages a layer (0.4 ms). What that costs on A100 is not",
    "published.",
    "",
    "The Xeon Phi rows rest on 2.5 GB/s a process over Omni-Path, fitted by hand to the four published times on",
    "these nodes (the two that are counted, `you_knl_512` and `you_alexnet_knl`), and on messages that hide",
    "behind nothing. The cause is published, the number is not: Omni-Path leaves its packets to the cores, which",
    "are slow here, and one process can't fill the link (Rosales and Gomez-Iglesias, PEARC 2017; Cornell's pages",
    "on Stampede2 ask for two tasks a node at least; Boyle et al., arXiv 1711.04883, sped an all-reduce of",
    "gradients up by ten with several endpoints a process). At the link's full rate AlexNet's time was predicted",
    "at half.",
    "",
    "On Xeon 8160 messages hide behind compute, as the three rows say: without overlap they miss by 20 and 40 %.",
    "One factor on Intel Caffe's share of a peak meets these three and Intel's two of DAWNBench, of a later version on",
    "Xeon 8124M, whose share is taken to be the same. Their rates are the iterations of a line of the entry's table",
    "over its time, evaluation among it: 600 in 260.5 s (n = 29) and 640 in 277.8 (n = 47) on 64 nodes; on 128, whose",
    "table has no iterations, lines of 128.5 (n = 15) and 146.5 s (n = 65) are taken for 280 and 320: a ratio that",
    "fits to 0.3 %. The sources don't agree on",
    "`you_alexnet_11`: 1,024 processors in one version of the paper, 2,048 in another.",
    "",
    "PCL-DNN's linear layers are planned as split over all nodes (`linear_groups: 1`) since that fits. By the",
    "paper's formula for the groups (4, 2, 2, 3 or 4, and 1, in the order of the table) the speed-ups are",
    "predicted at +18.6, +5.3, +5.2, +23.9 and -0.1 %. Dearer messages don't mend it: at twice the fitted time of",
    "one +9.4, +0.7, -10.7, +20.0 and -0.3 %. Rehearsed by messages of torusgd's own on 2026-11-25, n = 5 steps",
    "(`torusgd rehearse intel-cddnn-16 --cluster endeavor --devices 16 --allreduce halving-doubling`, M of",
    "`--model-parallel M`):",
    "layers over all 16 nodes give 5.66 times one node, over 8 7.66, over 4 7.42, whole layers 1.84; published are",
    "6.5, between the two readings. So both can be run, and neither gives the figure; what the program did is not",
    "published.",
)


def rates(fitted: Sequence[Prediction], further: Sequence[Prediction]) -> list[str]:
    """The lines that set Das et al.'s rates beside their speed-ups: rate = speed-up times the rate of one node."""
    known = {each.row.id: each for each in (*fitted, *further)}
    lines = [
        "Das et al. publish speed-ups over one node and rates of the same runs, so also the rate of one node. The",
        "error of a planned rate is that of the speed-up and that of the one node:",
        "",
        "| rate | published | speed-up | one node | planned node | error of the node | of the speed-up | of the rate |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for speedup, rate in ((known[a], known[b]) for a, b in _RATES.items()):
        node = rate.row.value / speedup.row.value
        planned = predict_row(alone(rate.row)).predicted
        lines.append(
            f"| {rate.row.id} | {number(rate.row.value)} | {number(speedup.row.value)} | {number(node)} "
            f"| {number(planned)} | {change(planned / node - 1)} | {change(speedup.error)} "
            f"| {change(rate.error)} |"
        )
    return lines


def alone(row: Row) -> Row:
    """The row's whole batch on one device.

    >>> from torusgd.plan.published import read_rows
    >>> [(each.devices, each.images) for each in map(alone, read_rows()[:1])]
    [(1, (128,))]
    """
    images = tuple(each * row.devices for each in row.images)
    return row.model_copy(update={"devices": 1, "images": images})


def section(fitted: Sequence[Prediction], further: Sequence[Prediction]) -> list[str]:
    """The lines of notes/published.md on all of it."""
    return ["## What the sources leave open", "", *rates(fitted, further), "", *_OF_DAS, "", *_OPEN]
