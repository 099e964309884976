"""Mixture of experts: routing, and experts that are loaded when they are needed.

`routing` chooses experts, `offload` says which of them lie on the device, `offload_engine` is what an engine has to
keep, and `bounds` limits the error of routing.
"""
