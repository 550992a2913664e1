#include "core/schedule.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <span>
#include <utility>

#include "core/arguments.h"
#include "core/balance.h"
#include "core/piece.h"

namespace dualkv::core {
namespace {

constexpr int64_t kMaxRanks = 65536;

using MicroBatch = std::vector<Piece>;

// Checks the arguments and works out all costs.
Workload ReadWorkload(const dualkv_step_schedule_params& params, std::span<const int64_t>& response_counts) {
  Require(params.num_groups >= 0 && params.num_groups <= kMaxRows, "num_groups must be 0 to ", kMaxRows,
          ", got ", params.num_groups);
  Require(params.num_ranks >= 1 && params.num_ranks <= kMaxRanks, "num_ranks must be 1 to ", kMaxRanks,
          ", got ", params.num_ranks);
  Require(params.max_tokens >= 1, "max_tokens must be >= 1, got ", params.max_tokens);
  for (const auto& [name, cost] : {std::pair{"token_cost", params.token_cost},
                                   {"target_cost", params.target_cost},
                                   {"pair_cost", params.pair_cost}}) {
    // The bound keeps the cost of any batch finite.
    Require(cost >= 0 && cost <= 1e250, name, " must be 0 to 1e250, got ", cost);
  }
  Require(params.equal_samples == 0 || params.equal_samples == 1, "equal_samples must be 0 or 1, got ",
          params.equal_samples);

  Workload work;
  work.max_tokens = params.max_tokens;
  work.prompt_lengths = Values(params.prompt_lengths, params.num_groups, "prompt_lengths");
  response_counts = Values(params.response_counts, params.num_groups, "response_counts");
  int64_t segments = params.num_groups;
  const int64_t num_responses = AddUp(response_counts, "response_counts", "groups and responses", segments);
  work.lengths = Values(params.response_lengths, num_responses, "response_lengths");
  int64_t rows = 0;
  AddUp(work.prompt_lengths, "prompt_lengths", "tokens", rows);
  AddUp(work.lengths, "response_lengths", "tokens", rows);

  work.costs.reserve(num_responses);
  for (int64_t g = 0; g < params.num_groups; ++g) {
    const auto prompt = static_cast<double>(work.prompt_lengths[g]);
    work.prompt_costs.push_back(params.token_cost * prompt + params.pair_cost * prompt * (prompt + 1) / 2);
    for (int64_t n = 0; n < response_counts[g]; ++n) {
      const int64_t length = work.lengths[work.costs.size()];
      Require(work.prompt_lengths[g] + length <= params.max_tokens, "max_tokens must be at least ",
              work.prompt_lengths[g] + length, " for response ", n, " of group ", g, " (a prompt of ",
              work.prompt_lengths[g], " tokens and a response of ", length, "), got ", params.max_tokens);
      const auto response = static_cast<double>(length);
      work.costs.push_back((params.token_cost + params.target_cost) * response +
                           params.pair_cost * response * (prompt + (response + 1) / 2));
    }
  }
  return work;
}

// Bins that things of these sizes, all within the capacity, are put into: best-fit decreasing.
struct Bins {
  std::vector<int64_t> bin_of;  // [sizes]
  int64_t count = 0;
};

Bins BestFit(std::span<const int64_t> sizes, int64_t capacity) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::ranges::greater{}, [&](size_t i) { return sizes[i]; });
  Bins bins;
  bins.bin_of.resize(sizes.size());
  std::set<std::pair<int64_t, int64_t>> rooms;  // room left, bin
  for (const size_t i : order) {
    const auto fullest = rooms.lower_bound({sizes[i], 0});
    auto [room, bin] = fullest != rooms.end() ? *fullest : std::pair{capacity, bins.count++};
    if (fullest != rooms.end()) {
      rooms.erase(fullest);
    }
    bins.bin_of[i] = bin;
    rooms.emplace(room - sizes[i], bin);
  }
  return bins;
}

// Groups as pieces: each whole, or, if it exceeds max_tokens, in as few as best-fit finds. Groups without
// responses have none.
std::vector<Piece> CutToBudget(const Workload& work, std::span<const int64_t> response_counts) {
  std::vector<Piece> pieces;
  int64_t begin = 0;
  for (size_t g = 0; g < response_counts.size(); ++g) {
    const auto lengths = work.lengths.subspan(begin, response_counts[g]);
    const Bins bins = BestFit(lengths, work.max_tokens - work.prompt_lengths[g]);
    std::vector<std::vector<int64_t>> responses(bins.count);
    for (size_t n = 0; n < lengths.size(); ++n) {
      responses[bins.bin_of[n]].push_back(begin + static_cast<int64_t>(n));
    }
    for (std::vector<int64_t>& of_piece : responses) {
      pieces.push_back(work.MakePiece(static_cast<int64_t>(g), std::move(of_piece)));
    }
    begin += response_counts[g];
  }
  return pieces;
}

std::vector<int64_t> TokensOf(const std::vector<Piece>& pieces) {
  std::vector<int64_t> tokens(pieces.size());
  std::ranges::transform(pieces, tokens.begin(), &Piece::tokens);
  return tokens;
}

double CostOf(const MicroBatch& micro_batch) {
  return std::accumulate(micro_batch.begin(), micro_batch.end(), 0.0,
                         [](double sum, const Piece& piece) { return sum + piece.cost; });
}

// Deals things out, each to the half that has cost less so far; neither half stays empty if there are two.
template <class T, class Cost>
std::pair<std::vector<T>, std::vector<T>> Deal(std::vector<T> things, Cost cost_of) {
  std::pair<std::vector<T>, std::vector<T>> halves;
  double lead = 0;  // of the first half
  for (T& thing : things) {
    const bool first = lead < 0 || halves.first.empty();
    lead += first ? cost_of(thing) : -cost_of(thing);
    (first ? halves.first : halves.second).push_back(std::move(thing));
  }
  return halves;
}

// Whether a micro-batch can be halved without a prompt that comes twice.
bool HalvesFreely(const Workload& work, const MicroBatch& micro_batch) {
  return micro_batch.size() > 1 ||
         (micro_batch[0].responses.size() > 1 && work.prompt_lengths[micro_batch[0].group] == 0);
}

// Halves of such a micro-batch: of its pieces, or of its only piece.
std::pair<MicroBatch, MicroBatch> Halve(const Workload& work, MicroBatch whole) {
  if (whole.size() == 1) {
    const int64_t group = whole[0].group;
    auto [first, second] = Deal(whole[0].responses, [&](int64_t response) { return work.costs[response]; });
    return {{work.MakePiece(group, std::move(first))}, {work.MakePiece(group, std::move(second))}};
  }
  std::ranges::stable_sort(whole, std::ranges::greater{}, &Piece::cost);
  return Deal(std::move(whole), [](const Piece& piece) { return piece.cost; });
}

// The pieces of a rank as at most `count` micro-batches of about equal cost: each piece, the most expensive
// first, goes to the cheapest that has room for it. Where that does not work out, best-fit does.
std::vector<MicroBatch> Pack(const Workload& work, std::vector<Piece> pieces, int64_t count) {
  std::ranges::stable_sort(pieces, std::ranges::greater{}, &Piece::cost);
  struct Bin {
    int64_t tokens = 0;
    double cost = 0;
  };
  std::vector<Bin> bins(count);
  std::vector<int64_t> bin_of;
  bool fits = true;
  for (const Piece& piece : pieces) {
    const auto cheapest = std::ranges::min_element(bins, {}, [&](const Bin& bin) {
      return std::pair(bin.tokens + piece.tokens > work.max_tokens, bin.cost);
    });
    fits = fits && cheapest->tokens + piece.tokens <= work.max_tokens;
    cheapest->tokens += piece.tokens;
    cheapest->cost += piece.cost;
    bin_of.push_back(cheapest - bins.begin());
  }
  if (!fits) {
    bin_of = BestFit(TokensOf(pieces), work.max_tokens).bin_of;
  }
  std::vector<MicroBatch> micro_batches(count);
  for (size_t i = 0; i < pieces.size(); ++i) {
    MicroBatch& micro_batch = micro_batches[bin_of[i]];
    const auto same_group = std::ranges::find(micro_batch, pieces[i].group, &Piece::group);
    if (same_group != micro_batch.end()) {
      work.Join(*same_group, pieces[i].responses);
    } else {
      micro_batch.push_back(std::move(pieces[i]));
    }
  }
  std::erase_if(micro_batches, [](const MicroBatch& micro_batch) { return micro_batch.empty(); });
  return micro_batches;
}

// Halves the most expensive micro-batches until there are `count`, or none is left that can be halved without
// repeating a prompt.
void HalveUntil(const Workload& work, int64_t count, std::vector<MicroBatch>& micro_batches) {
  while (static_cast<int64_t>(micro_batches.size()) < count) {
    const auto heaviest = std::ranges::max_element(micro_batches, {}, [&](const MicroBatch& micro_batch) {
      return HalvesFreely(work, micro_batch) ? CostOf(micro_batch) : -1.0;
    });
    if (heaviest == micro_batches.end() || !HalvesFreely(work, *heaviest)) {
      return;
    }
    auto [first, second] = Halve(work, std::move(*heaviest));
    *heaviest = std::move(first);
    micro_batches.push_back(std::move(second));
  }
}

// What a rank computes when it has no micro-batch left: the shortest prompt that is not empty, if there is
// one. That costs no more than the prompt that halving a group would repeat.
MicroBatch Filler(const Workload& work, std::span<const Piece> pieces) {
  const auto shortest = std::ranges::min_element(pieces, {}, [&](const Piece& piece) {
    const int64_t length = work.prompt_lengths[piece.group];
    return std::pair(length == 0, length);
  });
  return {work.MakePiece(shortest->group, {})};
}

void Append(MicroBatch micro_batch, std::span<const int64_t> first_of_group, StepSchedule& schedule) {
  std::ranges::sort(micro_batch, {}, &Piece::group);
  int64_t tokens = 0;
  for (Piece& piece : micro_batch) {
    tokens += piece.tokens;
    schedule.groups.push_back(piece.group);
    std::ranges::sort(piece.responses);
    for (const int64_t response : piece.responses) {
      schedule.responses.push_back(response - first_of_group[piece.group]);
    }
    schedule.response_begin.push_back(static_cast<int64_t>(schedule.responses.size()));
  }
  schedule.part_begin.push_back(static_cast<int64_t>(schedule.groups.size()));
  schedule.tokens.push_back(tokens);
  schedule.costs.push_back(CostOf(micro_batch));
}

}  // namespace

StepSchedule MakeStepSchedule(const dualkv_step_schedule_params& params) {
  std::span<const int64_t> response_counts;
  const Workload work = ReadWorkload(params, response_counts);
  const std::vector<Piece> pieces = CutToBudget(work, response_counts);
  std::vector<std::vector<Piece>> ranks =
      BalanceRanks(work, pieces, params.num_ranks, params.equal_samples != 0);

  StepSchedule schedule;
  schedule.num_ranks = params.num_ranks;
  std::vector<int64_t> first_of_group(response_counts.size());
  std::exclusive_scan(response_counts.begin(), response_counts.end(), first_of_group.begin(), int64_t{0});
  for (const std::vector<Piece>& rank : ranks) {
    schedule.num_micro_batches =
        std::max(schedule.num_micro_batches, BestFit(TokensOf(rank), work.max_tokens).count);
  }
  for (std::vector<Piece>& rank : ranks) {
    if (schedule.num_micro_batches == 0) {
      break;
    }
    std::vector<MicroBatch> micro_batches = Pack(work, std::move(rank), schedule.num_micro_batches);
    HalveUntil(work, schedule.num_micro_batches, micro_batches);
    std::ranges::stable_sort(micro_batches, std::ranges::greater{}, CostOf);
    micro_batches.resize(schedule.num_micro_batches, Filler(work, pieces));
    for (MicroBatch& micro_batch : micro_batches) {
      Append(std::move(micro_batch), first_of_group, schedule);
    }
  }
  return schedule;
}

}  // namespace dualkv::core
