"""A small causal transformer whose loss is a mean over tokens, not over sequences or ranks.

    torchrun --standalone --nproc-per-node 1 examples/causal_text.py
    torchrun --standalone --nproc-per-node 3 examples/causal_text.py
    torchrun --standalone --nproc-per-node 2 examples/causal_text.py --micro-batches 12

Texts have different lengths. A mean of the ranks' means would weigh the tokens of short texts more, by who shares a
rank or a micro-batch with whom. Here each micro-batch gives the gradient of its *sum* over tokens and their count, both
are summed exactly, and one is divided by the other: the same bits on any number of ranks, and with other micro-batches
the same but for rounding.
"""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from torusgd import StreamSampler, exact_all_reduce
from torusgd.rng import keyed_integer
from torusgd.weights import weights_sha256

SYMBOLS, LENGTH, PAD = 28, 48, -100


def text(index: int) -> Tensor:
    """A sum and its result in decimal digits, `12+345=357`: int64 [length], 1 to 12, of 3 to 36 symbols."""
    terms = keyed_integer(10**6, 7, index, np.arange(4))[: 1 + index % 4].tolist()
    written = "+".join(map(str, terms)) + "=" + str(sum(terms))
    return torch.tensor(["0123456789+=".index(symbol) + 1 for symbol in written])


class Transformer(nn.Module):
    """Decoder only: 5 layers of width 128, about a million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(SYMBOLS, 128), nn.Parameter(torch.randn(LENGTH, 128) / 11)
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False), nn.Linear(128, SYMBOLS)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.layers(self.tokens(tokens) + self.places[:length], mask, is_causal=True))


def main() -> None:
    """Trains for some steps and prints the loss of the last one and the weights' hash."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=6)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    sampler = StreamSampler(2000, 48, micro_batches=options.micro_batches)
    texts = [text(index) for index in range(2000)]
    loader: DataLoader[Tensor] = DataLoader(texts, batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
    loss = mean = torch.zeros(())
    for mine in zip(*[iter(loader)] * len(sampler.positions()), strict=True):
        sums, counts = [], []
        for part in mine:
            symbols = pad_sequence(part, batch_first=True)
            wanted = symbols[:, 1:].masked_fill(symbols[:, 1:] == 0, PAD)
            total = nn.functional.cross_entropy(
                model(symbols[:, :-1]).flatten(0, 1), wanted.flatten(), ignore_index=PAD, reduction="sum"
            )
            gradients = torch.autograd.grad(total, parameters)
            sums.append(torch.cat([total.detach().reshape(1), *(gradient.reshape(-1) for gradient in gradients)]))
            counts.append((wanted != PAD).sum().double().reshape(1))
        mean = exact_all_reduce(sums) / exact_all_reduce(counts).float()
        loss, *means = mean.split([1, *map(torch.numel, parameters)])
        for parameter, gradient in zip(parameters, means, strict=True):
            parameter.grad = gradient.view_as(parameter)
        optimizer.step()
        sampler.step()
        if sampler.steps == options.steps:
            break
    if dist.get_rank() == 0:
        print(f"{sum(parameter.numel() for parameter in parameters)} parameters, {dist.get_world_size()} ranks, "
              f"{options.micro_batches} micro-batches: loss {loss.item():.9f}, "
              f"gradient {mean[1:].norm():.9f}, weights {weights_sha256(model.state_dict())[:8]}")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
