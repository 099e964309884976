"""A decoder on a device: what stays there, what is brought, and what a token meets on its way.

`decoder` is where to begin. `block` and `sparse` are the two halves of a layer; `matrices`, `workspace` and `budget`
say what lies on the device and how much of it there may be; `loading` brings it there; `lane` gives it all back.
"""

from lowbit_cuda.model.decoder import Decoder, State

__all__ = ["Decoder", "State"]
