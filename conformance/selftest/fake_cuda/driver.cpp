// A stand-in for NVIDIA's driver, so that the Python that talks to it runs where there is no GPU. It is no GPU: nothing
// that a kernel does is tested here, unless a test gives a function for it (standInKernel), and no time means anything.
//
// It has the entry points that cuda.core and lowbit_cuda.cuda come to call, and says of every other that it is not found.
#include "cubin.h"
#include "world.h"

static World world;
static thread_local void* current = nullptr;
static char the_context;

#define ENTER                                                \
    std::lock_guard<std::recursive_mutex> held(world.lock); \
    if (int code = world.call(__func__)) return code
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

// The device after a restart of the process: whatever was lost or left behind is forgotten.
extern "C" void standInForget() {
    world.lost = 0;
    world.failures.clear();
    world.calls.clear();
    world.wrongs.clear();
    for (auto* stream : world.streams) stream->queue.clear();
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
