// The functions of fuser/core/sm90.cuh under the emulator. That file says what they do.
#pragma once

namespace fuser {

// The last two parameters say where the source calls.
#define FUSER_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define FUSER_SITE(name) fuser_emulator::Site{name, file, line}

// ---- barriers ----

inline void init_barrier(Barrier* barrier, int count, FUSER_HERE) {
    fuser_emulator::init_barrier(FUSER_SITE("init_barrier"), barrier, count);
}

inline void publish_barriers() { fuser_emulator::publish_barriers(); }

inline void arrive(Barrier* barrier, FUSER_HERE) {
    fuser_emulator::arrive(FUSER_SITE("arrive"), barrier, 0);
}

inline void arrive_expecting(Barrier* barrier, int bytes, FUSER_HERE) {
    fuser_emulator::arrive(FUSER_SITE("arrive_expecting"), barrier, bytes);
}

inline void wait(Barrier* barrier, unsigned parity, FUSER_HERE) {
    fuser_emulator::wait_for_phase(FUSER_SITE("wait"), barrier, parity);
}

// ---- copies ----

inline void load_box(void* to, const TensorMap* matrix, int column, int row, Barrier* barrier,
                     FUSER_HERE) {
    fuser_emulator::load_box(FUSER_SITE("load_box"), to, matrix->words, column, row, barrier);
}

inline void load_bytes(void* to, const void* from, int bytes, Barrier* barrier, FUSER_HERE) {
    fuser_emulator::load_bytes(FUSER_SITE("load_bytes"), to, from, bytes, barrier);
}

inline void prefetch_map(const TensorMap*) {}

// ---- registers ----

template <int kCount>
void give_registers_back(FUSER_HERE) {
    fuser_emulator::set_registers(FUSER_SITE("give_registers_back"), kCount, false);
}

template <int kCount>
void take_registers(FUSER_HERE) {
    fuser_emulator::set_registers(FUSER_SITE("take_registers"), kCount, true);
}

// ---- products ----

inline unsigned long long operand(const void* matrix, FUSER_HERE) {
    return fuser_emulator::operand(FUSER_SITE("operand"), matrix);
}

inline void begin_products(FUSER_HERE) {
    fuser_emulator::begin_products(FUSER_SITE("begin_products"));
}

inline void close_products(FUSER_HERE) {
    fuser_emulator::close_products(FUSER_SITE("close_products"));
}

template <int kLeft>
void wait_for_products(FUSER_HERE) {
    fuser_emulator::wait_for_products(FUSER_SITE("wait_for_products"), kLeft);
}

template <int kCount>
void pin(float (&)[kCount]) {}

template <Fp8 kA, Fp8 kB, int kSums>
void add_product(float (&sums)[kSums], unsigned long long a, unsigned long long b, bool adds,
                 FUSER_HERE) {
    static_assert(kSums == 64 || kSums == 128, "64 x 128 or 64 x 256 sums");
    const fuser_emulator::Product product{
        a, b, kA == Fp8::kE5m2, kB == Fp8::kE5m2, adds, 2 * kSums};
    fuser_emulator::add_product(FUSER_SITE("add_product"), product, sums);
}

#undef FUSER_SITE
#undef FUSER_HERE

}  // namespace fuser
