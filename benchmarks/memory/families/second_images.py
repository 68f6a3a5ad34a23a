"""Second unseen set, images and films: convolutions, masked patches, diffusion, codes, adversaries, play."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory.configuration import Configuration, Subject, image_batch, image_loss


def _regnet() -> nn.Module:
    from transformers import RegNetConfig, RegNetForImageClassification

    shape = {"hidden_sizes": [64, 128, 320, 768], "depths": [1, 3, 8, 2], "groups_width": 16}
    return RegNetForImageClassification(RegNetConfig(**shape, layer_type="y", num_labels=1000))


def _mobilenet() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=1000))


def _masked_patches() -> nn.Module:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    shape = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 2048}
    decoder = {"decoder_hidden_size": 256, "decoder_num_hidden_layers": 4, "decoder_intermediate_size": 1024}
    return ViTMAEForPreTraining(ViTMAEConfig(**shape, **decoder, decoder_num_attention_heads=8))


def _masked_patches_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(pixel_values=batch["pixel_values"]).loss
    return loss


class FilmBlock(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv3d(num_in, num_out, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv3d(num_out, num_out, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm3d(num_out) for _ in range(2))
        self.past = nn.Conv3d(num_in, num_out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.first(x)), inplace=True)
        return F.relu(self.norms[1](self.second(hidden)) + self.past(x), inplace=True)


class Films(nn.Module):
    """Convolutions over time, height and width."""

    def __init__(self) -> None:
        super().__init__()
        widths = [32, 64, 128, 256]
        self.stem = nn.Conv3d(3, widths[0], (3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3), bias=False)
        self.blocks = nn.Sequential(*(FilmBlock(a, b, 2) for a, b in pairwise(widths)))
        self.head = nn.Linear(widths[-1], 400)

    def forward(self, films: Tensor) -> Tensor:
        hidden = self.blocks(F.relu(self.stem(films), inplace=True))
        scores: Tensor = self.head(hidden.mean(dim=(2, 3, 4)))
        return scores


def _film_batch(*, batch_size: int, frames: int) -> dict[str, Tensor]:
    return {
        "films": torch.randn(batch_size, 3, frames, 112, 112),
        "labels": torch.randint(0, 400, (batch_size,)),
    }


def _film_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["films"]), batch["labels"])


class Detection(nn.Module):
    """A convolutional backbone, then nn.Transformer from places to queries: classes and boxes."""

    def __init__(self, *, width: int = 256, num_queries: int = 100) -> None:
        super().__init__()
        widths = [3, 64, 128, 256, 512]
        self.backbone = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
                for a, b in pairwise(widths)
            ),
            nn.Conv2d(widths[-1], width, 1),
        )
        self.transformer = nn.Transformer(width, 8, 4, 4, 1024, batch_first=True)
        self.queries = nn.Parameter(torch.randn(num_queries, width))
        self.places = nn.Parameter(torch.randn(400, width))
        self.classes, self.boxes = nn.Linear(width, 92), nn.Linear(width, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        places = self.backbone(images).flatten(2).transpose(1, 2)
        queries = self.queries.expand(len(images), -1, -1)
        found = self.transformer(places + self.places[: places.shape[1]], queries)
        return self.classes(found), self.boxes(found).sigmoid()


def _detection_batch(*, batch_size: int, image: int) -> dict[str, Tensor]:
    return {
        "images": torch.randn(batch_size, 3, image, image),
        "classes": torch.randint(0, 92, (batch_size, 100)),
        "boxes": torch.rand(batch_size, 100, 4),
    }


def _detection_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    classes, boxes = model(batch["images"])
    return F.cross_entropy(classes.flatten(0, 1), batch["classes"].flatten()) + 5 * F.l1_loss(
        boxes.float(), batch["boxes"]
    )


class DiffusionBlock(nn.Module):
    """Attention and two layers, each scaled and shifted by the time of the noise."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        parts = self.condition(time)[:, None].chunk(6, dim=-1)
        x = x + parts[2] * self.attend(self.norms[0](x) * (1 + parts[1]) + parts[0])
        return x + parts[5] * self.layers(self.norms[1](x) * (1 + parts[4]) + parts[3])  # type: ignore[no-any-return]

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        found: Tensor = self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return found


class DiffusionTransformer(nn.Module):
    def __init__(self, *, width: int = 576, num_heads: int = 8, num_layers: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(DiffusionBlock(width, num_heads) for _ in range(num_layers))
        self.head = nn.Linear(width, 4 * 4)

    def forward(self, latents: Tensor, times: Tensor) -> Tensor:
        turns = torch.arange(128, device=times.device) * times[:, None]
        time = self.time(torch.cat([turns.cos(), turns.sin()], dim=-1))
        x = self.patches(latents).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, time)
        side = latents.shape[-1] // 2
        found = self.head(x).unflatten(1, (side, side)).unflatten(-1, (4, 2, 2))
        return found.permute(0, 3, 1, 4, 2, 5).reshape(latents.shape)  # type: ignore[no-any-return]


def _latent_batch(*, batch_size: int, latent: int) -> dict[str, Tensor]:
    return {"latents": torch.randn(batch_size, 4, latent, latent), "times": torch.rand(batch_size)}


def _denoise(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    noise = torch.randn_like(batch["latents"])
    share = batch["times"][:, None, None, None]
    found = model((1 - share) * batch["latents"] + share * noise, batch["times"])
    return F.mse_loss(found.float(), noise)


class Codes(nn.Module):
    """Images to codes of a book and back: the nearest code, passed straight through."""

    def __init__(self, *, width: int = 128, num_codes: int = 1024) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(2 * width, width, 3, 1, 1),
        )  # fmt: skip
        self.book = nn.Embedding(num_codes, width)
        self.up = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, 1, 1), nn.Upsample(scale_factor=2), nn.ReLU(),
            nn.Conv2d(2 * width, width, 3, 1, 1), nn.Upsample(scale_factor=2), nn.ReLU(),
            nn.Conv2d(width, 3, 3, 1, 1),
        )  # fmt: skip

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        sent = self.down(images).permute(0, 2, 3, 1)
        flat = sent.flatten(0, 2).float()
        nearest = torch.cdist(flat, self.book.weight).argmin(dim=1)
        codes = self.book(nearest).view(sent.shape)
        commitment = F.mse_loss(sent.float(), codes.detach()) + F.mse_loss(codes, sent.detach().float())
        passed = sent + (codes - sent).detach()
        return self.up(passed.permute(0, 3, 1, 2)), commitment


def _codes_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found, commitment = model(batch["pixel_values"])
    return F.l1_loss(found.float(), batch["pixel_values"]) + commitment


class Adversaries(nn.Module):
    """One draws images from noise with transposed convolutions, the other tells them from real ones."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [8 * width, 4 * width, 2 * width, width]
        drawn: list[nn.Module] = [nn.ConvTranspose2d(128, widths[0], 4)]
        for a, b in pairwise(widths):
            drawn += [nn.BatchNorm2d(a), nn.ReLU(inplace=True), nn.ConvTranspose2d(a, b, 4, 2, 1)]
        self.draw = nn.Sequential(*drawn, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())
        told: list[nn.Module] = []
        for a, b in zip([3, *reversed(widths)], [*reversed(widths)], strict=False):
            layer = nn.utils.parametrizations.spectral_norm(nn.Conv2d(a, b, 4, 2, 1))
            told += [layer, nn.LeakyReLU(0.2, inplace=True)]
        self.tell = nn.Sequential(*told, nn.Conv2d(widths[0], 1, 4))


def _adversaries_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Both at once: the one that tells does not see where the drawn images came from."""
    real = batch["pixel_values"]
    drawn = model.draw(torch.randn(len(real), 128, 1, 1, device=real.device))  # type: ignore[operator]
    told: Any = model.tell
    known = F.relu(1 - told(real)).mean() + F.relu(1 + told(drawn.detach())).mean()
    result: Tensor = known - told(drawn).mean()
    return result


class Play(nn.Module):
    """A policy and a value from stacked frames."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        )  # fmt: skip
        self.policy, self.value = nn.Linear(512, 18), nn.Linear(512, 1)

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.see(frames.float() / 255)
        return self.policy(hidden), self.value(hidden).squeeze(1)


def _play_batch(*, batch_size: int) -> dict[str, Tensor]:
    return {
        "frames": torch.randint(0, 256, (batch_size, 4, 84, 84), dtype=torch.uint8),
        "actions": torch.randint(0, 18, (batch_size,)),
        "before": torch.rand(batch_size),
        "gains": torch.randn(batch_size),
    }


def _play_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores, values = model(batch["frames"])
    chances = torch.distributions.Categorical(logits=scores.float(), validate_args=False)
    ratio = (chances.log_prob(batch["actions"]) - batch["before"]).exp()
    gained = torch.min(ratio * batch["gains"], ratio.clamp(0.8, 1.2) * batch["gains"]).mean()
    result: Tensor = F.mse_loss(values.float(), batch["gains"]) - gained - 0.01 * chances.entropy().mean()
    return result


def _subject(family: str, make_model: Any, make_batch: Any, loss: Any) -> Subject:
    return Subject(family=family, name=family, make_model=make_model, make_batch=make_batch, loss=loss)


REGNET = _subject("regnet", _regnet, image_batch, image_loss)
MOBILENET = _subject("mobilenet", _mobilenet, image_batch, image_loss)
MASKED_PATCHES = _subject("masked-patches", _masked_patches, image_batch, _masked_patches_loss)
FILMS = _subject("films", Films, _film_batch, _film_loss)
DETECTION = _subject("detection", Detection, _detection_batch, _detection_loss)
DIFFUSION = _subject("diffusion-transformer", DiffusionTransformer, _latent_batch, _denoise)
CODES = _subject("codes", Codes, image_batch, _codes_loss)
ADVERSARIES = _subject("adversaries", Adversaries, image_batch, _adversaries_loss)
PLAY = _subject("play", Play, _play_batch, _play_loss)

CONFIGURATIONS: list[Configuration] = [
    REGNET.at(64, sizes={"image": 224}, precision="bf16", optimizer="sgd-momentum"),
    MOBILENET.at(64, sizes={"image": 224}, precision="fp32", optimizer="rmsprop"),
    MASKED_PATCHES.at(128, sizes={"image": 224}, precision="bf16"),
    FILMS.at(32, sizes={"frames": 16}, precision="fp32", optimizer="sgd-momentum"),
    FILMS.at(64, sizes={"frames": 16}, precision="bf16"),
    DETECTION.at(16, sizes={"image": 320}, precision="fp16", clip_norm=0.1),
    DIFFUSION.at(64, sizes={"latent": 32}, precision="bf16", optimizer="adamw-fused"),
    CODES.at(64, sizes={"image": 128}, precision="fp32"),
    ADVERSARIES.at(1024, sizes={"image": 64}, precision="bf16", optimizer="adam"),
    PLAY.at(4096, precision="fp32", optimizer="adam", clip_norm=0.5),
]
