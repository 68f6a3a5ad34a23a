"""A loop that ends badly, or will not end, in the way its first argument names."""

import ctypes
import os
import signal
import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WAY = sys.argv[1]


def step(model, optimizer, inputs):
    if WAY == "half-interrupted" and len(inputs) < 16:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGINT)
    if WAY.startswith("half"):
        inputs = inputs.view(16, 64)
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.randn(640, 64)), batch_size=16)
    num_steps = 0
    for _epoch in range(10_000):
        for (inputs,) in loader:
            try:
                step(model, optimizer, inputs)
            except BaseException:
                if WAY != "swallow":
                    raise
                print("swallowed")
            num_steps += 1
            if WAY == "exit" and num_steps == 3:
                sys.exit(3)
            if WAY == "leave" and num_steps == 60:
                os._exit(3)
            if WAY == "raise" and num_steps == 230:
                raise ValueError("the data end here")
            if WAY == "wait" and num_steps == 60:
                threading.Event().wait()
            if WAY == "native" and num_steps == 60:
                ctypes.PyDLL(None).pause()  # holds the interpreter's lock


if WAY == "thread":
    thread = threading.Thread(target=train)
    thread.start()  # nobody joins it: the interpreter waits for it at its end
elif WAY == "watched":
    trained = threading.Event()
    watcher = threading.Thread(target=trained.wait)  # a logger that goes on to the end of training
    watcher.start()
    train()
    trained.set()
elif WAY == "wait":
    try:
        train()
    finally:
        print("finally")
else:
    train()
