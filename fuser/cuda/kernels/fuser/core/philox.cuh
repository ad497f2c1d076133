// Philox4x32-7 for dropout, a counter-based random number generator (Salmon et al., 2011).
//
// Seven rounds are the fewest that pass the authors' tests of randomness. The usual ten would take
// more instructions than a dropout can issue at the speed of an H200's memory.
// fuser/reference/dropout.py computes the same numbers in torch.
#pragma once

namespace fuser {

// The 128 random bits of a 128-bit counter under a 64-bit key.
__device__ __forceinline__ uint4 philox(unsigned long long low, unsigned long long high,
                                        unsigned long long key) {
    uint4 c = make_uint4(static_cast<unsigned>(low), static_cast<unsigned>(low >> 32),
                         static_cast<unsigned>(high), static_cast<unsigned>(high >> 32));
    unsigned k0 = static_cast<unsigned>(key);
    unsigned k1 = static_cast<unsigned>(key >> 32);
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        const unsigned long long p0 = 0xd2511f53ull * c.x;
        const unsigned long long p1 = 0xcd9e8d57ull * c.z;
        c = make_uint4(static_cast<unsigned>(p1 >> 32) ^ c.y ^ k0, static_cast<unsigned>(p1),
                       static_cast<unsigned>(p0 >> 32) ^ c.w ^ k1, static_cast<unsigned>(p0));
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return c;
}

}  // namespace fuser
