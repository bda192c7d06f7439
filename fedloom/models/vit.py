"""A small vision transformer (Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021)."""

from typing import Literal

import torch
from torch import Tensor, nn

from fedloom.core.errors import UserError
from fedloom.core.options import Count, Share
from fedloom.core.protocols import Shape
from fedloom.core.rng import Dropout
from fedloom.models.base import SplitModel, register


class Attention(nn.Module):
    """Multi-head self-attention (Vaswani et al., 2017).

    Written as matrix products: fused attention kernels have no rule for vectorised clients (`engine.cohort`).
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [B, T, width] to [B, T, width]."""
        batch, tokens, width = x.shape
        each = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (part.reshape(each).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = (q @ k.transpose(2, 3) * each[-1] ** -0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Pre-norm transformer block: attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [B, T, width] to [B, T, width]."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Embedding(nn.Module):
    """Patches of an image as tokens, with learnt positions and, if wanted, a class token before them."""

    def __init__(self, shape: Shape, patch: int, width: int, class_token: bool):
        super().__init__()
        channels, height, side = shape
        self.patches = nn.Conv2d(channels, width, patch, patch)
        count = (height // patch) * (side // patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width)) if class_token else None
        self.positions = nn.Parameter(torch.empty(1, count + class_token, width))
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to tokens [B, T, width]."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        if self.token is not None:
            tokens = torch.cat([self.token.expand(tokens.shape[0], -1, -1), tokens], 1)
        return tokens + self.positions


class Pool(nn.Module):
    """The mean of all tokens, or the first one (the class token)."""

    def __init__(self, kind: Literal["mean", "token"]):
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [B, T, width] to [B, width]."""
        return x.mean(1) if self.kind == "mean" else x[:, 0]


@register("vit")
class ViT(SplitModel):
    """A small vision transformer: pre-norm blocks on image patches (Dosovitskiy et al., 2021).

    `patch` is the side of a patch in pixels; 0 chooses the largest side up to 16 that gives at least 4 × 4 patches and
    divides the image. `pool: mean` averages the tokens; `token` uses a class token. The perceptrons have the hidden
    width 4 · `width`.
    """

    smallest = 4

    def __init__(
        self,
        shape: Shape,
        classes: int,
        *,
        patch: int = 0,
        width: Count = 64,
        depth: Count = 4,
        heads: Count = 4,
        pool: Literal["mean", "token"] = "mean",
        dropout: Share = 0.0,
    ):
        super().__init__()
        _, height, side = shape
        if width % heads:
            raise UserError(f"model.heads = {heads}: must divide model.width = {width}")
        patch = patch or _patch(height, side)
        if patch < 1 or height % patch or side % patch:
            raise UserError(
                f"model.patch = {patch}: must divide the height and width of the images, {height} and {side}; choose "
                f"one of {', '.join(map(str, _divisors(height, side)))}"
            )
        self.features = width
        self.taps = tuple(f"extractor.block{number}" for number in range(1, depth + 1))
        self.extractor = nn.Sequential()
        self.extractor.add_module("embedding", Embedding(shape, patch, width, pool == "token"))
        for tap in self.taps:
            self.extractor.add_module(tap.removeprefix("extractor."), Block(width, heads, 4 * width, dropout))
        self.extractor.add_module("norm", nn.LayerNorm(width))
        self.extractor.add_module("pool", Pool(pool))
        self.head = nn.Linear(width, classes)


def _divisors(height: int, width: int) -> list[int]:
    return [side for side in range(1, min(height, width) + 1) if height % side == width % side == 0]


def _patch(height: int, width: int) -> int:
    """Return the largest side up to 16 that divides the image and gives at least 4 × 4 patches; at least 1."""
    most = max(1, min(16, height // 4, width // 4))
    return max(side for side in _divisors(height, width) if side <= most)
