// Hopper in the emulator's worker: meetings of warpgroups, and their registers.

#include <cstdio>
#include <cstring>

#include "worker.hpp"

namespace fuser_emulator {
namespace {

struct Warpgroup {
    unsigned present = 0;
    Site site{};
    Request request{};
    unsigned registers = 0;
    unsigned wanted = 0;
};

constexpr unsigned kRegisters = 65536;
constexpr unsigned kMostRegisters = 248;

Warpgroup warpgroups[kMostWarpgroups];

// A kernel is compiled for as many registers as a block of its size can have, in steps of 8.
unsigned launch_registers() { return std::min(kMostRegisters, kRegisters / thread_count / 8 * 8); }

unsigned warpgroup_count() { return thread_count / kWarpgroup; }

void give_wanted_registers() {
    for (unsigned i = 0; i < warpgroup_count(); ++i) {
        unsigned others = 0;
        for (unsigned j = 0; j < warpgroup_count(); ++j) {
            others += j == i ? 0 : warpgroups[j].registers;
        }
        Warpgroup& warpgroup = warpgroups[i];
        if (warpgroup.wanted == 0 ||
            others + warpgroup.wanted > warpgroup_count() * launch_registers()) {
            continue;
        }
        warpgroup.registers = warpgroup.wanted;
        warpgroup.wanted = 0;
        for (unsigned number = i * kWarpgroup; number < (i + 1) * kWarpgroup; ++number) {
            if (threads[number].state == State::kForRegisters) {
                threads[number].state = State::kReady;
            }
        }
    }
}

}  // namespace

// ---- the worker's ----

void start_block_of_warpgroups() {
    for (Warpgroup& warpgroup : warpgroups) {
        warpgroup = {};
        warpgroup.registers = launch_registers();
    }
}

std::string awaited_registers(const Thread& thread) {
    const Warpgroup& own = warpgroups[thread.number / kWarpgroup];
    unsigned all = 0;
    for (unsigned i = 0; i < warpgroup_count(); ++i) {
        all += warpgroups[i].registers;
    }
    char text[128];
    std::snprintf(text, sizeof text, ", for %u registers; the block has %u, the others %u",
                  own.wanted, warpgroup_count() * launch_registers(), all - own.registers);
    return text;
}

bool meet_warpgroup(const Site& site, const Request& request) {
    const unsigned number = current->number / kWarpgroup, first = number * kWarpgroup;
    if (first + kWarpgroup > thread_count) {
        fail("%s at %s:%d is called in a warpgroup of %u threads; it has %u", site.function,
             site.file, site.line, thread_count - first, kWarpgroup);
    }
    Warpgroup& warpgroup = warpgroups[number];
    if (warpgroup.present == 0) {
        warpgroup.site = site;
        warpgroup.request = request;
    } else if (!same(warpgroup.site, site)) {
        fail("Threads of one warpgroup meet in two calls: %s at %s:%d and %s at %s:%d",
             warpgroup.site.function, warpgroup.site.file, warpgroup.site.line, site.function,
             site.file, site.line);
    } else if (std::memcmp(&warpgroup.request, &request, sizeof request) != 0) {
        fail("Threads of one warpgroup call %s at %s:%d with different arguments", site.function,
             site.file, site.line);
    }
    if (++warpgroup.present < kWarpgroup) {
        current->state = State::kInWarpgroup;
        current->site = site;
        suspend();
        return false;
    }
    warpgroup.present = 0;
    for (unsigned i = first; i < first + kWarpgroup; ++i) {
        threads[i].state = State::kReady;
    }
    return true;
}

// ---- what kernels call ----

void set_registers(Site site, int count, bool takes) {
    if (count < 24 || count > 256 || count % 8 != 0) {
        fail("%s at %s:%d gets %d registers; it is a multiple of 8 from 24 to 256", site.function,
             site.file, site.line, count);
    }
    const unsigned number = current->number / kWarpgroup, registers = static_cast<unsigned>(count);
    if (meet_warpgroup(site, {{registers}})) {
        Warpgroup& warpgroup = warpgroups[number];
        if (takes ? registers < warpgroup.registers : registers > warpgroup.registers) {
            fail("%s at %s:%d asks for %u registers, and the warpgroup has %u", site.function,
                 site.file, site.line, registers, warpgroup.registers);
        }
        (takes ? warpgroup.wanted : warpgroup.registers) = registers;
        give_wanted_registers();
    }
    while (warpgroups[number].wanted != 0) {
        current->state = State::kForRegisters;
        current->site = site;
        suspend();
    }
}

}  // namespace fuser_emulator
