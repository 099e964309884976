// A stand-in for NVIDIA's driver, so that the Python that talks to it runs where there is no GPU. It is no GPU: nothing
// that a kernel does is tested here, unless a test gives a function for it (standInKernel), and no time means anything.
//
// It has the entry points that cuda.core and lowbit_cuda.cuda come to call, and says of every other that it is not found.
#include "cubin.h"
#include "world.h"

static World world;
static thread_local void* current = nullptr;
static char the_context;

struct Kernel {
    std::string name;
    Arguments arguments;
    int shared = 48 << 10;
};
struct Library {
    std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

using Meaning = int (*)(const uint8_t* arguments, const uint32_t* grid_block_shared);
static std::map<std::string, Meaning> meanings;
static std::string answer;

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

// The device, and its context.

static int cuInit(unsigned) {
    std::lock_guard<std::recursive_mutex> held(world.lock);
    if (!world.pid) world.pid = getpid();
    if (int code = world.call("cuInit")) return code;
    return number("STAND_IN_DEVICES", 1) ? int(number("STAND_IN_INIT", 0)) : int(NO_DEVICE);
}
static int cuDriverGetVersion(int* version) {
    *version = number("STAND_IN_CUDA", 13000);
    return SUCCESS;
}
static int cuDeviceGetCount(int* count) {
    ENTER;
    *count = number("STAND_IN_DEVICES", 1);
    return SUCCESS;
}
static int cuDeviceGet(int* device, int ordinal) {
    ENTER;
    *device = ordinal;
    return ordinal >= 0 && ordinal < number("STAND_IN_DEVICES", 1) ? SUCCESS : INVALID_DEVICE;
}
static int cuDeviceGetName(char* name, int length, int) {
    ENTER;
    snprintf(name, length, "stand-in, not a GPU");
    return SUCCESS;
}
static int cuDeviceGetAttribute(int* value, int attribute, int) {
    ENTER;
    long capability = number("STAND_IN_CAPABILITY", 90);
    *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : 0;
    return SUCCESS;
}
static int cuDevicePrimaryCtxRetain(void** context, int) {
    ENTER;
    *context = &the_context;
    return SUCCESS;
}
static int cuDevicePrimaryCtxRelease(int) {
    ENTER;
    return SUCCESS;
}
static int cuCtxSetCurrent(void* context) {
    ENTER;
    current = context;
    return SUCCESS;
}
static int cuCtxGetCurrent(void** context) {
    ENTER;
    *context = current;
    return SUCCESS;
}
static int cuCtxGetDevice(int* device) {
    CONTEXT;
    *device = 0;
    return SUCCESS;
}
static int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    CONTEXT;
    *least = 0, *greatest = -5;
    return SUCCESS;
}
static const std::map<int, std::pair<const char*, const char*>> TEXTS = {
    {SUCCESS, {"CUDA_SUCCESS", "no error"}},
    {INVALID_VALUE, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
    {INVALID_CONTEXT, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
    {NOT_FOUND, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {ILLEGAL_ADDRESS, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
    {LAUNCH_FAILED, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
};
static int cuGetErrorName(int code, const char** text) {
    auto found = TEXTS.find(code);
    *text = found == TEXTS.end() ? "CUDA_ERROR_UNKNOWN" : found->second.first;
    return SUCCESS;
}
static int cuGetErrorString(int code, const char** text) {
    auto found = TEXTS.find(code);
    *text = found == TEXTS.end() ? "unknown error" : found->second.second;
    return SUCCESS;
}

// Memory.

static size_t capacity() { return number("STAND_IN_MEMORY", 1 << 26); }
static int cuMemGetInfo(size_t* free_bytes, size_t* total) {
    CONTEXT;
    *total = capacity(), *free_bytes = capacity() - world.device_used;
    return SUCCESS;
}
static int cuMemAlloc(uint64_t* address, size_t bytes) {
    CONTEXT;
    if (!bytes) return INVALID_VALUE;
    if (bytes > capacity() - world.device_used) return OUT_OF_MEMORY;
    *address = world.allocate(bytes, true);
    return SUCCESS;
}
static int cuMemFree(uint64_t address) {
    CONTEXT;
    return world.release(address, true);
}
static int cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
    CONTEXT;
    if (!bytes) return INVALID_VALUE;
    *pointer = reinterpret_cast<void*>(world.allocate(bytes, false));
    return SUCCESS;
}
static int cuMemFreeHost(void* pointer) {
    CONTEXT;
    return world.release(reinterpret_cast<uint64_t>(pointer), false);
}
static int cuMemcpyAsync(uint64_t to, uint64_t of, size_t bytes, Stream* stream) {
    CONTEXT;
    if (!world.place(to, bytes) || !world.place(of, bytes)) return INVALID_VALUE;
    auto run = [=] {
        auto *target = world.place(to, bytes), *source = world.place(of, bytes);
        if (!target || !source) return int(ILLEGAL_ADDRESS);
        memmove(target, source, bytes);
        return int(SUCCESS);
    };
    return world.give(stream, {"a copy", run, {to, of}});
}

// Streams and events.

static int cuStreamCreateWithPriority(Stream** stream, unsigned flags, int) {
    CONTEXT;
    if (flags != 1) world.wrong("a stream that waits for the default stream");
    world.streams.insert(*stream = new Stream);
    return SUCCESS;
}
static int cuStreamDestroy(Stream* stream) {
    ENTER;
    if (!world.streams.erase(stream)) return INVALID_HANDLE;
    if (!stream->queue.empty()) world.wrong("a stream was destroyed with work in it");
    delete stream;
    return SUCCESS;
}
static int cuStreamSynchronize(Stream* stream) {
    ENTER;
    return world.drain(stream);
}
static int cuStreamGetCtx(Stream*, void** context) {
    ENTER;
    *context = &the_context;
    return SUCCESS;
}
static int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    ENTER;
    if (!world.events.count(event)) return INVALID_HANDLE;
    auto mark = event->mark;
    return world.give(stream, {"a wait", [mark] { return world.reach(mark); }, {}});
}
static int cuEventCreate(Event** event, unsigned) {
    CONTEXT;
    world.events.insert(*event = new Event);
    return SUCCESS;
}
static int cuEventDestroy(Event* event) {
    ENTER;
    if (!world.events.erase(event)) return INVALID_HANDLE;
    delete event;
    return SUCCESS;
}
static int cuEventRecord(Event* event, Stream* stream) {
    ENTER;
    if (!world.events.count(event)) return INVALID_HANDLE;
    if (world.streams.count(stream) && stream->capture) return CAPTURE_UNSUPPORTED;
    auto mark = event->mark = std::make_shared<Mark>();
    mark->stream = stream;
    auto run = [mark] {
        mark->done = true;
        mark->milliseconds = world.milliseconds;
        return int(SUCCESS);
    };
    return world.give(stream, {"an event", run, {}});
}
static int cuEventSynchronize(Event* event) {
    ENTER;
    return world.events.count(event) ? world.reach(event->mark) : INVALID_HANDLE;
}
static int cuEventQuery(Event* event) {  // asking often enough brings things forward
    ENTER;
    if (!world.events.count(event)) return INVALID_HANDLE;
    auto& mark = event->mark;
    if (!mark || mark->done) return SUCCESS;
    if (int code = world.step(mark->stream)) return code;
    return NOT_READY;
}
static int cuEventElapsedTime(float* milliseconds, Event* first, Event* second) {
    ENTER;
    if (!world.events.count(first) || !world.events.count(second)) return INVALID_HANDLE;
    if (!first->mark->done || !second->mark->done) return NOT_READY;
    *milliseconds = float(second->mark->milliseconds - first->mark->milliseconds);
    return SUCCESS;
}

// Kernels.

static int cuLibraryLoadData(Library** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
    ENTER;
    auto found = kernels_of(code);
    if (found.empty()) return INVALID_IMAGE;
    *library = new Library;
    for (auto& [name, arguments] : found) (*library)->kernels[name].reset(new Kernel{name, arguments});
    world.libraries.insert(*library);
    return SUCCESS;
}
static int cuLibraryUnload(Library* library) {
    ENTER;
    if (!world.libraries.erase(library)) return INVALID_HANDLE;
    delete library;
    return SUCCESS;
}
static int cuLibraryGetKernel(Kernel** kernel, Library* library, const char* name) {
    ENTER;
    auto found = library->kernels.find(name);
    if (found == library->kernels.end()) return NOT_FOUND;
    *kernel = found->second.get();
    return SUCCESS;
}
static int cuKernelSetAttribute(int attribute, int value, Kernel* kernel, int) {
    ENTER;
    if (attribute != 8 || value > LAUNCHABLE) return INVALID_VALUE;
    kernel->shared = value;
    return SUCCESS;
}
struct LaunchConfig {
    uint32_t grid[3], block[3], shared;
    Stream* stream;
    void* attributes;
    uint32_t count;
};
static int cuLaunchKernelEx(const LaunchConfig* config, Kernel* kernel, void** given, void**) {
    CONTEXT;
    auto& it = *config;
    for (int i = 0; i < 3; i++)
        if (!it.grid[i] || !it.block[i]) return INVALID_VALUE;
    if (it.block[0] * it.block[1] * it.block[2] > 1024 || int(it.shared) > kernel->shared) return INVALID_VALUE;
    std::vector<uint8_t> packed;
    std::vector<uint64_t> addresses;
    for (size_t i = 0; i < kernel->arguments.size(); i++) {
        auto [offset, bytes] = kernel->arguments[i];
        if (packed.size() < offset + bytes) packed.resize(offset + bytes);
        memcpy(packed.data() + offset, given[i], bytes);
        if (bytes == 8) addresses.push_back(*static_cast<uint64_t*>(given[i]));
    }
    std::array<uint32_t, 7> sizes{it.grid[0], it.grid[1], it.grid[2], it.block[0], it.block[1], it.block[2], it.shared};
    auto name = kernel->name;
    auto run = [=] {
        auto meaning = meanings.find(name);
        return meaning == meanings.end() ? int(SUCCESS) : meaning->second(packed.data(), sizes.data());
    };
    return world.give(it.stream, {"the kernel " + name, run, addresses});
}
static int cuLaunchKernel(Kernel* kernel, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz,
                          uint32_t shared, Stream* stream, void** given, void** extra) {
    LaunchConfig config{{gx, gy, gz}, {bx, by, bz}, shared, stream, nullptr, 0};
    return cuLaunchKernelEx(&config, kernel, given, extra);
}

// Graphs.

static int cuStreamBeginCapture(Stream* stream, int) {
    ENTER;
    if (!world.streams.count(stream)) return INVALID_HANDLE;
    stream->capture.reset(new Graph);
    return SUCCESS;
}
static int cuStreamEndCapture(Stream* stream, Graph** graph) {
    ENTER;
    if (!world.streams.count(stream) || !stream->capture) return INVALID_VALUE;
    world.graphs.insert(*graph = stream->capture.release());
    return SUCCESS;
}
static int cuStreamIsCapturing(Stream* stream, int* status) {
    ENTER;
    *status = stream->capture ? 1 : 0;
    return SUCCESS;
}
static int cuStreamGetCaptureInfo(Stream* stream, int* status, uint64_t* id, Graph** graph, void* more, void*, size_t*) {
    ENTER;
    *status = stream->capture ? 1 : 0;
    if (id) *id = 1;
    if (graph) *graph = stream->capture.get();
    if (more) *static_cast<void**>(more) = nullptr;
    return SUCCESS;
}
struct Instantiation {
    uint64_t flags;
    void *stream, *node;
    int result;
};
static int cuGraphInstantiateWithParams(Graph** executable, Graph* graph, Instantiation* how) {
    ENTER;
    if (!world.graphs.count(graph)) return INVALID_HANDLE;
    how->result = 0;
    world.executables.insert(*executable = new Graph(*graph));
    return SUCCESS;
}
static int cuGraphInstantiateWithFlags(Graph** executable, Graph* graph, uint64_t) {
    Instantiation how{};
    return cuGraphInstantiateWithParams(executable, graph, &how);
}
static int cuGraphLaunch(Graph* executable, Stream* stream) {
    ENTER;
    if (!world.executables.count(executable)) return INVALID_HANDLE;
    for (auto& operation : executable->operations)
        if (int code = world.give(stream, operation)) return code;
    return SUCCESS;
}
static int cuGraphDestroy(Graph* graph) {
    ENTER;
    if (!world.graphs.erase(graph)) return INVALID_HANDLE;
    delete graph;
    return SUCCESS;
}
static int cuGraphExecDestroy(Graph* executable) {
    ENTER;
    if (!world.executables.erase(executable)) return INVALID_HANDLE;
    delete executable;
    return SUCCESS;
}
static int cuUserObjectCreate(Keepsake** made, void* what, void (*end)(void*), unsigned, unsigned) {
    ENTER;
    std::shared_ptr<Keepsake> kept(new Keepsake{what, end});
    world.keepsakes[*made = kept.get()] = kept;
    return SUCCESS;
}
static int cuUserObjectRelease(Keepsake* kept, unsigned) {
    ENTER;
    return world.keepsakes.erase(kept) ? SUCCESS : INVALID_HANDLE;
}
static int cuGraphRetainUserObject(Graph* graph, Keepsake* kept, unsigned, unsigned flags) {
    ENTER;
    auto found = world.keepsakes.find(kept);
    if (found == world.keepsakes.end() || !world.graphs.count(graph)) return INVALID_VALUE;
    graph->keepsakes.push_back(found->second);
    if (flags & 1) world.keepsakes.erase(found);  // the caller's own goes with it
    return SUCCESS;
}
static int cuGraphReleaseUserObject(Graph* graph, Keepsake* kept, unsigned) {
    ENTER;
    for (auto it = graph->keepsakes.begin(); it != graph->keepsakes.end(); ++it)
        if (it->get() == kept) {
            graph->keepsakes.erase(it);
            return SUCCESS;
        }
    return INVALID_VALUE;
}

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
    ENTRY(cuKernelSetAttribute), ENTRY(cuLaunchKernelEx), ENTRY(cuLaunchKernel), ENTRY(cuStreamBeginCapture),
    ENTRY(cuStreamEndCapture), ENTRY(cuStreamIsCapturing), ENTRY(cuStreamGetCaptureInfo),
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
