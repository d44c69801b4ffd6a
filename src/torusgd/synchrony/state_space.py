"""Teng and Wood's predictor of worker times: a deep state-space model with amortised inference.

A hidden state z_t of a few numbers, such as which nodes are busy, moves from step to step and makes all workers'
times together (arXiv 1803.04209; the model is Krishnan, Shalit and Sontag's deep Markov model, AAAI 2017):

    z_t ~ N(transition(z_(t-1)))        a gated mean and a diagonal variance
    x_t ~ N(emission(z_t))              logarithms of the times, independent given the state

The guide q(z_t | x_1..x_t) is a network too: it is trained once, together with the model, to maximise the evidence
lower bound on journalled times, and afterwards finds the state of new times in one pass (amortised). The coming step
is then drawn: a state from the guide, the next one by the transition, times by the emission.

What differs from the paper. Times are taken as logarithms, so that no draw is negative. The guide is a GRU over the
past alone and knows no z_(t-1) (the paper's is conditioned on it), so that all steps of a window are trained at once.
The sizes are ours, and so is the training: a few seconds of Adam on a CPU, once, on one journal.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from .delays import F64

# Steps that the guide reads.
WINDOW = 16
_STATE, _HIDDEN = 6, 32
_BATCH, _RATE = 16, 0.01
# Of a logarithm: no time is known better than to 1 %.
_LEAST_DEVIATION = 0.01


class StateSpaceModel(nn.Module):
    """The model and its guide over n workers; made by `fit`.

    `centre` is the mean logarithm of each worker's times, float32 [n], `scale` their standard deviation around it.
    """

    def __init__(self, centre: Tensor, scale: float) -> None:
        super().__init__()
        workers = len(centre)
        self.centre, self.scale = centre, scale
        self.reader = nn.GRU(workers, _HIDDEN)
        self.guide = nn.Linear(_HIDDEN, 2 * _STATE)
        self.gate = nn.Linear(_STATE, _STATE)
        self.moved = nn.Sequential(nn.Linear(_STATE, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _STATE))
        self.spread = nn.Linear(_STATE, _STATE)
        self.emission = nn.Sequential(nn.Linear(_STATE, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, 2 * workers))

    def transition(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the next state: [..., _STATE] to two of that shape."""
        gate = torch.sigmoid(self.gate(state))
        return (1 - gate) * state + gate * self.moved(state), softplus(self.spread(state)) + 1e-3

    def emit(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the standardised logarithms: [..., _STATE] to two of [..., n]."""
        mean, spread = self.emission(state).chunk(2, dim=-1)
        return mean, softplus(spread) + _LEAST_DEVIATION / self.scale

    def infer(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """The guide: mean and standard deviation of each step's state from standardised times [steps, windows, n]."""
        mean, spread = self.guide(self.reader(windows)[0]).chunk(2, dim=-1)
        return mean, softplus(spread) + 1e-3

    def standardised(self, seconds: Tensor) -> Tensor:
        """Logarithms of times [..., n], centred and scaled."""
        return (seconds.log() - self.centre) / self.scale

    def lower_bound(self, windows: Tensor, draws: torch.Generator) -> Tensor:
        """The evidence lower bound a window and step, [], of standardised times [steps, windows, n]."""
        guided, spread = self.infer(windows)
        # One draw a step, by which gradients pass (reparametrised); the model's prior of each step is the transition
        # from the draw of the step before, of the first step a standard normal.
        states = guided + spread * torch.randn(guided.shape, generator=draws)
        means, deviations = self.transition(states[:-1])
        means = torch.cat([torch.zeros_like(guided[:1]), means])
        deviations = torch.cat([torch.ones_like(guided[:1]), deviations])
        # KL(N(guided, spread) || N(means, deviations)), in closed form.
        divergence = (deviations / spread).log() + (spread**2 + (guided - means) ** 2) / (2 * deviations**2) - 0.5
        centre, width = self.emit(states)
        likelihood = -((windows - centre) ** 2) / (2 * width**2) - width.log() - 0.5 * math.log(2 * math.pi)
        return (likelihood.sum(dim=-1) - divergence.sum(dim=-1)).mean()

    @torch.no_grad()
    def forecast(self, window: Tensor, count: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """The coming step's standardised times after a window [steps, n]: `count` pairs of means and deviations."""
        guided, spread = (each[-1].expand(count, -1) for each in self.infer(window[:, None]))
        mean, deviation = self.transition(guided + spread * torch.randn(guided.shape, generator=draws))
        return self.emit(mean + deviation * torch.randn(mean.shape, generator=draws))


def fit(times: F64, seed: int, iterations: int = 800) -> StateSpaceModel:
    """Trains model and guide on journalled times (seconds [steps, n], all above 0, more than 16 steps).

    It takes some seconds of CPU time; the same seed gives the same model on the same machine. Each iteration of Adam
    takes 16 windows.
    """
    logarithms = torch.from_numpy(times).log().float()
    centre = logarithms.mean(dim=0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = StateSpaceModel(centre, float((logarithms - centre).std()) + 1e-6)
    draws = torch.Generator().manual_seed(seed)
    data = model.standardised(torch.from_numpy(times).float())
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, iterations)
    for _ in range(iterations):
        starts = torch.randint(len(data) - WINDOW + 1, (_BATCH,), generator=draws)
        windows = torch.stack([data[start : start + WINDOW] for start in starts.tolist()], dim=1)
        optimizer.zero_grad()
        (-model.lower_bound(windows, draws)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        decay.step()
    return model.eval()


class StateSpace:
    """A trained model as a predictor (`torusgd.synchrony.cutoff.Predictor`) after known steps.

    `past` are the seconds [steps, n] of the steps before, at least one.
    """

    def __init__(self, model: StateSpaceModel, past: F64, seed: int) -> None:
        self._model, self._draws = model, torch.Generator().manual_seed(seed)
        self._window = model.standardised(torch.from_numpy(past[-WINDOW:]).float())

    def samples(self, draws: int) -> F64:
        mean, deviation = self._model.forecast(self._window, draws, self._draws)
        drawn = mean + deviation * torch.randn(mean.shape, generator=self._draws)
        return np.asarray((drawn * self._model.scale + self._model.centre).exp().double().numpy())

    def observe(self, seconds: F64, cutoff: float) -> None:
        left_out = torch.from_numpy(np.isnan(seconds))
        known = torch.from_numpy(np.where(np.isnan(seconds), cutoff, seconds)).float()
        times = self._model.standardised(known)
        if left_out.any():
            times = torch.where(left_out, self._beyond(times), times)
        self._window = torch.cat([self._window, times[None]])[-WINDOW:]

    def _beyond(self, limit: Tensor) -> Tensor:
        """A draw above `limit` [n] from one joint prediction: its normals, truncated there."""
        mean, deviation = (each[0].double() for each in self._model.forecast(self._window, 1, self._draws))
        below = torch.special.ndtr((limit - mean) / deviation)
        chances = below + (1 - below) * torch.rand(len(mean), generator=self._draws, dtype=torch.float64)
        drawn = mean + deviation * torch.special.ndtri(chances.clamp(1e-9, 1 - 1e-9))
        return torch.maximum(drawn.float(), limit)
