// For kernels and stages of users: stages of chains, activations, elements and packed loads.
#pragma once

#include <fuser/chain/stages.cuh>
