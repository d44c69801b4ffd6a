"""Real libraries: a run that stops in mid-epoch and goes on, on another number of ranks, sees each sample once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torusgd.data.order import StreamOrder

LENGTH, BATCH, STOP, STEPS = 50, 12, 7, 13

COMMON = """
import json, os, sys
import torch
from torch.utils.data import DataLoader, Dataset

folder, stop, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)

class Numbers(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return {"x": torch.full((3,), index / 50), "labels": torch.tensor(float(index))}

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
        return {"loss": (out - labels / 50).square().mean(), "logits": out}
"""

TRAINER = (
    COMMON
    + """
from transformers import TrainingArguments
from torusgd.integrations.transformers import StreamTrainer

def calibration():
    yield {"x": torch.rand(8, 3)}

arguments = TrainingArguments(folder + "/out", per_device_train_batch_size=2, use_cpu=True, report_to=[],
    gradient_accumulation_steps=12 // 2 // ranks, max_steps=last, save_steps=stop, logging_steps=100,
    disable_tqdm=True, dataloader_num_workers=1, ddp_backend="gloo", eval_strategy="steps", eval_steps=4)
trainer = StreamTrainer(Net(), arguments, train_dataset=Numbers(), eval_dataset=Numbers(), wire="exact",
    compare_every=2, calibration=calibration)
trainer.train(resume_from_checkpoint=os.path.exists(folder + f"/out/checkpoint-{stop}"))
"""
)

ACCELERATE = (
    COMMON
    + """
from accelerate import Accelerator
from torusgd.integrations.accelerate import follow_steps, stream_loader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=12 // 2 // ranks)
model, optimizer = Net(), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = accelerator.prepare(model, optimizer)
loader, sampler = stream_loader(accelerator, Numbers(), 12, num_workers=2)
follow_steps(model, optimizer, sampler, wire="exact", compare_every=2)
if os.path.exists(folder + "/state"):
    accelerator.load_state(folder + "/state")
while sampler.steps < last:
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if sampler.steps in (stop, last) and accelerator.sync_gradients:
            accelerator.save_state(folder + "/state")
            break
    if sampler.steps == stop and last != stop:
        break
"""
)

LIGHTNING = (
    COMMON
    + """
import lightning.pytorch as pl
from torusgd import StreamSampler
from torusgd.integrations.lightning import StreamCallback

sampler = StreamSampler(50, 12, micro_batches=6)

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)["logits"]

    def training_step(self, batch, _):
        return self.net(**batch)["loss"]

    def validation_step(self, batch, _):
        self.net.eval()(**batch)

    def train_dataloader(self):
        return DataLoader(Numbers(), batch_sampler=sampler, num_workers=2)

    def val_dataloader(self):
        return DataLoader(Numbers(), batch_size=10)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

trainer = pl.Trainer(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto",
    accumulate_grad_batches=6 // ranks, max_steps=last, use_distributed_sampler=False, logger=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    callbacks=[StreamCallback(sampler, wire="exact", compare_every=2, calibration=lambda: [torch.rand(8, 3)]),
               pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=stop, save_top_k=-1)])
saved = folder + f"/step={stop}.ckpt"
trainer.fit(Module(), ckpt_path=saved if os.path.exists(saved) else None)
"""
)


def run(script: str, folder: Path, ranks: int, stop: int, last: int) -> list[list[int]]:
    """The samples of each micro-batch that a run trained on, in the order of steps and ranks."""
    for file in folder.glob("seen-*"):
        file.unlink()
    program = folder / "script.py"
    program.write_text(script)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        str(program), str(folder), str(stop), str(last),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = [[json.loads(line) for line in (folder / f"seen-{rank}").open()] for rank in range(ranks)]
    lists = 6 // ranks
    assert len({len(each) for each in seen}) == 1
    return [
        each
        for step in range(len(seen[0]) // lists)
        for rank in seen
        for each in rank[step * lists : (step + 1) * lists]
    ]


@pytest.mark.parametrize(
    ("library", "script"), [("transformers", TRAINER), ("accelerate", ACCELERATE), ("lightning", LIGHTNING)]
)
def test_a_stop_in_mid_epoch_and_other_ranks_lose_and_repeat_nothing(library: str, script: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    seen = run(script, tmp_path, 2, STOP, STOP) + run(script, tmp_path, 3, STOP, STEPS)
    stream = StreamOrder(LENGTH, seed=42 if library == "transformers" else 0).at(0, STEPS * BATCH)[0].tolist()
    assert [sample for each in seen for sample in each] == stream
