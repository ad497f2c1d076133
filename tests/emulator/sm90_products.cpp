// Hopper in the emulator's worker: matrix products of a warpgroup (wgmma).
//
// The 32 products of a sum are added in fp32, four at a time, and their total to the sum. Hardware
// adds them in an order of its own, with fewer bits.

#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "worker.hpp"

namespace fuser_emulator {
namespace {

constexpr unsigned kRows = 64;
constexpr unsigned kDepth = 32;
constexpr unsigned kMostColumns = 256;
// No arithmetic makes this NaN.
constexpr std::uint32_t kUnderWay = 0x7fc5ca1e;

// The registers of a warpgroup to which products are under way.
struct Sums {
    float* of[kWarpgroup];
    unsigned columns;
    unsigned products = 0;
    std::vector<float> values;  // [kRows, columns]
};

struct Pending {
    Site site;
    Product product;
    Sums* sums;
    unsigned group;
};

struct Warpgroup {
    bool has_begun = false;
    unsigned closed_groups = 0;
    std::vector<Pending> pending;
    std::map<const float*, Sums> sums;  // by those of the first thread
};

Warpgroup warpgroups[kMostWarpgroups];

Warpgroup& own_warpgroup() { return warpgroups[current->number / kWarpgroup]; }

// ---- registers ----

// Calls `f` with each register and the sum that it has: the layout in fuser/core/sm90.cuh.
template <class F>
void for_each_register(Sums& sums, F f) {
    for (unsigned thread = 0; thread < kWarpgroup; ++thread) {
        float* own = sums.of[thread];
        const unsigned row = thread / 32 * 16 + thread % 32 / 4, column = 2 * (thread % 4);
        for (unsigned i = 0; i < sums.columns / 2; ++i) {
            const unsigned at = (row + i / 2 % 2 * 8) * sums.columns + i / 4 * 8 + column + i % 2;
            f(own[i], sums.values[at]);
        }
    }
}

void check_untouched(const Site& site, Sums& sums) {
    for_each_register(sums, [&](const float& own, float&) {
        std::uint32_t bits;
        std::memcpy(&bits, &own, sizeof bits);
        if (bits != kUnderWay) {
            fail("%s at %s:%d finds that sums were written before products to them had ended",
                 site.function, site.file, site.line);
        }
    });
}

Sums& sums_of(const Site& site, const Product& product) {
    const unsigned first = current->number / kWarpgroup * kWarpgroup;
    auto [found, is_new] = own_warpgroup().sums.try_emplace(threads[first].sums);
    Sums& sums = found->second;
    if (is_new) {
        sums.columns = product.columns;
        sums.values.resize(kRows * product.columns);
        for (unsigned i = 0; i < kWarpgroup; ++i) {
            sums.of[i] = threads[first + i].sums;
        }
        for_each_register(sums, [](float& own, float& value) {
            value = own;
            std::memcpy(&own, &kUnderWay, sizeof own);
        });
    } else if (sums.columns != product.columns) {
        fail("%s at %s:%d adds %u columns to sums where a product of %u is under way",
             site.function, site.file, site.line, product.columns, sums.columns);
    } else {
        check_untouched(site, sums);
    }
    return sums;
}

// ---- operands ----

const float* values_of(bool is_e5m2) {
    static float values[2][256];
    if (values[0][1] == 0.0f) {
        for (int code = 0; code < 256; ++code) {
            for (int e5m2 = 0; e5m2 < 2; ++e5m2) {
                const int bits = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
                const int exponent = (code & 127) >> bits, mantissa = code & ((1 << bits) - 1);
                float value = exponent == 0 ? std::ldexp(mantissa, 1 - bias - bits)
                                            : std::ldexp(mantissa + (1 << bits),
                                                         exponent - bias - bits);
                if (e5m2 ? exponent == 31 : (code & 127) == 127) {
                    value = e5m2 && mantissa == 0 ? std::numeric_limits<float>::infinity()
                                                  : std::numeric_limits<float>::quiet_NaN();
                }
                values[e5m2][code] = code & 128 ? -value : value;
            }
        }
    }
    return values[is_e5m2];
}

// Where eight rows of an operand begin: PTX ISA, "Matrix descriptor format" of wgmma.
struct Operand {
    unsigned start;
    unsigned step;  // from eight rows to the next
};

Operand decoded(const Site& site, std::uint64_t descriptor) {
    const Operand operand{static_cast<unsigned>(descriptor & 0x3fff) * 16,
                          static_cast<unsigned>(descriptor >> 32 & 0x3fff) * 16};
    const unsigned base_offset = descriptor >> 49 & 7, swizzle = descriptor >> 62;
    if (swizzle != 1 || base_offset != 0 || operand.step % 1024 != 0) {
        fail("%s at %s:%d gets the descriptor 0x%llx; its swizzle is 128 bytes, its base offset 0, "
             "and the step of eight rows a multiple of 1024 bytes",
             site.function, site.file, site.line, static_cast<unsigned long long>(descriptor));
    }
    if (operand.start % 1024 >= 128 || operand.start % 32 != 0) {
        fail("%s at %s:%d gets an operand at shared address 0x%x; it begins at a multiple of 32 "
             "bytes in the first of eight rows, which begin at a multiple of 1024",
             site.function, site.file, site.line, operand.start);
    }
    return operand;
}

// Calls `f` with the row, the place in it and the value of each element of an operand.
template <class F>
void decode(const Site& site, std::uint64_t descriptor, unsigned rows, bool is_e5m2, F f) {
    const float* values = values_of(is_e5m2);
    const Operand operand = decoded(site, descriptor);
    for (unsigned row = 0; row < rows; ++row) {
        const unsigned line = operand.start / 128 * 128 + row / 8 * operand.step + row % 8 * 128;
        const char* bytes = shared_pointer(site, line);
        touch(bytes, 128);
        for (unsigned k = 0; k < kDepth; ++k) {
            const unsigned place = (operand.start % 128 + k) ^ row % 8 << 4;
            f(row, k, values[static_cast<unsigned char>(bytes[place])]);
        }
    }
}

// ---- arithmetic ----

// sums [kRows, columns] += a [kRows, kDepth] b [kDepth, columns]
__attribute__((optimize("O3"), no_sanitize("address", "undefined"))) void multiply(
    const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ sums,
    unsigned columns) {
    for (unsigned row = 0; row < kRows; ++row) {
        float line[kMostColumns] = {};
        for (unsigned k = 0; k < kDepth; k += 4) {
            const float* x = a + row * kDepth + k;
            const float* y = b + k * columns;
            for (unsigned column = 0; column < columns; ++column) {
                line[column] += (x[0] * y[column] + x[1] * y[columns + column]) +
                                (x[2] * y[2 * columns + column] + x[3] * y[3 * columns + column]);
            }
        }
        for (unsigned column = 0; column < columns; ++column) {
            sums[row * columns + column] += line[column];
        }
    }
}

void run_product(const Pending& pending) {
    static float a[kRows * kDepth];
    static float b[kDepth * kMostColumns];
    const Product& product = pending.product;
    const unsigned columns = product.columns;
    decode(pending.site, product.a, kRows, product.a_is_e5m2,
           [](unsigned row, unsigned k, float value) { a[row * kDepth + k] = value; });
    decode(pending.site, product.b, columns, product.b_is_e5m2,
           [&](unsigned row, unsigned k, float value) { b[k * columns + row] = value; });
    std::vector<float>& values = pending.sums->values;
    if (!product.adds) {
        std::fill(values.begin(), values.end(), 0.0f);
    }
    multiply(a, b, values.data(), columns);
}

// The first `count` products, and the sums that no other is added to.
void complete(const Site& site, Warpgroup& warpgroup, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        Sums& sums = *warpgroup.pending[i].sums;
        run_product(warpgroup.pending[i]);
        if (--sums.products == 0) {
            check_untouched(site, sums);
            for_each_register(sums, [](float& own, float& value) { own = value; });
            warpgroup.sums.erase(warpgroup.sums.find(sums.of[0]));
        }
    }
    warpgroup.pending.erase(warpgroup.pending.begin(),
                            warpgroup.pending.begin() + static_cast<std::ptrdiff_t>(count));
}

}  // namespace

void start_block_of_products() {
    for (Warpgroup& warpgroup : warpgroups) {
        warpgroup = {};
    }
}

void end_block_of_products() {
    for (const Warpgroup& warpgroup : warpgroups) {
        if (!warpgroup.pending.empty()) {
            const Site& site = warpgroup.pending[0].site;
            fail("The block ends before the product of %s at %s:%d does", site.function, site.file,
                 site.line);
        }
    }
}

// ---- what kernels call ----

std::uint64_t operand(Site site, const void* matrix) {
    constexpr std::uint64_t kSwizzle128 = 1ull << 62, kEightRows = 1024 / 16;
    return kSwizzle128 | kEightRows << 32 | 1ull << 16 | shared_address(site, matrix) / 16;
}

void begin_products(Site site) {
    if (meet_warpgroup(site, {})) {
        own_warpgroup().has_begun = true;
    }
}

void add_product(Site site, const Product& product, float* sums) {
    current->sums = sums;
    const std::uint64_t kind = product.a_is_e5m2 | product.b_is_e5m2 << 1 | product.adds << 2;
    if (!meet_warpgroup(site, {{product.a, product.b, kind, product.columns}})) {
        return;
    }
    Warpgroup& warpgroup = own_warpgroup();
    if (!warpgroup.has_begun) {
        fail("%s at %s:%d follows the kernel's begin or a wait without begin_products",
             site.function, site.file, site.line);
    }
    decoded(site, product.a);
    decoded(site, product.b);
    Sums& own = sums_of(site, product);
    ++own.products;
    warpgroup.pending.push_back({site, product, &own, warpgroup.closed_groups});
    if (running->schedule == kInOrder) {
        complete(site, warpgroup, 1);
    }
}

void close_products(Site site) {
    if (meet_warpgroup(site, {})) {
        ++own_warpgroup().closed_groups;
    }
}

void wait_for_products(Site site, unsigned left) {
    if (!meet_warpgroup(site, {{left}})) {
        return;
    }
    Warpgroup& warpgroup = own_warpgroup();
    std::size_t count = 0;
    while (count < warpgroup.pending.size() &&
           warpgroup.pending[count].group + left < warpgroup.closed_groups) {
        ++count;
    }
    complete(site, warpgroup, count);
    warpgroup.has_begun = false;
}

}  // namespace fuser_emulator
