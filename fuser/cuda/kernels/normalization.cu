// RMSNorm, LayerNorm and L2 normalization of rows, optionally after an addition, in one read.
#include <fuser/core/norms.cuh>
#include <fuser/core/row_sums.cuh>
#include <fuser/core/rows.cuh>
#include <fuser/core/scaling.cuh>

namespace fuser {

// z has type T: x is an fp32 tensor if the extra has another type.
template <class T, class Out, class Extra>
struct Forward {
    const T* x;
    const Extra* extra;  // null: z is x
    const void* gamma;
    const void* beta;
    Out* y;
    T* z;  // null: not written; so are mean, rstd and amax
    float* mean;
    float* rstd;
    unsigned* amax;  // the bits of a float
};

// An upper bound of |y| in the columns of a thread, from the largest |z| there. Gain and shift are
// the same in every row. So a row that cannot raise the amax need not be normalized.
template <class Norm, class Out>
struct Bound {
    // Rounding adds up to 2^-8 of a bf16, and half a subnormal to an fp16.
    static constexpr float kSlack = 1.01f, kLeast = 1e-7f;

    float gain;
    float shift;

    // The arguments are bits of the largest magnitudes; NaN is above infinity.
    __device__ __forceinline__ Bound(unsigned largest_gain, unsigned largest_shift)
        : gain(kSlack * __uint_as_float(largest_gain)),
          shift(fmaf(kSlack, __uint_as_float(largest_shift), kLeast)) {}

    // False for NaN, infinity and overflow.
    __device__ __forceinline__ bool is_below(float amax, float largest_z, float mean,
                                             float rstd) const {
        const float difference = Norm::kCentered ? largest_z + fabsf(mean) : largest_z;
        return fmaf(difference * rstd, gain, shift) < fminf(amax, kLargestFinite<Out>);
    }
};

// The part of one row in a thread, processed in passes over its chunks. An aligned row of one chunk
// stays in registers. Other rows are read again in each pass, one vector at a time, and added in
// the same order.
template <class Norm, class T, class Out, bool kIsInRegisters, bool kWrites, class Extra>
struct ForwardRow {
    static constexpr int kVectors = kIsInRegisters ? 4 : 1;
    static constexpr int kCount = kWidest<T>;
    // On an H200, RMSNorm takes 1% less time without the hint, and LayerNorm 2% more.
    static constexpr bool kStreams = Norm::kCentered;
    using ChunkColumns = Columns<kCount, kVectors>;

    const Forward<T, Out, Extra>& a;
    const Sizes& sizes;
    const int row;
    const int end;
    const int chunks;
    const bool is_aligned;
    Packed<T, kCount> z[kVectors];

    __device__ __forceinline__ ForwardRow(const Forward<T, Out, Extra>& tensors,
                                          const Sizes& sizes_, int row_)
        : a(tensors),
          sizes(sizes_),
          row(row_),
          end(row_ < sizes_.rows ? sizes_.columns : 0),
          chunks(kIsInRegisters ? 1 : sizes_.chunks),
          is_aligned(kIsInRegisters || sizes_.is_aligned) {}

    // Loads a chunk of z = x + extra. If the row has one chunk, passes after the first find it in
    // registers.
    __device__ __forceinline__ void load(const ChunkColumns& columns, bool is_first_pass) {
        if (kIsInRegisters && !is_first_pass) {
            return;
        }
        load_chunk(start_of(a.x, row, sizes.x_stride), columns, is_aligned, z);
        if (a.extra == nullptr) {
            return;
        }
        Packed<Extra, kCount> extra[kVectors];
        load_chunk(start_of(a.extra, row, sizes.extra_stride), columns, is_aligned, extra);
        T* target = start_of(a.z, row, sizes.columns) + columns.first;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            z[v] = added(z[v], extra[v]);
            if (is_first_pass && a.z != nullptr && columns.left(v) > 0) {
                store_vector<kStreams>(target + v * columns.step, columns.left(v), is_aligned,
                                       z[v]);
            }
        }
    }

    __device__ __forceinline__ float sum() {
        float total = 0.0f;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            load(ChunkColumns(chunk, end), true);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                float part = 0.0f;
#pragma unroll
                for (int i = 0; i < kCount; ++i) {
                    part += z[v][i];
                }
                total += part;
            }
        }
        return total;
    }

    __device__ __forceinline__ float sum_of_squares(float mean) {
        float total = 0.0f;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const ChunkColumns columns(chunk, end);
            load(columns, !Norm::kCentered);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                float part = 0.0f;
#pragma unroll
                for (int i = 0; i < kCount; ++i) {
                    float x = z[v][i] - mean;
                    if constexpr (Norm::kCentered && !kIsInRegisters) {
                        // Elements after the end of the row are zero, which differs from the mean.
                        x = i < columns.left(v) ? x : 0.0f;
                    }
                    part = fmaf(x, x, part);
                }
                total += Norm::kCentered && columns.left(v) <= 0 ? 0.0f : part;
            }
        }
        return total;
    }

    // The bound for the columns of the thread, for rows of one chunk.
    __device__ __forceinline__ Bound<Norm, Out> bound() const {
        unsigned largest_gain = 0, largest_shift = 0;
        const ChunkColumns columns(0, sizes.columns);
#pragma unroll 1
        for (int v = 0; v < kVectors; ++v) {
            const int left = columns.left(v);
            if (left > 0) {
                float gain[kCount], shift[kCount] = {};
                load_parameters_of(columns.first + v * columns.step, left, gain, shift);
#pragma unroll
                for (int i = 0; i < kCount; ++i) {
                    largest_gain = max(largest_gain, magnitudes<float>(__float_as_uint(gain[i])));
                    largest_shift =
                        max(largest_shift, magnitudes<float>(__float_as_uint(shift[i])));
                }
            }
        }
        return Bound<Norm, Out>(largest_gain, largest_shift);
    }

    __device__ __forceinline__ float largest_z() const {
        unsigned largest = 0;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            largest = max(largest, largest_magnitude(z[v], kCount));
        }
        return __uint_as_float(magnitude_as_fp32<T>(largest));
    }

    __device__ __forceinline__ void load_parameters_of(int column, int left, float (&gain)[kCount],
                                                       float (&shift)[kCount]) const {
        load_gain(a.gamma, sizes.parameter_type, sizes.gain_offset, column, left, is_aligned, gain);
        if constexpr (Norm::kCentered) {
            load_parameters(a.beta, sizes.parameter_type, column, left, is_aligned, shift);
        }
    }

    // Computes y and, with kWrites, stores it. Returns the bits of its largest magnitude if a.amax
    // is not null.
    __device__ __forceinline__ unsigned write(float mean, float rstd) {
        // Without stores, a loop over single vectors is enough; LayerNorm has no registers for
        // more.
        constexpr int kAtOnce = kWrites ? kVectors : 1;
        unsigned largest = 0;
        if (!kWrites && a.amax == nullptr) {
            return largest;
        }
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const ChunkColumns columns(chunk, end);
            load(columns, false);
            Out* target = start_of(a.y, row, sizes.columns) + columns.first;
#pragma unroll kAtOnce
            for (int v = 0; v < kVectors; ++v) {
                const int left = columns.left(v);
                if (left <= 0) {
                    continue;
                }
                const Packed<T, kCount> x = z[kWrites ? v : 0];
                const int column = columns.first + v * columns.step;
                float gain[kCount], shift[kCount] = {}, values[kCount];
                load_parameters_of(column, left, gain, shift);
#pragma unroll
                for (int i = 0; i < kCount; ++i) {
                    values[i] = y_of<Norm>(x[i], mean, rstd, gain[i], shift[i]);
                }
                const Packed<Out, kCount> y = packed<Out>(values);
                if constexpr (kWrites) {
                    store_vector<kStreams>(target + v * columns.step, left, is_aligned, y);
                }
                if (a.amax != nullptr) {
                    const int measured = kIsInRegisters ? kCount : left;
                    largest = max(largest, largest_magnitude(y, measured));
                }
                if constexpr (!kWrites) {
#pragma unroll
                    for (int next = 1; next < kVectors; ++next) {
                        z[next - 1] = z[next];  // no run-time index
                    }
                }
            }
        }
        return magnitude_as_fp32<Out>(largest);
    }
};

}  // namespace fuser

// z = x + extra, y = (z - mean) * rstd * gain + beta. Without kWrites, only the amax of y is
// computed. kWrites is not a run-time argument because LayerNorm has no registers for that.
template <class Norm, class T, class Out, bool kIsInRegisters, bool kWrites, class Extra = T>
__global__ void __launch_bounds__(sizeof(T) == 4 ? 1024 : 512, sizeof(T) == 4 ? 1 : 2)
    fuser_norm(const fuser::Forward<T, Out, Extra> a, const fuser::Sizes sizes) {
    using namespace fuser;
    __shared__ float scratch[RowSums<1>::kScratch];
    RowSums<1> row_sums{scratch};
    using Row = ForwardRow<Norm, T, Out, kIsInRegisters, kWrites, Extra>;
    constexpr bool kHasBound = kIsInRegisters && !kWrites;
    const bool has_bound = kHasBound && a.amax != nullptr;
    Bound<Norm, Out> bound(0u, 0u);
    // One thread of the block reads the amax for all: on an H200 a pass takes 2 to 4% less time than
    // if every warp asks for this one address. The two places are used in turn, as in RowSums.
    __shared__ unsigned amaxes[2];
    int turn = 0;
    if (has_bound) {
        bound = Row(a, sizes, 0).bound();
    }

    const int step = static_cast<int>(gridDim.x * blockDim.y);
    for (int first = static_cast<int>(blockIdx.x * blockDim.y); first < sizes.rows; first += step) {
        Row row(a, sizes, first + static_cast<int>(threadIdx.y));
        if (has_bound && threadIdx.x == blockDim.x - 1 && threadIdx.y == blockDim.y - 1) {
            amaxes[turn] = *static_cast<const volatile unsigned*>(a.amax);
        }
        const bool is_writer = threadIdx.x == 0 && row.row < sizes.rows;
        // ---- statistics: the mean first, then the squares of the differences from it ----
        float mean = 0.0f;
        if constexpr (Norm::kCentered) {
            mean = mul_rn(row_sums(row.sum()), sizes.scale);  // the value that is written, see y_of
            if (is_writer && a.mean != nullptr) {
                a.mean[row.row] = mean;
            }
        }
        const float squares = row_sums(row.sum_of_squares(mean));
        const float rstd = rsqrtf(fmaf(squares, sizes.scale, sizes.eps));
        if (is_writer && a.rstd != nullptr) {
            a.rstd[row.row] = rstd;
        }
        // ---- y ----
        unsigned known = 0;
        if (has_bound) {
            if (blockDim.x <= 32) {
                __syncthreads();  // wider rows had one when they were summed
            }
            known = amaxes[turn];
            turn ^= 1;
        }
        unsigned largest = 0;
        if (!has_bound ||
            !bound.is_below(__uint_as_float(known), row.largest_z(), mean, rstd)) {
            largest = row.write(mean, rstd);
        }
        if (a.amax != nullptr && (!kHasBound || __any_sync(kAllLanes, largest > known))) {
            record_amax(largest, a.amax);
        }
    }
}
