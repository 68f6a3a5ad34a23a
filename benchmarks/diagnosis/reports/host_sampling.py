"""Train a language model on answers that it samples itself; each token is drawn on the host.

Report: rasbt/reasoning-from-scratch#177, 46-50 tokens per second, 57-64 with the draw on the GPU.
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--mended", action="store_true")
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY, DIM, LAYERS, TOKENS = (151_936, 1024, 12, 24) if device.type == "cuda" else (512, 32, 2, 8)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x, cache):
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, -1, 32).permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
            cache[:] = k, v
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(nn.functional.silu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens, caches=None):
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[number])
        return self.head(self.norm(x))


@torch.no_grad()
def sample_response(model, prompt, temperature=0.9):
    caches = [[] for _ in model.blocks]
    tokens, next_token = [], prompt
    for _ in range(TOKENS):
        logits = model(next_token, caches)[:, -1].float()
        probas = torch.softmax(logits / temperature, dim=-1)
        if args.mended:
            next_token = torch.multinomial(probas, 1)
        else:
            next_token = torch.multinomial(probas.cpu(), 1).to(device)  # guilty: device-round-trip on cuda
        tokens.append(next_token)
    return torch.cat([prompt, *tokens], dim=1)


def reward_of(answer):
    """Made up: as if a verifier had looked at the text."""
    return float(answer.sum() % 2)


def main():
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Model().to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    prompts = torch.randint(0, VOCABULARY, (64, 16), device=device)
    baseline = 0.5
    for step in range(100_000):
        prompt = prompts[step % len(prompts)][None]
        answer = sample_response(model, prompt)
        reward = reward_of(answer.cpu())  # also: sync-in-step on cuda
        logits = model(answer[:, :-1]).float()
        scores = -nn.functional.cross_entropy(logits.flatten(0, 1), answer[:, 1:].flatten(), reduction="none")
        loss = -(reward - baseline) * scores[prompt.shape[1] - 1 :].mean()
        baseline += 0.05 * (reward - baseline)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step} reward {baseline:.2f}")


if __name__ == "__main__":
    main()
