"""Train a policy with REINFORCE and a baseline on a simulated cart and pole."""

import argparse
import math
import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=128)
parser.add_argument("--horizon", type=int, default=40)
parser.add_argument("--episodes", type=int, default=100_000)
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--mended", choices=["rollout"])
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class CartPole:
    """A pole on a cart, Euler steps of 20 ms; the episode goes on for the whole horizon."""

    def reset(self):
        self.state = [random.uniform(-0.05, 0.05) for _ in range(4)]
        return self.state

    def step(self, action):
        x, x_dot, theta, theta_dot = self.state
        force = 10.0 if action == 1 else -10.0
        cos, sin = math.cos(theta), math.sin(theta)
        temp = (force + 0.05 * theta_dot**2 * sin) / 1.1
        theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        x_acc = temp - 0.05 * theta_acc * cos / 1.1
        x, x_dot = x + 0.02 * x_dot, x_dot + 0.02 * x_acc
        theta, theta_dot = theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc
        fell = abs(x) > 2.4 or abs(theta) > 0.21
        self.state = [random.uniform(-0.05, 0.05) for _ in range(4)] if fell else [x, x_dot, theta, theta_dot]
        return self.state, 0.0 if fell else 1.0


class Policy(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.affine = nn.Linear(4, hidden)
        self.action_head = nn.Linear(hidden, 2)
        self.value_head = nn.Linear(hidden, 1)

    def forward(self, x):
        x = F.relu(self.affine(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


def select_action(policy, state):
    state = torch.tensor(state, dtype=torch.float32).to(device)
    probs, value = policy(state)
    m = Categorical(probs)
    action = m.sample()
    return action.item(), m.log_prob(action), value


def rollout(policy, env):
    state = env.reset()
    log_probs, values, rewards = [], [], []
    for _ in range(args.horizon):
        action, log_prob, value = select_action(policy, state)
        state, reward = env.step(action)
        log_probs.append(log_prob)
        values.append(value)
        rewards.append(reward)
    return torch.stack(log_probs), torch.cat(values), rewards


def rollout_without_graph(policy, env):
    """Act without gradients, then one batched forward over what was seen."""
    states, actions, rewards = [], [], []
    state = env.reset()
    affine, head = policy.affine, policy.action_head
    with torch.no_grad():
        w1, b1, w2, b2 = (p.cpu().numpy() for p in (affine.weight, affine.bias, head.weight, head.bias))
    for _ in range(args.horizon):
        logits = w2 @ (w1 @ state + b1).clip(min=0) + b2
        action = int(random.random() < 1 / (1 + math.exp(float(logits[0] - logits[1]))))
        states.append(state)
        actions.append(action)
        state, reward = env.step(action)
        rewards.append(reward)
    probs, values = policy(torch.tensor(states, dtype=torch.float32).to(device))
    return Categorical(probs).log_prob(torch.tensor(actions, device=device)), values.squeeze(-1), rewards


def main():
    torch.manual_seed(0)
    random.seed(0)
    env, policy = CartPole(), Policy(args.hidden).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-2)
    collect = rollout_without_graph if args.mended == "rollout" else rollout
    for episode in range(args.episodes):
        log_probs, values, rewards = collect(policy, env)
        returns, ret = deque(), 0.0
        for reward in reversed(rewards):
            ret = reward + args.gamma * ret
            returns.appendleft(ret)
        returns = torch.tensor(list(returns), device=device)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        advantage = returns - values.detach()
        loss = -(log_probs * advantage).sum() + F.smooth_l1_loss(values, returns, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if episode % 50 == 0:
            print(f"episode {episode} reward {sum(rewards):.1f} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
