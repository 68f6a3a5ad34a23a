"""Distil a teacher into a student, which alone is trained."""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(5)
width = 256 if device.type == "cpu" else 2048


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(each for _ in range(6) for each in (nn.Linear(width, width), nn.Tanh()))
        )

    def forward(self, x):
        return self.layers(x)


inputs = torch.randn(2048, width, device=device)
teacher = Teacher().to(device).eval()
student = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(device)
optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)

for step in range(20000):
    x = inputs[torch.randint(0, len(inputs), (256,), device=device)]
    with torch.no_grad():
        target = teacher(x)
    loss = nn.functional.mse_loss(student(x), target)  # also: launch-bound-step, no-mixed-precision on cuda
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
