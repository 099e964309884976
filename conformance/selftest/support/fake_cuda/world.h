// What the stand-in knows: memory, streams, events, graphs, failures to come, and what was done wrong.
//
// Device memory has addresses that no program can reach, and never the same twice: whoever touches it from the host, or
// after it was given back, is found out. Every allocation lies between guard bytes.
//
// Streams are as late as they may be: an operation runs when somebody waits for it, or asks whether it is done, and with
// it only what it had to wait for. So a wait that is missing shows as old data.
//
// Memory is taken from the device in pieces of two MiB: an allocation of a MiB or more has pieces of its own, smaller ones
// share. The code of a library, the nodes of graphs and the local memory of threads take their part beside allocations.
// A context that an error has broken answers every call with that error, cuMemFree among them, and keeps what it has.
//
// What a driver does without saying is written down: calls that make the device wait for everything (`waits`), and calls
// that make the host spin (`wrongs`).
#pragma once
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

enum Code {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    DEINITIALIZED = 4,
    DEVICE_UNAVAILABLE = 46,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
};

constexpr size_t GUARD = 128;
constexpr uint8_t GUARD_BYTE = 0xA5, UNWRITTEN = 0xFF;

constexpr size_t PIECE = 2 << 20, SHARED = 1 << 20, NODE = 64 << 10;

struct Allocation {
    size_t bytes = 0;
    bool device = false;
    std::vector<uint8_t> room;  // between guards
    uint8_t* begin() { return room.data() + offset; }
    size_t offset = GUARD;
};

struct Stream;
struct Mark {  // a place in a stream that an event was recorded at
    Stream* stream = nullptr;
    bool done = false;
    double milliseconds = 0;
};

struct Operation {
    std::string what;
    std::function<int()> run;
    std::vector<uint64_t> addresses;  // that it touches
};

struct Keepsake {  // what lives as long as some graph does
    void* what;
    void (*end)(void*);
    ~Keepsake() { end(what); }
};

struct Graph {
    std::vector<Operation> operations;
    std::vector<std::shared_ptr<Keepsake>> keepsakes;
};

struct Stream {
    const char* context;
    std::deque<Operation> queue;
    std::unique_ptr<Graph> capture;
};

struct Event {
    const char* context;
    bool blocking;
    std::shared_ptr<Mark> mark;
};

struct Failure {
    int nth, code;
};

struct World {
    std::recursive_mutex lock;
    int pid = 0, lost = 0;
    double milliseconds = 0;
    std::map<uint64_t, Allocation> memory;
    uint64_t next = uint64_t(1) << 36;
    size_t device_used = 0, pinned_used = 0, taken = 0, local = 0;
    std::vector<std::string> waits, afterwards;
    std::set<Stream*> streams;
    std::set<Event*> events;
    std::set<Graph*> graphs, executables;
    std::set<void*> libraries;
    std::map<Keepsake*, std::shared_ptr<Keepsake>> keepsakes;
    std::map<std::string, Failure> failures;
    std::map<std::string, long> calls;
    std::vector<std::string> wrongs;

    void wrong(const std::string& what) { wrongs.push_back(what); }

    // Of the call of this name: whether it is to fail, or everything does.
    int call(const char* name, bool looks) {
        calls[name]++;
        if (pid != getpid()) return NOT_INITIALIZED;
        if (lost && !looks) {
            afterwards.push_back(name);
            return lost;
        }
        return planned(name);
    }

    // What a call of this name does while the device is at work: it waits for all of that, first.
    void implicit(const std::string& what) {
        for (auto* stream : streams)
            if (!stream->queue.empty()) {
                waits.push_back(what);
                return;
            }
    }

    // Bytes of the device that are taken, in pieces.
    static size_t pieces(size_t bytes) { return (bytes + PIECE - 1) / PIECE * PIECE; }
    size_t footprint() const {
        size_t small = 0, large = 0, nodes = 0;
        for (auto& [address, it] : memory)
            if (it.device && it.bytes < SHARED)
                small += (it.bytes + 255) / 256 * 256;
            else if (it.device)
                large += pieces(it.bytes);
        for (auto* graph : executables) nodes += graph->operations.size();
        return pieces(small) + large + pieces(nodes * NODE) + libraries.size() * PIECE + pieces(local) + taken;
    }

    int planned(const std::string& name) {
        auto found = failures.find(name);
        if (found == failures.end() || --found->second.nth > 0) return SUCCESS;
        int code = found->second.code;
        failures.erase(found);
        return code;
    }

    // The allocation that an address lies in; null if none.
    std::pair<const uint64_t, Allocation>* find(uint64_t address) {
        auto next_one = memory.upper_bound(address);
        if (next_one == memory.begin()) return nullptr;
        auto& found = *std::prev(next_one);
        return address < found.first + found.second.bytes ? &found : nullptr;
    }

    // Where the bytes of an address really are, if all of them lie in one allocation.
    uint8_t* place(uint64_t address, size_t bytes) {
        auto* found = find(address);
        if (!found || address + bytes > found->first + found->second.bytes) return nullptr;
        return found->second.begin() + (address - found->first);
    }

    uint64_t allocate(size_t bytes, bool device) {
        Allocation made;
        made.bytes = bytes;
        made.device = device;
        made.room.assign(bytes + 2 * GUARD + 256, UNWRITTEN);
        made.offset = GUARD + (256 - reinterpret_cast<uintptr_t>(made.room.data() + GUARD) % 256) % 256;
        memset(made.begin() - GUARD, GUARD_BYTE, GUARD);
        memset(made.begin() + bytes, GUARD_BYTE, GUARD);
        uint64_t address = device ? next : reinterpret_cast<uint64_t>(made.begin());
        if (device) next += (bytes + 4095) / 4096 * 4096 + 4096;
        (device ? device_used : pinned_used) += bytes;
        memory.emplace(address, std::move(made));
        return address;
    }

    int release(uint64_t address, bool device) {
        auto found = memory.find(address);
        if (found == memory.end() || found->second.device != device) return INVALID_VALUE;
        Allocation& it = found->second;
        for (size_t i = 0; i < GUARD; i++)
            if (it.begin()[it.bytes + i] != GUARD_BYTE || *(it.begin() - 1 - i) != GUARD_BYTE) {
                wrong("bytes beside an allocation were written");
                break;
            }
        for (auto* stream : streams)
            for (auto& operation : stream->queue)
                for (auto touched : operation.addresses)
                    if (touched >= address && touched < address + it.bytes) {
                        wrong("memory was given back before " + operation.what);
                        goto counted;
                    }
    counted:
        (device ? device_used : pinned_used) -= it.bytes;
        memory.erase(found);
        return SUCCESS;
    }

    // Streams.

    int give(Stream* stream, Operation operation) {
        if (!streams.count(stream)) return INVALID_HANDLE;
        if (stream->capture)
            stream->capture->operations.push_back(std::move(operation));
        else
            stream->queue.push_back(std::move(operation));
        return SUCCESS;
    }

    int step(Stream* stream) {
        Operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        milliseconds += 1;
        int code = planned("run");
        if (!code) code = operation.run();
        if (code) lost = code;
        return code;
    }

    int drain(Stream* stream) {
        if (!streams.count(stream)) return INVALID_HANDLE;
        if (stream->capture) return CAPTURE_UNSUPPORTED;
        while (!stream->queue.empty())
            if (int code = step(stream)) return code;
        return SUCCESS;
    }

    int reach(const std::shared_ptr<Mark>& mark) {
        while (mark && !mark->done && !mark->stream->queue.empty())
            if (int code = step(mark->stream)) return code;
        return SUCCESS;
    }
};
