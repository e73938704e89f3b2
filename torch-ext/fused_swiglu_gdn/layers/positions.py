"""Queries that are scaled by the position of their token."""

import torch


def scale_by_position(positions: torch.Tensor, rope_parameters: dict) -> torch.Tensor:
    """The factor of a token's queries (Llama 4, Ministral 3, Mistral 4), [B, T, 1, 1]; positions
    [B, T]."""
    beta = rope_parameters["llama_4_scaling_beta"]
    most = rope_parameters["original_max_position_embeddings"]
    return (1 + beta * torch.log(1 + torch.floor(positions / most)))[:, :, None, None]
