// The seed, and what is drawn from it: the order of all that has none.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <random>

#include "emulator.hpp"

namespace emulator {
namespace {

// Without a setting another one in each process: an order that nobody tried is found some day. Of few digits, to be typed.
uint32_t choose_seed() {
    if (const char* given = std::getenv("CUDA_EMULATOR_SEED")) return uint32_t(std::strtoul(given, nullptr, 10));
    auto now = uint64_t(std::chrono::system_clock::now().time_since_epoch() / std::chrono::microseconds(1));
    return uint32_t((now + uint64_t(getpid()) * 7919) % 1000000);
}

uint32_t seed() {
    static uint32_t one = choose_seed();
    return one;
}

// Libraries beside the driver draw without its lock.
struct Generator {
    std::mutex mutex;
    std::mt19937 numbers{seed()};
};

Generator& generator() {
    static Generator one;
    return one;
}

}  // namespace

uint32_t draw(uint32_t below) {
    Generator& g = generator();
    std::lock_guard<std::mutex> lock(g.mutex);
    return std::uniform_int_distribution<uint32_t>(0, below - 1)(g.numbers);
}

uint32_t restart_draws() {
    Generator& g = generator();
    std::lock_guard<std::mutex> lock(g.mutex);
    g.numbers.seed(seed());
    return seed();
}

std::string with_seed(const std::string& message) {
    const char name[] = "CUDA_EMULATOR_SEED=";
    bool has_it = message.find(name) != std::string::npos;
    return has_it ? message : message + " (" + name + std::to_string(seed()) + ")";
}

}  // namespace emulator
