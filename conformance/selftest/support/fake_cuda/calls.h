// Entry points for the device, its memory, streams and events. `world` is the stand-in's, see driver.cpp.
#pragma once

// The device, and its context.

static int cuInit(unsigned) {
    std::lock_guard<std::recursive_mutex> held(world.lock);
    if (!world.pid) world.pid = getpid();
    if (int code = world.call("cuInit", false)) return code;
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
constexpr size_t PROCESSORS = 4, THREADS = 2048, STACK = 1024;
static int cuDeviceGetAttribute(int* value, int attribute, int) {
    ENTER;
    long capability = number("STAND_IN_CAPABILITY", 90);
    switch (attribute) {
        case 16: *value = PROCESSORS; break;
        case 20: *value = number("STAND_IN_MODE", 0); break;  // the compute mode
        case 39: *value = THREADS; break;
        case 75: *value = capability / 10; break;
        case 76: *value = capability % 10; break;
        default: *value = 0;
    }
    return SUCCESS;
}
static int cuDevicePrimaryCtxRetain(void** context, int) {
    ENTER;
    *context = &the_primary;
    return SUCCESS;
}
static int cuDevicePrimaryCtxRelease(int) {
    ENTER;
    return SUCCESS;
}
static int cuCtxSetCurrent(char* context) {
    LOOK;
    current = context;
    return SUCCESS;
}
static int cuCtxGetLimit(size_t* value, int limit) {
    CONTEXT;
    *value = STACK;
    return limit ? int(INVALID_VALUE) : int(SUCCESS);  // 0 is the stack
}
static int cuCtxGetCurrent(void** context) {
    LOOK;
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
    {DEINITIALIZED, {"CUDA_ERROR_DEINITIALIZED", "driver shutting down"}},
    {DEVICE_UNAVAILABLE, {"CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"}},
    {ILLEGAL_ADDRESS, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
    {LAUNCH_FAILED, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
};
static std::map<int, std::string> names;  // of every code, as the packages have them
static int cuGetErrorName(int code, const char** text) {
    if (auto known = names.find(code); known != names.end()) {
        *text = known->second.c_str();
        return SUCCESS;
    }
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

static size_t capacity() { return number("STAND_IN_MEMORY", 1 << 28); }
static int cuMemGetInfo(size_t* free_bytes, size_t* total) {
    CONTEXT;
    *total = capacity(), *free_bytes = capacity() - std::min(capacity(), world.footprint());
    return SUCCESS;
}
static int cuMemAlloc(uint64_t* address, size_t bytes) {
    CONTEXT;
    if (!bytes) return INVALID_VALUE;
    world.implicit("allocating on the device");
    if (current != &the_primary) world.wrong("memory in a context of another");
    *address = world.allocate(bytes, true);
    if (world.footprint() <= capacity()) return SUCCESS;
    world.release(*address, true);
    return OUT_OF_MEMORY;
}
static int cuMemFree(uint64_t address) {
    CONTEXT;
    world.implicit("freeing on the device");
    return world.release(address, true);
}
static int cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
    CONTEXT;
    if (!bytes) return INVALID_VALUE;
    world.implicit("pinning");
    *pointer = reinterpret_cast<void*>(world.allocate(bytes, false));
    return SUCCESS;
}
static int cuMemFreeHost(void* pointer) {
    CONTEXT;
    world.implicit("freeing on the host");
    return world.release(reinterpret_cast<uint64_t>(pointer), false);
}
static int cuMemcpyAsync(uint64_t to, uint64_t of, size_t bytes, Stream* stream) {
    CONTEXT;
    if (world.streams.count(stream) && stream->context != current) return INVALID_HANDLE;
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
    world.streams.insert(*stream = new Stream{current, {}, {}});
    return SUCCESS;
}
static int cuStreamDestroy(Stream* stream) {
    LOOK;
    if (!world.streams.erase(stream)) return INVALID_HANDLE;
    if (!stream->queue.empty() && !world.lost) world.wrong("a stream was destroyed with work in it");
    delete stream;
    return SUCCESS;
}
static int cuStreamQuery(Stream* stream) {
    ENTER;
    if (!world.streams.count(stream)) return INVALID_HANDLE;
    return stream->queue.empty() ? SUCCESS : NOT_READY;
}
static int cuStreamSynchronize(Stream* stream) {
    ENTER;
    world.wrong("a wait for a stream, which spins");
    return world.drain(stream);
}
static int cuStreamGetCtx(Stream*, void** context) {
    ENTER;
    *context = &the_primary;
    return SUCCESS;
}
static int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    ENTER;
    if (!world.events.count(event)) return INVALID_HANDLE;
    auto mark = event->mark;
    return world.give(stream, {"a wait", [mark] { return world.reach(mark); }, {}});
}
static int cuEventCreate(Event** event, unsigned flags) {
    CONTEXT;
    world.events.insert(*event = new Event{current, (flags & 1) != 0, nullptr});
    return SUCCESS;
}
static int cuEventDestroy(Event* event) {
    LOOK;
    if (!world.events.erase(event)) return INVALID_HANDLE;
    delete event;
    return SUCCESS;
}
static int cuEventRecord(Event* event, Stream* stream) {
    ENTER;
    if (!world.events.count(event)) return INVALID_HANDLE;
    if (world.streams.count(stream) && stream->context != event->context) return INVALID_HANDLE;
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
    if (!world.events.count(event)) return INVALID_HANDLE;
    if (!event->blocking) world.wrong("a wait for an event, which spins");
    return world.reach(event->mark);
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
