"""Small models, trained here, for claims about algorithms that change weights or route tokens.

Published weights that a fresh machine can get are quantised already. These are not: `training.models` lists them,
`training.network` computes them in torch, `training.train` trains one, and `training.writing` writes it as a checkpoint
directory of the usual layout, which everything else of lowbit reads.
"""
