// Any bytes as calls of the C interface. A call is answered or refused with a message; an answered one has
// written all of its outputs, with finite values if its inputs were tame, and the same bits for another
// number of threads. Nothing is read or written outside the arrays, which are as long as the parameters say.
#include <memory>
#include <utility>

#include "abi_input.h"

namespace dualkv::fuzz {
namespace {

using ForestPointer = std::unique_ptr<dualkv_forest, decltype(&dualkv_forest_destroy)>;
using PlanPointer = std::unique_ptr<dualkv_plan, decltype(&dualkv_plan_destroy)>;
using BatchPointer = std::unique_ptr<dualkv_batch, decltype(&dualkv_batch_destroy)>;

dualkv_forest_view ViewOf(const dualkv_forest* forest) {
  dualkv_forest_view view{.size = sizeof(view), .version = DUALKV_ABI_VERSION};
  Check(dualkv_forest_get_view(forest, &view) == DUALKV_OK, "a forest can be looked at");
  return view;
}

ForestPointer MakeForest(Input& input) {
  dualkv_forest* forest = nullptr;
  bool made;
  if (input.Flag()) {
    const int64_t count = input.Size(6);
    std::vector<int64_t> lengths = input.Sizes(std::min<int64_t>(count, 6), 20);
    std::vector<int64_t> parents = input.Values<int64_t>(lengths.size(), -1, 5);
    made = Succeeded(dualkv_forest_create(count, input.Pointer(lengths), input.Pointer(parents),
                                          input.Rarely() ? nullptr : &forest));
  } else {
    const int64_t groups = input.Size(3);
    std::vector<int64_t> prompts = input.Sizes(std::min<int64_t>(groups, 3), 40);
    std::vector<int64_t> counts = input.Sizes(prompts.size(), 3);
    std::vector<int64_t> responses = input.Sizes(Total(counts), 20);
    made = Succeeded(dualkv_forest_create_from_groups(groups, input.Pointer(prompts), input.Pointer(counts),
                                                      input.Pointer(responses),
                                                      input.Rarely() ? nullptr : &forest));
  }
  Check(made == (forest != nullptr), "a forest is made if and only if the call succeeds");
  ForestPointer owner(forest, &dualkv_forest_destroy);
  if (made) {
    const dualkv_forest_view view = ViewOf(forest);
    std::vector<int64_t> positions(view.total_tokens);
    Succeeded(dualkv_forest_position_ids(forest, input.Pointer(positions)));
    int64_t pairs = -1;
    if (Succeeded(dualkv_forest_visible_pairs(forest, input.Rarely() ? input.Any() : input.Range(-1, 30),
                                              &pairs))) {
      Check(pairs >= view.total_tokens, "each row sees itself at least");
    }
  }
  return owner;
}

PlanPointer MakePlan(Input& input, const dualkv_forest* forest) {
  auto params = input.Params<dualkv_plan_params>();
  std::vector<uint8_t> keys_only(ViewOf(forest).num_segments);
  if (input.Flag()) {
    for (uint8_t& flag : keys_only) {
      flag = input.Range(0, 3) == 3;
    }
  }
  params.forest = input.Rarely() ? nullptr : forest;
  params.window_left = input.Rarely() ? input.Any() : input.Range(-1, 40);
  params.keys_only = input.Pointer(keys_only);
  for (int32_t* tile : {&params.forward_query_tile, &params.forward_key_tile, &params.backward_query_tile,
                        &params.backward_key_tile}) {
    *tile = input.Enum(70);
  }
  params.backward_parts = input.Range(0, 3) == 3 ? input.Enum(300) : 0;
  dualkv_plan* plan = nullptr;
  Check(Succeeded(dualkv_plan_create(&params, &plan)) == (plan != nullptr),
        "a plan is made if the call succeeds");
  return {plan, &dualkv_plan_destroy};
}

void CallTilesAndImage(Input& input, const dualkv_plan* plan) {
  auto params = input.Params<dualkv_plan_params>();
  if (Succeeded(dualkv_plan_set_tiles(input.Rarely() ? nullptr : &params, input.Enum(1), input.Enum(8),
                                      input.Enum(4), input.Enum(140)))) {
    for (const int32_t tile : {params.forward_query_tile, params.forward_key_tile, params.backward_query_tile,
                               params.backward_key_tile}) {
      Check(tile >= 1 && tile <= 65536, "a plan can have the tiles of a device");
    }
    Check(params.backward_parts >= 0 && params.backward_parts <= 65536,
          "a plan can have the parts of a device");
  }
  size_t bytes = 0;
  if (!Succeeded(dualkv_plan_image_bytes(plan, input.Rarely() ? nullptr : &bytes))) {
    return;
  }
  const size_t offset = input.Rarely() ? static_cast<size_t>(input.Range(0, 15)) : 0;
  const size_t missing = input.Rarely() ? 1 : 0;
  const std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(16, bytes + (offset > 0 ? 16 : 0))), &std::free);
  Check(Succeeded(dualkv_plan_write_image(plan, memory.get() + offset, bytes - missing)) ==
            (offset == 0 && missing == 0),
        "an image is written if and only if there is room for it");
}

// A [rows, heads, dim] tensor. Rows and heads of an input may repeat, run backwards or lie anywhere.
class Tensor {
 public:
  Tensor(Input& input, int32_t dtype, int64_t rows, int64_t heads, int64_t dim, bool is_output)
      : rows_(std::max<int64_t>(rows, 0)),
        heads_(std::max<int64_t>(heads, 0)),
        dim_(std::max<int64_t>(dim, 0)),
        head_stride_(is_output ? dim_ + input.Range(0, 3) : input.Range(-30, 30)),
        row_stride_(is_output ? heads_ * head_stride_ + input.Range(0, 3) : input.Range(-60, 60)),
        first_(-std::min<int64_t>(0, (rows_ - 1) * row_stride_) -
               std::min<int64_t>(0, (heads_ - 1) * head_stride_)),
        elements_(dtype, rows_ * heads_ * dim_ == 0
                             ? 0
                             : first_ + std::max<int64_t>(0, (rows_ - 1) * row_stride_) +
                                   std::max<int64_t>(0, (heads_ - 1) * head_stride_) + dim_) {}

  dualkv_tensor View(Input& input) {
    return {input.Rarely() ? nullptr : elements_.at(first_), row_stride_, head_stride_};
  }
  void CheckFinite(const char* what) const {
    for (int64_t t = 0; t < rows_; ++t) {
      for (int64_t h = 0; h < heads_; ++h) {
        for (int64_t d = 0; d < dim_; ++d) {
          Check(std::isfinite(elements_.Get(first_ + t * row_stride_ + h * head_stride_ + d)), what);
        }
      }
    }
  }
  Elements& elements() { return elements_; }

 private:
  int64_t rows_, heads_, dim_, head_stride_, row_stride_, first_;
  Elements elements_;
};

// Runs the call twice, with poisoned outputs and another number of threads the second time.
template <class Call>
bool RunTwice(int32_t& num_threads, const std::vector<Elements*>& outputs, Call&& call) {
  if (!Succeeded(call())) {
    return false;
  }
  std::vector<Elements> first;
  for (Elements* output : outputs) {
    first.push_back(*output);
    output->Poison();
  }
  num_threads = num_threads == 1 ? 2 : 1;
  Check(Succeeded(call()), "a call succeeds a second time");
  for (size_t i = 0; i < outputs.size(); ++i) {
    Check(first[i] == *outputs[i], "the same bits for any number of threads");
  }
  return true;
}

// The sizes of a workspace need no arrays, so they may be anything.
void AskForWorkspace(Input& input, dualkv_attention_backward_params params) {
  params.forward.query_rows = input.Any();
  params.forward.key_rows = input.Any();
  params.forward.num_kv_heads = input.Enum(4);
  params.forward.num_heads = input.Enum(8);
  size_t bytes = 0;
  Succeeded(dualkv_attention_backward_workspace(&params, input.Rarely() ? nullptr : &bytes));
}

void CallAttention(Input& input, const dualkv_forest* forest, const dualkv_plan* plan) {
  std::minstd_rand rng(static_cast<uint32_t>(input.Range(0, 255)));
  const int64_t total = ViewOf(forest).total_tokens;
  auto params = input.Params<dualkv_attention_backward_params>();
  params.forward = input.Params<dualkv_attention_params>();
  dualkv_attention_params& forward = params.forward;
  forward.device = input.Rarely() ? input.Enum(2) : DUALKV_CPU;
  forward.dtype = input.Enum(3);
  forward.num_threads = input.Enum(3);
  forward.num_kv_heads = static_cast<int32_t>(input.Range(input.Rarely() ? -1 : 1, 2));
  forward.num_heads = input.Rarely() ? static_cast<int32_t>(input.Range(-1, 5))
                                     : forward.num_kv_heads * static_cast<int32_t>(input.Range(1, 3));
  forward.head_dim = static_cast<int32_t>(input.Rarely() ? input.Range(-1, 600) : input.Range(1, 24));
  forward.plan = input.Rarely() ? nullptr : plan;
  forward.query_row_begin = input.Rarely() ? input.Range(-1, total + 1) : 0;
  forward.query_rows =
      total - std::max<int64_t>(forward.query_row_begin, 0) + input.Range(input.Rarely() ? -2 : 0, 2);
  forward.key_rows = total + input.Range(input.Rarely() ? -2 : 0, 2);
  forward.scale = input.Number(0.5);
  forward.softcap = input.Number(input.Flag() ? 2 : 0);
  const bool tame = forward.scale == 0.5 && (forward.softcap == 0 || forward.softcap == 2);

  const int64_t heads = forward.num_heads, kv_heads = forward.num_kv_heads, dim = forward.head_dim;
  auto tensor = [&](int64_t rows, int64_t tensor_heads, bool is_output) {
    return Tensor(input, forward.dtype, rows, tensor_heads, dim, is_output);
  };
  Tensor q = tensor(forward.query_rows, heads, false), k = tensor(forward.key_rows, kv_heads, false),
         v = tensor(forward.key_rows, kv_heads, false), dout = tensor(forward.query_rows, heads, false);
  Tensor out = tensor(forward.query_rows, heads, true), dq = tensor(forward.query_rows, heads, true),
         dk = tensor(forward.key_rows, kv_heads, true), dv = tensor(forward.key_rows, kv_heads, true);
  const int32_t accumulator = AccumulatorOf(forward.dtype);
  const int64_t rows_of_heads = std::max<int64_t>(forward.query_rows, 0) * std::max<int64_t>(heads, 0);
  Elements lse(accumulator, rows_of_heads), dlse(accumulator, rows_of_heads), sinks(accumulator, heads),
      dsinks(accumulator, heads);
  for (Tensor* each : {&q, &k, &v, &dout}) {
    each->elements().Randomize(rng);
  }
  dlse.Randomize(rng);
  sinks.Randomize(rng);

  const bool has_sinks = input.Flag();
  forward.q = q.View(input);
  forward.k = k.View(input);
  forward.v = v.View(input);
  forward.out = out.View(input);
  forward.sinks = has_sinks ? sinks.data() : nullptr;
  forward.lse = input.Rarely() ? nullptr : lse.data();
  params.dout = dout.View(input);
  params.dlse = input.Flag() ? dlse.data() : nullptr;
  params.dq = dq.View(input);
  params.dk = dk.View(input);
  params.dv = dv.View(input);
  params.dsinks = has_sinks != input.Rarely() ? dsinks.data() : nullptr;
  params.deterministic = input.Enum(1);

  AskForWorkspace(input, params);
  std::vector<Elements*> outputs = {&out.elements()};
  if (forward.lse != nullptr) {
    outputs.push_back(&lse);
  }
  if (!RunTwice(forward.num_threads, outputs, [&] { return dualkv_attention_forward(&forward); })) {
    return;
  }
  if (tame) {
    out.CheckFinite("out of tame inputs is finite");
  }

  if (!Succeeded(dualkv_attention_backward_workspace(&params, &params.workspace_bytes))) {
    return;
  }
  // A workspace that starts anywhere but on a line of 64 bytes must be refused.
  const size_t offset = input.Rarely() ? static_cast<size_t>(input.Range(0, 63)) : 0;
  const std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(64, params.workspace_bytes + (offset > 0 ? 64 : 0))),
      &std::free);
  params.workspace = params.workspace_bytes > 0 ? memory.get() + offset : nullptr;
  params.workspace_bytes -= params.workspace_bytes > 0 && input.Rarely() ? 1 : 0;
  outputs = {&dq.elements(), &dk.elements(), &dv.elements()};
  if (has_sinks) {
    outputs.push_back(&dsinks);
  }
  if (RunTwice(forward.num_threads, outputs, [&] { return dualkv_attention_backward(&params); }) && tame) {
    dq.CheckFinite("dq of tame inputs is finite");
    dk.CheckFinite("dk of tame inputs is finite");
    dv.CheckFinite("dv of tame inputs is finite");
  }
}

void CheckBatch(dualkv_batch* made) {
  const BatchPointer batch(made, &dualkv_batch_destroy);
  dualkv_batch_view view{.size = sizeof(view), .version = DUALKV_ABI_VERSION};
  Check(dualkv_batch_get_view(batch.get(), &view) == DUALKV_OK, "a batch can be looked at");
  Check(ViewOf(view.forest).total_tokens == view.num_tokens, "a batch has the rows of its forest");
  Check(view.target_begin[view.num_responses] == view.num_targets, "responses have all targets");
  for (int64_t m = 0; m < view.num_targets; ++m) {
    Check(view.target_rows[m] >= 0 && view.target_rows[m] < view.num_tokens,
          "a target's row is in the batch");
    Check(view.target_ids[m] >= 0, "a target is a token");
  }
  for (int64_t i = 0; i < view.num_tokens; ++i) {
    Check(view.input_ids[i] >= 0 && view.position_ids[i] >= 0 && view.position_ids[i] <= i,
          "rows are in order");
  }
}

// The schedule of groups of these lengths.
void CallSchedule(Input& input, const dualkv_pack_params& groups, int64_t num_responses) {
  auto params = input.Params<dualkv_step_schedule_params>();
  params.num_groups = groups.num_groups;
  params.prompt_lengths = groups.prompt_lengths;
  params.response_counts = groups.response_counts;
  params.response_lengths = groups.response_lengths;
  params.num_ranks = input.Rarely() ? input.Any() : input.Range(1, 6);
  params.max_tokens = input.Rarely() ? input.Any() : input.Range(8, 40);
  params.token_cost = input.Number(1);
  params.target_cost = input.Number(0.5);
  params.pair_cost = input.Number(0.25);
  params.equal_samples = input.Enum(1);
  dualkv_step_schedule* made = nullptr;
  if (!Succeeded(dualkv_step_schedule_create(&params, input.Rarely() ? nullptr : &made))) {
    return;
  }
  const std::unique_ptr<dualkv_step_schedule, decltype(&dualkv_step_schedule_destroy)> schedule(
      made, &dualkv_step_schedule_destroy);
  dualkv_step_schedule_view view{.size = sizeof(view), .version = DUALKV_ABI_VERSION};
  Check(dualkv_step_schedule_get_view(made, &view) == DUALKV_OK, "a schedule can be looked at");
  Check(view.num_responses == num_responses && view.response_begin[view.num_parts] == num_responses,
        "all responses are scheduled");
  const int64_t entries = view.num_ranks * view.num_micro_batches;
  Check(view.part_begin[entries] == view.num_parts, "all parts are in a micro-batch");
  for (int64_t entry = 0; entry < entries; ++entry) {
    Check(view.tokens[entry] <= params.max_tokens, "a micro-batch fits");
  }
}

void CallPack(Input& input) {
  auto params = input.Params<dualkv_pack_params>();
  params.num_groups = input.Size(4);
  std::vector<int64_t> prompts = input.Sizes(std::min<int64_t>(params.num_groups, 4), 8);
  std::vector<int64_t> counts = input.Sizes(prompts.size(), 4);
  std::vector<int64_t> responses = input.Sizes(Total(counts), 8);
  auto prompt_tokens = input.Values<int64_t>(Total(prompts), 0, 9);
  auto response_tokens = input.Values<int64_t>(Total(responses), 0, 9);
  params.prompt_lengths = input.Pointer(prompts);
  params.response_counts = input.Pointer(counts);
  params.response_lengths = input.Pointer(responses);
  params.prompt_tokens = input.Pointer(prompt_tokens);
  params.response_tokens = input.Pointer(response_tokens);
  dualkv_batch* batch = nullptr;
  if (Succeeded(dualkv_pack(&params, input.Rarely() ? nullptr : &batch))) {
    CheckBatch(batch);
  }
  CallSchedule(input, params, static_cast<int64_t>(responses.size()));
}

void CallPackPadded(Input& input) {
  auto params = input.Params<dualkv_pack_padded_params>();
  params.num_rows = input.Size(5);
  params.num_columns = input.Size(8);
  params.response_columns = input.Size(8);
  const int64_t rows = std::clamp<int64_t>(params.num_rows, 0, 5),
                columns = std::clamp<int64_t>(params.num_columns, 0, 8),
                response_columns = std::clamp<int64_t>(params.response_columns, 0, 8);
  auto ids = input.Values<int64_t>(rows * columns, 0, 1);
  auto attention_mask = input.Values<uint8_t>(rows * columns, 0, 1);
  auto response_mask = input.Values<uint8_t>(rows * response_columns, 0, 1);
  auto group_ids = input.Values<int64_t>(rows, 0, 1);
  params.input_ids = input.Pointer(ids);
  params.attention_mask = input.Pointer(attention_mask);
  params.response_mask = input.Pointer(response_mask);
  params.group_ids = input.Pointer(group_ids);
  dualkv_batch* batch = nullptr;
  if (Succeeded(dualkv_pack_padded(&params, input.Rarely() ? nullptr : &batch))) {
    CheckBatch(batch);
  }
}

void CallLinearLogprob(Input& input) {
  std::minstd_rand rng(static_cast<uint32_t>(input.Range(0, 255)));
  auto params = input.Params<dualkv_linear_logprob_backward_params>();
  params.forward = input.Params<dualkv_linear_logprob_params>();
  dualkv_linear_logprob_params& forward = params.forward;
  forward.device = input.Rarely() ? input.Enum(2) : DUALKV_CPU;
  forward.dtype = input.Enum(3);
  forward.num_threads = input.Enum(3);
  const int64_t least = input.Rarely() ? -1 : 1;
  forward.hidden_rows = input.Range(least, 10);
  forward.hidden_dim = input.Range(least, 20);
  forward.vocab_size = input.Range(least, 70);
  forward.num_targets = input.Range(std::min<int64_t>(least, 0), 12);
  const int64_t rows = std::max<int64_t>(forward.hidden_rows, 0),
                dim = std::max<int64_t>(forward.hidden_dim, 0),
                vocab = std::max<int64_t>(forward.vocab_size, 0), count = forward.num_targets;
  forward.temperature = input.Number(0.7);
  forward.softcap = input.Number(input.Flag() ? 3 : 0);
  const bool tame = forward.temperature == 0.7 && (forward.softcap == 0 || forward.softcap == 3);

  const int32_t dtype = forward.dtype, accumulator = AccumulatorOf(dtype);
  Tensor hidden(input, dtype, rows, 1, dim, false), weight(input, dtype, vocab, 1, dim, false);
  Elements bias(dtype, vocab);
  Elements logprob(accumulator, count), entropy(accumulator, count), lse(accumulator, count),
      dlogprob(accumulator, count), dentropy(accumulator, count);
  Elements dhidden(dtype, rows * dim), dweight(dtype, vocab * dim), dbias(dtype, vocab);
  for (Elements* each : {&hidden.elements(), &weight.elements(), &bias, &dlogprob, &dentropy}) {
    each->Randomize(rng);
  }
  auto target_rows = input.Values<int64_t>(count, 0, std::max<int64_t>(rows - 1, 0));
  auto targets = input.Values<int64_t>(count, 0, std::max<int64_t>(vocab - 1, 0));
  if (!targets.empty() && input.Flag()) {
    targets[0] = DUALKV_IGNORE_TARGET;
  }
  auto pointer = [&](Elements& elements) { return input.Rarely() ? nullptr : elements.data(); };
  const dualkv_tensor hidden_view = hidden.View(input), weight_view = weight.View(input);
  forward.hidden = hidden_view.data;
  forward.hidden_row_stride = hidden_view.row_stride;
  forward.weight = weight_view.data;
  forward.weight_row_stride = weight_view.row_stride;
  forward.bias = input.Flag() ? bias.data() : nullptr;
  forward.rows = input.Pointer(target_rows);
  forward.targets = input.Pointer(targets);
  forward.logprob = pointer(logprob);
  forward.entropy = pointer(entropy);
  forward.lse = pointer(lse);
  if (!RunTwice(forward.num_threads, {&logprob, &entropy},
                [&] { return dualkv_linear_logprob_forward(&forward); })) {
    return;
  }
  for (int64_t m = 0; m < count && tame; ++m) {
    Check(std::isfinite(logprob.Get(m)) && logprob.Get(m) <= 1e-3, "a log-probability of tame inputs is one");
    Check(std::isfinite(entropy.Get(m)) && entropy.Get(m) >= -1e-3, "an entropy of tame inputs is one");
  }

  std::vector<Elements*> outputs;
  for (const auto& [field, elements] :
       {std::pair{&params.dhidden, &dhidden}, {&params.dweight, &dweight}, {&params.dbias, &dbias}}) {
    if (input.Range(0, 3) > 0) {
      *field = elements->data();
      outputs.push_back(elements);
    }
  }
  params.dlogprob = input.Flag() ? dlogprob.data() : nullptr;
  params.dentropy = input.Flag() ? dentropy.data() : nullptr;
  if (RunTwice(forward.num_threads, outputs, [&] { return dualkv_linear_logprob_backward(&params); }) &&
      tame) {
    for (const Elements* output : outputs) {
      for (int64_t i = 0; i < output->size(); ++i) {
        Check(std::isfinite(output->Get(i)), "a gradient of tame inputs is finite");
      }
    }
  }
}

}  // namespace
}  // namespace dualkv::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace dualkv::fuzz;
  Input input(data, size);
  switch (input.Range(0, 3)) {
    case 0:
      if (const ForestPointer forest = MakeForest(input)) {
        if (const PlanPointer plan = MakePlan(input, forest.get())) {
          CallAttention(input, forest.get(), plan.get());
          CallTilesAndImage(input, plan.get());
        }
      }
      break;
    case 1:
      CallPack(input);
      break;
    case 2:
      CallPackPadded(input);
      break;
    default:
      CallLinearLogprob(input);
  }
  return 0;
}
