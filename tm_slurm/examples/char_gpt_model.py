"""A byte-level GPT: pre-normalised decoder blocks, causal attention with rotary positions."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from tm_slurm.examples.char_gpt_options import ModelOptions

BYTES = 256
_SLOWEST_TURN = 1000  # bytes: the longest wave length of the rotary positions, divided by 2 pi


class Block(nn.Module):
    """Attention, then a feed-forward layer of four times the width, each added to its input."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        width = options.width
        self.head_width = width // options.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.forward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, hidden: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        projected = self.query_key_value(self.attention_norm(hidden))
        query, key, value = projected.view(batch, length, 3, -1, self.head_width).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            turned(query, turn), turned(key, turn), value, is_causal=True
        )
        attended = attended.transpose(1, 2).flatten(2)
        hidden = hidden + self.dropout(self.attention_out(attended))
        expanded = functional.gelu(self.up(self.forward_norm(hidden)), approximate="tanh")
        out: torch.Tensor = hidden + self.dropout(self.down(expanded))
        return out


class CharGpt(nn.Module):
    """Logits of the next byte, [batch, length, 256], for bytes [batch, length].

    After `keep_stage` it is one stage of a pipeline: between stages go hidden values, [batch, length, width].
    """

    embedding: nn.Embedding | None
    norm: nn.LayerNorm | None
    head: nn.Linear | None

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, options.width)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, BYTES, bias=False)
        self._pairs = options.width // options.heads // 2
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.02)
        for name, parameter in self.blocks.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("attention_out.weight", "down.weight"))
                shrink = math.sqrt(2 * options.layers) if residual else 1.0
                nn.init.normal_(parameter, std=1 / (shrink * math.sqrt(parameter.shape[1])))

    def keep_stage(self, stage: int, stages: int) -> None:
        """Drops all layers but those of one stage of so many; the first has the embedding, the last the
        head."""
        each = len(self.blocks) // stages
        self.blocks = self.blocks[stage * each : (stage + 1) * each]
        if stage > 0:
            self.embedding = None
        if stage < stages - 1:
            self.norm = self.head = None

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = text if self.embedding is None else self.dropout(self.embedding(text))
        turn = turns(text.shape[1], self._pairs, text.device)
        for block in self.blocks:
            hidden = block(hidden, turn)
        if self.head is None or self.norm is None:
            return hidden
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def turns(length: int, pairs: int, device: torch.device) -> torch.Tensor:
    """Cosine and sine, [2, length, pairs], of how far each pair of features is turned at each position."""
    speed = _SLOWEST_TURN ** (-torch.arange(pairs, device=device) / pairs)
    angle = torch.outer(torch.arange(length, device=device), speed)
    return torch.stack((angle.cos(), angle.sin()))


def turned(features: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Features [batch, heads, length, 2 * pairs] with each pair turned by its position."""
    cosine, sine = turn
    left, right = features.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)
