// Spreads pieces over ranks, so that the slowest rank has as little to do as possible.
#pragma once

#include <cstdint>
#include <vector>

#include "core/piece.h"

namespace dualkv::core {

// Pieces of each rank. Pieces are cut further where that helps the slowest rank more than the prompts that
// are thereby repeated cost it. With `equal_samples` the ranks' numbers of responses differ by at most one.
std::vector<std::vector<Piece>> BalanceRanks(const Workload& work, const std::vector<Piece>& pieces,
                                             int64_t num_ranks, bool equal_samples);

}  // namespace dualkv::core
