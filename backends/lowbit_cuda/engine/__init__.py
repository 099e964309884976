"""The offload engine: section 3 of the paper, on a port. It knows neither the device nor the model.

`placement` decides which expert lies where, `storage` holds the experts' bytes, `transfers` orders copies and kernels,
and `engine` carries out the decisions. `prefetch_trial` and `token_timer` measure whether prefetching pays, `cost`
chooses what the host computes, and `recovery` restores the initial placement.
"""
