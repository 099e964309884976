"""Mixture of experts: routing, and experts that are loaded when they are needed.

`routing` chooses experts, `offload` decides which of them are on the device, `offload_engine` specifies an engine, and
`bounds` limits the error of routing.
"""
