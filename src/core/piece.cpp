#include "core/piece.h"

#include <algorithm>
#include <utility>

namespace dualkv::core {

Piece Workload::MakePiece(int64_t group, std::vector<int64_t> responses) const {
  Piece piece{group, {}, prompt_lengths[group], prompt_costs[group]};
  Join(piece, responses);
  return piece;
}

std::vector<int64_t> Workload::Extract(Piece& piece, size_t begin, size_t end) const {
  const auto from = piece.responses.begin() + begin, to = piece.responses.begin() + end;
  std::vector<int64_t> taken(from, to);
  piece.responses.erase(from, to);
  for (const int64_t response : taken) {
    piece.tokens -= lengths[response];
    piece.cost -= costs[response];
  }
  return taken;
}

void Workload::Join(Piece& piece, std::span<const int64_t> responses) const {
  for (const int64_t response : responses) {
    piece.tokens += lengths[response];
    piece.cost += costs[response];
    piece.responses.push_back(response);
  }
  std::ranges::sort(piece.responses,
                    [&](int64_t a, int64_t b) { return costs[a] != costs[b] ? costs[a] > costs[b] : a < b; });
}

}  // namespace dualkv::core
