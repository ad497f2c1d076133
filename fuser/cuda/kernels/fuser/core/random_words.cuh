// Philox-4x32-10 for stochastic rounding (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2,
// 3", 2011). fuser.reference.nvfp4.random_words gives the same words.
#pragma once

namespace fuser {

// The four words of the counter (block, stream, 0). `block` takes two words of the counter, the low
// one first.
__device__ __forceinline__ void philox(unsigned long long seed, unsigned long long block,
                                       unsigned stream, unsigned (&words)[4]) {
    unsigned c0 = static_cast<unsigned>(block), c1 = static_cast<unsigned>(block >> 32);
    unsigned c2 = stream, c3 = 0;
    unsigned key0 = static_cast<unsigned>(seed), key1 = static_cast<unsigned>(seed >> 32);
#pragma unroll 1  // unrolled code would compile slower and run no faster
    for (int round = 0; round < 10; ++round) {
        const unsigned low0 = 0xD2511F53u * c0, high0 = __umulhi(0xD2511F53u, c0);
        const unsigned low1 = 0xCD9E8D57u * c2, high1 = __umulhi(0xCD9E8D57u, c2);
        c0 = high1 ^ c1 ^ key0;
        c2 = high0 ^ c3 ^ key1;
        c1 = low1;
        c3 = low0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

// Eight words of a stream, from word `first` on.
__device__ __forceinline__ void random_words8(unsigned long long seed, unsigned long long first,
                                              unsigned stream, unsigned (&words)[8]) {
    unsigned found[3][4] = {};
    philox(seed, first / 4, stream, found[0]);
    philox(seed, first / 4 + 1, stream, found[1]);
    const unsigned skip = static_cast<unsigned>(first % 4);
    if (skip != 0u) {
        philox(seed, first / 4 + 2, stream, found[2]);
    }
    // Shifts by one word if skip is odd, then by two. The compiler knows these indices, so the
    // words stay in registers.
    unsigned shifted[10];
#pragma unroll
    for (int i = 0; i < 10; ++i) {
        shifted[i] = skip & 1u ? found[(i + 1) / 4][(i + 1) % 4] : found[i / 4][i % 4];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        words[i] = skip & 2u ? shifted[i + 2] : shifted[i];
    }
}

}  // namespace fuser
