// C++20 wrapper of the C interface: objects that own themselves, errors as exceptions.
//
//   auto forest = dualkv::Forest::FromGroups({{.prompt = 512, .responses = {100, 37}}});
//   dualkv::Plan plan(forest);
//   auto params = dualkv::Params<dualkv_attention_params>();
//   params.plan = plan.get();
//   ...
//   dualkv::Check(dualkv_attention_forward(&params));
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "dualkv/dualkv.h"

namespace dualkv {

// A failed call: its status, and dualkv_last_error() as the message.
class Error : public std::runtime_error {
 public:
  Error(dualkv_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  dualkv_status status() const { return status_; }

 private:
  dualkv_status status_;
};

// Throws Error unless `status` is DUALKV_OK.
inline void Check(dualkv_status status) {
  if (status != DUALKV_OK) {
    throw Error(status, dualkv_last_error());
  }
}

// A parameter or view struct of the C interface, zeroed, with its size and version set.
template <class Struct>
Struct Params() {
  Struct params{};
  params.size = sizeof(Struct);
  params.version = DUALKV_ABI_VERSION;
  return params;
}

template <>
inline dualkv_attention_backward_params Params() {
  dualkv_attention_backward_params params{};
  params.size = sizeof(params);
  params.version = DUALKV_ABI_VERSION;
  params.forward = Params<dualkv_attention_params>();
  return params;
}

template <>
inline dualkv_linear_logprob_backward_params Params() {
  dualkv_linear_logprob_backward_params params{};
  params.size = sizeof(params);
  params.version = DUALKV_ABI_VERSION;
  params.forward = Params<dualkv_linear_logprob_params>();
  return params;
}

template <>
inline dualkv_linear_logprob_chunk_backward_params Params() {
  dualkv_linear_logprob_chunk_backward_params params{};
  params.size = sizeof(params);
  params.version = DUALKV_ABI_VERSION;
  params.forward = Params<dualkv_linear_logprob_chunk_params>();
  return params;
}

// A prompt with its responses, as numbers of tokens.
struct Group {
  int64_t prompt = 0;
  std::vector<int64_t> responses;
};

// The forest of segments of a packed batch.
class Forest {
 public:
  // Lengths and parents (-1: a root) of segments in preorder.
  static Forest FromSegments(std::span<const int64_t> lengths, std::span<const int64_t> parents) {
    if (lengths.size() != parents.size()) {
      throw Error(DUALKV_INVALID_ARGUMENT, "lengths and parents must have as many entries, got " +
                                               std::to_string(lengths.size()) + " and " +
                                               std::to_string(parents.size()));
    }
    dualkv_forest* forest = nullptr;
    Check(
        dualkv_forest_create(static_cast<int64_t>(lengths.size()), lengths.data(), parents.data(), &forest));
    return Forest(forest);
  }

  static Forest FromGroups(std::span<const Group> groups) {
    std::vector<int64_t> prompts, counts, responses;
    for (const Group& group : groups) {
      prompts.push_back(group.prompt);
      counts.push_back(static_cast<int64_t>(group.responses.size()));
      responses.insert(responses.end(), group.responses.begin(), group.responses.end());
    }
    dualkv_forest* forest = nullptr;
    Check(dualkv_forest_create_from_groups(static_cast<int64_t>(prompts.size()), prompts.data(),
                                           counts.data(), responses.data(), &forest));
    return Forest(forest);
  }

  static Forest FromGroups(std::initializer_list<Group> groups) {
    return FromGroups(std::span<const Group>(groups.begin(), groups.size()));
  }

  std::span<const dualkv_segment> segments() const {
    const dualkv_forest_view v = View();
    return {v.segments, static_cast<size_t>(v.num_segments)};
  }
  int64_t total_tokens() const { return View().total_tokens; }

  // Position of every row: [total_tokens].
  std::vector<int64_t> PositionIds() const {
    std::vector<int64_t> positions(total_tokens());
    Check(dualkv_forest_position_ids(get(), positions.data()));
    return positions;
  }

  // Number of (row, key) pairs that see each other.
  int64_t VisiblePairs(std::optional<int64_t> window_left = std::nullopt) const {
    int64_t pairs = 0;
    Check(dualkv_forest_visible_pairs(get(), window_left.value_or(DUALKV_NO_WINDOW), &pairs));
    return pairs;
  }

  const dualkv_forest* get() const { return forest_.get(); }

 private:
  explicit Forest(dualkv_forest* forest) : forest_(forest, dualkv_forest_destroy) {}

  dualkv_forest_view View() const {
    auto view = Params<dualkv_forest_view>();
    Check(dualkv_forest_get_view(get(), &view));
    return view;
  }

  std::unique_ptr<dualkv_forest, void (*)(dualkv_forest*)> forest_;
};

// The tile sizes and parts of the kernels of a device for attention of these dimensions. On CUDA a plan must
// have them.
inline void SetTiles(dualkv_plan_params& params, dualkv_device device, int32_t num_heads,
                     int32_t num_kv_heads, int32_t head_dim) {
  Check(dualkv_plan_set_tiles(&params, device, num_heads, num_kv_heads, head_dim));
}

// The tile schedules of a forest; see dualkv_plan_params for the options.
class Plan {
 public:
  explicit Plan(const Forest& forest, std::optional<int64_t> window_left = std::nullopt)
      : Plan(WithForest(forest, window_left.value_or(DUALKV_NO_WINDOW))) {}

  explicit Plan(const dualkv_plan_params& params) : plan_(nullptr, dualkv_plan_destroy) {
    dualkv_plan* plan = nullptr;
    Check(dualkv_plan_create(&params, &plan));
    plan_.reset(plan);
  }

  dualkv_plan_view View() const {
    auto view = Params<dualkv_plan_view>();
    Check(dualkv_plan_get_view(get(), &view));
    return view;
  }

  // What the kernels of a GPU read of the plan: to be copied to device memory that is aligned to 16 bytes.
  std::vector<std::byte> Image() const {
    static_assert(__STDCPP_DEFAULT_NEW_ALIGNMENT__ >= 16, "a vector is aligned as an image must be");
    size_t bytes = 0;
    Check(dualkv_plan_image_bytes(get(), &bytes));
    std::vector<std::byte> image(bytes);
    Check(dualkv_plan_write_image(get(), image.data(), bytes));
    return image;
  }

  const dualkv_plan* get() const { return plan_.get(); }

 private:
  static dualkv_plan_params WithForest(const Forest& forest, int64_t window_left) {
    auto params = Params<dualkv_plan_params>();
    params.forest = forest.get();
    params.window_left = window_left;
    return params;
  }

  std::unique_ptr<dualkv_plan, void (*)(dualkv_plan*)> plan_;
};

// What each rank does in a training step: its micro-batches of parts of groups.
class StepSchedule {
 public:
  explicit StepSchedule(const dualkv_step_schedule_params& params)
      : schedule_(nullptr, dualkv_step_schedule_destroy) {
    dualkv_step_schedule* schedule = nullptr;
    Check(dualkv_step_schedule_create(&params, &schedule));
    schedule_.reset(schedule);
  }

  // The pointers in the view are owned by the schedule.
  dualkv_step_schedule_view View() const {
    auto view = Params<dualkv_step_schedule_view>();
    Check(dualkv_step_schedule_get_view(schedule_.get(), &view));
    return view;
  }

 private:
  std::unique_ptr<dualkv_step_schedule, void (*)(dualkv_step_schedule*)> schedule_;
};

// A packed batch.
class Batch {
 public:
  explicit Batch(const dualkv_pack_params& params) : Batch(&dualkv_pack, params) {}
  explicit Batch(const dualkv_pack_padded_params& params) : Batch(&dualkv_pack_padded, params) {}

  // The pointers in the view are owned by the batch.
  dualkv_batch_view View() const {
    auto view = Params<dualkv_batch_view>();
    Check(dualkv_batch_get_view(batch_.get(), &view));
    return view;
  }

 private:
  template <class PackParams>
  Batch(dualkv_status (*pack)(const PackParams*, dualkv_batch**), const PackParams& params)
      : batch_(nullptr, dualkv_batch_destroy) {
    dualkv_batch* batch = nullptr;
    Check(pack(&params, &batch));
    batch_.reset(batch);
  }

  std::unique_ptr<dualkv_batch, void (*)(dualkv_batch*)> batch_;
};

}  // namespace dualkv
