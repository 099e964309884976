"""What NVIDIA's driver does and its reference says, and what the device makes of it: over a stand-in (`stand_in`).

The stand-in takes memory in pieces, keeps the errors of a broken context, lets other libraries switch the context, and
writes down which calls make the device wait or the host spin. Each test is a script in a child process.
"""

from pathlib import Path

import pytest
import stand_in
from cuda_tools import needs_stand_in
from stand_in import said

from lowbit_cuda.cuda.driver import ERRORS_OF_THE_CALL, LOST, RELAUNCH
from lowbit_cuda.cuda.reserve import CODE, GRAPHS, REST, Reserve

pytestmark = needs_stand_in

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stand-in lies."""
    folder = tmp_path_factory.mktemp("driver")
    stand_in.build(folder)
    return folder


# **Errors.**


def test_errors_that_ask_for_a_new_process_are_those_of_the_reference() -> None:
    """By the text that cuda.bindings has of each; a newer one that asks for it fails this test until it is listed."""
    from cuda.bindings import driver

    texts = {code.name: " ".join((code.__doc__ or "").split()) for code in driver.CUresult}
    asking = {name for name, text in texts.items() if "process must be terminated and relaunched" in text}
    if not asking:  # before cuda.bindings 12.9, members have no text
        pytest.skip("this cuda.bindings has no text for each error")
    assert asking == RELAUNCH
    for words in ("context cannot be used", "uncorrectable", "has been terminated", "in the process of shutting down"):
        broken = {name for name, text in texts.items() if words in text}
        assert broken and broken <= LOST, words
    assert set(texts) >= LOST
    assert not LOST & ERRORS_OF_THE_CALL


def test_every_such_error_loses_the_device(folder: Path) -> None:
    """Each is told once as such; afterwards every call fails at once, without a call of the driver, and the end is
    quiet."""
    script = """
from cuda.bindings.driver import CUresult
from lowbit_cuda.cuda.driver import LOST
from lowbit_cuda.port import DeviceLostError
for name in sorted(LOST):
    device = open_device()
    stream = device.stream("compute")
    memory, host = device.allocate(4 * COUNT, "y"), device.pin(4 * COUNT, "host")
    device.load([contract.fill])
    event = device.record(stream)
    device.finish()
    control.lose(int(getattr(CUresult, name)))
    try:
        device.synchronize(event)
    except DeviceLostError as error:
        assert name in str(error), error
    told = control.afterwards()
    for call in (device.finish, lambda: device.record(stream), lambda: device.copy(memory.span(), host.span(), stream),
                 lambda: device.launch(contract.fill, {"y": memory.span(), "n": 1, "first": 1.0, "step": 0}, stream),
                 lambda: device.reached(event), lambda: device.allocate(1, "more"), lambda: device.pin(1, "more"),
                 lambda: device.read(host.span(), np.float32, (1,)), lambda: device.stream("more"),
                 lambda: device.load([contract.fill]), device.describe):
        try:
            call()
        except DeviceLostError as error:
            assert "the device is lost since an earlier error: waiting for an event failed" in str(error), error
        else:
            raise AssertionError(name)
    device.free(memory)
    device.close()
    print(told, control.afterwards(), device.used, device.pinned)
    control.forget()
"""
    lines = said(folder, script)
    assert lines == ["['cuEventSynchronize'] ['cuEventSynchronize'] 0 0"] * len(LOST)


def test_a_code_of_the_list_loses_the_device_whatever_the_call(folder: Path) -> None:
    """And no other code does, of a call that waits for nothing."""
    script = """
from cuda.bindings.driver import CUresult
from lowbit_cuda.port import DeviceLostError
found = set()
for code in CUresult:
    if int(code) == 0:
        continue
    control.fail("cuMemAlloc", 1, int(code))
    with open_device() as device:
        try:
            device.allocate(1, "y")
        except DeviceLostError:
            found.add(code.name)
        except DeviceError:
            device.allocate(1, "y")
print(*sorted(found))
"""
    assert said(folder, script) == [" ".join(sorted(LOST))]


def test_whatever_waiting_answers_loses_the_device(folder: Path) -> None:
    """An error of work is no error of the call that waits for it, so only codes that are about calls let it go on."""
    script = """
for call, code in (("cuEventSynchronize", 999), ("cuEventQuery", 304), ("cuEventSynchronize", 400)):
    control.forget()
    with open_device() as device:
        event = device.record(device.stream("compute"))
        control.fail(call, 1, code)
        try:
            device.reached(event) if call == "cuEventQuery" else device.synchronize(event)
        except DeviceError as error:
            print(error)
        try:
            device.allocate(1, "more")
            print("goes on")
        except DeviceError as error:
            print(str(error)[:15])
"""
    ending = "; the device is lost to this process, which must be restarted"
    first, then, second, afterwards, third, last = said(folder, script)
    assert first.startswith("waiting for an event failed: CUDA_ERROR_UNKNOWN") and first.endswith(ending)
    assert second.startswith("asking for an event failed: CUDA_ERROR_OPERATING_SYSTEM") and second.endswith(ending)
    assert third.startswith("waiting for an event failed: CUDA_ERROR_INVALID_HANDLE") and "lost" not in third
    assert (then, afterwards, last) == ("the device is l", "the device is l", "goes on")


def test_a_loss_is_found_where_cuda_core_hides_the_code(folder: Path) -> None:
    """It says only that no event could be made; the device is asked why, before it is used any further."""
    script = """
from lowbit_cuda.port import DeviceLostError
for call in ("record", "finish", "free", "close"):
    control.forget()
    device = open_device()
    stream, memory = device.stream("compute"), device.allocate(1024, "y")
    device.launch(contract.fill, {"y": memory.span(), "n": 1, "first": 1.0, "step": 0}, stream)
    control.lose(700)
    try:
        {"record": lambda: device.record(stream), "finish": device.finish, "free": lambda: device.free(memory),
         "close": device.close}[call]()
    except DeviceLostError as error:
        print(error)
    device.close()
    print(device.used)
"""
    *lines, used = said(folder, script)
    assert used == "0" and lines[1::2] == ["0"] * 3
    assert all(line.startswith("marking compute failed: CUDA_ERROR_ILLEGAL_ADDRESS") for line in lines[::2]), lines
    assert len(lines) == 7


def test_a_driver_that_has_shut_down_is_no_error_at_the_end(folder: Path) -> None:
    """Python may end after the driver: closing is quiet then, and so are matrices that are let go of."""
    script = """
device = open_device()
stream = device.stream("compute")
memory = sent(device, stream, ramp())
control.lose(4)
device.close()
print(device.used)
"""
    assert said(folder, script) == ["0"]


# **Contexts.**


@pytest.mark.parametrize("context", ["another library's", "none"])
def test_the_context_is_asked_and_restored(folder: Path, context: str) -> None:
    """Another library makes its own context current before every call: all programs of the contract still hold, and
    after each call its context is current again."""
    script = f"""
class Visited:
    def __init__(self, device):
        self.device = device
    def __getattr__(self, name):
        found = getattr(self.device, name)
        if not callable(found):
            return found
        def call(*arguments):
            control.switch({context!r})
            try:
                return found(*arguments)
            finally:
                assert control.current == {context!r}, name
        return call

control.switch({context!r})
for name, program in contract.PROGRAMS.items():
    with open_device() as device:
        assert control.current == {context!r}
        program(Visited(device))
        control.switch({context!r})
    assert control.current == {context!r}
    del device
    gc.collect()
    assert control.report() == [], (name, control.report())
    control.forget()
print("well")
"""
    assert said(folder, script) == ["well"]


def test_calls_in_a_block_only_ask(folder: Path) -> None:
    """The context is set once and restored once, also where another library switches in between or the block fails."""
    script = """
control.switch("another library's")
with open_device() as device:
    stream, memory = device.stream("compute"), device.allocate(1024, "y")
    before = control.calls("cuCtxSetCurrent"), control.calls("cuCtxGetCurrent")
    with device.batch():
        for _ in range(10):
            device.record(stream)
    after = control.calls("cuCtxSetCurrent"), control.calls("cuCtxGetCurrent")
    print(control.current, *(now - then for now, then in zip(after, before)))
    try:
        with device.batch():
            control.switch("none")
            device.record(stream)
            assert control.current == "none"
            raise ZeroDivisionError
    except ZeroDivisionError:
        print(control.current)
"""
    assert said(folder, script) == ["another library's 2 11", "another library's"]


# **Memory.**


def test_the_reserve_adds_up() -> None:
    """Code, graphs, the local memory of every thread that can be resident, and the rest, in whole pieces."""
    reserve = Reserve(processors=28, threads=1536, stack=1024)
    assert reserve.local == 42 * MIB
    assert reserve.total == CODE + GRAPHS + REST + 42 * MIB == 142 * MIB


def test_the_default_budget_leaves_the_reserve(folder: Path) -> None:
    """All of it is allocated, in small and large parts; kernels are then loaded, captured, and run."""
    script = """
with CudaDevice(kernels=KERNELS) as device:
    print(device.budget, device.describe()["reserve"])
    stream, kept = device.stream("compute"), []
    y = device.allocate(4 * COUNT, "y")
    for size in (3 << 20, 1 << 20, 100, 5000):
        kept += [device.allocate(size, "some") for _ in range(9)]
    kept.append(device.allocate((device.budget - device.used) // (2 << 20) * (2 << 20), "all"))
    before = device.used
    for n in range(40):
        with device.capture(stream) as graph:
            for _ in range(10):
                device.launch(contract.fill, {"y": y.span(), "n": COUNT, "first": 1.0, "step": 0}, stream)
        kept.append(graph())
    device.replay(kept[-1], stream)
    assert set(fetched(device, stream, y.span()).tolist()) == {1.0}
    assert device.budget - device.used < 2 << 20
print(control.report(), control.errors)
"""
    assert said(folder, script, STAND_IN_MEMORY=str(300 * MIB)) == [f"{192 * MIB} {108 * MIB} bytes", "[] []"]


def test_a_budget_that_the_device_does_not_have_is_refused(folder: Path) -> None:
    """When the device is opened, with what it has and what of that the driver needs."""
    script = """
for budget in (93 << 20, 92 << 20, None):
    try:
        with open_device(budget) as device:
            print(device.budget)
    except ArgumentError as error:
        print(error)
control.take(150 << 20)
for budget in (1, None):
    try:
        open_device(budget)
    except ArgumentError as error:
        print(error)
"""
    most = f"at most {92 * MIB} bytes (92.0 MiB)"
    has = "the device has {} free, of which 108.0 MiB stay for the driver's code, graphs and local memory"
    assert said(folder, script, STAND_IN_MEMORY=str(200 * MIB)) == [
        f"device memory is {93 * MIB} bytes (93.0 MiB); allowed: {most}; {has.format('200.0 MiB')}",
        str(92 * MIB),
        str(92 * MIB),
        f"device memory is 1 bytes (1 bytes); allowed: a device with more free memory; {has.format('50.0 MiB')}",
        f"device memory is all that is free; allowed: a device with more free memory; {has.format('50.0 MiB')}",
    ]


def test_what_is_counted_is_what_the_driver_takes(folder: Path) -> None:
    """Of large allocations to the byte; small ones share pieces, so they take at most one piece more."""
    script = """
from cuda.bindings import driver
def free():
    control.switch("the device's")
    return driver.cuMemGetInfo()[1]
with open_device(100 << 20) as device:
    before = free()
    for size in (1 << 20, (2 << 20) + 1, 5 << 20):
        device.allocate(size, "large")
    print(before - free() - device.used)
    for size in (1, 300, 100000, (1 << 20) - 256):
        device.allocate(size, "small")
    print(0 <= before - free() - device.used < 2 << 20)
"""
    assert said(folder, script) == ["0", "True"]


def test_more_than_the_host_has_is_not_pinned(folder: Path) -> None:
    """Page-locking it would end this process or another; the driver is not asked, and less can be had."""
    script = """
from lowbit_cuda.cuda import memory
with open_device() as device:
    memory.available_bytes = lambda: 3 << 20
    try:
        device.pin(5 << 20, "experts of layer 7")
    except DeviceMemoryError as error:
        print(error)
    print(control.calls("cuMemHostAlloc"), device.pinned)
    device.pin(3 << 20, "less")
"""
    assert said(folder, script) == [
        "host memory for experts of layer 7: 5242880 bytes asked, but the host cannot page-lock them (3145728 "
        "bytes are available); free host memory, or raise the memory limit of the container (cgroup)",
        "0 0",
    ]


# **Waiting.**


def test_nothing_makes_the_device_wait_in_the_middle_of_operations(folder: Path) -> None:
    """Arrays that grow from call to call, matrices that are let go of at any time: memory is taken, given back, and
    kernels are loaded, where the device is idle."""
    script = """
from lowbit_cuda.calls import Calls
device = open_device()
calls = Calls(device)
for n in (10, 1000, 100, 50000):
    x, y = np.arange(n, dtype=np.float32), np.zeros(n, np.float32)
    calls.release(device.allocate(n, "a matrix"))
    calls(contract.add, {"x": x, "y": y}, n=n, by=2.0)
    assert np.array_equal(y, 2 * x)
print(control.waits())
calls.close()
device.close()
print(control.report())
"""
    assert said(folder, script) == ["[]", "[]"]


@pytest.mark.parametrize("old", [False, True])
def test_a_kernel_that_was_loaded_does_not_hold_up_the_device(folder: Path, old: bool) -> None:
    """The driver is lazy: a kernel comes to the device with its first launch, which waits, unless it was loaded. An old
    driver has no call to load a function, and loads it where it is found."""
    script = """
device = open_device()
stream, other = device.stream("one"), device.stream("two")
host, y = device.pin(4 * COUNT, "host"), device.allocate(4 * COUNT, "y")
device.write(host.span(), ramp())
device.load([contract.fill])
device.copy(y.span(), host.span(), other)
device.launch(contract.fill, {"y": y.span(), "n": COUNT, "first": 1.0, "step": 0}, stream)
print(control.waits())
device.launch(contract.turn, {"x": y.span(), "y": y.span(), "n": COUNT}, stream)
print(control.waits())
device.close()
"""
    if old:
        script = "from lowbit_cuda.cuda import launches\nlaunches.LOADS = 99, 0\n" + script
    variables = {"STAND_IN_NO_FUNC_LOAD": "1"} if old else {}
    assert said(folder, script, **variables) == ["[]", "['loading contract_turn']"]


# **Devices that cannot be had.**


def test_a_device_that_is_taken_or_prohibited_is_said(folder: Path) -> None:
    """By another process that has it alone, and by the mode in which no process may use it."""
    script = """
control.fail("cuDevicePrimaryCtxRetain", 1, 46)
try:
    open_device()
except LowbitError as error:
    print(error)
os.environ["STAND_IN_MODE"] = "2"
state = availability()
print(state.usable, state.reason, "|", state.remedy)
"""
    assert said(folder, script) == [
        "the CUDA device is unavailable: another process has exclusive use of device 0 (compute mode Exclusive "
        "Process); "
        "wait for it, or use another device",
        "False device 0 is in the compute mode Prohibited, in which no process may use it | "
        "nvidia-smi --compute-mode=DEFAULT, or use another device",
    ]
