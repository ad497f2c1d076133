// What the worker's files know of each other: the launch that runs, its threads, their waiting.
#pragma once

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <emulator/runtime.hpp>

namespace fuser_emulator {

enum class State {
    kReady,
    kAtBarrier,      // of the block
    kInMeeting,      // of a warp
    kInWarpgroup,    // in a meeting of one
    kAtPhase,        // of a barrier in shared memory
    kForRegisters,
    kReturned
};

// A copy under way: what was read, and where it will be.
struct Copy {
    char* to;
    char bytes[16];
    std::size_t count;
    unsigned group;
};

struct Thread {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    State state = State::kReturned;
    unsigned number = 0;
    Site site{};
    unsigned mask = 0;
    std::uint64_t value = 0;
    Meeting met{};
    std::vector<Copy> copies{};
    unsigned closed_groups = 0;
    // At a phase: which barrier, and the phase's parity.
    const unsigned long long* barrier = nullptr;
    unsigned parity = 0;
    // In a product: its sums.
    float* sums = nullptr;
};

// Heap memory that ends exactly with its last byte, at an address that is `offset` beyond a multiple
// of 256.
struct Memory {
    Memory(std::string what, std::size_t bytes, std::size_t offset);
    Memory(Memory&& other) noexcept
        : what(std::move(other.what)),
          data(other.data),
          bytes(other.bytes),
          begin(std::exchange(other.begin, nullptr)) {}
    ~Memory() {
        if (begin != nullptr) {
            __asan_unpoison_memory_region(begin, static_cast<std::size_t>(data - begin));
            std::free(begin);
        }
    }

    // The sanitizer guards memory in units of 8 bytes. These are in the first byte's unit.
    char* front() const { return data - reinterpret_cast<std::uintptr_t>(data) % 8; }
    void guard_front(unsigned char byte) { std::fill(front(), data, static_cast<char>(byte)); }
    bool front_is(unsigned char byte) const {
        return std::all_of(front(), data, [&](char c) { return c == static_cast<char>(byte); });
    }

    std::string what;
    char* data = nullptr;
    std::size_t bytes = 0;
    char* begin = nullptr;
};

// In which order threads run; worker.py says it in words.
enum Schedule { kInOrder, kBackwards, kWarpByWarp };

struct Launch {
    unsigned long long number = 0;
    std::string name;
    const Entry* entry = nullptr;
    Schedule schedule = kInOrder;
    unsigned char poison = 0;
    std::vector<Memory> buffers;
    std::vector<void*> arguments;
    // What the block's threads have asked for so far.
    std::vector<Memory> shared;
    std::size_t static_bytes = 0;
    std::size_t dynamic_bytes = 0;
    char* dynamic = nullptr;
    std::size_t dynamic_alignment = 0;
};

extern std::vector<Thread> threads;
extern Thread* current;
extern Launch* running;
extern unsigned thread_count;

// Ends the current thread's turn.
void suspend();
// Makes a thread ready; where warps run one by one, it goes on before its waker's warp does.
void wake(Thread& thread);
bool same(const Site& a, const Site& b);

// ---- sm90.cpp: barriers in shared memory, and the copy engine ----

void start_block_of_sm90();
void end_block_of_sm90();

// Lets one copy land; false if none is under way.
bool land_copy();

// What a thread at a phase waits for, to go on "wait in <function> at <place>".
std::string awaited_phase(const Thread& thread);

// The address of shared memory as instructions know it, equal to the pointer modulo 1024.
unsigned shared_address(const Site& site, const void* pointer);
char* shared_pointer(const Site& site, unsigned address);

// An access that the sanitizer reports if it may not be.
void touch(const void* from, std::size_t bytes);

// ---- sm90_warpgroups.cpp: meetings of warpgroups, and their registers ----

constexpr unsigned kWarpgroup = 128;
constexpr unsigned kMostWarpgroups = 1024 / kWarpgroup;

// What all threads of a warpgroup must say in one call.
struct Request {
    std::uint64_t values[4];
};

// Waits for all threads of the warpgroup. True for the last to come, which acts for all of them.
bool meet_warpgroup(const Site& site, const Request& request);

void start_block_of_warpgroups();

// What a thread without registers waits for.
std::string awaited_registers(const Thread& thread);

// ---- sm90_products.cpp: matrix products of a warpgroup ----

void start_block_of_products();
void end_block_of_products();

}  // namespace fuser_emulator
