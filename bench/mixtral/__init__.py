"""A small Mixtral that this repository trains, what its routing is like, and the paper's Table 2 replayed from it.

In the order in which each is made of those before it:

=============== =============== ====================================================================================
file            written by      holds
=============== =============== ====================================================================================
`model`         `train`         the checkpoint directory, float16
training.json   `train`         settings; bits per byte on the last tenth of each text, and there the share of each
                                layer's experts; time, machine, torch, threads; the sum of each file of `model`; the
                                curve of the training: mean bits per byte since the point before, and balance loss
routings.npz    `record`        which experts each layer ran and guessed, token by token (`recordings`)
table2.json     `table2`        for each machine and number of bits the preset, and a row for each way to run: tokens a
                                second and seconds a token in virtual time; bytes copied a token, and the seconds that
                                the link needs for them; the most bytes of the device; `ratio` to naive loading; what
                                the paper printed, how it is read (errata M8), its ratio; `residual_seconds`, paper
                                less virtual; `implied_gb` (`paper.implied_gb`) and what the link carries, GB/s
=============== =============== ====================================================================================

In `training.json` settings are the options of `train` and the constants at its head: weight of the balance loss, weight
decay, limit of the gradient's norm, steps of warm-up, the last learning rate as a part of the highest, and from which
part of the steps on sequences are long. Every JSON file names the weights that it comes from by their sums.
"""
