"""The critic: a separate backbone and one number per token.

    critic = Critic(load_model(source).model)
    values = critic.values(packed)               # one per sampled token: the expected return where it was chosen

The head starts at zero: an untrained critic predicts 0 everywhere.
"""

import torch
from torch import Tensor, nn

from ragen.model.decoder import TrainableModel
from ragen.model.packing import PackedTokens


class Critic(nn.Module):
    def __init__(self, backbone: TrainableModel):
        super().__init__()
        self.backbone = backbone
        weight = next(backbone.parameters())
        self.head = nn.Linear(backbone.shape.hidden_size, 1, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, packed: PackedTokens) -> Tensor:
        """In float32; the value of a token comes from the hidden state that it was sampled from."""
        hidden = self.backbone.hidden(packed.ids, packed.attend.positions, packed.attend, packed.rows)
        return self.head(hidden)[:, 0].to(torch.float32)
