"""A policy with MultiMax next to one with softmax: policy gradients on CartPole, whose equations are below.

The policy chooses among five forces. Both learn by REINFORCE with the mean return as a baseline, from the same start;
all poles of a batch are simulated at once. Run: python examples/policy.py [--steps 60] [--seeds 3]
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

import multimax

FORCES = torch.linspace(-10.0, 10.0, 5)
LONGEST, POLES, DISCOUNT = 200, 32, 0.99


def push(state: Tensor, force: Tensor) -> Tensor:
    """The cart and its pole 0.02 s later (Barto, Sutton, Anderson 1983); state is (..., 4)."""
    gravity, cart, pole, half_length, seconds = 9.8, 1.0, 0.1, 0.5, 0.02
    _, x_dot, theta, theta_dot = state.unbind(-1)
    sin, cos, total = theta.sin(), theta.cos(), cart + pole
    pressure = (force + pole * half_length * theta_dot.square() * sin) / total
    theta_dotdot = (gravity * sin - cos * pressure) / (half_length * (4 / 3 - pole * cos.square() / total))
    x_dotdot = pressure - pole * half_length * theta_dotdot * cos / total
    step = torch.stack([x_dot, x_dotdot, theta_dot, theta_dotdot], -1)
    return state + seconds * step


def stands(state: Tensor) -> Tensor:
    """Whether the cart is on its track and the pole within 12 degrees."""
    return (state[..., 0].abs() < 2.4) & (state[..., 2].abs() < 12 * torch.pi / 180)


def episodes(policy: Callable[[Tensor], Distribution]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the actions, entropies and which steps were taken, (steps, poles) each."""
    state = torch.rand(POLES, 4) * 0.1 - 0.05
    alive = torch.ones(POLES, dtype=torch.bool)
    log_probs, entropies, taken = [], [], []
    while alive.any() and len(taken) < LONGEST:
        actions = policy(state)
        action = actions.sample()
        log_probs.append(actions.log_prob(action))
        entropies.append(actions.entropy().detach())
        taken.append(alive)
        state = push(state, FORCES[action])
        alive = alive & stands(state)
    return torch.stack(log_probs), torch.stack(entropies), torch.stack(taken).float()


def train(with_multimax: bool, steps: int, seed: int) -> tuple[float, float, float]:
    """Loss, mean length and mean entropy of the last fifth of the training."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, len(FORCES)))
    layer = multimax.MultiMax(init="identity")

    def policy(state: Tensor) -> Distribution:
        if with_multimax:
            return multimax.MultiMaxCategorical(model(state), *layer.parameters_in_use())
        return Categorical(logits=model(state))

    optimizer = torch.optim.Adam([*model.parameters(), *layer.parameters()], 1e-2)
    history = []
    for _ in range(steps):
        log_probs, entropies, taken = episodes(policy)
        returns = torch.zeros_like(taken)
        following = torch.zeros(POLES)
        for t in reversed(range(len(taken))):
            following = returns[t] = taken[t] * (1 + DISCOUNT * following)
        baseline = (returns.sum(1) / taken.sum(1).clamp(min=1))[:, None]
        advantage = (returns - baseline) * taken
        loss = -(log_probs * advantage / advantage.std().clamp(min=1e-6)).sum() / taken.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append((loss.item(), taken.sum(0).mean().item(), (entropies * taken).sum().item() / taken.sum().item()))
    last = torch.tensor(history[-max(steps // 5, 1) :]).mean(0)
    return tuple(last.tolist())


def main() -> None:
    """Both policies, over seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="updates, of 32 episodes each (default 60)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, from different starts (default 1)")
    options = parser.parse_args()
    for name, with_multimax in (("softmax", False), ("multimax", True)):
        runs = torch.tensor([train(with_multimax, options.steps, seed) for seed in range(options.seeds)])
        loss, length, entropy = runs.mean(0).tolist()
        spread = f" (from {runs[:, 1].min():.0f} to {runs[:, 1].max():.0f})" if options.seeds > 1 else ""
        print(f"{name + ':':10s}loss {loss:+.4f}, {length:.0f} of {LONGEST} steps{spread}, entropy {entropy:.2f}")


if __name__ == "__main__":
    main()
