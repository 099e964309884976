"""A decoder on a device whose memory need not hold all experts.

Begin with `decoder`. `block` and `sparse` are the two halves of a layer. `matrices`, `workspace` and `budget` say what
lies on the device and how much memory it takes; `loading` copies weights there; `arena` frees everything at once.
"""
