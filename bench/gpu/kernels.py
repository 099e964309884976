"""Each kernel of the table on small arrays, against its meaning in numpy.

The launches are those of the selftests (`cuda_cases`), where the kernels' C++ runs without a device: each has what is
hard about its kernel, and says how far it may be from the meaning. Most may not be at all. The arrays are small enough
for compute-sanitizer, under which a kernel is a thousand times slower; `sanitizer` runs this part under it.
"""

from typing import Any

from cuda_cases import Case, cases

from gpu.parts import Answer, Setting
from lowbit_cuda.port import DevicePort, Number, Span, Stream


def run(setting: Setting) -> Answer:
    """All cases."""
    wrong, count = dict[str, str](), 0
    with setting.device() as device:
        stream = device.stream("kernels")
        for case in cases():
            count += 1
            if said := tried(device, stream, case):
                wrong[str(case)] = said
    result: dict[str, Any] = {"launches": count, "wrong": wrong}
    if wrong:
        first, said = next(iter(wrong.items()))
        return Answer("failed", f"{len(wrong)} of {count} launches are wrong, the first {first}: {said}", result)
    return Answer("simulated" if setting.simulate else "passed", f"{count} launches", result)


def tried(device: DevicePort, stream: Stream, case: Case) -> str:
    """What is wrong with what the device makes of a launch; nothing, if it is right."""
    launch = case.launch()
    memories = {name: device.allocate(array.nbytes, name) for name, array in launch.arrays.items()}
    pinned = {name: device.pin(array.nbytes, name) for name, array in launch.arrays.items()}
    arguments: dict[str, Span | Number] = dict(launch.numbers)
    for name, array in launch.arrays.items():
        device.write(pinned[name].span(), array)
        device.copy(memories[name].span(), pinned[name].span(), stream)
        arguments[name] = memories[name].span()
    device.launch(launch.kernel, arguments, stream)
    for name in launch.arrays:
        device.copy(pinned[name].span(), memories[name].span(), stream)
    device.synchronize(device.record(stream))
    for name, array in launch.arrays.items():
        array[...] = device.read(pinned[name].span(), array.dtype, array.shape)
    for memory in (*memories.values(), *pinned.values()):
        device.free(memory)
    return case.wrong(launch)
