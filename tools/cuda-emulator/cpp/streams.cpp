// Streams, their events, and graphs of captured work.
//
// Work of a stream is put in a queue and runs as late as it may: when somebody waits for it. So whoever reads too
// early, or gives a buffer back too early, finds out every time. At a draw of the seed some of it runs earlier.
#include <unistd.h>

#include "driver.hpp"

using namespace emulator;

namespace {

// What only functions here say to each other: the next work of a stream waits for another device.
constexpr CUresult BLOCKED = -1;

// Work of a stream is about its own device.
struct OnDevice {
    int before = used_device();
    explicit OnDevice(int device) { use_device(device); }
    ~OnDevice() { use_device(before); }
};

// Keeps what has ended when this work of a stream begins, which it does now.
void start_work(Stream* stream, const Op& op) {
    driver().running = stream;
    if (op.order == Order::NONE) return;
    auto& all = stream->unfinished;
    auto ended = [&](const Unfinished& one) { return op.order != Order::EARLY || one.work <= op.known; };
    all.erase(all.begin(), std::find_if_not(all.begin(), all.end(), ended));
    uint32_t work = ++driver().work;
    if (op.order != Order::ALONE) all.push_back({work, op.name});
    // A copy leaves writers as they are: all that its stream has had have ended.
    set_writer(op.order == Order::ALONE ? 0 : work);
}

// The host has waited for the work of a stream up to this number. An event may outlive its stream.
void learn(Stream* stream, uint32_t work) {
    if (driver().streams.count(stream)) stream->known = std::max(stream->known, work);
}

CUresult run_one(Stream* stream) {
    Driver& d = driver();
    if (d.sticky != SUCCESS) return d.sticky;
    {
        const Op& next = stream->queue.front();
        while (next.event && next.event->done < next.version) {
            Stream* other = next.event->stream;
            if (!other || other->queue.empty()) return broken("a stream waits for an event that nobody records");
            if (CUresult code = run_one(other)) return code;
        }
    }
    OnDevice on(stream->device);
    if (stream->queue.front().ready && !stream->queue.front().ready()) return BLOCKED;
    Op op = std::move(stream->queue.front());
    stream->queue.pop_front();
    start_work(stream, op);
    if (!op.run) return SUCCESS;
    std::string problem = op.run();
    return problem.empty() ? SUCCESS : broken(problem);
}

CUresult run_until(Stream* stream, size_t left) {
    while (stream->queue.size() > left)
        if (CUresult code = run_one(stream)) return code;
    return driver().sticky;
}

// Lets other threads go on, which work for other devices. What the driver has is not the same behind it.
void yield_lock() {
    int device = used_device();
    driver().mutex.unlock();
    usleep(50);
    driver().mutex.lock();
    use_device(device);
}

}  // namespace

CUresult emulator::finish(Stream* stream) {
    for (;;) {
        CUresult code = run_until(stream, 0);
        if (code == SUCCESS) learn(stream, driver().work);
        if (code != BLOCKED) return code;
        yield_lock();
    }
}

CUresult emulator::run_all() {
    for (bool blocked = true; blocked;) {
        blocked = false;
        for (Stream* stream : driver().streams) {
            if (stream->device != used_device()) continue;
            CUresult code = run_until(stream, 0);
            if (code == BLOCKED) blocked = true;
            else if (code) return code;
        }
        if (blocked) yield_lock();
    }
    return driver().sticky;
}

CUresult emulator::enqueue(Stream* stream, Op op) {
    Driver& d = driver();
    if (d.sticky != SUCCESS) return d.sticky;
    if (!d.streams.count(stream)) return fail(INVALID_HANDLE, "no such stream");
    if (stream->device != used_device()) return fail(INVALID_CONTEXT, "the stream is one of another device");
    if (stream->capturing) {
        stream->captured.ops.push_back(std::move(op));
        return SUCCESS;
    }
    op.known = stream->known;
    stream->queue.push_back(std::move(op));
    CUresult code = SUCCESS;
    if (draw(16) == 0) code = run_until(stream, draw(uint32_t(stream->queue.size())));
    return code == BLOCKED ? SUCCESS : code;
}

bool emulator::any_capture() {
    for (Stream* stream : driver().streams)
        if (stream->capturing && stream->device == used_device()) return true;
    return false;
}

int emulator::enqueue_work(void* stream, const char* name, std::function<std::string()> work,
                           std::function<bool()> ready) {
    Locked lock;
    if (current_device() < 0) return fail(INVALID_CONTEXT, "no context is current on this thread");
    use_device(current_device());
    Op op = {std::move(work), Order::EARLY, name};
    op.ready = std::move(ready);
    return enqueue(static_cast<Stream*>(stream), std::move(op));
}

extern "C" {

CUresult cuCtxSynchronize() {
    NEEDS_CONTEXT;
    if (any_capture()) return fail(CAPTURE_UNSUPPORTED, "the host waits for a context of which a stream is captured");
    count_host_sync();
    CUresult code = run_all();
    for (Stream* stream : driver().streams)
        if (code == SUCCESS && stream->device == used_device()) learn(stream, driver().work);
    return code;
}

// ---- streams and events ----------------------------------------------------------------------------------------------------

CUresult cuStreamCreate(Stream** stream, unsigned) {
    NEEDS_CONTEXT;
    *stream = new Stream{};
    (*stream)->device = used_device();
    driver().streams.insert(*stream);
    return SUCCESS;
}
CUresult cuStreamDestroy_v2(Stream* stream) {
    NEEDS_CONTEXT;
    if (!driver().streams.count(stream)) return fail(INVALID_HANDLE, "no such stream");
    finish(stream);
    driver().streams.erase(stream);
    delete stream;
    return SUCCESS;
}
CUresult cuStreamSynchronize(Stream* stream) {
    NEEDS_CONTEXT;
    if (!driver().streams.count(stream)) return fail(INVALID_HANDLE, "no such stream");
    if (stream->capturing) return fail(CAPTURE_UNSUPPORTED, "the host waits for a stream that is captured");
    count_host_sync();
    return finish(stream);
}
CUresult cuEventCreate(Event** event, unsigned) {
    NEEDS_CONTEXT;
    *event = new Event;
    return SUCCESS;
}
CUresult cuEventDestroy_v2(Event* event) {
    NEEDS_CONTEXT;
    run_all();
    delete event;
    return SUCCESS;
}
CUresult cuEventRecord(Event* event, Stream* stream) {
    NEEDS_CONTEXT;
    uint64_t version = ++event->recorded;
    event->stream = stream;
    event->captured = driver().streams.count(stream) && stream->capturing;
    return enqueue(stream, {[=] {
        event->done = version;
        event->work = driver().work;
        return std::string();
    }});
}
CUresult cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    NEEDS_CONTEXT;
    Op op = {nullptr};
    op.event = event;
    op.version = event->recorded;
    return enqueue(stream, std::move(op));
}
CUresult cuEventSynchronize(Event* event) {
    NEEDS_CONTEXT;
    if (event->captured) return fail(CAPTURED_EVENT, "the host waits for an event of a captured step");
    count_host_sync();
    while (event->done < event->recorded) {
        if (!event->stream || event->stream->queue.empty()) break;
        CUresult code = run_one(event->stream);
        if (code == BLOCKED) yield_lock();
        else if (code) return code;
    }
    if (event->done == event->recorded) learn(event->stream, event->work);
    return driver().sticky;
}
CUresult cuEventQuery(Event* event) {
    NEEDS_CONTEXT;
    if (driver().sticky) return driver().sticky;
    if (event->captured) return fail(CAPTURED_EVENT, "the host asks for an event of a captured step");
    if (event->done < event->recorded && event->stream && !event->stream->queue.empty()) run_one(event->stream);
    if (event->done < event->recorded) return NOT_READY;
    learn(event->stream, event->work);
    return driver().sticky;
}

// ---- graphs --------------------------------------------------------------------------------------------------------------------

CUresult cuStreamBeginCapture_v2(Stream* stream, int) {
    NEEDS_CONTEXT;
    if (!driver().streams.count(stream) || stream->capturing) return fail(INVALID_HANDLE, "no stream to be captured");
    stream->capturing = true;
    stream->captured = Graph();
    return SUCCESS;
}
CUresult cuStreamEndCapture(Stream* stream, Graph** graph) {
    NEEDS_CONTEXT;
    if (!stream->capturing) return fail(INVALID_VALUE, "the stream is not captured");
    stream->capturing = false;
    *graph = new Graph(std::move(stream->captured));
    return SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(Graph** exec, Graph* graph, unsigned long long) {
    NEEDS_CONTEXT;
    *exec = new Graph(*graph);
    return SUCCESS;
}
CUresult cuGraphLaunch(Graph* exec, Stream* stream) {
    NEEDS_CONTEXT;
    // It begins when all before it has ended.
    if (CUresult code = enqueue(stream, {nullptr, Order::ALONE})) return code;
    for (const Op& op : exec->ops)
        if (CUresult code = enqueue(stream, op)) return code;
    driver().replays++;
    return SUCCESS;
}
CUresult cuGraphExecDestroy(Graph* exec) {
    NEEDS_CONTEXT;
    run_all();
    delete exec;
    return SUCCESS;
}
CUresult cuGraphDestroy(Graph* graph) {
    NEEDS_CONTEXT;
    delete graph;
    return SUCCESS;
}
}
