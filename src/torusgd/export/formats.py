"""Trained networks as graphs that run without torusgd: ONNX, and torch.export's own format."""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import RunError, UserError, first_line, needs
from ..recipe.section import sides
from ..run.trained_weights import TrainedModel
from ..weights import replacing, weights_sha256

RECORDS_SHA256 = "records_sha256"  # hash of the last record of the run that left the weights; empty: nobody knows
TOLERANCE = 1e-4  # largest difference of a graph's logits from the network's, relative to the largest logit
_BATCHES = (2, 5)  # sizes of the compared batches; the graph is made with the first, so the second shows it takes any


def export_onnx(trained: TrainedModel, path: Path) -> float:
    """Writes an ONNX file with a free batch size, input `images` and output `logits`, float32; classes in its metadata.

    Returns the largest difference of its logits, run by onnxruntime, from the network's, relative to the largest logit.
    RunError if the network can't be exported, or the graph gives other logits.
    """
    with needs("--format onnx: a package is missing", "onnx onnxruntime onnxscript (the extra onnx)"):
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch needs it
    images, data = example_images(trained, _BATCHES[0]), trained.recipe.held_out_data
    with _telling("onnx"), replacing(path) as temporary:
        torch.onnx.export(
            trained.model, (images,), str(temporary), dynamo=True, external_data=False, verbose=False,
            dynamic_shapes=({0: torch.export.Dim("batch")},), input_names=["images"], output_names=["logits"],
        )  # fmt: skip
        graph = onnx.load(str(temporary))
        known = {
            "classes": list(trained.classes), "mean": data.mean, "std": data.std, "resize": data.resize,
            "weights_sha256": weights_sha256(trained.model.state_dict()),
            RECORDS_SHA256: trained.metadata.get(RECORDS_SHA256, ""),
        }  # fmt: skip
        onnx.helper.set_model_props(graph, {name: json.dumps(value) for name, value in known.items()})
        onnx.checker.check_model(graph)
        onnx.save(graph, str(temporary))
        session = onnxruntime.InferenceSession(str(temporary), providers=["CPUExecutionProvider"])

        def run(images: Tensor) -> Tensor:
            return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])

        return _compared(trained, run)


def export_torch(trained: TrainedModel, path: Path) -> float:
    """Writes what `torch.export.load(path).module()` runs, with this version of torch; returns as `export_onnx`."""
    with _telling("torch"), replacing(path) as temporary:
        images, shapes = (example_images(trained, _BATCHES[0]),), ({0: torch.export.Dim("batch")},)
        # Through a buffer: torch wants a file's name to end in .pt2, which that of an unfinished file does not.
        buffer = io.BytesIO()
        program = torch.export.export(trained.model, images, dynamic_shapes=shapes)
        torch.export.save(program, buffer, extra_files={RECORDS_SHA256: trained.metadata.get(RECORDS_SHA256, "")})
        temporary.write_bytes(buffer.getvalue())
        module: nn.Module = torch.export.load(buffer).module()
        return _compared(trained, module)


def example_images(trained: TrainedModel, count: int) -> Tensor:
    """Drawn images as the network takes them for evaluation, float32 [count, channels, height, width]."""
    data = trained.recipe.held_out_data
    return torch.randn((count, data.channels, *sides(data.image_size)), generator=torch.Generator().manual_seed(count))


@torch.no_grad()
def _compared(trained: TrainedModel, run: Callable[[Tensor], Tensor]) -> float:
    # Before a graph stays, it and the network take the same drawn images, in two sizes of batch, and must give the same
    # logits up to rounding, since another runtime adds up in another order.
    worst = 0.0
    for count in _BATCHES:
        images = example_images(trained, count)
        expected, found = trained.model(images), run(images)
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)))
    if not worst <= TOLERANCE:
        raise RunError(f"the graph's logits differ from the network's by {worst:.1e} of the largest one; not written")
    return worst


@contextmanager
def _telling(name: str) -> Iterator[None]:
    """Makes one line of what torch raises about a network that it can't write down, and leaves out its warnings."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (UserError, RunError, OSError):
        raise
    except Exception as error:  # of many kinds, all of which mean that this network has no such graph
        raise RunError(f"--format {name}: the network can't be exported: {first_line(error)}") from error
    finally:
        log.setLevel(level)
