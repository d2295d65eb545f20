"""A small transformer that reads an image patch by patch."""

from __future__ import annotations

from typing import Any

from slurmdl.errors import UsageError
from slurmdl.train.trainer.models.arguments import parse_ints, require_image_shape


def transformer(arguments: str, shape: tuple[int, ...], classes: int) -> Any:
    """Encoder layers over square patches of an image, and the mean of what they make of them.

    `arguments` are the width, the number of layers, and of heads, by default 64,2,4. A patch's side is an eighth of
    the image's. There is no dropout, so that nothing is random but the first parameters.

    References
    ----------
    A. Dosovitskiy et al.: An image is worth 16x16 words. ICLR 2021. arXiv:2010.11929
    """
    import torch
    from torch import nn

    channels, height, across = require_image_shape("transformer", shape)
    found = parse_ints("transformer", arguments, (64, 2, 4), "WIDTH,LAYERS,HEADS, e.g. transformer:64,2,4,")
    if len(found) != 3 or found[0] % found[2]:
        raise UsageError(f"train: --model transformer:{arguments}: WIDTH,LAYERS,HEADS expected, and a width that the "
                         "heads divide, e.g. transformer:64,2,4")
    width, layers, heads = found
    side = max(min(height, across) // 8, 1)

    class Places(nn.Module):  # type: ignore[misc]
        """Adds what is learnt of each patch's place."""

        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(0.02 * torch.randn((height // side) * (across // side), width))

        def forward(self, patches: Any) -> Any:
            return patches.flatten(2).transpose(1, 2) + self.places

    class Mean(nn.Module):  # type: ignore[misc]
        def forward(self, patches: Any) -> Any:
            return patches.mean(1)

    # layers made one by one: those of TransformerEncoder are copies of one, with equal first parameters
    encoder = [nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
                                          norm_first=True) for _ in range(layers)]
    return nn.Sequential(nn.Conv2d(channels, width, side, side), Places(), *encoder, nn.LayerNorm(width), Mean(),
                         nn.Linear(width, classes))
