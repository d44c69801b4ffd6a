"""Real libraries: a run that stops in mid-epoch and goes on, on another number of ranks, sees each sample once."""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.comm.gloo_world import run_script
from tests.commands import ran

from torusgd.data.order import StreamOrder

LENGTH, BATCH, STOP, STEPS = 50, 12, 7, 13

COMMON = """
import json, os, sys
import torch
from torch.utils.data import DataLoader, Dataset

folder, stop, last, length = sys.argv[1], *map(int, sys.argv[2:])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)

class Numbers(Dataset):
    def __len__(self):
        return length
    def __getitem__(self, index):
        return {"x": torch.full((3,), index / length), "labels": torch.tensor(float(index))}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def forward(self, x, labels=None):
        out = self.layer(x).squeeze(1)
        if labels is None:
            return {"logits": out}
        if self.training:
            with open(f"{folder}/seen-{rank}", "a") as file:
                file.write(json.dumps([int(label) for label in labels]) + "\\n")
        return {"loss": (out - labels / length).square().mean(), "logits": out}

def end(net):
    if rank == 0:
        torch.save({name: parameter.detach() for name, parameter in net.named_parameters()}, folder + "/weights")
"""

TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments
from torusgd.integrations.transformers import StreamTrainer

class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == last

def trained(kind, options, **arguments):
    options = TrainingArguments(folder + "/out", per_device_train_batch_size=2, use_cpu=True, report_to=[],
        gradient_accumulation_steps=6 // ranks, save_steps=stop, logging_steps=100, disable_tqdm=True,
        dataloader_num_workers=1, ddp_backend="gloo", **options)
    trainer = kind(Net(), options, train_dataset=Numbers(), **arguments)
    trainer.train(resume_from_checkpoint=os.path.exists(folder + f"/out/checkpoint-{stop}"))
    return trainer.model
"""

ACCELERATE = """
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from torusgd.integrations.accelerate import follow_steps, stream_loader

set_seed(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=6 // ranks,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = accelerator.prepare(model, optimizer)

def resume():
    if os.path.exists(folder + "/state"):
        accelerator.load_state(folder + "/state")
        return stop
    return 0

def passes(batches):
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        yield accelerator.sync_gradients
"""

LIGHTNING = """
import lightning.pytorch as pl
from torusgd import StreamSampler
from torusgd.integrations.lightning import StreamCallback

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def forward(self, x):
        return self.net(x)["logits"]
    def training_step(self, batch, _):
        return self.net(**batch)["loss"]
    def train_dataloader(self):
        return loader
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

class Validated(Module):
    def validation_step(self, batch, _):
        self.net.eval()(**batch)
    def val_dataloader(self):
        return DataLoader(Numbers(), batch_size=10)

def trained(module, *callbacks, **options):
    saving = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=stop, save_top_k=-1)
    trainer = pl.Trainer(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", logger=False,
        accumulate_grad_batches=6 // ranks, max_steps=last, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[*callbacks, saving], **options)
    saved = folder + f"/step={stop}.ckpt"
    trainer.fit(module, ckpt_path=saved if os.path.exists(saved) else None)
    return module.net
"""

OWN_LOOP = """
import torch.distributed as dist
from torch.utils.data import DistributedSampler
from torusgd import StreamSampler
LIBRARY

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = epoch = 0
SAMPLER
parts = {"model": model, "optimizer": optimizer, STATE}
saved = folder + "/state-0"
if os.path.exists(saved):
    # Each rank has a state of its own; a new rank takes that of rank 0.
    own = folder + f"/state-{rank}"
    state = torch.load(own if os.path.exists(own) else saved, weights_only=False)
    steps, epoch = state["steps"], state["epoch"]
    for name, part in parts.items():
        part.load_state_dict(state[name])
passes = 0
while True:
    sampler.set_epoch(epoch)
    for batch in loader:
        model(**batch)["loss"].backward()
        passes += 1
        if passes % (6 // ranks) == 0:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps in (stop, last):
                break
    if steps in (stop, last):
        break
    epoch += 1
state = {"steps": steps, "epoch": epoch, **{name: part.state_dict() for name, part in parts.items()}}
torch.save(state, folder + f"/state-{rank}")
loader = None
dist.barrier()
dist.destroy_process_group()
"""


def own_loop(library: str, sampler: str, state: str = "") -> str:
    return OWN_LOOP.replace("LIBRARY", library).replace("SAMPLER", sampler).replace("STATE", state)


STATEFUL = "from torchdata.stateful_dataloader import StatefulDataLoader"
DISTRIBUTED = (
    "sampler = DistributedSampler(Numbers(), seed=1)\nloader = {}(Numbers(), 2, sampler=sampler, num_workers=2)"
)
STREAM = """
sampler = StreamSampler(length, 12, micro_batches=6)
sampler.follow(optimizer)
loader = {}(Numbers(), batch_sampler=sampler, num_workers=2)
"""

ALONE = {
    "DataLoader": own_loop("", DISTRIBUTED.format("DataLoader")),
    "StatefulDataLoader": own_loop(STATEFUL, DISTRIBUTED.format("StatefulDataLoader"), "'loader': loader"),
    "Trainer": TRAINER + "trained(Trainer, {'max_steps': 10}, callbacks=[Stop()])",
    "Accelerate": ACCELERATE
    + """
loader = accelerator.prepare(DataLoader(Numbers(), 2, shuffle=True, num_workers=2))
steps = resume()
epoch, first = divmod(steps * 6 // ranks, len(loader))
while True:
    loader.set_epoch(epoch)
    for is_step in passes(skip_first_batches(loader, first) if first else loader):
        steps += is_step
        if is_step and steps in (stop, last):
            break
    if steps in (stop, last):
        break
    epoch, first = epoch + 1, 0
accelerator.save_state(folder + "/state")
""",
    "Lightning": LIGHTNING
    + """
pl.seed_everything(1)
loader = DataLoader(Numbers(), 2, shuffle=True, num_workers=2)
trained(Module())
""",
}
"""Each library as its own documents have it, without a part of ours."""

WITH_STREAM = {
    "DataLoader": own_loop("", STREAM.format("DataLoader"), "'sampler': sampler"),
    "StatefulDataLoader": own_loop(STATEFUL, STREAM.format("StatefulDataLoader"), "'sampler': sampler"),
    "Trainer": TRAINER
    + """
def calibration():
    yield {"x": torch.rand(8, 3)}

options = {"max_steps": last, "eval_strategy": "steps", "eval_steps": 4, "lr_scheduler_type": "constant"}
end(trained(StreamTrainer, options, eval_dataset=Numbers(), wire="exact", compare_every=2, calibration=calibration))
""",
    "Accelerate": ACCELERATE
    + """
loader, sampler = stream_loader(accelerator, Numbers(), 12, num_workers=2)
follow_steps(accelerator, model, optimizer, sampler, wire="exact", compare_every=2)
resume()
while sampler.steps < last:
    for is_step in passes(loader):
        if is_step and sampler.steps in (stop, last):
            accelerator.save_state(folder + "/state")
            break
    if sampler.steps == stop and last != stop:
        break
end(accelerator.unwrap_model(model))
""",
    "Lightning": LIGHTNING
    + """
sampler = StreamSampler(length, 12, micro_batches=6)
loader = DataLoader(Numbers(), batch_sampler=sampler, num_workers=2)
following = StreamCallback(sampler, wire="exact", compare_every=2, calibration=lambda: [torch.rand(8, 3)])
end(trained(Validated(), following, use_distributed_sampler=False))
""",
}
NEEDS = {"DataLoader": "torch", "StatefulDataLoader": "torchdata", "Trainer": "transformers"}


def run(
    scripts: dict[str, str], library: str, folder: Path, ranks: int, stop: int, last: int, length: int = LENGTH
) -> list[list[int]]:
    """The samples of each micro-batch that a run trained on, in the order of steps and ranks."""
    pytest.importorskip(NEEDS.get(library, library.lower()))
    folder.mkdir(exist_ok=True)
    for file in folder.glob("seen-*"):
        file.unlink()
    program = folder / "script.py"
    program.write_text(COMMON + scripts[library])
    if "dist.init_process_group" in scripts[library]:
        run_script(ranks, program, folder, stop, last, length)
    else:  # a library looks for torchrun
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        again = partial(ran, [*launcher, program, folder, stop, last, length], env=os.environ | environment)
        try:
            again(timeout=150)
        except subprocess.TimeoutExpired:
            subprocess.run(["pkill", "-KILL", "-f", program], check=False)  # the ranks, which outlive their launcher
            # In Python 3.11 a DataLoader's worker may hang for ever in its fork, while another thread of its parent
            # comes into Python (gh-112275, mended in 3.12). That is before a step was taken.
            if sys.version_info >= (3, 12) or any(file.stat().st_size for file in folder.glob("seen-*")):
                raise
            again(timeout=300)
    seen = [[json.loads(line) for line in (folder / f"seen-{rank}").open()] for rank in range(ranks)]
    lists = 6 // ranks
    assert len({len(each) for each in seen}) == 1
    return [
        each
        for step in range(len(seen[0]) // lists)
        for rank in seen
        for each in rank[step * lists : (step + 1) * lists]
    ]


@pytest.mark.parametrize("library", WITH_STREAM)
def test_a_stop_in_mid_epoch_and_other_ranks_lose_and_repeat_nothing(library: str, tmp_path: Path) -> None:
    seen = run(WITH_STREAM, library, tmp_path, 2, STOP, STOP) + run(WITH_STREAM, library, tmp_path, 3, STOP, STEPS)
    stream = StreamOrder(LENGTH, seed=42 if library == "Trainer" else 0).at(0, STEPS * BATCH)[0].tolist()
    assert [sample for each in seen for sample in each] == stream


UNEVEN_TRAINER = """
from transformers import TrainerCallback
class Seen(TrainerCallback):
    epochs = []
    def on_step_end(self, args, state, control, **_):
        self.epochs.append(round(state.epoch, 4))
options = TrainingArguments(folder + "/out", per_device_train_batch_size=4, use_cpu=True, report_to=[],
    disable_tqdm=True, num_train_epochs=10, save_strategy="no", lr_scheduler_type="linear", learning_rate=1.0)
trainer = StreamTrainer(Net(), options, train_dataset=Numbers(), callbacks=[Seen()])
trainer.train()
assert Seen.epochs == [round(4 * (step + 1) / 10, 4) for step in range(25)], Seen.epochs
few = {"per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_steps": 2}
Trainer(Net(), TrainingArguments(folder + "/plain", max_steps=2, **few), train_dataset=Numbers()).train()
resumed = StreamTrainer(Net(), TrainingArguments(folder + "/plain", max_steps=4, **few), train_dataset=Numbers())
resumed.train(resume_from_checkpoint=True)
assert resumed.stream.consumed == 16, "a plain Trainer's checkpoint is gone on with at its step"
assert abs(trainer.lr_scheduler.get_last_lr()[0]) < 1e-9, (trainer.lr_scheduler.get_last_lr(), trainer.state.max_steps)
"""
UNEVEN_LIGHTNING = """
class Counted(Module):
    steps = []
    def train_dataloader(self):
        return DataLoader(Numbers(), batch_sampler=sampler)
    def validation_step(self, batch, _):
        pass
    def val_dataloader(self):
        return DataLoader(Numbers(), batch_size=10)
    def on_validation_epoch_end(self):
        self.steps.append(self.trainer.global_step)
def fit(epochs, saved=None):
    global sampler
    sampler = StreamSampler(10, 4)
    trainer = pl.Trainer(accelerator="cpu", logger=False, max_epochs=4, max_steps=epochs, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[StreamCallback(sampler), pl.callbacks.
        ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)], num_sanity_val_steps=0)
    trainer.fit(Counted(), ckpt_path=saved)
    return sampler.consumed
assert fit(-1) == 40 and Counted.steps == [3, 5, 8, 10], Counted.steps
assert fit(4) == 16 and fit(-1, folder + "/step=4.ckpt") == 40
"""


@pytest.mark.parametrize(
    ("library", "script"),
    [("transformers", TRAINER + UNEVEN_TRAINER), ("lightning", LIGHTNING + UNEVEN_LIGHTNING)],
)
def test_epochs_that_the_batch_does_not_divide_end_where_the_stream_has_them(
    library: str, script: str, tmp_path: Path
) -> None:
    """10 samples in batches of 4: epochs of 3 and 2 steps. Libraries take the first one's number for all."""
    pytest.importorskip(library)
    (tmp_path / "script.py").write_text(COMMON + script)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "1", "RANK": "0"}
    ran([sys.executable, tmp_path / "script.py", tmp_path, 4, 4, 10], timeout=200, env=environment)


SKIPPED = {
    "lightning": LIGHTNING
    + """
from lightning.pytorch.plugins.precision import MixedPrecision
class Infinite(Module):
    def training_step(self, batch, number):
        return super().training_step(batch, number) * (torch.inf if self.global_step == 1 else 1)
sampler = StreamSampler(10, 4)
loader = DataLoader(Numbers(), batch_sampler=sampler)
pl.Trainer(accelerator="cpu", logger=False, max_epochs=2, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=folder, callbacks=[StreamCallback(sampler)],
    plugins=[MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]).fit(Infinite())
""",
    "accelerate": """
from accelerate import Accelerator
from accelerate.optimizer import patch_optimizer_step
from torusgd.integrations.accelerate import follow_steps, stream_loader
accelerator, model = Accelerator(cpu=True), Net()
loader, sampler = stream_loader(accelerator, Numbers(), 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
# As it has them on a GPU with float16.
accelerator.scaler = optimizer.scaler = torch.amp.GradScaler("cpu")
optimizer._optimizer_original_step_method = optimizer.optimizer.step
optimizer._optimizer_patched_step_method = patch_optimizer_step(optimizer, optimizer.optimizer.step)
follow_steps(accelerator, model, optimizer, sampler)
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"] * (torch.inf if sampler.steps == 1 else 1))
            optimizer.step()
            optimizer.zero_grad()
""",
}


@pytest.mark.parametrize("library", SKIPPED)
def test_a_step_that_a_gradient_scaler_leaves_out_has_had_its_samples(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    (tmp_path / "script.py").write_text(COMMON + SKIPPED[library] + "assert sampler.steps == 5, sampler.steps")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "1", "RANK": "0"}
    ran([sys.executable, tmp_path / "script.py", tmp_path, 0, 0, 10], timeout=200, env=environment)
    seen = [sample for line in (tmp_path / "seen-0").open() for sample in json.loads(line)]
    assert seen == StreamOrder(10, seed=0).at(0, 20)[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("library", ["Trainer", "Accelerate", "Lightning"])
def test_exact_sums_go_on_with_the_same_bits_on_twice_as_many_ranks(library: str, tmp_path: Path) -> None:
    for part, ranks, stop, last in (("parts", 3, STOP, STOP), ("parts", 6, STOP, STEPS), ("whole", 3, STEPS, STEPS)):
        run(WITH_STREAM, library, tmp_path / part, ranks, stop, last)
    stopped, unstopped = (torch.load(tmp_path / part / "weights", weights_only=True) for part in ("parts", "whole"))
    assert all(stopped[name].equal(unstopped[name]) for name in unstopped)


@pytest.mark.slow
@pytest.mark.parametrize(("library", "ranks", "wrong"), [
    ("DataLoader", 3, (24, 24)), ("StatefulDataLoader", 2, (0, 0)), ("StatefulDataLoader", 3, (9, 9)),
    ("Trainer", 3, (0, 0)), ("Accelerate", 3, (0, 0)), ("Lightning", 2, (12, 12)), ("Lightning", 3, (21, 21)),
])  # fmt: skip
def test_what_libraries_lose_and_repeat_by_themselves(library: str, ranks: int, wrong, tmp_path: Path) -> None:
    """Two epochs of five steps, stopped on two ranks after seven steps, and gone on with: the second epoch."""
    seen = run(ALONE, library, tmp_path, 2, STOP, STOP, 60)[30:] + run(ALONE, library, tmp_path, ranks, STOP, 10, 60)
    counts = Counter(sample for each in seen for sample in each)
    assert (60 - len(counts), counts.total() - len(counts)) == wrong
