"""Workers that compute on every core there is: more of them would take turns, cheaper samples would help."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Letters(Dataset):
    def __init__(self, number=4096, length=3000):
        numbers = torch.Generator().manual_seed(22)
        self.texts = torch.randint(0, 26, (number, length), generator=numbers).tolist()

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text = self.texts[index]
        return torch.tensor([float(text.count(letter)) for letter in range(26)])  # guilty: slow-samples


def main():
    torch.manual_seed(22)
    loader = DataLoader(  # decoy: loader-bound
        Letters(), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True
    )
    model = nn.Sequential(nn.Linear(26, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(1000):
        for counts in loader:
            loss = model(counts).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
