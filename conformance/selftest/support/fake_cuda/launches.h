// Entry points for kernels and graphs.
#pragma once

// Kernels.

struct Kernel {
    std::string name;
    Arguments arguments;
    int shared = 48 << 10;
    bool loaded = false;  // otherwise the first launch does it, as the driver is lazy
};
static bool has_func_load() { return !getenv("STAND_IN_NO_FUNC_LOAD"); }  // drivers before CUDA 12.4 have none
// A kernel comes to the device: that takes memory, waits for what runs, and must not happen while a stream is in capture.
static void bring(Kernel* kernel) {
    if (kernel->loaded) return;
    for (auto* stream : world.streams)
        if (stream->capture) world.wrong("a kernel was loaded while a stream was in capture");
    world.implicit("loading " + kernel->name);
    kernel->loaded = true;
}
struct Library {
    std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

using Meaning = int (*)(const uint8_t* arguments, const uint32_t* grid_block_shared);
static std::map<std::string, Meaning> meanings;
static std::string answer;

static int cuLibraryLoadData(Library** library, const void* code, void*, void*, unsigned, void*, void*, unsigned) {
    ENTER;
    auto found = kernels_of(code);
    if (found.empty()) return INVALID_IMAGE;
    world.implicit("loading a library");
    if (world.footprint() + PIECE > capacity()) return OUT_OF_MEMORY;
    *library = new Library;
    for (auto& [name, arguments] : found) (*library)->kernels[name].reset(new Kernel{name, arguments});
    world.libraries.insert(*library);
    return SUCCESS;
}
static int cuLibraryUnload(Library* library) {
    ENTER;
    world.implicit("unloading a library");
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
static int cuKernelGetFunction(Kernel** function, Kernel* kernel) {
    CONTEXT;
    *function = kernel;
    if (!has_func_load()) bring(kernel);
    return SUCCESS;
}
static int cuFuncLoad(Kernel* function) {
    CONTEXT;
    bring(function);
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
    if (!world.streams.count(it.stream) || it.stream->context != current) return INVALID_HANDLE;
    bring(kernel);
    if (size_t local = PROCESSORS * THREADS * STACK; world.local < local) {
        if (world.footprint() + local > capacity()) return OUT_OF_MEMORY;
        world.local = local;
    }
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

static int cuStreamBeginCapture(Stream* stream, int mode) {
    ENTER;
    if (mode != 2) world.wrong("a capture that calls of other threads break");
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
    if (world.footprint() + graph->operations.size() * NODE > capacity()) return OUT_OF_MEMORY;
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
    LOOK;
    if (!world.graphs.erase(graph)) return INVALID_HANDLE;
    delete graph;
    return SUCCESS;
}
static int cuGraphExecDestroy(Graph* executable) {
    LOOK;
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
