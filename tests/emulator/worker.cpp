// The process that runs kernels for the emulator: blocks one by one, their threads as fibers.
//
// Requests come on stdin and answers go to stdout as 64-bit integers and runs of bytes; what a
// kernel prints, and every report of an error in one, goes to stderr.

#include <dlfcn.h>
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "worker.hpp"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace fuser_emulator {

std::vector<Thread> threads(1024);
Thread* current = nullptr;
Launch* running = nullptr;
unsigned thread_count = 0;

namespace {

// ---- fibers ----

// Frames grow several times under AddressSanitizer.
constexpr std::size_t kStackBytes = 256 * 1024;
constexpr std::size_t kGuardBytes = 4096;

// What a block has for static variables.
constexpr std::size_t kMostStaticBytes = 48 * 1024;

extern "C" void fuser_switch_stacks(void** save, void* load);
asm(R"(
.text
.globl fuser_switch_stacks
.type fuser_switch_stacks, @function
fuser_switch_stacks:
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
.size fuser_switch_stacks, .-fuser_switch_stacks
)");

void* scheduler_stack_pointer = nullptr;
const void* scheduler_stack = nullptr;
std::size_t scheduler_stack_bytes = 0;
std::vector<Thread*> woken;

// ---- the launch that runs ----

unsigned at_barrier = 0;
unsigned barriers = 0;  // that the block is past
int barrier_predicates = 0;
int barrier_result = 0;

void print_place() {
    if (running == nullptr) {
        return;
    }
    std::fprintf(stderr, "in %s, block (%u, %u, %u)", running->name.c_str(), blockIdx.x,
                 blockIdx.y, blockIdx.z);
    if (current != nullptr) {
        std::fprintf(stderr, ", thread (%u, %u, %u)", threadIdx.x, threadIdx.y, threadIdx.z);
    }
    std::fprintf(stderr, "\n");
}

[[noreturn]] void die() {
    std::fflush(stderr);
    _exit(1);
}

}  // namespace

Memory::Memory(std::string what, std::size_t bytes, std::size_t offset)
    : what(std::move(what)), bytes(bytes) {
    // The front is a red zone of its own: the allocator's would be left by a small step over it.
    const std::size_t front = 256 + offset;
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, front + bytes) != 0) {
        std::fprintf(stderr, "There is no memory for the %zu bytes of %s.\n", bytes,
                     this->what.c_str());
        die();
    }
    begin = static_cast<char*>(memory);
    data = begin + front;
    __asan_poison_memory_region(begin, front);
}

namespace {

// Called by the sanitizers after their report.
void explain_report() {
    print_place();
    if (running == nullptr || !__asan_report_present()) {
        return;
    }
    const char* address = static_cast<const char*>(__asan_get_report_address());
    for (const std::vector<Memory>* memories : {&running->buffers, &running->shared}) {
        for (const Memory& memory : *memories) {
            // The nearest: allocations are 256 bytes apart at least.
            const long long offset = address - memory.data;
            const long long bytes = static_cast<long long>(memory.bytes);
            if (offset >= -256 && offset < bytes + 256) {
                std::fprintf(stderr, "at byte %lld of %s, which has %lld bytes\n", offset,
                             memory.what.c_str(), bytes);
            }
        }
    }
    std::fflush(stderr);
}

void on_alarm(int) {
    std::fprintf(stderr, "The kernel does not end ");
    print_place();
    die();
}

// ---- scheduling ----

uint3 index_of(unsigned number) {
    const unsigned x = number % blockDim.x;
    const unsigned y = number / blockDim.x % blockDim.y;
    return {x, y, number / blockDim.x / blockDim.y};
}

}  // namespace

void suspend() {
    void* fake_stack = nullptr;
    // A thread that has returned gives its stack back.
    __sanitizer_start_switch_fiber(current->state == State::kReturned ? nullptr : &fake_stack,
                                   scheduler_stack, scheduler_stack_bytes);
    fuser_switch_stacks(&current->stack_pointer, scheduler_stack_pointer);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

void wake(Thread& thread) {
    thread.state = State::kReady;
    if (running->schedule == kWarpByWarp && current != nullptr) {
        woken.push_back(&thread);
    }
}

bool same(const Site& a, const Site& b) {
    const auto are_equal = [](const char* x, const char* y) {
        return x == y || std::strcmp(x, y) == 0;
    };
    return a.line == b.line && are_equal(a.function, b.function) && are_equal(a.file, b.file);
}

namespace {

void resume(Thread& thread) {
    current = &thread;
    threadIdx = index_of(thread.number);
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(&fake_stack, thread.stack, kStackBytes);
    fuser_switch_stacks(&scheduler_stack_pointer, thread.stack_pointer);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
    current = nullptr;
}

// Whether all lanes of a collective are there; lanes that have returned are not waited for.
bool complete(unsigned warp, unsigned mask, const Site& site) {
    Meeting met{};
    for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned number = 32 * warp + lane;
        if (!(mask >> lane & 1u) || number >= thread_count ||
            threads[number].state == State::kReturned) {
            continue;
        }
        const Thread& thread = threads[number];
        if (thread.state != State::kInMeeting || thread.mask != mask || !same(thread.site, site)) {
            return false;
        }
        met.values[lane] = thread.value;
        met.present |= 1u << lane;
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
        if (met.present >> lane & 1u) {
            threads[32 * warp + lane].met = met;
            threads[32 * warp + lane].state = State::kReady;
        }
    }
    return true;
}

// The returned thread may have been the last that a collective of its warp waited for.
void leave(unsigned warp) {
    for (unsigned number = 32 * warp; number < 32 * warp + 32 && number < thread_count; ++number) {
        if (threads[number].state == State::kInMeeting) {
            complete(warp, threads[number].mask, threads[number].site);
        }
    }
}

__attribute__((no_sanitize("address"), noreturn)) void fiber() {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
    running->entry->call(running->entry->kernel, running->arguments.data());
    current->state = State::kReturned;
    leave(current->number / 32);
    suspend();
    __builtin_unreachable();
}

void start(Thread& thread, unsigned number) {
    if (thread.stack == nullptr) {
        void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            fail("There is no memory for the stack of a thread");
        }
        mprotect(memory, kGuardBytes, PROT_NONE);
        thread.stack = static_cast<char*>(memory) + kGuardBytes;
    }
    // Six registers, then where to go, then a return address that is never used, which puts the
    // stack where a call would have left it.
    void** top = reinterpret_cast<void**>(thread.stack + kStackBytes) - 8;
    std::memset(top, 0, 8 * sizeof(void*));
    top[6] = reinterpret_cast<void*>(&fiber);
    thread.stack_pointer = top;
    thread.number = number;
    thread.copies.clear();
    thread.closed_groups = 0;
    thread.state = State::kReady;
}

void print_threads(const std::vector<unsigned>& numbers) {
    std::fprintf(stderr, "  %zu thread%s (", numbers.size(), numbers.size() == 1 ? "" : "s");
    for (std::size_t i = 0; i < numbers.size();) {
        std::size_t last = i;
        while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) {
            ++last;
        }
        std::fprintf(stderr, "%s%u", i == 0 ? "" : ", ", numbers[i]);
        if (last > i) {
            std::fprintf(stderr, " to %u", numbers[last]);
        }
        i = last + 1;
    }
    std::fprintf(stderr, ") ");
}

[[noreturn]] void report_deadlock() {
    std::fprintf(stderr, "The kernel deadlocks ");
    print_place();
    std::map<std::string, std::vector<unsigned>> groups;
    for (unsigned number = 0; number < thread_count; ++number) {
        const Thread& thread = threads[number];
        std::string what = "returned";
        if (thread.state != State::kReturned) {
            what = std::string("wait in ") + thread.site.function + " at " + thread.site.file +
                   ":" + std::to_string(thread.site.line);
        }
        if (thread.state == State::kInMeeting) {
            char mask[32];
            std::snprintf(mask, sizeof mask, ", mask 0x%08x", thread.mask);
            what += mask;
        }
        if (thread.state == State::kAtPhase) {
            what += awaited_phase(thread);
        } else if (thread.state == State::kForRegisters) {
            what += awaited_registers(thread);
        }
        groups[what].push_back(number);
    }
    for (const auto& [what, numbers] : groups) {
        print_threads(numbers);
        std::fprintf(stderr, "%s\n", what.c_str());
    }
    die();
}

// A thread to its next barrier or collective, then the next thread.
void run_in_step() {
    for (bool progress = true; progress;) {
        progress = false;
        for (unsigned i = 0; i < thread_count; ++i) {
            Thread& thread = threads[running->schedule == kBackwards ? thread_count - 1 - i : i];
            if (thread.state == State::kReady) {
                resume(thread);
                progress = true;
            }
        }
        progress = progress || land_copy();
    }
}

// All threads of a warp to their next barrier or collective, but not past a barrier of the block.
bool run_warp(unsigned warp) {
    const unsigned turn = barriers;
    bool progress = false;
    for (unsigned number = 32 * warp; number < 32 * warp + 32 && number < thread_count; ++number) {
        if (barriers == turn && threads[number].state == State::kReady) {
            resume(threads[number]);
            progress = true;
        }
        while (!woken.empty()) {
            Thread& thread = *woken.back();
            woken.pop_back();
            resume(thread);
        }
    }
    return progress;
}

// A warp to its next barrier, through collectives, then the next warp. Between two barriers warps go
// up or down, so that each is ahead of each other one sooner or later.
void run_warp_by_warp(unsigned long long block) {
    const unsigned warps = (thread_count + 31) / 32;
    for (bool progress = true; progress;) {
        progress = false;
        const unsigned turn = barriers;
        const bool goes_down = (barriers + block) % 2 == 1;
        for (unsigned i = 0; i < warps && barriers == turn; ++i) {
            while (barriers == turn && run_warp(goes_down ? warps - 1 - i : i)) {
                progress = true;
            }
        }
        progress = progress || land_copy();
    }
}

void run_block(unsigned long long block) {
    for (const Memory& memory : running->shared) {
        std::memset(memory.data, running->poison, memory.bytes);
    }
    for (unsigned number = 0; number < thread_count; ++number) {
        start(threads[number], number);
    }
    at_barrier = 0;
    barrier_predicates = 0;
    barriers = 0;
    start_block_of_sm90();
    start_block_of_warpgroups();
    start_block_of_products();
    if (running->schedule == kWarpByWarp) {
        run_warp_by_warp(block);
    } else {
        run_in_step();
    }
    for (unsigned number = 0; number < thread_count; ++number) {
        if (threads[number].state != State::kReturned) {
            report_deadlock();
        }
    }
    end_block_of_sm90();
    end_block_of_products();
}

void run_grid() {
    thread_count = blockDim.x * blockDim.y * blockDim.z;
    const unsigned long long blocks = 1ull * gridDim.x * gridDim.y * gridDim.z;
    for (unsigned long long i = 0; i < blocks; ++i) {
        const unsigned long long block = running->schedule == kBackwards ? blocks - 1 - i : i;
        blockIdx.x = static_cast<unsigned>(block % gridDim.x);
        blockIdx.y = static_cast<unsigned>(block / gridDim.x % gridDim.y);
        blockIdx.z = static_cast<unsigned>(block / gridDim.x / gridDim.y);
        run_block(block);
    }
}

// Aligned to `alignment` and to no more, as it may be on a GPU; but to 8, the sanitizer's unit.
char* new_shared(const std::string& what, std::size_t bytes, std::size_t alignment) {
    running->shared.emplace_back(what, bytes, std::max<std::size_t>(alignment, 8));
    char* memory = running->shared.back().data;
    std::memset(memory, running->poison, bytes);
    return memory;
}

}  // namespace

// ---- what kernels call ----

int block_barrier(Site site, bool predicate) {
    if (at_barrier > 0) {
        for (unsigned number = 0; number < thread_count; ++number) {
            const Thread& other = threads[number];
            if (other.state != State::kAtBarrier) {
                continue;
            }
            if (!same(other.site, site)) {
                fail("Threads of one block meet in two barriers: %s at %s:%d, where thread %u "
                     "waits, and %s at %s:%d",
                     other.site.function, other.site.file, other.site.line, number, site.function,
                     site.file, site.line);
            }
            break;
        }
    }
    barrier_predicates += predicate;
    ++at_barrier;
    if (at_barrier < thread_count) {
        current->state = State::kAtBarrier;
        current->site = site;
        suspend();
        return barrier_result;
    }
    barrier_result = barrier_predicates;
    at_barrier = 0;
    barrier_predicates = 0;
    ++barriers;
    for (unsigned number = 0; number < thread_count; ++number) {
        threads[number].state = State::kReady;
    }
    if (running->schedule == kWarpByWarp) {
        suspend();  // which warp is the first is not for the last to come to say
    }
    return barrier_result;
}

const Meeting& meet(Site site, unsigned mask, std::uint64_t value) {
    if (!(mask >> lane() & 1u)) {
        fail("%s at %s:%d is called by lane %u, which its mask 0x%08x leaves out", site.function,
             site.file, site.line, lane(), mask);
    }
    current->state = State::kInMeeting;
    current->site = site;
    current->mask = mask;
    current->value = value;
    if (!complete(current->number / 32, mask, site)) {
        suspend();
    }
    return current->met;
}

unsigned lane() { return current->number % 32; }

void copy_later(void* shared, const void* global, std::size_t bytes) {
    for (const void* address : {static_cast<const void*>(shared), global}) {
        if (reinterpret_cast<std::uintptr_t>(address) % bytes != 0) {
            fail("An asynchronous copy of %zu bytes is not aligned to them", bytes);
        }
    }
    Copy copy{static_cast<char*>(shared), {}, bytes, current->closed_groups};
    std::memcpy(copy.bytes, global, bytes);
    if (running->schedule != kInOrder) {
        std::memset(shared, running->poison, bytes);
        current->copies.push_back(copy);
    } else {
        std::memcpy(shared, copy.bytes, bytes);
    }
}

void close_copies() { ++current->closed_groups; }

void wait_for_copies(unsigned left) {
    std::vector<Copy> waiting;
    for (const Copy& copy : current->copies) {
        if (copy.group + left < current->closed_groups) {
            std::memcpy(copy.to, copy.bytes, copy.count);
        } else {
            waiting.push_back(copy);
        }
    }
    current->copies.swap(waiting);
}

void* static_shared(Shared& variable) {
    if (variable.launch != running->number) {
        running->static_bytes += variable.bytes;
        if (running->static_bytes > kMostStaticBytes) {
            fail("The block has %zu bytes of static shared memory, and %zu is the most",
                 running->static_bytes, kMostStaticBytes);
        }
        variable.launch = running->number;
        variable.memory = new_shared(std::string("shared variable ") + variable.name,
                                     variable.bytes, variable.alignment);
    }
    return variable.memory;
}

void* dynamic_shared(std::size_t alignment) {
    if (running->dynamic == nullptr) {
        running->dynamic_alignment = alignment;
        running->dynamic = new_shared("dynamic shared memory", running->dynamic_bytes, alignment);
    }
    if (alignment > running->dynamic_alignment) {
        fail("Dynamic shared memory is declared with alignment %zu and then with %zu",
             running->dynamic_alignment, alignment);
    }
    return running->dynamic;
}

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, ", ");
    print_place();
    die();
}

// ---- requests and answers ----

namespace {

int answers = 1;

void read_bytes(void* to, std::size_t bytes) {
    if (std::fread(to, 1, bytes, stdin) != bytes) {
        _exit(0);
    }
}

long long read_number() {
    long long value;
    read_bytes(&value, sizeof value);
    return value;
}

std::string read_text() {
    std::string text(static_cast<std::size_t>(read_number()), '\0');
    read_bytes(text.data(), text.size());
    return text;
}

void write_bytes(const void* from, std::size_t bytes) {
    const char* p = static_cast<const char*>(from);
    while (bytes > 0) {
        const ssize_t written = write(answers, p, bytes);
        if (written <= 0) {
            _exit(0);
        }
        p += written;
        bytes -= static_cast<std::size_t>(written);
    }
}

[[noreturn]] void refuse(const std::string& message) {
    std::fprintf(stderr, "%s\n", message.c_str());
    die();
}

const Library& library_at(const std::string& path) {
    static std::map<std::string, const Library*> loaded;
    const Library*& library = loaded[path];
    if (library == nullptr) {
        void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            refuse(std::string("The compiled kernels cannot be loaded: ") + dlerror());
        }
        library = static_cast<const Library*>(dlsym(handle, "fuser_emulator_library"));
    }
    return *library;
}

const Entry& entry_of(const Library& library, const std::string& name) {
    for (std::size_t i = 0; i < library.entry_count; ++i) {
        if (name == library.entries[i].name) {
            return library.entries[i];
        }
    }
    refuse("The compiled source has no kernel " + name);
}

const char* name_of(char kind) {
    switch (kind) {
        case 'p': return "pointer";
        case 'f': return "floating-point number";
        case 'i': return "integer";
        default: return "struct";
    }
}

std::string described(std::size_t bytes, char kind) {
    return std::string("a ") + name_of(kind) + " of " + std::to_string(bytes) + " bytes";
}

dim3 read_dim3() {
    const unsigned x = static_cast<unsigned>(read_number());
    const unsigned y = static_cast<unsigned>(read_number());
    const unsigned z = static_cast<unsigned>(read_number());
    return {x, y, z};
}

void serve_launch(unsigned seconds) {
    Launch launch;
    static unsigned long long launches = 0;
    launch.number = ++launches;
    const Library& library = library_at(read_text());
    launch.name = read_text();
    launch.entry = &entry_of(library, launch.name);
    gridDim = read_dim3();
    blockDim = read_dim3();
    launch.dynamic_bytes = static_cast<std::size_t>(read_number());
    launch.schedule = static_cast<Schedule>(read_number());
    launch.poison = static_cast<unsigned char>(read_number());

    const std::size_t buffers = static_cast<std::size_t>(read_number());
    for (std::size_t i = 0; i < buffers; ++i) {
        const std::string what = "argument " + std::to_string(read_number());
        const std::size_t bytes = static_cast<std::size_t>(read_number());
        launch.buffers.emplace_back(what, bytes, static_cast<std::size_t>(read_number()));
        read_bytes(launch.buffers.back().data, bytes);
        launch.buffers.back().guard_front(launch.poison);
    }
    std::vector<Memory> arguments;
    const std::size_t given = static_cast<std::size_t>(read_number());
    if (given != launch.entry->parameter_count) {
        refuse("The kernel takes " + std::to_string(launch.entry->parameter_count) +
               " arguments, and the launch has " + std::to_string(given));
    }
    for (std::size_t i = 0; i < given; ++i) {
        const Parameter& parameter = launch.entry->parameters[i];
        const char kind = static_cast<char>(read_number());
        const std::string bytes = read_text();
        if (kind != parameter.kind || bytes.size() != parameter.bytes) {
            refuse("Argument " + std::to_string(i) + " is " + described(bytes.size(), kind) +
                   ", and the kernel takes " + described(parameter.bytes, parameter.kind));
        }
        arguments.emplace_back("argument " + std::to_string(i) + " itself", bytes.size(), 0);
        char* argument = arguments.back().data;
        std::memcpy(argument, bytes.data(), bytes.size());
        // Addresses in it: where, and which byte of which buffer they point to.
        for (long long addresses = read_number(); addresses > 0; --addresses) {
            const long long where = read_number();
            const Memory& buffer = launch.buffers[static_cast<std::size_t>(read_number())];
            const char* target = buffer.data + read_number();
            std::memcpy(argument + where, &target, sizeof target);
        }
        launch.arguments.push_back(argument);
    }

    running = &launch;
    // The GPU build flushes subnormals too (-ftz=true).
    const unsigned control = _mm_getcsr();
    _mm_setcsr(control | 0x8040);
    alarm(seconds);
    run_grid();
    alarm(0);
    _mm_setcsr(control);
    for (const Memory& buffer : launch.buffers) {
        if (!buffer.front_is(launch.poison)) {
            fail("The kernel writes before the first byte of %s", buffer.what.c_str());
        }
    }
    running = nullptr;

    std::fflush(nullptr);
    const long long done = 1;
    write_bytes(&done, sizeof done);
    for (const Memory& buffer : launch.buffers) {
        write_bytes(buffer.data, buffer.bytes);
    }
}

}  // namespace
}  // namespace fuser_emulator

extern "C" void __ubsan_on_report() { fuser_emulator::print_place(); }

int main(int, char** arguments) {
    using namespace fuser_emulator;
    // What a kernel prints must not get between the answers.
    answers = dup(STDOUT_FILENO);
    dup2(STDERR_FILENO, STDOUT_FILENO);
    signal(SIGALRM, on_alarm);
    __sanitizer_set_death_callback(explain_report);
    for (;;) {
        serve_launch(static_cast<unsigned>(std::atoi(arguments[1])));
    }
}
