"""``lowbit bench``: the time of what was certified, beside other backends and the speed of memory.

In the order of reading: `targets` (which backends), `inputs` (what they multiply), `layers` (what else they compute),
`judging` and `judging_layers` (whether a result is right), `reading` (the speed of memory), `rounds` (the measurement),
`intervals` (medians), `worker` (the process that measures), `comparison` (that process, seen from the command),
`report` (tables and pictures), `command` (``lowbit bench``).
"""
