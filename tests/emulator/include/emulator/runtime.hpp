// What compiled kernels and the worker that runs them know of each other.
#pragma once

#include <cstddef>
#include <cstdint>

#include <vector_types.h>

namespace fuser_emulator {

// ---- a compiled source, as the worker finds it ----

// `kind` is p(ointer), f(loating), i(nteger, bool or enum) or s(truct).
struct Parameter {
    std::size_t bytes;
    char kind;
};

struct Entry {
    const char* name;
    void (*kernel)();
    void (*call)(void (*kernel)(), void* const* arguments);
    const Parameter* parameters;
    std::size_t parameter_count;
};

struct Library {
    const Entry* entries;
    std::size_t entry_count;
};

// ---- what kernels ask of the worker ----

// A call that waits for other threads: the function's name, and where the source calls it.
struct Site {
    const char* function;
    const char* file;
    int line;
};

// What the lanes of a warp brought to a collective; `present` are those that took part.
struct Meeting {
    std::uint64_t values[32];
    unsigned present;
};

// Wait for all threads of the block; how many of them came with a true predicate.
int block_barrier(Site site, bool predicate);

// Wait for the lanes of `mask`. The result holds until this thread's next meeting.
const Meeting& meet(Site site, unsigned mask, std::uint64_t value);

unsigned lane();

// Copies that the thread does not wait for, in groups that it closes, until at most `left` of its
// groups are under way. In the first run of a launch they land at once, in the others as late as
// they may; meanwhile garbage is where they will be.
void copy_later(void* shared, const void* global, std::size_t bytes);
void close_copies();
void wait_for_copies(unsigned left);

// A static variable in shared memory: one for each declaration and instantiation.
struct Shared {
    const char* name;
    std::size_t bytes;
    std::size_t alignment;
    // The worker's: where it is in the launch of this number.
    void* memory = nullptr;
    unsigned long long launch = 0;
};

void* static_shared(Shared& variable);
void* dynamic_shared(std::size_t alignment);

// ---- what kernels for Hopper ask of it: include/emulator/sm90.hpp has their names for it ----

// A barrier in shared memory ends a phase after `count` arrivals and all announced bytes.
using Barrier = unsigned long long;
void init_barrier(Site site, Barrier* barrier, int count);
void publish_barriers();
void arrive(Site site, Barrier* barrier, long long announced_bytes);
void wait_for_phase(Site site, const Barrier* barrier, unsigned parity);

// Copies by the copy engine. In the first run of a launch they land at once, in the others when no
// thread can go on without them; meanwhile garbage is where they will be. The last copies land
// first where threads run backwards. `map` is Emulator.tensor_map of backend.py.
void load_box(Site site, void* to, const unsigned long long* map, int column, int row,
              Barrier* barrier);
void load_bytes(Site site, void* to, const void* from, int bytes, Barrier* barrier);

// The registers of each thread of the warpgroup from here on.
void set_registers(Site site, int count, bool takes);

// One product of a warpgroup: `a` and `b` are matrix descriptors, `columns` are rows of b.
struct Product {
    std::uint64_t a;
    std::uint64_t b;
    bool a_is_e5m2;
    bool b_is_e5m2;
    bool adds;
    unsigned columns;
};

// Products read shared memory and have their sums, like copies, at once in the first run; in the
// others when a wait completes their group, and until then their sums are NaN.
std::uint64_t operand(Site site, const void* matrix);
void begin_products(Site site);
void add_product(Site site, const Product& product, float* sums);
void close_products(Site site);
void wait_for_products(Site site, unsigned left);

// End the worker with a message that goes on "... in <kernel>, block <b>, thread <t>".
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace fuser_emulator

extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
