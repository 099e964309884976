"""``lowbit bench``: the time of what was certified, beside other backends and the speed of memory.

In the order of reading: `targets` (which backends), `inputs` (what they multiply), `reading` (the speed of memory),
`rounds` (the measurement), `intervals` (medians), `worker` (the process that measures), `report` (tables and pictures),
`command` (``lowbit bench``).
"""
