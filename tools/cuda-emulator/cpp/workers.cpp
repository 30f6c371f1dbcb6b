// Threads of the host that run blocks of a kernel.
#include <algorithm>
#include <condition_variable>
#include <thread>

#include "emulator.hpp"

namespace emulator {
namespace {

// Threads that help the one that calls, with one thing at a time. They are never ended: they wait when the process ends.
struct Helpers {
    std::mutex mutex;
    std::condition_variable begins, ends;
    const std::function<void(unsigned)>* work = nullptr;
    uint64_t round = 0;
    unsigned busy = 0;

    Helpers() {
        for (unsigned worker = 1; worker < workers(); worker++) std::thread([=] { help(worker); }).detach();
    }
    void help(unsigned worker) {
        std::unique_lock<std::mutex> lock(mutex);
        for (uint64_t seen = 0;;) {
            begins.wait(lock, [&] { return round != seen; });
            seen = round;
            if (!work) continue;
            const auto& mine = *work;
            busy++;
            lock.unlock();
            mine(worker);
            lock.lock();
            if (--busy == 0) ends.notify_one();
        }
    }
    void run(const std::function<void(unsigned)>& shared) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            work = &shared;
            round++;
        }
        begins.notify_all();
        shared(0);
        // Who has not begun yet has nothing left to do.
        std::unique_lock<std::mutex> lock(mutex);
        work = nullptr;
        ends.wait(lock, [&] { return busy == 0; });
    }
};

}  // namespace

unsigned workers() {
    static unsigned count = std::min(std::max(std::thread::hardware_concurrency(), 1u), MOST_WORKERS);
    return count;
}

void run_by_all(const std::function<void(unsigned)>& work) {
    // Never ended, as its threads are not.
    static Helpers& helpers = *new Helpers;
    helpers.run(work);
}

}  // namespace emulator
