"""Teng and Wood's predictor of worker times: a deep state-space model with amortised inference.

A hidden state z_t of a few numbers, such as which nodes are busy, moves from step to step and makes all workers'
times together (arXiv 1803.04209; the model is Krishnan, Shalit and Sontag's deep Markov model, AAAI 2017):

    z_t ~ N(transition(z_(t-1)))        a gated mean and a diagonal variance
    x_t ~ N(emission(z_t))              logarithms of the times, independent given the state

The guide q(z_t | z_(t-1), x_1..x_t) is a network too: it is trained once, together with the model, to maximise the
evidence lower bound on journalled times, and afterwards finds the state of new times in one pass (amortised). The
coming step is then drawn: a state from the guide, the next one by the transition, times by the emission.

Unlike the paper's, times are logarithms, so that no draw is negative, and the guide's GRU reads the past alone, as a
predictor must. The sizes are ours, and so is the training: some seconds of Adam on a CPU, once, on one journal.
"""

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from .delays import F64

# Steps that the guide reads.
WINDOW = 16
STATES, ITERATIONS = 6, 800
_HIDDEN = 32
_BATCH, _RATE = 16, 0.01
# Of a logarithm: no time is known better than to 1 %.
_LEAST_DEVIATION = 0.01


class StateSpaceModel(nn.Module):
    """The model and its guide over n workers, with mean and deviation of the logarithms of times; made by `fit`."""

    def __init__(self, centre: Tensor, scale: float, states: int) -> None:
        super().__init__()
        workers = len(centre)
        self.centre, self.scale, self.states = centre, scale, states
        self.reader = nn.GRU(workers, _HIDDEN)
        self.before = nn.Linear(states, _HIDDEN)
        self.guide = nn.Linear(_HIDDEN, 2 * states)
        self.gate = nn.Linear(states, states)
        self.moved = nn.Sequential(nn.Linear(states, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, states))
        self.spread = nn.Linear(states, states)
        self.emission = nn.Sequential(nn.Linear(states, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, 2 * workers))

    def transition(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the next state: [..., states] to two of that shape."""
        gate = torch.sigmoid(self.gate(state))
        return (1 - gate) * state + gate * self.moved(state), softplus(self.spread(state)) + 1e-3

    def emit(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the standardised logarithms: [..., states] to two of [..., n]."""
        mean, spread = self.emission(state).chunk(2, dim=-1)
        return mean, softplus(spread) + _LEAST_DEVIATION / self.scale

    def infer(self, windows: Tensor, draws: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """The guide: from standardised times [steps, windows, n] each state's mean, standard deviation, and a draw that
        the next one is given, [steps, windows, states]."""
        read = self.reader(windows)[0]
        state, found = read.new_zeros(*read.shape[1:-1], self.states), []
        for step in read:
            # What was read, and the state before: their mean, as in the deep Markov model.
            mean, spread = self.guide((step + torch.tanh(self.before(state))) / 2).chunk(2, dim=-1)
            spread = softplus(spread) + 1e-3
            # By its normal draw gradients pass (reparametrised).
            state = mean + spread * torch.randn(mean.shape, generator=draws)
            found.append((mean, spread, state))
        means, spreads, states = (torch.stack(each) for each in zip(*found, strict=True))
        return means, spreads, states

    def standardised(self, seconds: Tensor) -> Tensor:
        """Logarithms of times [..., n], centred and scaled."""
        return (seconds.log() - self.centre) / self.scale

    def lower_bound(self, windows: Tensor, draws: torch.Generator) -> Tensor:
        """The evidence lower bound a window and step, [], of standardised times [steps, windows, n]."""
        # The model's prior of each step is the transition from the draw of the step before, of the first step a
        # standard normal.
        guided, spread, states = self.infer(windows, draws)
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
        states = self.infer(window[:, None].expand(-1, count, -1), draws)[2]
        mean, deviation = self.transition(states[-1])
        return self.emit(mean + deviation * torch.randn(mean.shape, generator=draws))


def fit(times: F64, seed: int, iterations: int = ITERATIONS, states: int = STATES) -> StateSpaceModel:
    """The model after all of `training`."""
    return next(islice(training(times, seed, states), iterations - 1, None)).eval()


def training(times: F64, seed: int, states: int = STATES) -> Iterator[StateSpaceModel]:
    """Trains model and guide on journalled times (seconds [steps, n], all above 0, more than 16 steps).

    Yields the model after each of ITERATIONS iterations, by Adam on 16 windows; it takes some seconds of CPU time in
    all, and the same seed gives the same model on the same machine. `states` are the numbers of the hidden state, such
    as the nodes that turn slow by themselves.
    """
    logarithms = torch.from_numpy(times).log().float()
    centre = logarithms.mean(dim=0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = StateSpaceModel(centre, float((logarithms - centre).std()) + 1e-6, states)
    draws = torch.Generator().manual_seed(seed)
    data = model.standardised(torch.from_numpy(times).float())
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, ITERATIONS)
    for _ in range(ITERATIONS):
        starts = torch.randint(len(data) - WINDOW + 1, (_BATCH,), generator=draws)
        windows = torch.stack([data[start : start + WINDOW] for start in starts.tolist()], dim=1)
        optimizer.zero_grad()
        (-model.lower_bound(windows, draws)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        decay.step()
        yield model


class StateSpace:
    """A trained model as a predictor (`synchrony.cutoff.Predictor`) after known steps, seconds [steps, n]."""

    def __init__(self, model: StateSpaceModel, past: F64, seed: int) -> None:
        self._model, self._draws = model, torch.Generator().manual_seed(seed)
        self._window = model.standardised(torch.from_numpy(past[-WINDOW:]).float())

    def samples(self, draws: int) -> F64:
        mean, deviation = self._model.forecast(self._window, draws, self._draws)
        drawn = mean + deviation * torch.randn(mean.shape, generator=self._draws)
        return np.asarray((drawn * self._model.scale + self._model.centre).exp().double().numpy())

    def observe(self, seconds: F64, cutoff: float) -> None:
        left_out = torch.from_numpy(np.isnan(seconds))
        times = self._model.standardised(torch.from_numpy(np.where(np.isnan(seconds), cutoff, seconds)).float())
        if left_out.any():
            # A draw above the cutoff from one joint prediction: its normals, truncated there.
            mean, deviation = (each[0].double() for each in self._model.forecast(self._window, 1, self._draws))
            below = torch.special.ndtr((times - mean) / deviation)
            chances = below + (1 - below) * torch.rand(len(mean), generator=self._draws, dtype=torch.float64)
            drawn = mean + deviation * torch.special.ndtri(chances.clamp(1e-9, 1 - 1e-9))
            times = torch.where(left_out, torch.maximum(drawn.float(), times), times)
        self._window = torch.cat([self._window, times[None]])[-WINDOW:]
