"""A decoder on a device: what stays there, what is brought, and what a token meets on its way."""

from lowbit_cuda.model.decoder import Decoder, State

__all__ = ["Decoder", "State"]
