// Gradients of RMSNorm, LayerNorm and L2 normalization of rows, in one read.
#include <fuser/core/norms.cuh>
#include <fuser/core/row_sums.cuh>
#include <fuser/core/rows.cuh>
#include <fuser/core/scaling.cuh>

namespace fuser {

template <class T, class Dy>
struct Backward {
    const Dy* dy;
    const T* x;
    const void* gamma;
    const void* beta;  // only LayerNorm has it, and only y needs it
    const float* mean;  // only LayerNorm has it
    const float* rstd;
    const T* d_extra;  // null: nothing is added
    T* dx;  // null: not written; so are all below
    Dy* rounded_dx;  // dx in fewer bits, beside it; null if T and Dy are one type
    Dy* y;  // the output of forward; its memory may be that of dy
    float* partials;  // [1, or 2 for LayerNorm][blocks][columns]
    float* means;  // [rows][1, or 2 for LayerNorm]: the means that dx needs
    unsigned* amax;  // of dx, the bits of a float

    __device__ __forceinline__ bool needs_values() const {
        return dx != nullptr || amax != nullptr;
    }
};

// The statistics of a row. They are 0 after the last row, where x and dy are 0 too.
template <class Norm>
struct Statistics {
    float mean = 0.0f;
    float rstd = 0.0f;

    template <class T, class Dy>
    __device__ __forceinline__ void load(const Backward<T, Dy>& a, const Sizes& sizes, int row) {
        rstd = row < sizes.rows ? a.rstd[row] : 0.0f;
        if constexpr (Norm::kCentered) {
            mean = row < sizes.rows ? a.mean[row] : 0.0f;
        }
    }
};

// The part of a vector in the sums over a row: of d_hat * x_hat and, for LayerNorm, of d_hat.
template <class Norm, int kCount>
struct RowVector {
    static constexpr int kSums = Norm::kCentered ? 2 : 1;

    float x_hat[kCount];
    float d_hat[kCount];

    template <class T, class Dy>
    __device__ __forceinline__ void set(const Packed<T, kCount>& x, const Packed<Dy, kCount>& dy,
                                        const float (&gain)[kCount], const Statistics<Norm>& row) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            x_hat[i] = x_hat_of<Norm>(x[i], row.mean, row.rstd);
            d_hat[i] = __fmul_rn(dy[i], gain[i]);
        }
    }

    __device__ __forceinline__ void add_to(float (&sums)[kSums]) const {
        float part[kSums] = {};
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            part[0] = fmaf(d_hat[i], x_hat[i], part[0]);
            if constexpr (Norm::kCentered) {
                part[1] += d_hat[i];
            }
        }
#pragma unroll
        for (int k = 0; k < kSums; ++k) {
            sums[k] += part[k];
        }
    }

    // (d_hat - means[1] - x_hat means[0]) rstd
    __device__ __forceinline__ void dx(const float (&means)[kSums], float rstd,
                                       float (&values)[kCount]) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = dx_of<Norm>(x_hat[i], d_hat[i], means, rstd);
        }
    }
};

// Turns the sums of a row into means, in all of its threads. The first thread writes them if
// a.means is not null.
template <class T, class Dy, int kSums>
__device__ __forceinline__ void average(const Backward<T, Dy>& a, const Sizes& sizes, int row,
                                        float (&sums)[kSums]) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) {
        sums[k] = __fmul_rn(sums[k], sizes.scale);
        if (a.means != nullptr && threadIdx.x == 0 && row < sizes.rows) {
            start_of(a.means, row, kSums)[k] = sums[k];
        }
    }
}

__device__ __forceinline__ void wait_for_oldest_of(int groups) {
    if (groups == 1) {
        wait_for_copies<0>();
    } else if (groups == 2) {
        wait_for_copies<1>();
    } else if (groups == 3) {
        wait_for_copies<2>();
    } else {
        wait_for_copies<3>();
    }
}

// The vectors of x, dy and d_extra of a thread, prefetched to shared memory for `prefetch_depth` rows. Each
// thread has its own part of that memory, so no barrier is needed.
template <class T, class Dy, int kVectors>
struct PrefetchedRows {
    static constexpr int kCount = kWidest<T>;
    static constexpr int kDyBytes = kCount * static_cast<int>(sizeof(Dy));

    const Backward<T, Dy>& a;
    const Sizes& sizes;
    unsigned char* memory;
    int threads;
    int thread;

    __device__ __forceinline__ PrefetchedRows(const Backward<T, Dy>& tensors, const Sizes& sizes_,
                                              unsigned char* shared)
        : a(tensors),
          sizes(sizes_),
          memory(shared),
          threads(static_cast<int>(blockDim.x * blockDim.y)),
          thread(static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x)) {}

    __device__ __forceinline__ unsigned char* start(int slot) const {
        const int bytes = 16 + kDyBytes + (a.d_extra != nullptr ? 16 : 0);
        return memory + slot * kVectors * threads * bytes;
    }
    __device__ __forceinline__ unsigned char* x(int slot, int v) const {
        return start(slot) + (v * threads + thread) * 16;
    }
    __device__ __forceinline__ unsigned char* dy(int slot, int v) const {
        return start(slot) + kVectors * threads * 16 + (v * threads + thread) * kDyBytes;
    }
    __device__ __forceinline__ unsigned char* extra(int slot, int v) const {
        return start(slot) + kVectors * threads * (16 + kDyBytes) + (v * threads + thread) * 16;
    }

    // Starts to copy a row. After the last row, x and dy are 0.
    __device__ __forceinline__ void fetch(int slot, int row) const {
        const Columns<kCount, kVectors> columns(0, row < sizes.rows ? sizes.columns : 0);
        const T* x_row = start_of(a.x, row, sizes.x_stride) + columns.first;
        const Dy* dy_row = start_of(a.dy, row, sizes.dy_stride) + columns.first;
        const T* extra_row = start_of(a.d_extra, row, sizes.extra_stride) + columns.first;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const int offset = v * columns.step;
            if (columns.left(v) <= 0) {
                write_packed(x(slot, v), zeros<T, kCount>());
                write_packed(dy(slot, v), zeros<Dy, kCount>());
                continue;
            }
            copy_async<16>(x(slot, v), x_row + offset);
            copy_async<kDyBytes>(dy(slot, v), dy_row + offset);
            if (a.d_extra != nullptr) {
                copy_async<16>(extra(slot, v), extra_row + offset);
            }
        }
        close_copies();
    }
};

// The columns of a thread in all rows of its block. A block of at most kThreads threads has 65536 /
// kThreads registers for each.
template <class Norm, class T, class Dy, int kVectors, int kThreads, bool kOutput>
struct BackwardColumns {
    static constexpr int kCount = kWidest<T>;
    using Vector = RowVector<Norm, kCount>;
    static constexpr int kSums = Vector::kSums;
    // With few columns, registers hold the gain and the values that both passes over a row need.
    // With many, each row reads the gain again, from L1, and x and dy again, from shared memory. A
    // LayerNorm in 16 bits has most sums: without 128 registers it keeps the gain only.
    static constexpr bool kKeepsGain = kVectors <= 2;
    static constexpr bool kKeeps =
        kKeepsGain && (kThreads <= 512 || !Norm::kCentered || sizeof(T) == 4);
    static constexpr int kKept = kKeeps ? kVectors : 1;

    const Backward<T, Dy>& a;
    const Sizes& sizes;
    const PrefetchedRows<T, Dy, kVectors>& prefetched;
    float d_parameters[kSums][kVectors][kCount] = {};
    float gain[kKeepsGain ? kVectors : 1][kCount];
    Vector vectors[kKept];  // of the current row

    __device__ __forceinline__ explicit BackwardColumns(
        const PrefetchedRows<T, Dy, kVectors>& prefetched_)
        : a(prefetched_.a), sizes(prefetched_.sizes), prefetched(prefetched_) {
#pragma unroll
        for (int v = 0; v < kVectors && kKeepsGain; ++v) {
            load_gain_of(v);
        }
    }

    __device__ __forceinline__ void load_gain_of(int v) {
        const Columns<kCount, kVectors> columns(0, sizes.columns);
        const int type = columns.left(v) > 0 ? sizes.parameter_type : kNoParameter;
        load_gain(a.gamma, type, sizes.gain_offset, columns.first + v * columns.step,
                  columns.left(v), true, gain[kKeepsGain ? v : 0]);
    }

    __device__ __forceinline__ Packed<Dy, kCount> read(int slot, int v,
                                                       const Statistics<Norm>& row) {
        if constexpr (!kKeepsGain) {
            load_gain_of(v);
        }
        const Packed<Dy, kCount> dy = read_packed<Dy, kCount>(prefetched.dy(slot, v));
        const Packed<T, kCount> x = read_packed<T, kCount>(prefetched.x(slot, v));
        vectors[kKeeps ? v : 0].set(x, dy, gain[kKeepsGain ? v : 0], row);
        return dy;
    }

    // Adds the row to the gradients of the parameters, and this thread's part to the sums of the
    // row.
    __device__ __forceinline__ void sum(int slot, const Statistics<Norm>& row,
                                        float (&sums)[kSums]) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            const Packed<Dy, kCount> dy = read(slot, v, row);
            const Vector& vector = vectors[kKeeps ? v : 0];
            vector.add_to(sums);
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                float& d_gamma = d_parameters[0][v][i];
                d_gamma = fmaf(dy[i], vector.x_hat[i], d_gamma);
                if constexpr (Norm::kCentered) {
                    d_parameters[1][v][i] += dy[i];
                }
            }
        }
    }

    // Computes dx and, if a.dx is not null, stores it; with kOutput also y. Returns the bits of its largest magnitude if
    // a.amax is not null.
    __device__ __forceinline__ unsigned write(int slot, int row, const Statistics<Norm>& statistics,
                                              const float (&means)[kSums]) {
        unsigned largest = 0;
        const Columns<kCount, kVectors> columns(0, row < sizes.rows ? sizes.columns : 0);
        T* target = start_of(a.dx, row, sizes.columns) + columns.first;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (columns.left(v) <= 0) {
                continue;
            }
            if constexpr (!kKeeps) {
                read(slot, v, statistics);
            }
            float values[kCount];
            vectors[kKeeps ? v : 0].dx(means, statistics.rstd, values);
            if (a.d_extra != nullptr) {
                add_packed(values, read_packed<T, kCount>(prefetched.extra(slot, v)));
            }
            const Packed<T, kCount> dx = packed<T>(values);
            if (a.dx != nullptr) {
                store_packed(target + v * columns.step, dx);
            }
            if constexpr (sizeof(Dy) < sizeof(T)) {
                if (a.rounded_dx != nullptr) {
                    Dy* rounded = start_of(a.rounded_dx, row, sizes.columns) + columns.first;
                    store_packed(rounded + v * columns.step, packed<Dy>(values));
                }
            }
            if (a.amax != nullptr) {
                largest = max(largest, largest_magnitude(dx, kCount));
            }
            if constexpr (kOutput) {
                store_output(slot, v, row, statistics);
            }
        }
        return largest;
    }

    // Stores y, over a dy that no other thread reads.
    __device__ __forceinline__ void store_output(int slot, int v, int row,
                                                 const Statistics<Norm>& statistics) const {
        const Columns<kCount, kVectors> columns(0, sizes.columns);
        const int column = columns.first + v * columns.step;
        const Packed<T, kCount> x = read_packed<T, kCount>(prefetched.x(slot, v));
        float shift[kCount] = {}, values[kCount];
        if constexpr (Norm::kCentered) {
            load_parameters(a.beta, sizes.parameter_type, column, columns.left(v), true, shift);
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] = y_of<Norm>(x[i], statistics.mean, statistics.rstd,
                                   gain[kKeepsGain ? v : 0][i], shift[i]);
        }
        store_packed(start_of(a.y, row, sizes.columns) + column, packed<Dy>(values));
    }

    // Writes the block's sums of the gradients of the parameters: over the rows that it processes
    // at a time, in order.
    __device__ __forceinline__ void write_partials(float* shared) const {
        const Columns<kCount, kVectors> columns(0, sizes.columns);
        const int width = kVectors * columns.step, rows = static_cast<int>(blockDim.y);
#pragma unroll
        for (int k = 0; k < kSums; ++k) {
            __syncthreads();
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                for (int i = 0; i < kCount; ++i) {
                    const int column = columns.first + v * columns.step + i;
                    shared[static_cast<int>(threadIdx.y) * width + column] = d_parameters[k][v][i];
                }
            }
            __syncthreads();
            const int index = static_cast<int>(k * gridDim.x + blockIdx.x);
            float* partials = start_of(a.partials, index, sizes.columns);
#pragma unroll 1
            for (int column = prefetched.thread; column < sizes.columns;
                 column += prefetched.threads) {
                float total = 0.0f;
#pragma unroll 1
                for (int r = 0; r < rows; ++r) {
                    total += shared[r * width + column];
                }
                partials[column] = total;
            }
        }
    }
};

}  // namespace fuser

// d_hat = dy * gain; dx = (d_hat - mean(d_hat) - x_hat * mean(d_hat * x_hat)) * rstd + d_extra,
// rounded once; an RMSNorm has no mean(d_hat). Also the partial sums of dy * x_hat and of dy, over
// the rows of each block. With kOutput, also y, as forward writes it.
template <class Norm, class T, class Dy, int kVectors, int kThreads, bool kOutput>
__global__ void __launch_bounds__(kThreads, 1)
    fuser_norm_backward(const fuser::Backward<T, Dy> a, const fuser::Sizes sizes) {
    using namespace fuser;
    using ThisColumns = BackwardColumns<Norm, T, Dy, kVectors, kThreads, kOutput>;
    constexpr int kSums = ThisColumns::kSums;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ float scratch[RowSums<kSums>::kScratch];
    RowSums<kSums> row_sums{scratch};
    const PrefetchedRows<T, Dy, kVectors> prefetched(a, sizes, memory);
    ThisColumns mine(prefetched);

    const int step = static_cast<int>(gridDim.x * blockDim.y);
    const int begin = static_cast<int>(blockIdx.x * blockDim.y);
    int row = begin + static_cast<int>(threadIdx.y);
    Statistics<Norm> statistics, next;
    next.load(a, sizes, row);

    // A row is fetched `ahead` rows before its use, so the first steps only fetch.
    const int ahead = sizes.prefetch_depth * step;
    row -= ahead;
    int slot = 0;
    unsigned largest = 0;
    for (int first = begin - ahead; first < sizes.rows; first += step, row += step) {
        if (first >= begin) {
            statistics = next;
            next.load(a, sizes, row + step);
            wait_for_oldest_of(sizes.prefetch_depth);
            float sums[kSums] = {};
            mine.sum(slot, statistics, sums);
            if (a.needs_values() || a.means != nullptr) {
                row_sums(sums);
                average(a, sizes, row, sums);
            }
            if (a.needs_values()) {
                largest = max(largest, mine.write(slot, row, statistics, sums));
            }
        }
        prefetched.fetch(slot, row + ahead);
        slot = slot + 1 == sizes.prefetch_depth ? 0 : slot + 1;
    }

    if (a.partials != nullptr) {
        wait_for_copies<0>();
        mine.write_partials(reinterpret_cast<float*>(memory));
    }
    if (a.amax != nullptr) {
        record_amax(magnitude_as_fp32<T>(largest), a.amax);
    }
}

// The same for rows that are unaligned or too long for the registers. A block has one row at a time
// and reads it in both passes, one vector at a time. The partials accumulate the gradients of the
// parameters.
template <class Norm, class T, class Dy, int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    fuser_norm_backward_in_chunks(const fuser::Backward<T, Dy> a, const fuser::Sizes sizes) {
    using namespace fuser;
    constexpr int kCount = kWidest<T>;
    using Vector = RowVector<Norm, kCount>;
    using ChunkColumns = Columns<kCount, 1>;
    __shared__ float scratch[RowSums<Vector::kSums>::kScratch];
    RowSums<Vector::kSums> row_sums{scratch};

    unsigned largest = 0;
    const int begin = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    for (int row = begin; row < sizes.rows; row += blocks) {
        Statistics<Norm> statistics;
        statistics.load(a, sizes, row);
        Packed<T, kCount> x[1];
        Packed<Dy, kCount> dy[1];
        Vector vector;
        auto read = [&](const ChunkColumns& columns) {
            float gain[kCount];
            load_chunk(start_of(a.x, row, sizes.x_stride), columns, sizes.is_aligned, x);
            load_chunk(start_of(a.dy, row, sizes.dy_stride), columns, sizes.is_aligned, dy);
            load_gain(a.gamma, sizes.parameter_type, sizes.gain_offset, columns.first,
                      columns.left(0), sizes.is_aligned, gain);
            vector.set(x[0], dy[0], gain, statistics);
        };
        // ---- sums over the row ----
        float sums[Vector::kSums] = {};
        for (int chunk = 0; chunk < sizes.chunks; ++chunk) {
            const ChunkColumns columns(chunk, sizes.columns);
            if (columns.left(0) > 0) {
                read(columns);
                vector.add_to(sums);
            }
        }
        row_sums(sums);
        average(a, sizes, row, sums);
        if (!a.needs_values() && a.partials == nullptr) {
            continue;
        }
        // ---- dx and the gradients of the parameters ----
        for (int chunk = 0; chunk < sizes.chunks; ++chunk) {
            const ChunkColumns columns(chunk, sizes.columns);
            const int left = columns.left(0);
            if (left <= 0) {
                break;
            }
            read(columns);
            if (a.needs_values()) {
                float values[kCount];
                vector.dx(sums, statistics.rstd, values);
                if (a.d_extra != nullptr) {
                    const T* extra = start_of(a.d_extra, row, sizes.extra_stride);
                    load_chunk(extra, columns, sizes.is_aligned, x);
                    add_packed(values, x[0]);
                }
                const Packed<T, kCount> dx = packed<T>(values);
                if (a.dx != nullptr) {
                    T* target = start_of(a.dx, row, sizes.columns) + columns.first;
                    store_vector(target, left, sizes.is_aligned, dx);
                }
                if constexpr (sizeof(Dy) < sizeof(T)) {
                    if (a.rounded_dx != nullptr) {
                        Dy* target = start_of(a.rounded_dx, row, sizes.columns) + columns.first;
                        store_vector(target, left, sizes.is_aligned, packed<Dy>(values));
                    }
                }
                if (a.amax != nullptr) {
                    largest = max(largest, largest_magnitude(dx, left));
                }
            }
            if (a.partials == nullptr) {
                continue;
            }
            const long long kind = static_cast<long long>(blocks) * sizes.columns;
            float* p = start_of(a.partials, begin, sizes.columns) + columns.first;
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                if (i < left) {
                    p[i] = fmaf(dy[0][i], vector.x_hat[i], row == begin ? 0.0f : p[i]);
                    if constexpr (Norm::kCentered) {
                        p[kind + i] = row == begin ? dy[0][i] : p[kind + i] + dy[0][i];
                    }
                }
            }
        }
    }
    if (a.amax != nullptr) {
        record_amax(magnitude_as_fp32<T>(largest), a.amax);
    }
}

// dgamma and, in the second row of blocks, dbeta: the sums of `count` partials for each of 32
// columns. Thread y of a column adds every blockDim.y-th partial.
template <class P>
__global__ void __launch_bounds__(1024)
    fuser_norm_parameter_gradients(const float* __restrict__ partials, P* __restrict__ d_gamma,
                                   P* __restrict__ d_beta, int count, int columns) {
    __shared__ float totals[32][32];
    const int column = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
    const int rows = static_cast<int>(blockDim.y);
    float total = 0.0f;
    if (column < columns) {
        const float* p = partials + static_cast<long long>(blockIdx.y) * count * columns + column;
#pragma unroll 8
        for (int row = static_cast<int>(threadIdx.y); row < count; row += rows) {
            total += p[static_cast<long long>(row) * columns];
        }
    }
    totals[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    P* target = blockIdx.y == 0 ? d_gamma : d_beta;
    if (threadIdx.y == 0 && column < columns && target != nullptr) {
#pragma unroll 8
        for (int row = 1; row < rows; ++row) {
            total += totals[row][threadIdx.x];
        }
        target[column] = fuser::from_float<P>(total);
    }
}
