#include "core/balance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

namespace dualkv::core {
namespace {

// Relative to the mean load: less than this is not worth a search.
constexpr double kNegligible = 1e-3;

// Most exchanges for each rank. Few batches need as many.
constexpr size_t kRounds = 32;

// How far above the ideal load a rank may be filled with groups that stay whole. Infinity: nothing is cut.
constexpr double kLevels[] = {
    std::numeric_limits<double>::infinity(), 0.32, 0.16, 0.08, 0.04, 0.02, 0.01, 0.005};

struct Rank {
  std::vector<Piece> pieces;
  double load = 0;
  int64_t samples = 0;
};

// Responses [first, last) of a piece, in the order of their costs.
struct Range {
  size_t first = 0, last = 0;
  size_t size() const { return last - first; }
};

// What two ranks may do: `own` responses of piece p of the one go to the other, `other` of piece q come back.
struct Exchange {
  size_t p, q;
  Range own, other;
};

// The exchange that most relieves the slower of two ranks, a, without making b as slow.
class ExchangeSearch {
 public:
  ExchangeSearch(const Workload& work, const Rank& a, const Rank& b)
      : work_(work), a_(a), b_(b), peak_((1 - kNegligible / 2) * a.load) {}

  // Piece p goes to b.
  void GiveAway(size_t p) { Consider(a_.pieces[p].cost, 0, 0, 0, {p, 0, AllOf(a_.pieces[p]), {}}); }

  // Pieces p and q change places.
  void Swap(size_t p, size_t q) {
    const Piece &own = a_.pieces[p], &other = b_.pieces[q];
    Consider(own.cost, other.cost, 0, 0, {p, q, AllOf(own), AllOf(other)});
  }

  // Pieces of one group: a response changes places with another, or, unless numbers are to stay, moves over.
  void Adjust(size_t p, size_t q, bool equal_samples) {
    const Piece &own = a_.pieces[p], &other = b_.pieces[q];
    for (size_t i = 0; i < own.responses.size(); ++i) {
      const double gives = work_.costs[own.responses[i]];
      const int64_t length = work_.lengths[own.responses[i]];
      if (!equal_samples && other.tokens + length <= work_.max_tokens) {
        Consider(gives, 0, 0, 0, {p, q, {i, i + 1}, {}});
      }
      for (size_t j = 0; j < other.responses.size(); ++j) {
        const int64_t growth = length - work_.lengths[other.responses[j]];
        if (other.tokens + growth <= work_.max_tokens && own.tokens - growth <= work_.max_tokens) {
          Consider(gives, work_.costs[other.responses[j]], 0, 0, {p, q, {i, i + 1}, {j, j + 1}});
        }
      }
    }
  }

  // Pieces of two groups: the k most expensive responses of the one for the k cheapest of the other. Each
  // rank repeats the other's prompt, and is rid of its own if no response of it is left.
  void Trade(size_t p, size_t q) {
    const Piece &own = a_.pieces[p], &other = b_.pieces[q];
    const double own_prompt = work_.prompt_costs[own.group], other_prompt = work_.prompt_costs[other.group];
    const size_t own_count = own.responses.size(), other_count = other.responses.size();
    double gives = 0, takes = 0;
    for (size_t k = 1; k <= std::min(own_count, other_count); ++k) {
      gives += work_.costs[own.responses[k - 1]];
      takes += work_.costs[other.responses[other_count - k]];
      Consider(gives, takes, other_prompt - (k == own_count ? own_prompt : 0),
               own_prompt - (k == other_count ? other_prompt : 0),
               {p, q, {0, k}, {other_count - k, other_count}});
    }
  }

  const std::optional<Exchange>& best() const { return best_; }

 private:
  static Range AllOf(const Piece& piece) { return {0, piece.responses.size()}; }

  // What a gives and takes, and what either rank spends on prompts.
  void Consider(double gives, double takes, double spends_a, double spends_b, const Exchange& exchange) {
    const double peak = std::max(a_.load - gives + takes + spends_a, b_.load + gives - takes + spends_b);
    if (peak < peak_) {
      peak_ = peak;
      best_ = exchange;
    }
  }

  const Workload& work_;
  const Rank &a_, &b_;
  double peak_;  // the larger of the two loads after the best exchange
  std::optional<Exchange> best_;
};

// A piece in a queue: how urgent it is, minus its group, so that ties go by group, and where it is.
using Entry = std::tuple<double, int64_t, size_t>;

class Ranks {
 public:
  Ranks(const Workload& work, int64_t num_ranks) : work_(work), ranks_(num_ranks) {}

  // The heaviest piece goes to the rank with the least load. If that would lift the rank above the level, the
  // piece is cut where the rank is full, and the rest waits for its turn among the others.
  void FillTo(double level, const std::vector<Piece>& pieces);

  // The ranks get the same number of responses. Pieces are placed so that the loads follow these numbers:
  // what counts is how far a piece, and a rank, is from the average cost of its number of responses.
  void FillEvenly(const std::vector<Piece>& pieces);

  // Exchanges between the slowest rank and another, while the slower of the two gains. Without `cut` no
  // prompt is repeated for it.
  void Exchanges(bool equal_samples, bool cut);

  double Peak() const { return std::ranges::max(ranks_, {}, &Rank::load).load; }
  double Mean() const {
    return std::accumulate(ranks_.begin(), ranks_.end(), 0.0,
                           [](double sum, const Rank& rank) { return sum + rank.load; }) /
           static_cast<double>(ranks_.size());
  }

  std::vector<std::vector<Piece>> Take() && {
    std::vector<std::vector<Piece>> pieces;
    for (Rank& rank : ranks_) {
      pieces.push_back(std::move(rank.pieces));
    }
    return pieces;
  }

 private:
  void Place(Rank& rank, Piece piece) const;
  std::optional<Piece> CutToFit(Piece& piece, double room) const;
  Piece CutToCount(Piece& piece, size_t count, double target) const;
  std::optional<Exchange> BestExchange(const Rank& a, const Rank& b, bool equal_samples, bool cut) const;
  void Apply(const Exchange& exchange, Rank& a, Rank& b) const;
  std::vector<int64_t> Extract(Rank& rank, size_t p, Range range) const;
  void Receive(Rank& rank, int64_t group, std::vector<int64_t> responses) const;

  const Workload& work_;
  std::vector<Rank> ranks_;
};

void Ranks::Place(Rank& rank, Piece piece) const {
  rank.load += piece.cost;
  rank.samples += static_cast<int64_t>(piece.responses.size());
  rank.pieces.push_back(std::move(piece));
}

// Cuts off what fits into `room`, unless the prompt would be most of it.
std::optional<Piece> Ranks::CutToFit(Piece& piece, double room) const {
  const double prompt = work_.prompt_costs[piece.group];
  std::vector<int64_t> taken, left;
  double cost = prompt;
  for (const int64_t response : piece.responses) {
    const bool fits = cost + work_.costs[response] <= room;
    cost += fits ? work_.costs[response] : 0;
    (fits ? taken : left).push_back(response);
  }
  if (taken.empty() || left.empty() || cost < 2 * prompt) {
    return std::nullopt;
  }
  Piece part = work_.MakePiece(piece.group, std::move(taken));
  piece = work_.MakePiece(piece.group, std::move(left));
  return part;
}

void Ranks::FillTo(double level, const std::vector<Piece>& pieces) {
  std::vector<Piece> pool = pieces;
  std::priority_queue<Entry> heaviest;
  for (size_t i = 0; i < pool.size(); ++i) {
    heaviest.emplace(pool[i].cost, -pool[i].group, i);
  }
  using Load = std::tuple<double, int64_t, size_t>;  // load, samples, rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> lightest;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    lightest.emplace(0.0, 0, r);
  }
  while (!heaviest.empty()) {
    const size_t i = std::get<2>(heaviest.top());
    heaviest.pop();
    const size_t r = std::get<2>(lightest.top());
    lightest.pop();
    const double room = level - ranks_[r].load;
    std::optional<Piece> part;
    if (pool[i].cost > room) {
      part = CutToFit(pool[i], room);
    }
    if (part) {
      heaviest.emplace(pool[i].cost, -pool[i].group, i);
    }
    Place(ranks_[r], part ? *std::move(part) : std::move(pool[i]));
    lightest.emplace(ranks_[r].load, ranks_[r].samples, r);
  }
}

void Ranks::FillEvenly(const std::vector<Piece>& pieces) {
  double cost = 0;
  int64_t samples = 0;
  for (const Piece& piece : pieces) {
    cost += piece.cost;
    samples += static_cast<int64_t>(piece.responses.size());
  }
  const double average = cost / static_cast<double>(samples);
  auto excess = [&](double load, int64_t count) { return load - average * static_cast<double>(count); };
  auto excess_of = [&](const Piece& piece) {
    return excess(piece.cost, static_cast<int64_t>(piece.responses.size()));
  };
  const auto num_ranks = static_cast<int64_t>(ranks_.size());
  std::vector<int64_t> slots(num_ranks);  // responses that each rank still needs
  for (int64_t r = 0; r < num_ranks; ++r) {
    slots[r] = samples / num_ranks + (r < samples % num_ranks ? 1 : 0);
  }

  std::vector<Piece> pool = pieces;
  std::priority_queue<Entry> furthest;
  auto push = [&](size_t i) { furthest.emplace(std::abs(excess_of(pool[i])), -pool[i].group, i); };
  for (size_t i = 0; i < pool.size(); ++i) {
    push(i);
  }
  while (!furthest.empty()) {
    const size_t i = std::get<2>(furthest.top());
    furthest.pop();
    Piece& piece = pool[i];
    const auto count = static_cast<int64_t>(piece.responses.size());
    // Among the ranks with room for all, the one whose load the piece evens out most.
    const double sign = excess_of(piece) > 0 ? 1 : -1;
    auto misfit = [&](int64_t r) {
      return std::pair(slots[r] < count, sign * excess(ranks_[r].load, ranks_[r].samples));
    };
    int64_t best = 0;
    for (int64_t r = 1; r < num_ranks; ++r) {
      best = misfit(r) < misfit(best) ? r : best;
    }
    if (slots[best] >= count) {
      slots[best] -= count;
      Place(ranks_[best], std::move(piece));
      continue;
    }
    best = std::ranges::max_element(slots) - slots.begin();
    const double load = excess(ranks_[best].load, ranks_[best].samples + slots[best]);
    Place(ranks_[best], CutToCount(piece, static_cast<size_t>(slots[best]), -load));
    slots[best] = 0;
    push(i);
  }
}

// Cuts off `count` responses, neighbours in the order of costs, so that the part costs about `target`.
Piece Ranks::CutToCount(Piece& piece, size_t count, double target) const {
  double cost = work_.prompt_costs[piece.group];
  size_t first = 0;
  double closest = std::numeric_limits<double>::infinity();
  for (size_t n = 0; n < piece.responses.size(); ++n) {
    cost += work_.costs[piece.responses[n]];
    if (n >= count) {
      cost -= work_.costs[piece.responses[n - count]];
    }
    if (n + 1 >= count && std::abs(cost - target) < closest) {
      closest = std::abs(cost - target);
      first = n + 1 - count;
    }
  }
  return work_.MakePiece(piece.group, work_.Extract(piece, first, first + count));
}

std::optional<Exchange> Ranks::BestExchange(const Rank& a, const Rank& b, bool equal_samples,
                                            bool cut) const {
  ExchangeSearch search(work_, a, b);
  for (size_t p = 0; p < a.pieces.size(); ++p) {
    if (!equal_samples && !cut) {
      search.GiveAway(p);
    }
    for (size_t q = 0; q < b.pieces.size(); ++q) {
      const Piece &own = a.pieces[p], &other = b.pieces[q];
      const bool same_group = own.group == other.group;
      if (cut && !same_group) {
        search.Trade(p, q);
      } else if (!cut && same_group) {
        search.Adjust(p, q, equal_samples);
      } else if (!cut && (!equal_samples || own.responses.size() == other.responses.size())) {
        search.Swap(p, q);
      }
    }
  }
  return search.best();
}

std::vector<int64_t> Ranks::Extract(Rank& rank, size_t p, Range range) const {
  if (range.size() == 0) {
    return {};
  }
  Piece& piece = rank.pieces[p];
  rank.load -= piece.cost;
  rank.samples -= static_cast<int64_t>(range.size());
  std::vector<int64_t> taken = work_.Extract(piece, range.first, range.last);
  if (piece.responses.empty()) {
    rank.pieces.erase(rank.pieces.begin() + static_cast<std::ptrdiff_t>(p));
  } else {
    rank.load += piece.cost;
  }
  return taken;
}

void Ranks::Receive(Rank& rank, int64_t group, std::vector<int64_t> responses) const {
  if (responses.empty()) {
    return;
  }
  Piece piece = work_.MakePiece(group, std::move(responses));
  for (Piece& present : rank.pieces) {
    if (present.group == group &&
        present.tokens + piece.tokens - work_.prompt_lengths[group] <= work_.max_tokens) {
      rank.load -= present.cost;
      rank.samples += static_cast<int64_t>(piece.responses.size());
      work_.Join(present, piece.responses);
      rank.load += present.cost;
      return;
    }
  }
  Place(rank, std::move(piece));
}

void Ranks::Apply(const Exchange& exchange, Rank& a, Rank& b) const {
  const int64_t own_group = a.pieces[exchange.p].group;
  const int64_t other_group = exchange.other.size() > 0 ? b.pieces[exchange.q].group : own_group;
  std::vector<int64_t> own = Extract(a, exchange.p, exchange.own);
  std::vector<int64_t> other = Extract(b, exchange.q, exchange.other);
  Receive(b, own_group, std::move(own));
  Receive(a, other_group, std::move(other));
}

void Ranks::Exchanges(bool equal_samples, bool cut) {
  std::set<std::pair<double, size_t>> by_load;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    by_load.emplace(ranks_[r].load, r);
  }
  const double enough = (1 + kNegligible) * Mean();
  for (size_t round = 0; round < kRounds * ranks_.size(); ++round) {
    const auto slowest = std::prev(by_load.end());
    if (slowest->first <= enough) {
      return;
    }
    Rank& a = ranks_[slowest->second];
    std::optional<Exchange> exchange;
    auto other = by_load.begin();
    for (; other != slowest; ++other) {
      exchange = BestExchange(a, ranks_[other->second], equal_samples, cut);
      if (exchange) {
        break;
      }
    }
    if (!exchange) {
      return;
    }
    const size_t r = slowest->second, o = other->second;
    by_load.erase(slowest);
    by_load.erase(other);
    Apply(*exchange, ranks_[r], ranks_[o]);
    by_load.emplace(ranks_[r].load, r);
    by_load.emplace(ranks_[o].load, o);
  }
}

}  // namespace

std::vector<std::vector<Piece>> BalanceRanks(const Workload& work, const std::vector<Piece>& pieces,
                                             int64_t num_ranks, bool equal_samples) {
  if (pieces.empty()) {
    return std::vector<std::vector<Piece>>(num_ranks);
  }
  if (equal_samples) {
    Ranks ranks(work, num_ranks);
    ranks.FillEvenly(pieces);
    ranks.Exchanges(true, false);
    ranks.Exchanges(true, true);
    ranks.Exchanges(true, false);
    return std::move(ranks).Take();
  }
  // No rank can do with less than the mean, nor with less than any response and its prompt.
  double total = 0, ideal = 0;
  for (const Piece& piece : pieces) {
    total += piece.cost;
    ideal = std::max(ideal, work.prompt_costs[piece.group] + work.costs[piece.responses[0]]);
  }
  ideal = std::max(ideal, total / static_cast<double>(num_ranks));
  std::optional<Ranks> best;
  for (const double level : kLevels) {
    Ranks ranks(work, num_ranks);
    ranks.FillTo((1 + level) * ideal, pieces);
    ranks.Exchanges(false, false);
    if (!best || ranks.Peak() < (1 - kNegligible) * best->Peak()) {
      best.emplace(std::move(ranks));
    }
    if (best->Peak() <= (1 + kNegligible) * ideal) {
      break;
    }
  }
  return std::move(*best).Take();
}

}  // namespace dualkv::core
