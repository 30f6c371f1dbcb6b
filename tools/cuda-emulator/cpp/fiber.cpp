// Fibers, for x86-64 and AArch64: a switch keeps the registers that a call must keep, on the stack that it leaves.
#include "fiber.hpp"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
constexpr size_t SAVED_WORDS = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, %function
emulator_switch:
    stp x19, x20, [sp, #-160]!
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    ldp x19, x20, [sp], #160
    ret
)");
#else
#error "fibers are written for x86-64 and AArch64"
#endif

namespace emulator {

char* new_stack() {
    void* at = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) std::abort();
    return static_cast<char*>(at);
}

void* begin_fiber(char* stack, void (*main)()) {
    auto* top = reinterpret_cast<void**>(stack + STACK_BYTES - 64);
#if defined(__x86_64__)
    // A function begins 8 bytes off a multiple of 16, as behind a call.
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void*>(main);
    return top - 2 - SAVED_WORDS;
#else
    void** frame = top - 20;
    std::memset(frame, 0, 160);
    frame[11] = reinterpret_cast<void*>(main);
    return frame;
#endif
}

}  // namespace emulator
