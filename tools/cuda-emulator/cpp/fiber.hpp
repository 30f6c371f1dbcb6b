// Fibers: several courses of one thread of the host, each with a stack of its own.
#pragma once
#include <cstddef>

namespace emulator {

constexpr size_t STACK_BYTES = 128 << 10;

// Memory for a stack, whose pages are there once they are touched.
char* new_stack();

// What `emulator_switch` goes to for `main` to begin on this stack; it must not return.
void* begin_fiber(char* stack, void (*main)());

}  // namespace emulator

// Goes on where `to` left off, which is kept in `from` of who calls this.
extern "C" void emulator_switch(void** from, void* to);
