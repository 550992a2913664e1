#include "core/plan.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/visibility.h"

namespace dualkv::core {
namespace {

void RequireFewRuns(size_t runs) {
  constexpr size_t kMaxRuns = size_t{1} << 30;  // their indices are int32
  Require(runs <= kMaxRuns, "the forest is too large for a plan: more than ", kMaxRuns, " runs of tiles");
}

int32_t CeilDiv(int32_t a, int32_t b) { return (a + b - 1) / b; }

// A query tile before it is scheduled: rows [begin, end), the first of which lies in segment `segment`.
struct QueryTile {
  int32_t begin;
  int32_t end;
  int32_t segment;
};

// Cuts the query rows into tiles: consecutive rows of one tree, from the first query row of the tree, or
// after a gap of keys-only rows, on.
std::vector<QueryTile> CutQueries(const Plan& plan, int32_t width) {
  const auto segments = plan.forest.segments();
  std::vector<QueryTile> tiles;
  int32_t filled = width;  // rows of the last tile; full: the next row opens a new one
  for (int32_t s = 0; s < static_cast<int32_t>(segments.size()); ++s) {
    if (segments[s].parent < 0 || plan.keys_only[s]) {
      filled = width;
    }
    if (plan.keys_only[s]) {
      continue;
    }
    for (int32_t row = segments[s].begin; row < segments[s].end;) {
      const int32_t rest = segments[s].end - row;
      if (filled == width) {
        filled = std::min(width, rest);
        tiles.push_back({row, row + filled, s});
        row += filled;
      } else {
        const int32_t add = std::min(width - filled, rest);
        filled += add;
        tiles.back().end += add;
        row += add;
      }
    }
  }
  return tiles;
}

// The rows of a query tile that lie in the subtree of `segment`, with the range of their positions.
struct RowsBelow {
  int32_t begin;
  int32_t end;
  int32_t min_position;
  int32_t max_position;
};

RowsBelow FindRowsBelow(const Plan& plan, const QueryTile& tile, const dualkv_segment& segment) {
  RowsBelow rows{std::max(tile.begin, segment.begin), std::min(tile.end, segment.tree_end), 0, 0};
  if (plan.window_left >= 0 && rows.begin < rows.end) {
    const auto [low, high] =
        std::minmax_element(plan.positions.begin() + rows.begin, plan.positions.begin() + rows.end);
    rows.min_position = *low;
    rows.max_position = *high;
  }
  return rows;
}

// Appends the runs of key tiles of segment `s` that the query tile visits: those with a visible pair.
void AppendRuns(const Plan& plan, const QueryTile& tile, int32_t s, int32_t key_tile,
                std::vector<dualkv_run>& runs) {
  const dualkv_segment& segment = plan.forest.segments()[s];
  const RowsBelow rows = FindRowsBelow(plan, tile, segment);
  if (rows.begin >= rows.end) {
    return;
  }
  // The keys that some row sees, and those that all rows of the tile see: intervals both.
  const Interval some = {VisibleKeys(rows.begin, rows.min_position, segment, plan.window_left).begin,
                         std::min(rows.end, segment.end)};
  Interval all = {segment.begin, segment.begin};
  if (rows.begin == tile.begin && rows.end == tile.end) {
    all = {VisibleKeys(rows.begin, rows.max_position, segment, plan.window_left).begin,
           std::min(rows.begin + 1, segment.end)};
  }
  if (some.begin >= some.end) {
    return;
  }
  // In tiles of the segment: visited from `first` on, unmasked between `whole` and `ragged`.
  const int32_t first = (some.begin - segment.begin) / key_tile;
  const int32_t last = CeilDiv(some.end - segment.begin, key_tile);
  const int32_t whole = std::clamp(CeilDiv(all.begin - segment.begin, key_tile), first, last);
  const int32_t ragged =
      std::clamp(all.end >= some.end ? last : (all.end - segment.begin) / key_tile, whole, last);

  auto append = [&](int32_t from, int32_t to, bool masked) {
    if (from < to) {
      runs.push_back({.begin = segment.begin + from * key_tile,
                      .end = std::min(segment.begin + to * key_tile, some.end),
                      .segment = s,
                      .masked = masked});
    }
  };
  append(first, whole, true);
  append(whole, ragged, false);
  append(ragged, last, true);
}

// The rows of each tile's runs, counted in tiles of `rows_per_tile`.
std::vector<int64_t> WorkOf(const Schedule& schedule, int32_t rows_per_tile = 1) {
  std::vector<int64_t> work;
  work.reserve(schedule.tiles.size());
  for (const dualkv_tile& tile : schedule.tiles) {
    int64_t tiles = 0;
    for (int32_t r = tile.run_begin; r < tile.run_end; ++r) {
      tiles += CeilDiv(schedule.runs[r].end - schedule.runs[r].begin, rows_per_tile);
    }
    work.push_back(tiles);
  }
  return work;
}

// The tiles' indices by their work, heaviest first; equal ones keep their order, so that tiles of one tree,
// which share keys, stay together.
std::vector<int32_t> OrderByWork(const Schedule& schedule) {
  const std::vector<int64_t> work = WorkOf(schedule);
  std::vector<int32_t> order(work.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::ranges::greater{}, [&](int32_t t) { return work[t]; });
  return order;
}

template <class T>
void Reorder(std::vector<T>& values, std::span<const int32_t> order) {
  std::vector<T> ordered;
  ordered.reserve(values.size());
  std::transform(order.begin(), order.end(), std::back_inserter(ordered),
                 [&](int32_t i) { return values[i]; });
  values = std::move(ordered);
}

// The tile matrix by rows: each query tile with its runs of keys. Neither tiles nor runs are sorted yet.
Schedule ByQueries(const Plan& plan, std::span<const QueryTile> queries, TileSizes sizes) {
  const auto segments = plan.forest.segments();
  Schedule schedule{sizes, {}, {}};
  schedule.tiles.reserve(queries.size());
  std::vector<int32_t> path;
  for (const QueryTile& tile : queries) {
    const auto run_begin = static_cast<int32_t>(schedule.runs.size());
    path.clear();
    for (int32_t s = segments[tile.segment].parent; s >= 0; s = segments[s].parent) {
      path.push_back(s);
    }
    std::for_each(path.rbegin(), path.rend(),
                  [&](int32_t s) { AppendRuns(plan, tile, s, sizes.key, schedule.runs); });
    for (size_t s = tile.segment; s < segments.size() && segments[s].begin < tile.end; ++s) {
      AppendRuns(plan, tile, static_cast<int32_t>(s), sizes.key, schedule.runs);
    }
    RequireFewRuns(schedule.runs.size());
    schedule.tiles.push_back({tile.begin, tile.end, run_begin, static_cast<int32_t>(schedule.runs.size())});
  }
  return schedule;
}

// The same matrix by columns: each key tile with its runs of query rows. Key tiles that no row sees get no
// runs, so that their gradients are still written.
Schedule ByKeys(const Plan& plan, const Schedule& by_queries) {
  const auto segments = plan.forest.segments();
  const TileSizes sizes = by_queries.tile_sizes;

  // first_tile[s]: index of the first key tile of segment s.
  std::vector<int32_t> first_tile(segments.size() + 1, 0);
  for (size_t s = 0; s < segments.size(); ++s) {
    first_tile[s + 1] = first_tile[s] + CeilDiv(segments[s].end - segments[s].begin, sizes.key);
  }

  // Query tiles come in the order of their rows. Each key tile keeps the run that its last visit extended; a
  // run that ends is put aside, to be sorted by key tile.
  struct KeyRun {
    int32_t key_tile;
    dualkv_run run;
  };
  std::vector<dualkv_run> open(first_tile.back(), dualkv_run{});  // empty: no visit yet
  std::vector<KeyRun> closed;
  std::vector<int32_t> run_begin(first_tile.back() + 1, 0);
  auto close = [&](int32_t k) {
    if (open[k].begin < open[k].end) {
      closed.push_back({k, open[k]});
      ++run_begin[k + 1];
    }
  };
  for (const dualkv_tile& query : by_queries.tiles) {
    for (int32_t r = query.run_begin; r < query.run_end; ++r) {
      const dualkv_run& keys = by_queries.runs[r];
      const dualkv_segment& segment = segments[keys.segment];
      int32_t k = first_tile[keys.segment] + (keys.begin - segment.begin) / sizes.key;
      for (int32_t key = keys.begin; key < keys.end; key += sizes.key, ++k) {
        // The run of keys ends with the last that some row sees: the rest of its last tile is hidden from
        // all.
        const bool masked = keys.masked || keys.end < std::min(key + sizes.key, segment.end);
        dualkv_run& last = open[k];
        const bool follows = last.end == query.begin && last.masked == masked && last.begin < last.end &&
                             (last.end - last.begin) % sizes.query == 0;
        if (!follows) {
          close(k);
          last = {.begin = query.begin, .end = 0, .segment = keys.segment, .masked = masked};
        }
        last.end = query.end;
      }
    }
  }
  for (int32_t k = 0; k < first_tile.back(); ++k) {
    close(k);
  }
  RequireFewRuns(closed.size());
  std::partial_sum(run_begin.begin(), run_begin.end(), run_begin.begin());

  Schedule schedule{sizes, {}, std::vector<dualkv_run>(closed.size())};
  std::vector<int32_t> next(run_begin.begin(), run_begin.end() - 1);
  for (const KeyRun& entry : closed) {
    schedule.runs[next[entry.key_tile]++] = entry.run;
  }
  schedule.tiles.reserve(first_tile.back());
  for (size_t s = 0; s < segments.size(); ++s) {
    for (int32_t k = first_tile[s]; k < first_tile[s + 1]; ++k) {
      const int32_t begin = segments[s].begin + (k - first_tile[s]) * sizes.key;
      schedule.tiles.push_back(
          {begin, std::min(begin + sizes.key, segments[s].end), run_begin[k], run_begin[k + 1]});
    }
  }
  return schedule;
}

// Cuts tiles into parts, see dualkv_plan_params: backward_parts, `parts` below, is 0 to leave them whole.
// Tiles come, and go, in the order of their rows, and so do the parts of each. partial and band of each tile
// are as in Plan, but bands have numbers here, in the order of their segments and rows. Returns the most
// visits that a part of each band's segment makes.
//
// With V the number of all visits and m = max(floor(V / parts), 1) the most that a part makes, there are
// fewer than 4 * parts parts. In a segment whose heaviest tile makes h > m visits, parts make up to
// l = ceil(h / ceil(h / m)) visits, and l + 1 > (m + 1) / 2. A tile of v > l visits is cut into ceil(v / l)
// <= 2 v / (l + 1) parts: with v = a l + b, a >= 1 and 1 <= b <= l, this is (a + 1) (l + 1) <= 2 a l + 2 b,
// or 0 <= (a - 1) (l - 1) + 2 (b - 1). That is less than 4 v / (m + 1), and V / (m + 1) < parts.
std::vector<int64_t> CutIntoParts(Plan& plan) {
  Schedule& schedule = plan.backward;
  const int32_t query_tile = schedule.tile_sizes.query;
  const std::vector<int64_t> visits_of_tiles = WorkOf(schedule, query_tile);
  const int64_t all = std::accumulate(visits_of_tiles.begin(), visits_of_tiles.end(), int64_t{0});
  const int64_t most =
      plan.backward_parts == 0 ? std::max<int64_t>(all, 1) : std::max<int64_t>(all / plan.backward_parts, 1);

  std::vector<dualkv_tile> tiles;
  std::vector<dualkv_run> runs;
  std::vector<int64_t> most_visits;  // of each band
  size_t t = 0;
  for (const dualkv_segment& segment : plan.forest.segments()) {
    size_t end = t;
    while (end < schedule.tiles.size() && schedule.tiles[end].begin < segment.end) {
      ++end;
    }
    int64_t heaviest = 1;
    for (size_t u = t; u < end; ++u) {
      heaviest = std::max(heaviest, visits_of_tiles[u]);
    }
    const int64_t count = (heaviest + most - 1) / most;
    const int64_t length = (heaviest + count - 1) / count;
    most_visits.insert(most_visits.end(), count, length);
    const auto last_band = static_cast<int32_t>(most_visits.size() - 1);
    for (; t < end; ++t) {
      const dualkv_tile& tile = schedule.tiles[t];
      auto run = schedule.runs.begin() + tile.run_begin;
      int32_t done = 0;  // rows of *run that earlier parts have taken
      const int64_t pieces = std::max<int64_t>((visits_of_tiles[t] + length - 1) / length, 1);
      plan.num_split_tiles += pieces > 1;
      for (int64_t piece = pieces - 1; piece >= 0; --piece) {  // counted from the last rows
        const auto run_begin = static_cast<int32_t>(runs.size());
        for (int64_t left = piece == pieces - 1 ? visits_of_tiles[t] - piece * length : length; left > 0;) {
          dualkv_run share = *run;
          share.begin += done;
          if (const int64_t needed = CeilDiv(share.end - share.begin, query_tile); needed <= left) {
            left -= needed;
            done = 0;
            ++run;
          } else {
            share.end = share.begin + static_cast<int32_t>(left) * query_tile;
            left = 0;
            done = share.end - run->begin;
          }
          runs.push_back(share);
        }
        RequireFewRuns(runs.size());
        tiles.push_back({tile.begin, tile.end, run_begin, static_cast<int32_t>(runs.size())});
        plan.partial.push_back(pieces > 1 ? static_cast<int32_t>(plan.num_partials++) : -1);
        plan.band.push_back(last_band - static_cast<int32_t>(piece));
      }
    }
  }
  schedule.tiles = std::move(tiles);
  schedule.runs = std::move(runs);
  return most_visits;
}

// Puts the backward's tiles in order, band by band, and gives each the index of its band's first tile. Heavy
// bands come first, but those whose most visits have equally many digits keep their order: the rows that
// waited for a turn longest are those that earlier bands came to first.
void OrderByBands(Plan& plan, std::span<const int64_t> most_visits) {
  std::vector<int32_t> order(plan.band.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](int32_t t) {
    const int32_t band = plan.band[t];
    return std::pair(-static_cast<int32_t>(std::bit_width(static_cast<uint64_t>(most_visits[band]))), band);
  });
  Reorder(plan.backward.tiles, order);
  Reorder(plan.partial, order);
  Reorder(plan.band, order);
  int32_t last = -1, first = 0;
  for (size_t t = 0; t < plan.band.size(); ++t) {
    if (plan.band[t] != last) {
      last = plan.band[t];
      first = static_cast<int32_t>(t);
    }
    plan.band[t] = first;
    plan.longest_band = std::max(plan.longest_band, static_cast<int32_t>(t) - first + 1);
  }
}

// Splits the runs of the backward wherever the turn changes, and puts them in the order of the schedule.
void TakeTurns(Plan& plan, std::span<const QueryTile> queries) {
  const int32_t query_tile = plan.backward.tile_sizes.query;
  std::vector<dualkv_run> runs;
  std::vector<int32_t> visits(queries.size(), 0);  // that each query tile has had
  for (dualkv_tile& tile : plan.backward.tiles) {
    const auto run_begin = static_cast<int32_t>(runs.size());
    for (int32_t r = tile.run_begin; r < tile.run_end; ++r) {
      const dualkv_run& run = plan.backward.runs[r];
      auto q = std::partition_point(queries.begin(), queries.end(),
                                    [&](const QueryTile& query) { return query.begin < run.begin; }) -
               queries.begin();
      for (int32_t row = run.begin; row < run.end; row += query_tile, ++q) {
        if (row == run.begin || visits[q] != plan.turn.back()) {
          runs.push_back({.begin = row, .end = 0, .segment = run.segment, .masked = run.masked});
          plan.first_query_tile.push_back(static_cast<int32_t>(q));
          plan.turn.push_back(visits[q]);
        }
        runs.back().end = std::min(row + query_tile, run.end);
        ++visits[q];
      }
    }
    RequireFewRuns(runs.size());
    tile.run_begin = run_begin;
    tile.run_end = static_cast<int32_t>(runs.size());
  }
  plan.backward.runs = std::move(runs);
}

}  // namespace

dualkv_schedule Schedule::View() const {
  return {.query_tile = tile_sizes.query,
          .key_tile = tile_sizes.key,
          .num_tiles = static_cast<int64_t>(tiles.size()),
          .num_runs = static_cast<int64_t>(runs.size()),
          .tiles = tiles.data(),
          .runs = runs.data()};
}

Plan::Plan(const Forest& forest_, int64_t window_left_, std::span<const uint8_t> keys_only_,
           TileSizes forward_tiles, TileSizes backward_tiles, int32_t backward_parts_)
    : forest(forest_),
      window_left(window_left_),
      keys_only(keys_only_.begin(), keys_only_.end()),
      backward_parts(backward_parts_) {
  keys_only.resize(forest.segments().size(), 0);
  for (size_t s = 0; s < keys_only.size(); ++s) {
    const dualkv_segment& segment = forest.segments()[s];
    if (keys_only[s] && segment.begin < segment.end) {
      cleared.push_back({segment.begin, segment.end});
    }
  }
  if (window_left >= 0) {
    positions.resize(forest.total_tokens());
    forest.WritePositions(positions.data());
  }

  const std::vector<QueryTile> queries = CutQueries(*this, backward_tiles.query);
  forward = ByQueries(*this, CutQueries(*this, forward_tiles.query), forward_tiles);
  backward =
      ByKeys(*this, forward_tiles == backward_tiles ? forward : ByQueries(*this, queries, backward_tiles));
  Reorder(forward.tiles, OrderByWork(forward));

  OrderByBands(*this, CutIntoParts(*this));
  num_query_tiles = static_cast<int64_t>(queries.size());
  TakeTurns(*this, queries);
}

dualkv_plan_view Plan::View() const {
  return {.size = sizeof(dualkv_plan_view),
          .version = DUALKV_ABI_VERSION,
          .window_left = window_left,
          .num_segments = static_cast<int64_t>(forest.segments().size()),
          .total_tokens = forest.total_tokens(),
          .segments = forest.segments().data(),
          .positions = window_left >= 0 ? positions.data() : nullptr,
          .forward = forward.View(),
          .backward = backward.View(),
          .num_query_tiles = num_query_tiles,
          .first_query_tile = first_query_tile.data(),
          .turn = turn.data(),
          .num_partials = num_partials,
          .partial = partial.data(),
          .band = band.data()};
}

}  // namespace dualkv::core
