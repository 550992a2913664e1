// Chunks of logits on the GPU through the C interface, with the matrix products on the host. Python tests
// have larger ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "device.h"
#include "dualkv/dualkv.hpp"
#include "linear_logprob_problem.h"

namespace dualkv::testing {
namespace {

// A problem with all rows of its hidden states in one block of rows, and `step` entries of the vocabulary in
// a chunk.
template <class Element>
class Chunks {
 public:
  Chunks(const LogprobProblem<Element>& problem, int64_t step)
      : problem_(problem),
        options_(problem.options),
        step_(step),
        stride_((step + 7) / 8 * 8),
        order_(OrderedTargets()),
        ranges_(Ranges()),
        targets_(Picked(problem.targets)),
        index_(order_),
        bias_(problem.bias),
        statistics_(Poison(3 * options_.rows)),
        logprob_(Zeros()),
        entropy_(Zeros()),
        lse_(Zeros()),
        dlogprob_(problem.dlogprob),
        dentropy_(problem.dentropy) {}

  LogprobOutputs<Element> Run() {
    LogprobOutputs<Element> out = problem_.PoisonedOutputs();
    ForEachChunk(
        [&](int64_t, int64_t, DeviceArray<float>&, const dualkv_linear_logprob_chunk_params& params) {
          EXPECT_EQ(dualkv_linear_logprob_chunk_forward(&params), DUALKV_OK) << dualkv_last_error();
        });
    out.logprob = logprob_.ToHost();
    out.entropy = entropy_.ToHost();
    out.lse = lse_.ToHost();

    std::vector<double> dhidden(out.dhidden.size()), dweight(out.dweight.size()), dbias(out.dbias.size());
    ForEachChunk([&](int64_t begin, int64_t count, DeviceArray<float>& logits,
                     const dualkv_linear_logprob_chunk_params& params) {
      auto backward = Params<dualkv_linear_logprob_chunk_backward_params>();
      backward.forward = params;
      backward.dlogprob = dlogprob_.data();
      backward.dentropy = dentropy_.data();
      EXPECT_EQ(dualkv_linear_logprob_chunk_backward(&backward), DUALKV_OK) << dualkv_last_error();
      const std::vector<float> memory = logits.ToHost();
      for (int64_t row = 0; row < options_.rows; ++row) {
        const auto* dlogits = reinterpret_cast<const Element*>(memory.data() + row * stride_);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t v = begin + i;
          const double gradient = ToDouble(dlogits[i]);
          if (gradient == 0) {  // hidden states of rows without targets are NaN
            continue;
          }
          dbias[v] += gradient;
          for (int64_t c = 0; c < options_.dim; ++c) {
            dhidden[row * options_.dim + c] += gradient * WeightAt(v, c);
            dweight[v * options_.dim + c] += gradient * HiddenAt(row, c);
          }
        }
      }
    });
    for (auto [from, to] : {std::tuple(&dhidden, &out.dhidden), std::tuple(&dweight, &out.dweight),
                            std::tuple(&dbias, &out.dbias)}) {
      std::transform(from->begin(), from->end(), to->begin(), [](double x) {
        Element y;
        Convert(x, y);
        return y;
      });
    }
    return out;
  }

 private:
  static std::vector<float> Poison(int64_t count) {
    return std::vector<float>(count, std::numeric_limits<float>::quiet_NaN());
  }
  std::vector<float> Zeros() const { return std::vector<float>(options_.targets); }

  // The targets that are not ignored, by row, token and place.
  std::vector<int64_t> OrderedTargets() const {
    std::vector<int64_t> order(options_.targets);
    std::iota(order.begin(), order.end(), 0);
    std::erase_if(order, [&](int64_t m) { return problem_.targets[m] == DUALKV_IGNORE_TARGET; });
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return std::tuple(problem_.rows[a], problem_.targets[a], a) <
             std::tuple(problem_.rows[b], problem_.targets[b], b);
    });
    return order;
  }
  std::vector<int64_t> Ranges() const {
    std::vector<int64_t> ranges;
    for (int64_t row = 0, end = 0; row < options_.rows; ++row) {
      ranges.push_back(end);
      while (end < static_cast<int64_t>(order_.size()) && problem_.rows[order_[end]] == row) {
        ++end;
      }
      ranges.push_back(end);
    }
    return ranges;
  }
  std::vector<int64_t> Picked(const std::vector<int64_t>& values) const {
    std::vector<int64_t> picked;
    std::transform(order_.begin(), order_.end(), std::back_inserter(picked),
                   [&](int64_t m) { return values[m]; });
    return picked;
  }

  double HiddenAt(int64_t row, int64_t c) const {
    return ToDouble(problem_.hidden[row * problem_.hidden_stride + c]);
  }
  double WeightAt(int64_t v, int64_t c) const {
    return ToDouble(problem_.weight[v * problem_.weight_stride + c]);
  }

  template <class Body>
  void ForEachChunk(Body body) {
    for (int64_t begin = 0; begin < options_.vocab; begin += step_) {
      const int64_t count = std::min(step_, options_.vocab - begin);
      std::vector<float> products = Poison(options_.rows * stride_);
      for (int64_t row = 0; row < options_.rows; ++row) {
        for (int64_t i = 0; i < count; ++i) {
          double sum = 0;
          for (int64_t c = 0; c < options_.dim; ++c) {
            sum += HiddenAt(row, c) * WeightAt(begin + i, c);
          }
          products[row * stride_ + i] = static_cast<float>(sum);
        }
      }
      DeviceArray<float> logits(products);
      auto params = Params<dualkv_linear_logprob_chunk_params>();
      params.device = DUALKV_CUDA;
      params.dtype = Type<Element>::kDtype;
      params.num_rows = options_.rows;
      params.vocab_size = options_.vocab;
      params.vocab_begin = begin;
      params.vocab_count = count;
      params.logits = logits.data();
      params.logits_row_stride = stride_;
      params.bias = options_.bias ? bias_.data() : nullptr;
      params.temperature = options_.temperature;
      params.softcap = options_.softcap;
      params.target_ranges = ranges_.data();
      params.targets = targets_.data();
      params.target_index = index_.data();
      params.statistics = statistics_.data();
      params.logprob = logprob_.data();
      params.entropy = entropy_.data();
      params.lse = lse_.data();
      body(begin, count, logits, params);
    }
  }

  const LogprobProblem<Element>& problem_;
  const LogprobOptions& options_;
  const int64_t step_, stride_;
  const std::vector<int64_t> order_;
  DeviceArray<int64_t> ranges_, targets_, index_;
  DeviceArray<Element> bias_;
  DeviceArray<float> statistics_, logprob_, entropy_, lse_, dlogprob_, dentropy_;
};

template <class Element>
class CudaLogprob : public CudaTest {};
using Elements = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(CudaLogprob, Elements);

TYPED_TEST(CudaLogprob, MatchesOracle) {
  uint64_t seed = 1;
  for (const int64_t vocab : {7, 1000, 9001}) {
    for (const int64_t step : {int64_t{8}, int64_t{136}, vocab}) {
      if (vocab > 100 * step) {
        continue;
      }
      for (const bool with_options : {false, true}) {
        const LogprobOptions options = {.rows = 5,
                                        .dim = 12,
                                        .vocab = vocab,
                                        .targets = 40,
                                        .bias = with_options,
                                        .temperature = with_options ? 0.7 : 1.0,
                                        .softcap = with_options ? 3.0 : 0.0,
                                        .ignored = 0.2};
        SCOPED_TRACE(options.ToString() + " step " + std::to_string(step) + " seed " + std::to_string(seed));
        const LogprobProblem<TypeParam> problem(options, seed++);
        const LogprobOutputs<TypeParam> out = Chunks<TypeParam>(problem, step).Run();
        ExpectLikeOracle(problem, out);
      }
    }
  }
}

}  // namespace
}  // namespace dualkv::testing
