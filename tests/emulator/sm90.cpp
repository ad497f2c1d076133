// Hopper in the emulator's worker: barriers in shared memory, and the copy engine.

#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>

#include "worker.hpp"

namespace fuser_emulator {
namespace {

// A barrier's state; the barrier itself is a mark that a kernel must not overwrite.
struct Phases {
    Barrier mark = 0;
    unsigned count = 0;
    unsigned pending = 0;  // arrivals
    long long bytes = 0;   // announced that have not landed; less than 0 if more have landed
    unsigned phase = 0;
    bool is_published = false;
};

struct Transfer {
    const Barrier* barrier;
    long long bytes;
    std::function<void()> write;
};

constexpr Barrier kMark = 0xba221e2ull << 32;
constexpr unsigned kMostArrivals = (1u << 20) - 1;
constexpr long long kMostBytes = (1 << 20) - 1;

// Where a shared address has as many bits as a matrix descriptor.
constexpr unsigned kWindow = 1u << 18;

std::map<const Barrier*, Phases> barriers;
std::deque<Transfer> transfers;

// Calls `f` with each shared memory and its address for instructions.
template <class F>
void for_each_shared(F f) {
    std::uintptr_t end = 0;
    for (const Memory& memory : running->shared) {
        const std::uintptr_t below = reinterpret_cast<std::uintptr_t>(memory.data) % 1024;
        const std::uintptr_t begin = (end + 1023) / 1024 * 1024 + below;
        end = begin + memory.bytes;
        f(memory, begin);
    }
}

std::string shown(const void* pointer) {
    std::string place = "no shared memory";
    for_each_shared([&](const Memory& memory, std::uintptr_t) {
        const std::ptrdiff_t offset = static_cast<const char*>(pointer) - memory.data;
        if (offset >= 0 && offset < static_cast<std::ptrdiff_t>(memory.bytes)) {
            place = "byte " + std::to_string(offset) + " of " + memory.what;
        }
    });
    return place;
}

void check_aligned(const Site& site, const char* what, const void* pointer, unsigned alignment) {
    const std::uintptr_t below = reinterpret_cast<std::uintptr_t>(pointer) % alignment;
    if (below != 0) {
        fail("%s at %s:%d gets %s that is %zu bytes beyond a multiple of %u", site.function,
             site.file, site.line, what, below, alignment);
    }
}

// ---- phases ----

Phases& phases_of(const Site& site, const Barrier* barrier) {
    const auto found = barriers.find(barrier);
    if (found == barriers.end()) {
        fail("%s at %s:%d uses a barrier that is not initialised, at %s", site.function, site.file,
             site.line, shown(barrier).c_str());
    }
    if (*barrier != found->second.mark) {
        fail("%s at %s:%d uses a barrier that has been overwritten, at %s", site.function,
             site.file, site.line, shown(barrier).c_str());
    }
    return found->second;
}

void end_phase_if_complete(const Barrier* barrier, Phases& phases) {
    if (phases.pending != 0 || phases.bytes != 0) {
        return;
    }
    for (const Transfer& transfer : transfers) {
        if (transfer.barrier == barrier) {
            fail("A phase of the barrier at %s ends before %lld bytes land that nobody announced",
                 shown(barrier).c_str(), transfer.bytes);
        }
    }
    ++phases.phase;
    phases.pending = phases.count;
    for (unsigned number = 0; number < thread_count; ++number) {
        Thread& thread = threads[number];
        if (thread.state == State::kAtPhase && thread.barrier == barrier) {
            wake(thread);
        }
    }
}

// ---- copies ----

void land(const Transfer& transfer) {
    transfer.write();
    Phases& phases = barriers.at(transfer.barrier);
    phases.bytes -= transfer.bytes;
    end_phase_if_complete(transfer.barrier, phases);
}

void start_transfer(const Site& site, void* to, Transfer transfer) {
    if (!phases_of(site, transfer.barrier).is_published) {
        fail("%s at %s:%d uses a barrier that is not published, at %s", site.function, site.file,
             site.line, shown(transfer.barrier).c_str());
    }
    if (running->schedule == kInOrder) {
        land(transfer);
    } else {
        std::memset(to, running->poison, static_cast<std::size_t>(transfer.bytes));
        transfers.push_back(std::move(transfer));
    }
}

// What Emulator.tensor_map of backend.py makes.
struct Matrix {
    const char* address;
    long long columns, rows, row_bytes, box_columns, box_rows, swizzle;
};

// The 128-byte swizzle: bits 4 to 6 of a shared address, XOR bits 7 to 9.
char* swizzled(char* shared) {
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(shared);
    return shared - address % 128 + ((address ^ (address >> 7 & 7) << 4) % 128);
}

void write_box(char* to, const Matrix& matrix, long long column, long long row) {
    const long long begin = std::max(column, 0ll);
    const long long end = std::min(column + matrix.box_columns, matrix.columns);
    for (long long i = 0; i < matrix.box_rows; ++i) {
        char line[128] = {};
        if (row + i >= 0 && row + i < matrix.rows && begin < end) {
            const char* from = matrix.address + (row + i) * matrix.row_bytes;
            std::memcpy(line + (begin - column), from + begin,
                        static_cast<std::size_t>(end - begin));
        }
        for (int chunk = 0; chunk < 128; chunk += 16) {
            std::memcpy(swizzled(to + 128 * i + chunk), line + chunk, 16);
        }
    }
}

void check_matrix(const Site& site, const Matrix& matrix, long long column, long long row) {
    check_aligned(site, "a matrix at an address", matrix.address, 16);
    check_aligned(site, "a matrix with rows", reinterpret_cast<const void*>(matrix.row_bytes), 16);
    if (matrix.box_columns != 128 || matrix.swizzle != 128) {
        fail("%s at %s:%d gets a box of %lld columns with a swizzle of %lld bytes; both are 128",
             site.function, site.file, site.line, matrix.box_columns, matrix.swizzle);
    }
    if (matrix.box_rows < 1 || matrix.box_rows > 256) {
        fail("%s at %s:%d gets a box of %lld rows; it has 1 to 256", site.function, site.file,
             site.line, matrix.box_rows);
    }
    const long long begin = std::max(column, 0ll);
    const long long end = std::min(column + matrix.box_columns, matrix.columns);
    for (long long i = std::max(row, 0ll); i < std::min(row + matrix.box_rows, matrix.rows); ++i) {
        if (begin < end) {
            touch(matrix.address + i * matrix.row_bytes + begin,
                  static_cast<std::size_t>(end - begin));
        }
    }
}

}  // namespace

// ---- the worker's ----

void start_block_of_sm90() {
    barriers.clear();
}

void end_block_of_sm90() {
    if (!transfers.empty()) {
        fail("The block ends before %lld bytes land in its shared memory", transfers[0].bytes);
    }
}

bool land_copy() {
    const auto end = threads.begin() + thread_count;
    const bool is_awaited = std::any_of(threads.begin(), end, [](const Thread& thread) {
        return thread.state != State::kReturned;
    });
    if (transfers.empty() || !is_awaited) {
        return false;
    }
    const bool is_last = running->schedule == kBackwards;
    const Transfer transfer = is_last ? transfers.back() : transfers.front();
    transfers.erase(is_last ? transfers.end() - 1 : transfers.begin());
    land(transfer);
    return true;
}

std::string awaited_phase(const Thread& thread) {
    const Phases& phases = barriers.at(thread.barrier);
    char text[256];
    std::snprintf(text, sizeof text,
                  ", parity %u, for %u arrivals and %lld bytes at the barrier at %s",
                  thread.parity, phases.pending, phases.bytes, shown(thread.barrier).c_str());
    return text;
}

unsigned shared_address(const Site& site, const void* pointer) {
    std::uintptr_t address = kWindow;
    for_each_shared([&](const Memory& memory, std::uintptr_t begin) {
        const std::ptrdiff_t offset = static_cast<const char*>(pointer) - memory.data;
        if (offset >= 0 && offset < static_cast<std::ptrdiff_t>(memory.bytes)) {
            address = begin + static_cast<std::uintptr_t>(offset);
        }
    });
    if (address >= kWindow) {
        fail("%s at %s:%d gets an address outside of shared memory", site.function, site.file,
             site.line);
    }
    return static_cast<unsigned>(address);
}

char* shared_pointer(const Site& site, unsigned address) {
    char* pointer = nullptr;
    for_each_shared([&](const Memory& memory, std::uintptr_t begin) {
        if (address >= begin && address < begin + memory.bytes) {
            pointer = memory.data + (address - begin);
        }
    });
    if (pointer == nullptr) {
        fail("%s at %s:%d gets an address outside of shared memory", site.function, site.file,
             site.line);
    }
    return pointer;
}

void touch(const void* from, std::size_t bytes) {
    const void* forbidden = __asan_region_is_poisoned(const_cast<void*>(from), bytes);
    if (forbidden != nullptr) {
        static_cast<void>(*static_cast<const volatile char*>(forbidden));
    }
}

// ---- what kernels call ----

void init_barrier(Site site, Barrier* barrier, int count) {
    check_aligned(site, "a barrier", barrier, sizeof(Barrier));
    shared_address(site, barrier);
    if (count < 1 || static_cast<unsigned>(count) > kMostArrivals) {
        fail("%s at %s:%d gets a count of %d; it is 1 to %u", site.function, site.file, site.line,
             count, kMostArrivals);
    }
    if (barriers.count(barrier) != 0) {
        fail("%s at %s:%d initialises the barrier at %s again", site.function, site.file,
             site.line, shown(barrier).c_str());
    }
    Phases& phases = barriers[barrier];
    phases.mark = *barrier = kMark | barriers.size();
    phases.count = phases.pending = static_cast<unsigned>(count);
}

void publish_barriers() {
    for (auto& [barrier, phases] : barriers) {
        phases.is_published = true;
    }
}

void arrive(Site site, Barrier* barrier, long long announced_bytes) {
    Phases& phases = phases_of(site, barrier);
    phases.bytes += announced_bytes;
    if (announced_bytes < 0 || phases.bytes > kMostBytes) {
        fail("%s at %s:%d announces %lld bytes, which makes %lld; it is 0 to %lld", site.function,
             site.file, site.line, announced_bytes, phases.bytes, kMostBytes);
    }
    if (phases.pending == 0) {
        fail("%s at %s:%d is arrival %u of a phase at the barrier at %s, whose count is %u",
             site.function, site.file, site.line, phases.count + 1, shown(barrier).c_str(),
             phases.count);
    }
    --phases.pending;
    const unsigned phase = phases.phase;
    end_phase_if_complete(barrier, phases);
    if (running->schedule == kWarpByWarp && phases.phase != phase) {
        suspend();
    }
}

void wait_for_phase(Site site, const Barrier* barrier, unsigned parity) {
    if (parity > 1) {
        fail("%s at %s:%d gets parity %u", site.function, site.file, site.line, parity);
    }
    while (phases_of(site, barrier).phase % 2 == parity) {
        current->state = State::kAtPhase;
        current->site = site;
        current->barrier = barrier;
        current->parity = parity;
        suspend();
    }
}

void load_box(Site site, void* to, const unsigned long long* map, int column, int row,
              Barrier* barrier) {
    Matrix matrix;
    static_assert(sizeof matrix == 7 * sizeof *map);
    std::memcpy(&matrix, map, sizeof matrix);
    check_matrix(site, matrix, column, row);
    check_aligned(site, "a place", to, 128);
    shared_address(site, to);
    char* box = static_cast<char*>(to);
    start_transfer(site, to, {barrier, matrix.box_rows * matrix.box_columns, [=] {
                                  write_box(box, matrix, column, row);
                              }});
}

void load_bytes(Site site, void* to, const void* from, int bytes, Barrier* barrier) {
    check_aligned(site, "a place", to, 16);
    check_aligned(site, "a source", from, 16);
    shared_address(site, to);
    if (bytes <= 0 || bytes % 16 != 0) {
        fail("%s at %s:%d copies %d bytes, which is no multiple of 16", site.function, site.file,
             site.line, bytes);
    }
    const std::size_t count = static_cast<std::size_t>(bytes);
    touch(from, count);
    start_transfer(site, to, {barrier, bytes, [=] { std::memcpy(to, from, count); }});
}

}  // namespace fuser_emulator
