// Schedules of a step through the public interface: properties that hold for any batch, known cases by name,
// and every refusal with its message.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dualkv/dualkv.hpp"

namespace dualkv::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Property;

struct Input {
  std::vector<Group> groups;
  int64_t num_ranks = 1;
  int64_t max_tokens = 1000;
  double token_cost = 1, target_cost = 0, pair_cost = 0;
  bool equal_samples = false;
};

// The arrays that the parameters of an input point to.
struct Arrays {
  explicit Arrays(const Input& input) : params(Params<dualkv_step_schedule_params>()) {
    for (const Group& group : input.groups) {
      prompts.push_back(group.prompt);
      counts.push_back(static_cast<int64_t>(group.responses.size()));
      responses.insert(responses.end(), group.responses.begin(), group.responses.end());
    }
    params.num_groups = static_cast<int64_t>(prompts.size());
    params.prompt_lengths = prompts.data();
    params.response_counts = counts.data();
    params.response_lengths = responses.data();
    params.num_ranks = input.num_ranks;
    params.max_tokens = input.max_tokens;
    params.token_cost = input.token_cost;
    params.target_cost = input.target_cost;
    params.pair_cost = input.pair_cost;
    params.equal_samples = input.equal_samples ? 1 : 0;
  }
  std::vector<int64_t> prompts, counts, responses;
  dualkv_step_schedule_params params;
};

struct Part {
  int64_t group;
  std::vector<int64_t> responses;
  bool operator==(const Part&) const = default;
};

struct MicroBatch {
  std::vector<Part> parts;
  int64_t tokens;
  double cost;
  bool operator==(const MicroBatch&) const = default;

  size_t samples() const {
    size_t count = 0;
    for (const Part& part : parts) {
      count += part.responses.size();
    }
    return count;
  }
};

struct Scheduled {
  std::vector<std::vector<MicroBatch>> ranks;

  std::vector<double> RankCosts() const {
    std::vector<double> costs;
    for (const auto& rank : ranks) {
      costs.push_back(std::accumulate(rank.begin(), rank.end(), 0.0,
                                      [](double sum, const MicroBatch& batch) { return sum + batch.cost; }));
    }
    return costs;
  }
  std::vector<size_t> RankSamples() const {
    std::vector<size_t> samples;
    for (const auto& rank : ranks) {
      samples.push_back(0);
      for (const MicroBatch& micro_batch : rank) {
        samples.back() += micro_batch.samples();
      }
    }
    return samples;
  }
  int64_t Tokens() const {
    int64_t tokens = 0;
    for (const auto& rank : ranks) {
      for (const MicroBatch& micro_batch : rank) {
        tokens += micro_batch.tokens;
      }
    }
    return tokens;
  }
  double SlowestOverMean() const {
    const std::vector<double> costs = RankCosts();
    return std::ranges::max(costs) * static_cast<double>(costs.size()) /
           std::accumulate(costs.begin(), costs.end(), 0.0);
  }
};

int64_t TokensOf(const std::vector<Group>& groups) { return Forest::FromGroups(groups).total_tokens(); }

double CostOf(const Input& input, const std::vector<Group>& groups) {
  const Forest forest = Forest::FromGroups(groups);
  int64_t targets = 0;
  for (const Group& group : groups) {
    targets = std::accumulate(group.responses.begin(), group.responses.end(), targets);
  }
  return input.token_cost * static_cast<double>(forest.total_tokens()) +
         input.target_cost * static_cast<double>(targets) +
         input.pair_cost * static_cast<double>(forest.VisiblePairs());
}

// The schedule of an input, once everything that holds for each has been checked.
Scheduled Schedule(const Input& input) {
  const Arrays arrays(input);
  const StepSchedule schedule(arrays.params);
  const dualkv_step_schedule_view view = schedule.View();
  EXPECT_EQ(view.num_ranks, input.num_ranks);
  EXPECT_EQ(view.num_responses, static_cast<int64_t>(arrays.responses.size()));
  Scheduled scheduled;
  std::set<std::pair<int64_t, int64_t>> seen;
  for (int64_t entry = 0; entry < view.num_ranks * view.num_micro_batches; ++entry) {
    if (entry % view.num_micro_batches == 0) {
      scheduled.ranks.emplace_back();
    }
    MicroBatch micro_batch{{}, view.tokens[entry], view.costs[entry]};
    std::vector<Group> packed;
    EXPECT_LT(view.part_begin[entry], view.part_begin[entry + 1]) << "no micro-batch is without a part";
    for (int64_t p = view.part_begin[entry]; p < view.part_begin[entry + 1]; ++p) {
      const int64_t g = view.groups[p];
      Part part{g, {view.responses + view.response_begin[p], view.responses + view.response_begin[p + 1]}};
      EXPECT_TRUE(micro_batch.parts.empty() || micro_batch.parts.back().group < g);
      EXPECT_TRUE(std::ranges::is_sorted(part.responses));
      packed.push_back({input.groups[g].prompt, {}});
      for (const int64_t n : part.responses) {
        EXPECT_TRUE(seen.emplace(g, n).second) << "response " << n << " of group " << g << " comes twice";
        packed.back().responses.push_back(input.groups[g].responses.at(n));
      }
      micro_batch.parts.push_back(std::move(part));
    }
    EXPECT_EQ(micro_batch.tokens, TokensOf(packed));
    EXPECT_LE(micro_batch.tokens, input.max_tokens);
    EXPECT_NEAR(micro_batch.cost, CostOf(input, packed), 1e-9 * micro_batch.cost);
    if (micro_batch.samples() == 0) {
      EXPECT_EQ(micro_batch.parts.size(), 1u) << "a filler is one prompt";
    } else {
      EXPECT_THAT(micro_batch.parts, Each(::testing::Field(&Part::responses, ::testing::Not(IsEmpty()))));
    }
    scheduled.ranks.back().push_back(std::move(micro_batch));
  }
  if (view.num_micro_batches == 0) {
    scheduled.ranks.resize(input.num_ranks);
  }
  EXPECT_EQ(seen.size(), arrays.responses.size());
  if (input.equal_samples) {
    const auto [fewest, most] = std::ranges::minmax(scheduled.RankSamples());
    EXPECT_LE(most - fewest, 1u);
  }
  for (size_t r = 0; r < scheduled.ranks.size(); ++r) {
    SCOPED_TRACE(::testing::Message() << "rank " << r);
    const auto& rank = scheduled.ranks[r];
    const auto fillers = std::ranges::find(rank, 0u, &MicroBatch::samples);
    EXPECT_TRUE(std::ranges::is_sorted(rank.begin(), fillers, std::ranges::greater{}, &MicroBatch::cost));
    EXPECT_TRUE(std::all_of(fillers, rank.end(), [](const MicroBatch& m) { return m.samples() == 0; }));
    // A rank has a filler only if no micro-batch can be halved without a prompt that comes twice.
    if (fillers != rank.end()) {
      for (const MicroBatch& micro_batch : rank) {
        EXPECT_EQ(micro_batch.parts.size(), 1u);
        EXPECT_TRUE(micro_batch.samples() < 2 || input.groups[micro_batch.parts[0].group].prompt > 0);
      }
    }
  }
  return scheduled;
}

// Prompts and responses of log-normal lengths, as rollouts have them.
Input RandomRollouts(uint32_t seed) {
  std::mt19937 engine(seed);
  auto uniform = [&](int64_t low, int64_t high) { return std::uniform_int_distribution(low, high)(engine); };
  auto length = [&](double median, double spread, double most) {
    std::lognormal_distribution<double> distribution(std::log(median), spread);
    return static_cast<int64_t>(std::clamp(distribution(engine), 1.0, most));
  };
  Input input;
  input.groups.resize(uniform(64, 512));
  for (Group& group : input.groups) {
    group.prompt = length(1024, 0.6, 4096);
    group.responses.resize(uniform(8, 32));
    std::ranges::generate(group.responses, [&] { return length(1024, 0.7, 8192); });
  }
  input.num_ranks = uniform(8, 64);
  input.max_tokens = int64_t{16384} << uniform(0, 2);
  // FLOPs of a decoder of 8 billion parameters, in units of a token's.
  input.target_cost = 0.09;
  input.pair_cost = 4.9e-5;
  return input;
}

TEST(Schedule, RandomRolloutsAreBalancedAndHardlyCut) {
  constexpr int kBatches = 40;
  for (const bool equal_samples : {false, true}) {
    double slowest = 0, tokens = 0;
    for (uint32_t seed = 0; seed < kBatches; ++seed) {
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", equal samples " << equal_samples);
      Input input = RandomRollouts(seed);
      input.equal_samples = equal_samples;
      const Scheduled scheduled = Schedule(input);
      slowest += scheduled.SlowestOverMean() / kBatches;
      tokens +=
          static_cast<double>(scheduled.Tokens()) / static_cast<double>(TokensOf(input.groups)) / kBatches;
    }
    EXPECT_LE(slowest, 1.03);
    EXPECT_LE(tokens, equal_samples ? 1.04 : 1.03);
  }
}

// Few, small and odd groups, where every edge is near.
Input RandomSmall(uint32_t seed) {
  std::mt19937 engine(seed);
  auto uniform = [&](int64_t low, int64_t high) { return std::uniform_int_distribution(low, high)(engine); };
  Input input;
  input.groups.resize(uniform(0, 6));
  input.max_tokens = uniform(24, 60);
  for (Group& group : input.groups) {
    group.prompt = uniform(0, 12);
    group.responses.resize(uniform(0, 6));
    std::ranges::generate(group.responses, [&] { return uniform(0, 12); });
  }
  input.num_ranks = uniform(1, 9);
  input.token_cost = static_cast<double>(uniform(0, 1));
  input.target_cost = static_cast<double>(uniform(0, 2));
  input.pair_cost = static_cast<double>(uniform(0, 1)) / 16;
  input.equal_samples = uniform(0, 1) == 1;
  return input;
}

TEST(Schedule, SmallBatchesOfAnyShape) {
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    const Input input = RandomSmall(seed);
    const Scheduled scheduled = Schedule(input);
    EXPECT_EQ(scheduled.ranks, Schedule(input).ranks) << "the same input gives the same schedule";
  }
}

TEST(Schedule, J7_NineGroupsOverFourRanks) {
  const Input input{.groups = std::vector<Group>(9, Group{50, {10}}), .num_ranks = 4};
  for (const bool equal_samples : {false, true}) {
    Input either = input;
    either.equal_samples = equal_samples;
    auto sizes = Schedule(either).RankSamples();
    std::ranges::sort(sizes, std::ranges::greater{});
    EXPECT_THAT(sizes, ElementsAre(3, 2, 2, 2));
  }
}

TEST(Schedule, J7_RanksWithoutEnoughResponsesFillUp) {
  // One rank needs three micro-batches; the others have two responses each.
  Input input{.groups = std::vector<Group>(9, Group{50, {10}}), .num_ranks = 4, .max_tokens = 60};
  input.groups[4].prompt = 49;  // the shortest prompt
  const Scheduled scheduled = Schedule(input);
  int64_t fillers = 0;
  for (const auto& rank : scheduled.ranks) {
    ASSERT_EQ(rank.size(), 3u);
    if (rank.back().samples() == 0) {
      EXPECT_EQ(rank.back().parts, (std::vector<Part>{{4, {}}}));
      EXPECT_EQ(rank.back().tokens, 49);
      ++fillers;
    }
  }
  EXPECT_EQ(fillers, 3);
}

TEST(Schedule, AMicroBatchIsHalvedBetweenGroupsWhereAnotherRankNeedsMore) {
  // 60 and 3 rows do not fit into one micro-batch; the other rank's 30 and 30 do.
  const Scheduled scheduled =
      Schedule({.groups = {{10, {50}}, {10, {20}}, {10, {20}}, {1, {2}}}, .num_ranks = 2, .max_tokens = 62});
  EXPECT_THAT(scheduled.RankCosts(), ElementsAre(63, 60));
  for (const auto& rank : scheduled.ranks) {
    EXPECT_THAT(rank, ElementsAre(Property(&MicroBatch::samples, 1u), Property(&MicroBatch::samples, 1u)));
  }
}

TEST(Schedule, J7_AGroupStaysWholeAndAFillerMakesUpTheNumber) {
  // The first group alone takes a rank, in one micro-batch; the others' rank needs two.
  const Scheduled scheduled = Schedule(
      {.groups = {{30000, {100, 100}}, {100, {20000}}, {100, {20000}}}, .num_ranks = 2, .max_tokens = 32000});
  EXPECT_THAT(scheduled.RankCosts(), ElementsAre(30300, 40200));
  ASSERT_EQ(scheduled.ranks[0].size(), 2u);
  EXPECT_EQ(scheduled.ranks[0][0].parts, (std::vector<Part>{{0, {0, 1}}}));
  EXPECT_EQ(scheduled.ranks[0][1].parts, (std::vector<Part>{{1, {}}}));
}

TEST(Schedule, AGroupWithoutAPromptIsHalvedSinceNothingIsRepeated) {
  const Scheduled scheduled =
      Schedule({.groups = {{0, {20000, 20000, 20000}}, {40000, {10000}}, {3000, {7010}}},
                .num_ranks = 2,
                .max_tokens = 60005});
  EXPECT_THAT(scheduled.RankCosts(), ElementsAre(60000, 60010));
  for (const auto& rank : scheduled.ranks) {
    EXPECT_THAT(rank, Each(Property(&MicroBatch::samples, ::testing::Ge(1u))));
  }
}

TEST(Schedule, LongPromptsAreNotRepeatedForTheNumberOfMicroBatches) {
  // Few groups for each rank, so that some ranks fill one micro-batch and others two.
  double step = 0;
  constexpr int kBatches = 40;
  for (uint32_t seed = 0; seed < kBatches; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 engine(seed);
    auto length = [&](double median, double spread) {
      std::lognormal_distribution<double> distribution(std::log(median), spread);
      return static_cast<int64_t>(std::clamp(distribution(engine), 1.0, 2 * median));
    };
    Input input{.groups = {}, .num_ranks = 8, .max_tokens = 40000, .target_cost = 0.09, .pair_cost = 4.9e-5};
    for (int g = 0; g < 12; ++g) {
      input.groups.push_back({length(8192, 0.3), {}});
      for (int n = 0; n < 8; ++n) {
        input.groups.back().responses.push_back(length(2048, 0.5));
      }
    }
    const std::vector<double> costs = Schedule(input).RankCosts();
    step += std::ranges::max(costs) * 8 / CostOf(input, input.groups) / kBatches;
  }
  EXPECT_LE(step, 1.11);
}

TEST(Schedule, J8_NothingToDo) {
  EXPECT_THAT(Schedule({.groups = {}, .num_ranks = 3}).ranks, ElementsAre(IsEmpty(), IsEmpty(), IsEmpty()));
  EXPECT_THAT(Schedule({.groups = {{5, {}}, {0, {}}}}).ranks, ElementsAre(IsEmpty()));
  // A prompt without responses may be longer than the budget: nobody computes it.
  EXPECT_THAT(Schedule({.groups = {{5000, {}}}}).ranks, ElementsAre(IsEmpty()));
}

TEST(Schedule, J8_GroupsWithoutResponsesAreLeftOut) {
  const Scheduled scheduled = Schedule({.groups = {{5000, {}}, {3, {4, 0}}, {1, {}}}});
  ASSERT_EQ(scheduled.ranks[0].size(), 1u);
  EXPECT_EQ(scheduled.ranks[0][0].parts, (std::vector<Part>{{1, {0, 1}}}));
}

TEST(Schedule, J6_GroupsOfDifferentSizesOnOneRank) {
  const Scheduled scheduled = Schedule({.groups = {{5, {1, 2, 3}}, {1, {2, 1}}, {9, {2}}}});
  ASSERT_EQ(scheduled.ranks[0].size(), 1u);
  EXPECT_EQ(scheduled.ranks[0][0].parts, (std::vector<Part>{{0, {0, 1, 2}}, {1, {0, 1}}, {2, {0}}}));
  EXPECT_EQ(scheduled.ranks[0][0].tokens, 26);
}

TEST(Schedule, ABudgetThatFitsExactlyCutsNothing) {
  const std::vector<Group> groups = {{10, {20, 30}}, {40, {15, 5}}};
  EXPECT_EQ(Schedule({.groups = groups, .max_tokens = 120}).ranks[0].size(), 1u);
  const Scheduled two = Schedule({.groups = groups, .max_tokens = 60});
  EXPECT_EQ(two.ranks[0].size(), 2u);
  EXPECT_EQ(two.Tokens(), 120);
}

TEST(Schedule, J4_ABudgetBelowAGroupCutsItAndRepeatsThePrompt) {
  const Scheduled scheduled = Schedule({.groups = {{10, {20, 20, 20, 20}}}, .max_tokens = 70});
  ASSERT_EQ(scheduled.ranks[0].size(), 2u);
  EXPECT_EQ(scheduled.ranks[0][0].samples(), 3u);
  EXPECT_EQ(scheduled.ranks[0][1].samples(), 1u);
  EXPECT_EQ(scheduled.Tokens(), 100);
}

TEST(Schedule, AGroupIsCutOnlyWhereTheBalanceGainsMoreThanThePromptCosts) {
  // Halves cost 60 with a prompt of 10, but 105 with one of 100: then the group stays whole.
  const Scheduled cut = Schedule({.groups = {{10, {50, 50}}}, .num_ranks = 2});
  EXPECT_THAT(cut.RankSamples(), ElementsAre(1, 1));
  Input dear{.groups = {{100, {5, 5}}}, .num_ranks = 2};
  EXPECT_THAT(Schedule(dear).RankSamples(), ::testing::UnorderedElementsAre(0, 2));
  dear.equal_samples = true;
  EXPECT_THAT(Schedule(dear).RankSamples(), ElementsAre(1, 1));
}

TEST(Schedule, MoreRanksThanResponses) {
  const Scheduled scheduled = Schedule({.groups = {{1, {9, 9}}, {1, {9}}}, .num_ranks = 5});
  EXPECT_EQ(scheduled.ranks.size(), 5u);
  EXPECT_THAT(scheduled.RankSamples(), ::testing::UnorderedElementsAre(1, 1, 1, 0, 0));
}

// ------------------------------------------------------------------------------------------------ refusals

void ExpectRefused(const dualkv_step_schedule_params& params, const std::string& message) {
  dualkv_step_schedule* schedule = nullptr;
  EXPECT_EQ(dualkv_step_schedule_create(&params, &schedule), DUALKV_INVALID_ARGUMENT);
  EXPECT_EQ(schedule, nullptr);
  EXPECT_EQ(dualkv_last_error(), message);
}

// One field of the parameters of a good input set to a bad value.
template <class Field, class Value>
void ExpectFieldRefused(Field dualkv_step_schedule_params::*field, Value value, const std::string& message) {
  Arrays arrays({.groups = {{10, {20, 30}}, {5, {7}}}});
  arrays.params.*field = value;
  ExpectRefused(arrays.params, message);
}

TEST(ScheduleRefuses, NumbersOutOfRange) {
  using P = dualkv_step_schedule_params;
  ExpectFieldRefused(&P::num_groups, -1, "num_groups must be 0 to 1073741824, got -1");
  ExpectFieldRefused(&P::num_ranks, 0, "num_ranks must be 1 to 65536, got 0");
  ExpectFieldRefused(&P::num_ranks, 65537, "num_ranks must be 1 to 65536, got 65537");
  ExpectFieldRefused(&P::max_tokens, 0, "max_tokens must be >= 1, got 0");
  ExpectFieldRefused(&P::token_cost, -1.0, "token_cost must be 0 to 1e250, got -1");
  ExpectFieldRefused(&P::target_cost, 1e300, "target_cost must be 0 to 1e250, got 1e+300");
  ExpectFieldRefused(&P::pair_cost, std::numeric_limits<double>::quiet_NaN(),
                     "pair_cost must be 0 to 1e250, got nan");
  ExpectFieldRefused(&P::equal_samples, 2, "equal_samples must be 0 or 1, got 2");
}

TEST(ScheduleRefuses, LengthsThatAreNone) {
  ExpectFieldRefused(&dualkv_step_schedule_params::prompt_lengths, nullptr,
                     "prompt_lengths must not be NULL for 2 values");
  ExpectRefused(Arrays({.groups = {{-1, {2}}}}).params, "prompt_lengths[0] must be >= 0, got -1");
  ExpectRefused(Arrays({.groups = {{1, {2}}, {1, {3, -4}}}}).params,
                "response_lengths[2] must be >= 0, got -4");
  ExpectRefused(Arrays({.groups = {{6, {1073741819}}}}).params,
                "at most 1073741824 tokens are supported, got 6 + 1073741819 at response_lengths[0]");
}

TEST(ScheduleRefuses, AResponseThatDoesNotFit) {
  ExpectRefused(Arrays({.groups = {{10, {20}}, {10, {20, 21}}}, .max_tokens = 30}).params,
                "max_tokens must be at least 31 for response 1 of group 1 (a prompt of 10 tokens and a "
                "response of 21), got 30");
}

TEST(ScheduleRefuses, WrongStructsAndPointers) {
  using P = dualkv_step_schedule_params;
  ExpectFieldRefused(&P::version, 7u, "params.version must be 1, got 7");
  const Arrays arrays({});
  EXPECT_EQ(dualkv_step_schedule_create(&arrays.params, nullptr), DUALKV_INVALID_ARGUMENT);
  EXPECT_STREQ(dualkv_last_error(), "schedule must not be NULL");
  auto view = Params<dualkv_step_schedule_view>();
  EXPECT_EQ(dualkv_step_schedule_get_view(nullptr, &view), DUALKV_INVALID_ARGUMENT);
  EXPECT_STREQ(dualkv_last_error(), "schedule must not be NULL");
  dualkv_step_schedule_destroy(nullptr);
}

}  // namespace
}  // namespace dualkv::testing
