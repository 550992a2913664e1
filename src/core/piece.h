// Pieces: what a schedule moves about. A piece is a prompt with some of its group's responses.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace dualkv::core {

struct Piece {
  int64_t group;
  std::vector<int64_t> responses;  // indices into Workload's arrays, the most expensive first
  int64_t tokens;
  double cost;
};

// Lengths and costs of all prompts and responses of a step. The cost of a piece is a sum: that of its prompt
// alone, and for each response what it adds.
struct Workload {
  std::span<const int64_t> prompt_lengths;  // [groups]
  std::span<const int64_t> lengths;         // [responses], group by group
  std::vector<double> prompt_costs;         // [groups]
  std::vector<double> costs;                // [responses]
  int64_t max_tokens = 0;                   // of a piece

  // A piece of some responses of a group, in any order.
  Piece MakePiece(int64_t group, std::vector<int64_t> responses) const;

  // Takes responses[begin, end) out of the piece.
  std::vector<int64_t> Extract(Piece& piece, size_t begin, size_t end) const;

  // Gives the piece more responses of its group.
  void Join(Piece& piece, std::span<const int64_t> responses) const;
};

}  // namespace dualkv::core
