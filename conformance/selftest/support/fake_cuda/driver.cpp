// A stand-in for NVIDIA's driver, so that the Python that talks to it runs where there is no GPU. It is no GPU: nothing
// that a kernel does is tested here, unless a test gives a function for it (standInKernel), and no time means anything.
//
// It has the entry points that cuda.core and lowbit_cuda.cuda come to call, and says of every other that it is not found.
#include "cubin.h"
#include "world.h"

static World world;
static thread_local char* current = nullptr;  // of this thread
static char the_primary, anothers;            // contexts: the device's own, and one that another library has made

// Most calls answer with the error that has broken the context, once it has. Those that only look do not.
#define LOOK                                                 \
    std::lock_guard<std::recursive_mutex> held(world.lock); \
    if (int code = world.call(__func__, true)) return code
#define ENTER                                                \
    std::lock_guard<std::recursive_mutex> held(world.lock); \
    if (int code = world.call(__func__, false)) return code
#define CONTEXT \
    ENTER;      \
    if (!current) return INVALID_CONTEXT
#define LAUNCHABLE 227 << 10

static long number(const char* name, long otherwise) {
    const char* given = getenv(name);
    return given ? atol(given) : otherwise;
}

#include "calls.h"
#include "launches.h"

// What the driver's entry points are found by.

#define ENTRY(name) {#name, reinterpret_cast<void*>(name)}
static const std::map<std::string, void*> ENTRIES = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetName),
    ENTRY(cuDeviceGetAttribute), ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuDevicePrimaryCtxRelease),
    ENTRY(cuCtxSetCurrent), ENTRY(cuCtxGetCurrent), ENTRY(cuCtxGetDevice), ENTRY(cuCtxGetStreamPriorityRange),
    ENTRY(cuCtxGetLimit), ENTRY(cuFuncLoad), ENTRY(cuStreamQuery),
    ENTRY(cuGetErrorName), ENTRY(cuGetErrorString), ENTRY(cuMemGetInfo), ENTRY(cuMemAlloc), ENTRY(cuMemFree),
    ENTRY(cuMemHostAlloc), ENTRY(cuMemFreeHost), ENTRY(cuMemcpyAsync), ENTRY(cuStreamCreateWithPriority),
    ENTRY(cuStreamDestroy), ENTRY(cuStreamSynchronize), ENTRY(cuStreamGetCtx), ENTRY(cuStreamWaitEvent),
    ENTRY(cuEventCreate), ENTRY(cuEventDestroy), ENTRY(cuEventRecord), ENTRY(cuEventSynchronize), ENTRY(cuEventQuery),
    ENTRY(cuEventElapsedTime), ENTRY(cuLibraryLoadData), ENTRY(cuLibraryUnload), ENTRY(cuLibraryGetKernel),
    ENTRY(cuKernelGetFunction), ENTRY(cuKernelSetAttribute), ENTRY(cuLaunchKernelEx), ENTRY(cuLaunchKernel),
    ENTRY(cuStreamBeginCapture), ENTRY(cuStreamEndCapture), ENTRY(cuStreamIsCapturing), ENTRY(cuStreamGetCaptureInfo),
    ENTRY(cuGraphInstantiateWithParams), ENTRY(cuGraphInstantiateWithFlags), ENTRY(cuGraphLaunch),
    ENTRY(cuGraphDestroy), ENTRY(cuGraphExecDestroy),
    ENTRY(cuUserObjectCreate), ENTRY(cuUserObjectRelease), ENTRY(cuGraphRetainUserObject),
    ENTRY(cuGraphReleaseUserObject),
};

extern "C" int cuGetProcAddress_v2(const char* name, void** found, int, uint64_t, int* status) {
    auto entry = ENTRIES.find(name);
    if (!strcmp(name, "cuFuncLoad") && !has_func_load()) entry = ENTRIES.end();
    *found = entry == ENTRIES.end() ? nullptr : entry->second;
    if (status) *status = *found ? 0 : 1;
    if (!*found && getenv("STAND_IN_VERBOSE")) fprintf(stderr, "stand-in: no %s\n", name);
    return *found ? SUCCESS : NOT_FOUND;
}
extern "C" int cuGetProcAddress(const char* name, void** found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, found, version, flags, nullptr);
}

// What a test may tell it, and ask it.

// Let the nth call of an entry point from now on fail; "run" stands for an operation that a stream runs.
extern "C" void standInFail(const char* call, int nth, int code) { world.failures[call] = {nth, code}; }
// What a kernel does, given the bytes of its arguments and its grid, block and shared memory; it answers with a code.
extern "C" void standInKernel(const char* name, Meaning meaning) { meanings[name] = meaning; }
extern "C" long standInCalls(const char* name) { return world.calls[name]; }
extern "C" void* standInPlace(uint64_t address, size_t bytes) { return world.place(address, bytes); }

// Another library makes a context of its own current in this thread, or none; and which is: 0 none, 1 the device's, 2 its.
extern "C" void standInSwitch(int which) { current = which == 2 ? &anothers : which == 1 ? &the_primary : nullptr; }
extern "C" int standInCurrent() { return current == &anothers ? 2 : current == &the_primary ? 1 : 0; }
extern "C" void standInName(int code, const char* name) { names[code] = name; }
// Work of the device fails, and nobody has been told.
extern "C" void standInLose(int code) { world.lost = code; }
// Another process takes so much of the device's memory.
extern "C" void standInTake(size_t bytes) { world.taken = bytes; }
// The calls, one to a line, that made a device wait which was at work; and those of a context that was broken.
static const char* listed(const std::vector<std::string>& lines) {
    answer.clear();
    for (auto& line : lines) answer += line + "\n";
    return answer.c_str();
}
extern "C" const char* standInWaits() { return listed(world.waits); }
extern "C" const char* standInAfterwards() { return listed(world.afterwards); }

// The device after a restart of the process: whatever was lost or left behind is forgotten.
extern "C" void standInForget() {
    world.lost = 0;
    world.taken = 0;
    world.waits.clear();
    world.afterwards.clear();
    world.failures.clear();
    world.calls.clear();
    world.wrongs.clear();
    for (auto* stream : world.streams) stream->queue.clear();
    world.memory.clear();
    world.libraries.clear();
}

// All that is not given back, and all that was done wrong, one to a line.
extern "C" const char* standInReport() {
    answer.clear();
    auto count = [](const char* what, size_t n) {
        if (n) answer += std::string(what) + ": " + std::to_string(n) + "\n";
    };
    count("allocations", world.memory.size());
    count("streams", world.streams.size());
    count("events", world.events.size());
    count("graphs", world.graphs.size() + world.executables.size());
    count("libraries", world.libraries.size());
    for (auto& what : world.wrongs) answer += what + "\n";
    return answer.c_str();
}
