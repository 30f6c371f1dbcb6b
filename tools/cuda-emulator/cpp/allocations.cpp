// Allocations, pools of them, and copies.
#include <cstring>

#include "driver.hpp"

using namespace emulator;

extern "C" {

// ---- memory ------------------------------------------------------------------------------------------------------------

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
    NEEDS_CONTEXT;
    *total = device_total();
    *free = device_total() - device_used();
    for (Pool* pool : driver().pools)
        if (pool->device == used_device()) *free -= std::min(*free, pool->reserved - pool->used);
    return SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr* at, size_t bytes) {
    NEEDS_CONTEXT;
    if (bytes == 0) return fail(INVALID_VALUE, "an allocation of no bytes");
    if (driver().sticky) return driver().sticky;
    count_host_sync();
    *at = device_alloc(bytes);
    return *at ? SUCCESS : fail(OUT_OF_MEMORY, "out of memory");
}
CUresult cuMemFree_v2(CUdeviceptr at) {
    NEEDS_CONTEXT;
    // It waits for all that runs, and may not be called while something is captured.
    if (any_capture()) return fail(CAPTURE_UNSUPPORTED, "memory is freed while a stream is captured");
    count_host_sync();
    run_all();
    return device_free(at) ? SUCCESS : fail(INVALID_VALUE, "no such allocation");
}

// ---- pools: memory in the order of a stream ------------------------------------------------------------------------------

CUresult cuMemPoolCreate(Pool** pool, const void*) {
    NEEDS_CONTEXT;
    *pool = new Pool{used_device()};
    driver().pools.insert(*pool);
    return SUCCESS;
}
CUresult cuMemPoolDestroy(Pool* pool) {
    NEEDS_CONTEXT;
    run_all();
    if (!driver().pools.count(pool)) return fail(INVALID_HANDLE, "no such pool");
    if (pool->used) return broken("a pool is destroyed of which " + std::to_string(pool->used) + " bytes are in use");
    driver().pools.erase(pool);
    delete pool;
    return SUCCESS;
}
CUresult cuMemPoolSetAttribute(Pool* pool, int attribute, void* value) {
    NEEDS_CONTEXT;
    if (attribute != 4) return fail(INVALID_VALUE, "the emulator sets the release threshold of pools alone");
    std::memcpy(&pool->threshold, value, 8);
    return SUCCESS;
}
CUresult cuMemPoolGetAttribute(Pool* pool, int attribute, void* value) {
    NEEDS_CONTEXT;
    uint64_t found = 0;
    switch (attribute) {
        case 4: found = pool->threshold; break;
        case 5: found = pool->reserved; break;
        case 7: found = pool->used; break;
        default: return fail(INVALID_VALUE, "the emulator's pools have no such attribute");
    }
    std::memcpy(value, &found, 8);
    return SUCCESS;
}
// The address is known at once; there is memory at it when the stream gets there.
CUresult cuMemAllocFromPoolAsync(CUdeviceptr* at, size_t bytes, Pool* pool, Stream* stream) {
    NEEDS_CONTEXT;
    if (bytes == 0) return fail(INVALID_VALUE, "an allocation of no bytes");
    if (!driver().pools.count(pool)) return fail(INVALID_HANDLE, "no such pool");
    if (driver().streams.count(stream) && stream->capturing)
        return fail(CAPTURE_UNSUPPORTED, "the emulator captures no allocations");
    if (driver().sticky) return driver().sticky;
    // What other pools keep is given back for it.
    uintptr_t got = device_reserve(bytes);
    if (!got) return fail(OUT_OF_MEMORY, "out of memory");
    *at = got;
    driver().pooled[got] = pool;
    pool->took(bytes);
    return enqueue(stream, {[=] {
        device_begin(got);
        return std::string();
    }});
}
CUresult cuMemFreeAsync(CUdeviceptr at, Stream* stream) {
    NEEDS_CONTEXT;
    auto found = driver().pooled.find(at);
    if (found == driver().pooled.end()) return fail(INVALID_VALUE, "no such allocation of a pool");
    if (driver().streams.count(stream) && stream->capturing)
        return fail(CAPTURE_UNSUPPORTED, "the emulator captures no allocations");
    Pool* pool = found->second;
    driver().pooled.erase(found);
    return enqueue(stream, {[=] {
        pool->gave(device_size(at));
        device_free(at);
        return std::string();
    }});
}

// ---- copies -------------------------------------------------------------------------------------------------------------

CUresult cuMemHostAlloc(void** at, size_t bytes, unsigned) {
    NEEDS_CONTEXT;
    count_host_sync();
    *at = host_alloc(bytes);
    return *at ? SUCCESS : fail(OUT_OF_MEMORY, "out of memory of the host");
}
CUresult cuMemFreeHost(void* at) {
    NEEDS_CONTEXT;
    count_host_sync();
    run_all();
    return host_free(at) ? SUCCESS : fail(INVALID_VALUE, "no such memory of the host");
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, Stream* stream) {
    NEEDS_CONTEXT;
    auto copy = [to, bytes](const void* source) {
        std::string problem = check_range(to, bytes, false);
        if (!problem.empty()) return "a copy to the device: " + problem;
        std::memcpy(reinterpret_cast<void*>(to), source, bytes);
        mark_written(to, bytes);
        return std::string();
    };
    if (is_pinned(from, bytes)) return enqueue(stream, {[=] { return copy(from); }, Order::ALONE});
    if (driver().streams.count(stream) && stream->capturing)
        return fail(CAPTURE_UNSUPPORTED, "a copy from pageable memory is captured");
    count_host_sync();
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                      static_cast<const char*>(from) + bytes);
    return enqueue(stream, {[=] { return copy(staged->data()); }, Order::ALONE});
}
CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, Stream* stream) {
    NEEDS_CONTEXT;
    // Bytes that nothing has written may be read back: whoever does that sees what they are.
    Op op = {[=] {
        std::string problem = check_range(from, bytes, false);
        if (!problem.empty()) return "a copy from the device: " + problem;
        std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
        return std::string();
    }, Order::ALONE};
    bool pinned = is_pinned(to, bytes);
    if (!pinned && driver().streams.count(stream) && stream->capturing)
        return fail(CAPTURE_UNSUPPORTED, "a copy to pageable memory is captured");
    CUresult code = enqueue(stream, std::move(op));
    if (code || pinned) return code;
    count_host_sync();
    return finish(stream);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, Stream* stream) {
    NEEDS_CONTEXT;
    return enqueue(stream, {[=] {
        std::string problem = check_range(from, bytes, false);
        if (problem.empty()) problem = check_range(to, bytes, false);
        if (!problem.empty()) return "a copy on the device: " + problem;
        if (to < from + bytes && from < to + bytes && to != from)
            return std::string("a copy on the device between ranges that overlap");
        std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
        copy_shadow(to, from, bytes);
        return std::string();
    }, Order::AFTER_ALL, "a copy on the device"});
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, Stream* stream) {
    NEEDS_CONTEXT;
    return enqueue(stream, {[=] {
        std::string problem = check_range(to, bytes, false);
        if (!problem.empty()) return "a fill: " + problem;
        std::memset(reinterpret_cast<void*>(to), value, bytes);
        mark_written(to, bytes);
        return std::string();
    }, Order::AFTER_ALL, "a fill"});
}
}
