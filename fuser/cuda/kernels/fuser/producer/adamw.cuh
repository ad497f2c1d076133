// The producer of the weights after a step of AdamW, which takes the step.
#pragma once

#include <fuser/core/adamw.cuh>
#include <fuser/tile/producer.cuh>

namespace fuser {

// The new weights, rounded to T. All tensors are contiguous, with a multiple of 8 columns, and at
// multiples of 16 bytes. With kWrites, the step is taken.
template <class T, class G, bool kWrites>
struct AdamWProducer {
    using Element = T;
    static constexpr bool kIsAligned = true;
    AdamWState<G> state;
};

// Beside the patch a thread holds one row of three fp32 and the gradient, and the constants.
template <class T, class G, bool kWrites>
constexpr int kFewerBlocks<AdamWProducer<T, G, kWrites>> = sizeof(T) == 4 ? 1 : 2;

// Row by row: an element is read once, and nothing outside of the matrix, because it is written.
template <class T, class G, bool kWrites>
__device__ __forceinline__ Patch<T> make_patch(const AdamWProducer<T, G, kWrites>& producer,
                                               const Tile& tile) {
    Patch<T> patch{};
    if (tile.columns_left > 0) {
        const AdamWConstants constants = producer.state.load_constants();
        const long long start = tile.row * tile.columns + tile.column;
        // A loop: a compiler that sees all rows at once keeps more in flight than it has registers
        // for. Finished rows move up, because registers cannot be indexed at run time.
#pragma unroll 1
        for (int i = 0; i < kPatch; ++i) {
            patch.template move_up<1>();
            float weights[kPatch] = {};
            if (i < tile.rows_left) {
                const long long first = start + static_cast<long long>(i) * tile.columns;
                step_adamw<kWrites>(producer.state, constants, first, weights);
            }
            patch.round_row(kPatch - 1, weights);
        }
    }
    return patch;
}

}  // namespace fuser
